"""The runner of `bench gpu`: limits, what remains of a part that fails, the page in every state, what it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermoe.benchmarks.gpu import build, checks, page, run_parts
from tiermoe.benchmarks.gpu.run_parts import Part, Record
from tiermoe.cluster.jobs.bench.metrics import fill_tables

_ROOT = run_parts.ROOT
PART = Part("machine", 30)
TEXT = (_ROOT / page.PAGE).read_text(encoding="utf-8")
ROW = "import json; json.dump({'rows': [{'kind': 'x'}], 'checks': [], 'goals': [], 'notes': []}, open(RECORD, 'w'));"


def _rendered(text: str, document: dict[str, Any] | None) -> str:
    return fill_tables(text, lambda name: page.block(name, document))


@pytest.mark.parametrize(
    ("code", "limit_s", "outcome", "rows", "log"),
    [
        (ROW, 30.0, "done", [{"kind": "x"}], None),
        (f"{ROW} raise SystemError('it fell off')", 30.0, "ended with status 1", [{"kind": "x"}], "it fell off"),
        ("import time; time.sleep(600)", 0.5, "cut off after", [], ""),
    ],
)
def test_a_part_that_fails_costs_only_itself(
    code: str, limit_s: float, outcome: str, rows: list[Any], log: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child runs `code`, with RECORD in place of its record's path."""
    popen = run_parts.subprocess.Popen

    def instead(command: list[str], **kwargs: Any) -> Any:
        record = command[command.index("--record") + 1]
        return popen([sys.executable, "-c", code.replace("RECORD", repr(record))], **kwargs)

    monkeypatch.setattr(run_parts.subprocess, "Popen", instead)
    monkeypatch.setattr(run_parts, "_GRACE_S", 0.0)
    found = run_parts._child(PART, run_parts.Plan(Path("unused"), "cpu", "toy", (PART,), 60.0), limit_s)
    assert found["outcome"].startswith(outcome)
    assert found["rows"] == rows
    assert ("log" in found) == (log is not None)
    assert (log or "") in found.get("log", "")


def test_parts_without_time_are_named_and_other_parts_stay(tmp_path: Path) -> None:
    found = {"rows": [], "checks": [], "goals": [], "notes": ["a note"], "outcome": "done", "seconds": 1.0}
    name = run_parts._device_name("cpu")
    before = {"device": "cpu", "sizes": "real", "device_name": name, "parts": {"loads": found, "gone": found}}
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    document = run_parts.run_all(run_parts.Plan(tmp_path, "cpu", "real", (PART,), 0.0), lambda text: None)
    assert document["parts"]["machine"]["outcome"] == "not run: no time was left"
    assert document["parts"]["loads"] == found
    assert "gone" not in document["parts"]
    assert run_parts.failures(document, (PART,)) == ["machine: not run: no time was left"]
    assert "a note" in (tmp_path / "gpu.md").read_text()


def test_failures_are_checks_and_not_goals_and_on_the_stand_in_not_speed(tmp_path: Path) -> None:
    record = Record("machine", tmp_path / "r.json")
    record.check("fast", 1.0, "<=", 2.0)
    record.check("slow", 3.0, "<=", 2.0)
    record.goal("wish", 0.0, ">=", 1.0)
    found = json.loads((tmp_path / "r.json").read_text()) | {"outcome": "done"}
    assert run_parts.failures({"parts": {"machine": found}}, (PART,)) == ["slow"]
    stand_in = Record("machine", None, judged=False)
    stand_in.check("speed", 3.0, "<=", 2.0)
    stand_in.check("identity", 3.0, "<=", 2.0, always=True)
    assert [check["name"] for check in stand_in.checks] == ["identity"]


def test_the_page_without_data_claims_nothing() -> None:
    assert "claims nothing about a GPU" in TEXT
    assert "benchmarks/gpu/run.sh" in TEXT
    blocks = re.findall(r"<!-- table: (.*) -->", TEXT)
    assert blocks[:3] == ["run", "parts", "limits"]
    assert set(blocks[3:]) == {part.name for part in run_parts.PARTS}
    bare = _rendered(TEXT, None)
    assert bare.count("\nNot run yet.\n") == len(blocks)
    assert bare == TEXT or (_ROOT / "docs/results/gpu.json").exists()


def test_missing_packages_and_the_extensions_to_build_are_known_without_the_package() -> None:
    assert build.missing({"numpy": "numpy", "no_such": "no-such", "no.such": "other"}) == ["no-such", "other"]
    assert build.missing(build.NEEDED) == []
    assert [ext.name for ext in build.extensions(_ROOT)] == [
        "tiermoe.kernels._cpu", "tiermoe.kernels._launch", "tiermoe.actors.core._core",
        "tiermoe.proto._ring",
    ]  # fmt: skip


def test_headers_that_a_source_includes_are_watched() -> None:
    """Guards against an extension that is not compiled again when one of its headers changes."""
    for extension in build.extensions(_ROOT):
        watched, left = set(extension.depends), [_ROOT / source for source in extension.sources]
        folders = [_ROOT / folder for folder in extension.include_dirs]
        seen: set[Path] = set()
        while left:
            file = left.pop()
            for name in re.findall(r'^#include "(.+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
                places = ((folder / name).resolve() for folder in (file.parent, *folders))
                found = next(path for path in places if path.is_file())
                if found.is_relative_to(_ROOT) and "site-packages" not in found.parts and found not in seen:
                    seen.add(found)
                    left.append(found)
        assert {str(path.relative_to(_ROOT)) for path in seen} <= watched, extension.name


def test_nanobind_missing_is_said_with_the_remedy() -> None:
    """By setup.py, for builds without isolation; nothing of setuptools' is needed to say it."""
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "--version"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stderr == "nanobind is not installed: python -m pip install 'nanobind==3.1.0'\n"


def test_no_part_imports_ray_or_typer() -> None:
    """A GPU machine has neither. Guards against modules of the package that import them for all of their users."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(('ray', 'typer', 'click', 'fastapi', 'matplotlib'));"
        "from tiermoe.benchmarks.gpu import run_parts; print(*(part.name for part in run_parts.PARTS if part.load()));"
        "from tiermoe.benchmarks.kernels import measured"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {part.name for part in run_parts.PARTS}


@pytest.mark.parametrize(
    ("test", "left_s", "why"),
    [
        ("import threading; threading.Event().wait(60)", 7.0, "was cut off: no time was left"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60.0, "ended with status -9"),
        ("import os; os._exit(0)", 60.0, "ended with status 0 and no report"),
    ],
)
def test_a_test_file_that_does_not_end_has_failed(
    test: str, left_s: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a file that was cut off, all of whose tests until then had passed: it counted as a pass."""
    (tmp_path / "test_it.py").write_text(f"def test_a() -> None: ...\n\ndef test_b() -> None:\n    {test}\n")
    monkeypatch.setattr(checks, "targets", lambda context: ["test_it.py"])
    record = Record("tests", None)
    checks.run(run_parts.Context(torch.device("cpu"), "toy", time.monotonic() + left_s, tmp_path), record)
    assert {check["name"]: check["ok"] for check in record.checks} == {
        "test_it.py: failures and errors": True, "test_it.py: ran to its end": False
    }  # fmt: skip
    assert why in record.notes[0]
    found = record.as_dict() | {"outcome": "done"}
    assert run_parts.failures({"parts": {"tests": found}}, (Part("tests", 1),)) == ["test_it.py: ran to its end"]
