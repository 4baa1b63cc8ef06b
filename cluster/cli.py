"""The `tiermoe` program: signals, errors in one line, and exit codes around the commands (`commands.py`).

Exit codes: 0 done, 1 the runtime failed, 2 the user can correct it (one line says how), 130 interrupted, 141 the reader
of standard output has ended, 143 ended. The module imports next to nothing, so that Ctrl-C is answered from the start.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .jobs.ending import handle_signals, signalled

_INTERRUPTED = 130
_CLOSED = 141  # 128 + SIGPIPE, as of a program that the signal ends


def main(args: list[str] | None = None) -> None:
    """Run the command line; ends by SystemExit.

    Args:
        args: the arguments; None: those of the process.
    """
    if args is None:  # a program, not a call from another one
        handle_signals()
    try:
        _open_closed_streams()
        _run(args)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception:
        if (code := signalled()) is None:
            raise
        sys.exit(code)  # a library has answered the interrupt with an error of its own


def _open_closed_streams() -> None:
    """A standard stream that the caller closed (`2>&-`) is the null device, here and in the processes started here.

    Libraries ask the streams for their descriptors, and a file that is opened later must not get the number of one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the lowest free number is the stream's own
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (for the life of the process)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _run(args: list[str] | None) -> None:
    """Run the commands; an error that the user can act on is one line."""
    from ..errors import OutputClosed, TierMoeError, exit_code, told
    from .commands import app
    from .report.output import guarded

    try:
        with guarded():
            app(args=args, prog_name="tiermoe")
    except SystemExit as error:
        if error.code and (code := signalled()) is not None:
            sys.exit(code)  # where a signal comes within a call of Ray's client, that makes another code of it
        raise
    except OutputClosed:
        sys.exit(_CLOSED)
    except TierMoeError as error:
        if signalled() == _INTERRUPTED:  # the interrupt ended what the error misses
            sys.exit(_INTERRUPTED)
        print(f"error: {told(error)}", file=sys.stderr)
        sys.exit(exit_code(error))
    except MemoryError as error:
        why = told(error)
        print(f"error: there is not enough memory{f' ({why})' if why else ''}; give less at a time", file=sys.stderr)
        sys.exit(1)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from .commands import app

    return app


if __name__ == "__main__":
    main()
