"""Part `tests`: the tests that need a GPU, and those of kernels that are interpreted where there is none.

Each file is a pytest process of its own, all side by side: a fault on the GPU ends one file and not the others.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .options import Context
from .packages import there
from .record import Record

_KEEP_S = 5.0  # of the part's time, to write down what there is
_SHOWN = 600  # characters of a failure


@dataclass(frozen=True)
class _Running:
    """One pytest process, what it says and what it reports."""

    target: str
    process: subprocess.Popen[bytes]
    log: Path
    report: Path


def run(context: Context, record: Record) -> None:
    """Run them; counts, and what failed."""
    if not there("pytest"):
        record.note("the tests did not run: pytest is not installed")
        record.check("tests ran", 0, ">=", 1, always=True)
        return
    if not there("hypothesis"):
        record.note("hypothesis is not installed: files that import it count as errors")
    with TemporaryDirectory() as scratch:
        running = [_begin(context.root, target, Path(scratch) / str(i)) for i, target in enumerate(targets(context))]
        try:
            for one in running:
                _finish(one, context, record)
        finally:
            for one in running:
                _end(one.process)


def targets(context: Context) -> list[str]:
    """What pytest is given: each file that needs a GPU; the kernels' as one."""
    files = sorted(path.relative_to(context.root) for path in (context.root / "tests/cuda").glob("test_*.py"))
    rest = ["tests/unit/test_bench_gpu_locality.py"] if context.toy else ["tests/kernels"]
    return [str(file) for file in files] + rest


def _begin(root: Path, target: str, stem: Path) -> _Running:
    report, log = stem.with_suffix(".xml"), stem.with_suffix(".log")
    command = [
        sys.executable, "-m", "pytest", target, "-q", "-p", "no:cacheprovider", "--junit-xml", str(report),
        "--continue-on-collection-errors",
    ]  # fmt: skip
    with log.open("wb") as said:
        process = subprocess.Popen(command, cwd=root, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    return _Running(target, process, log, report)


def _finish(one: _Running, context: Context, record: Record) -> None:
    """Wait for one of them, as long as there is time."""
    cut = False
    try:
        one.process.wait(max(1.0, context.left_s - _KEEP_S))
    except subprocess.TimeoutExpired:
        cut = True
        _end(one.process)
    said = one.log.read_text(encoding="utf-8", errors="replace")
    counts, failures = _read(one.report) if one.report.exists() else _from_text(said)
    status = one.process.returncode
    record.row("tests", folder=one.target, cut_off=cut, status=status, failures=failures, **counts)
    record.check(f"{one.target}: failures and errors", counts["failed"] + counts["errors"], "<=", 0, always=True)
    if cut:
        record.note(f"{one.target} was cut off: no time was left")
    elif status not in (0, 1, 5):  # 5: nothing collected, as where a module skips itself
        record.note(f"{one.target} ended with status {status}: {said[-_SHOWN:]}")
        record.check(f"{one.target}: ran to its end", 0, ">=", 1, always=True)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(report: Path) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Counts and failures of a JUnit report."""
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    failures: list[dict[str, str]] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        for tag, name in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
            found = case.find(tag)
            if found is None:
                continue
            outcome = name
            if name != "skipped":
                text = (found.get("message") or "") + "\n" + (found.text or "")[-_SHOWN:]
                failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "why": text[:_SHOWN]})
        counts[outcome] += 1
    return counts, failures


def _from_text(said: str) -> tuple[dict[str, int], list[dict[str, str]]]:
    """What the progress lines of a run that was cut off tell: a character for each test."""
    marks = "".join(re.findall(r"^([.FEsx]+)(?:\s+\[ *\d+%\])?$", said, re.MULTILINE))
    counts = {"passed": marks.count("."), "failed": marks.count("F"), "errors": marks.count("E")}
    return counts | {"skipped": marks.count("s")}, [{"test": "(cut off)", "why": said[-_SHOWN:]}] if said else []
