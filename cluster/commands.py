"""The commands of `tiermoe`. Every subcommand's module is imported when it is called, so that help is instant."""

from __future__ import annotations

import copy
from importlib import import_module
from itertools import zip_longest
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .host import versions
from .report.output import set_aside

# of a help, the most asked for first; others, such as a command's own options, come before these
_PANELS = ("Options", "Model", "Memory", "Sampling", "Output", "Runtime", "Cluster", "Emulation")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Command(TyperCommand):
    """A command that prints its results through `report.output.stdout`; what else prints goes to standard error."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperCommand.format_help(_for_help(self, ctx), ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with set_aside():
            return super().invoke(ctx)


class Group(TyperGroup):
    """A command that has commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(_for_help(self, ctx), ctx, formatter)


def _for_help(command: Any, ctx: Any) -> Any:
    """A copy of a command for its help: panels in the order of `_PANELS`, and flags, whose type says nothing, as
    `--x/--no-x` without it.
    """

    def place(option: Any) -> int:
        panel = getattr(option, "rich_help_panel", None)
        return _PANELS.index(panel) if panel in _PANELS else 0

    def shown(option: Any) -> Any:
        option = copy.copy(option)
        if getattr(option, "is_flag", False):
            option.opts = ["/".join(pair) for pair in zip_longest(option.opts, option.secondary_opts, fillvalue="")]
            option.opts, option.secondary_opts = [name.strip("/") for name in option.opts], []
            option.display_type_rich = lambda ctx: None
        return option

    options = [shown(option) for option in sorted(command.get_params(ctx), key=place)]
    command = copy.copy(command)
    command.get_params = lambda ctx: options
    return command


app = typer.Typer(
    name="tiermoe",
    cls=Group,
    help="Serve Mixture-of-Experts models that outgrow the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
jobs = typer.Typer(cls=Group, help="Merge the traces of several recordings.", no_args_is_help=True)
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
            target.command(cls=Command)(function)
        target(args=ctx.args, prog_name=f"{prefix} {name}")

    parent.command(name, help=summary, context_settings=_PASS_ON)(command)


_forward(app, "tiermoe", "run", ".jobs.run", "run_command", "Generate text for one prompt and report what it took.")
_forward(app, "tiermoe", "up", ".jobs.up", "up_command", "Start a runtime that runs until Ctrl-C or `down`.")
_forward(app, "tiermoe", "serve", ".jobs.serve", "serve_command", "Serve a model as OpenAI's and Anthropic's APIs.")
_forward(
    app, "tiermoe", "status", ".jobs.status_command", "status_command", "Show what runs, where, and what it holds.",
)  # fmt: skip
_forward(app, "tiermoe", "down", ".jobs.status_command", "down_command", "End a runtime and all that belongs to it.")
_forward(
    app, "tiermoe", "prepare", ".jobs.prepare.prepare_command", "prepare_command", "Turn a checkpoint into a store.",
)  # fmt: skip
_forward(app, "tiermoe", "plan", ".jobs.plan", "plan_command", "Say what would run where, and start nothing.")
_forward(app, "tiermoe", "doctor", ".jobs.doctor", "doctor_command", "Measure this machine and say what would fit.")
_forward(
    app, "tiermoe", "bench", ".jobs.bench.bench_commands", "bench_app",
    "Measure the system; --check compares to limits.",
)  # fmt: skip
_forward(
    app, "tiermoe", "eval", ".jobs.evaluate.eval_command", "eval_command", "Measure what a policy costs in quality.",
)  # fmt: skip
_forward(
    app, "tiermoe", "record", ".jobs.record.record_command", "record_command", "Write a trace of a model's routing.",
)  # fmt: skip
_forward(app, "tiermoe", "replay", ".jobs.replay", "replay_command", "Run policies on a trace, on a virtual clock.")
_forward(app, "tiermoe", "trace", ".jobs.trace", "trace_app", "Statistics of routing traces; synthetic traces.")
_forward(app, "tiermoe", "report", ".jobs.report", "report_command", "Compare result files on one HTML page.")
_forward(
    jobs, "tiermoe jobs", "merge-traces", ".jobs.record.record_command", "merge_command",
    "Put traces of one model together.",
)  # fmt: skip
