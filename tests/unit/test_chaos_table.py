"""The table of `make chaos`: which processes it has, and that a bar that is missed shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
import run as chaos

_PROCESSES = {
    "NDP worker", "shard", "store", "endpoint directory", "lead", "one of two leads", "matcher", "one of two edges",
    "the only edge", "helper that clears up", "dashboard agent",
    "runtime environment agent", "GCS", "raylet", "serve",
}  # fmt: skip


def row(process: str, signal: str, **other: Any) -> dict[str, Any]:
    fine = {"failed": 0, "retried": 0, "streams": 20, "identical": 20, "longest_silence_s": 0.5, "noticed_s": 1.0}
    return {"process": process, "signal": signal, "ready_s": 5.0, "left": []} | fine | other


def test_it_has_every_process() -> None:
    assert set(chaos.PROCESSES) == _PROCESSES


@pytest.mark.parametrize(
    ("process", "signal", "wrong"),
    [("lead", "SIGKILL", {"failed": 1}), ("matcher", "SIGSTOP", {"identical": 19}),
     ("raylet", "SIGKILL", {"noticed_s": 10.5}), ("endpoint directory", "SIGKILL", {"left": ["process 7"]}),
     ("serve", "SIGKILL", {"left": ["/dev/shm/a"]}), ("GCS", "SIGSTOP", {"ready_s": None})],
)  # fmt: skip
def test_what_goes_wrong_misses_a_bar(process: str, signal: str, wrong: Any) -> None:
    found = [row("shard", "SIGKILL"), row(process, signal)]
    assert all(bar["passed"] for bar in chaos.bars(found, 19.0))
    found[1] |= wrong
    held = chaos.bars(found, 21.0)
    assert [bar["passed"] for bar in held] == [False, False, True]


@pytest.mark.parametrize(
    "wrong",
    [{"failed": 1}, {"identical": 19}, {"wrong": "status finds 0 runtimes"}, {"heard": False}, {"ready_s": None},
     {"later": 3},
     {"left": ["process 7"]}],
)  # fmt: skip
def test_what_goes_wrong_in_the_surroundings_misses_a_bar(wrong: Any) -> None:
    one = {"surrounding": "a clock", "streams": 20, "failed": 0, "identical": 20, "longest_silence_s": 0.1,
           "wrong": None, "heard": True, "noticed_s": None, "ready_s": 1.0, "left": [], "later": 4}  # fmt: skip
    assert all(bar["passed"] for bar in chaos.bars_around([one]))
    held = chaos.bars_around([one | wrong])
    assert [bar["passed"] for bar in held] == [False, True]


def test_words_are_heard_in_their_order() -> None:
    said = ["serves", "it expires", "it expired"]
    assert chaos.listed(said, ("expires", "expired"))
    assert chaos.listed(said, ())
    assert not chaos.listed(said, ("expired", "expires"))


def test_a_page_is_of_one_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--only", "lead"])
    with pytest.raises(SystemExit):
        chaos.main()
    assert not list(tmp_path.iterdir())
