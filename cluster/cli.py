"""The `tiermoe` command. Every subcommand's module is imported when it is called, so that help is instant.

Exit codes: 0 done, 1 the runtime failed, 2 the user can correct it (one line says how), 130 interrupted, 143 ended.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from ..errors import RuntimeFailure, TierMoeError
from .host import versions
from .jobs.ending import handle_signals

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="tiermoe",
    help="Serve Mixture-of-Experts models that outgrow the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
jobs = typer.Typer(help="Longer jobs: train the default model, merge traces.", no_args_is_help=True)
app.add_typer(jobs, name="jobs")


def _show_versions(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None: ...


def _forward(parent: typer.Typer, prefix: str, name: str, module: str, attribute: str, summary: str) -> None:
    """Register a command whose options are parsed by the typer function or app `module:attribute`."""

    def command(ctx: typer.Context) -> None:
        target: Any = getattr(import_module(module, __package__), attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            target.command()(function)
        target(args=ctx.args, prog_name=f"{prefix} {name}")

    parent.command(name, help=summary, context_settings=_PASS_ON)(command)


_forward(app, "tiermoe", "run", ".jobs.run", "run_command", "Generate text for one prompt and report what it took.")
_forward(app, "tiermoe", "up", ".jobs.up", "up_command", "Start a runtime that runs until Ctrl-C or `down`.")
_forward(app, "tiermoe", "serve", ".jobs.serve", "serve_command", "Serve a model over HTTP, as OpenAI's API.")
_forward(app, "tiermoe", "status", ".jobs.status", "status_command", "Show what runs, where, and what it holds.")
_forward(app, "tiermoe", "down", ".jobs.status", "down_command", "End a runtime and all that belongs to it.")
_forward(app, "tiermoe", "prepare", ".jobs.prepare.command", "prepare_command", "Turn a checkpoint into a store.")
_forward(app, "tiermoe", "plan", ".jobs.plan", "plan_command", "Say what would run where, and start nothing.")
_forward(app, "tiermoe", "doctor", ".jobs.doctor", "doctor_command", "Measure this machine and say what would fit.")
_forward(app, "tiermoe", "bench", ".jobs.bench.command", "bench_app", "Measure the system; --check compares to limits.")
_forward(app, "tiermoe", "eval", ".jobs.evaluate.command", "eval_command", "Measure what a policy costs in quality.")
_forward(app, "tiermoe", "record", ".jobs.record.command", "record_command", "Write a trace of a model's routing.")
_forward(app, "tiermoe", "replay", ".jobs.replay", "replay_command", "Run policies on a trace, on a virtual clock.")
_forward(app, "tiermoe", "trace", ".jobs.trace", "trace_app", "Statistics of routing traces; synthetic traces.")
_forward(app, "tiermoe", "report", ".jobs.report", "report_command", "Compare result files on one HTML page.")
_forward(
    jobs, "tiermoe jobs", "merge-traces", ".jobs.record.command", "merge_command", "Put traces of one model together.",
)  # fmt: skip


def main(args: list[str] | None = None) -> None:
    """Run the command line; ends by SystemExit.

    Args:
        args: the arguments; None: those of the process.
    """
    if sys.stdout is None:  # closed by the caller (`>&-`): what goes there is not wanted
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the life of the process)
    if args is None:  # a program, not a call from another one
        handle_signals()
    try:
        app(args=args, prog_name="tiermoe")
    except TierMoeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RuntimeFailure) else 2)
    except MemoryError as error:
        why = " ".join(str(error).split())
        print(f"error: there is not enough memory{f' ({why})' if why else ''}; give less at a time", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
