"""`--json FILE` as another spelling of `--out FILE`, where `--json` alone is a flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand


class JsonCommand(TyperCommand):
    """A command with the flag `--json` and the option `--out FILE`, and with no arguments besides options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(spelled_out(args)))


def spelled_out(args: Sequence[str]) -> Iterator[str]:
    """The arguments with `--json FILE.json` and `--json=FILE` as `--out FILE`; another word after it stays an error."""
    args = list(args)
    while args:
        word = args.pop(0)
        if word.startswith("--json="):
            yield from ("--out", word.removeprefix("--json="))
        elif word == "--json" and args and args[0].endswith(".json") and not args[0].startswith("-"):
            yield from ("--out", args.pop(0))
        else:
            yield word
