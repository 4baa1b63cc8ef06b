"""`tiermoe ARGS` in the test's own process."""

from __future__ import annotations

import json
from typing import Any

import pytest


class Command:
    """Calls the command line; what it writes is taken from `capsys`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        from tiermoe.cluster.cli import main

        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        return (int(ended.value.code or 0), *self._capsys.readouterr())

    def json(self, *args: object) -> Any:
        """What a command that succeeds prints with `--json`."""
        code, out, err = self(*args, "--json")
        assert code == 0, err
        return json.loads(out)

    def refusal(self, *args: object) -> str:
        """The one line with which a command refuses its input."""
        code, out, err = self(*args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err
