"""Part `tests`: the tests that need a GPU, and those of kernels that are interpreted where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory

from .options import Context
from .packages import there
from .record import Record

# the GPU's own tests first: what a cut-off run has not reached are the kernels', which run elsewhere too
GPU_TESTS = ("tests/cuda", "tests/kernels")
TOY_TESTS = ("tests/cuda", "tests/unit/test_bench_gpu_locality.py")
_KEEP_S = 5.0
_SHOWN = 600  # characters of a failure


def run(context: Context, record: Record) -> None:
    """Run them with pytest in a process of its own; counts, and what failed."""
    lacking = [name for name in ("pytest", "hypothesis") if not there(name)]
    if "pytest" in lacking:
        record.note("the tests did not run: pytest is not installed")
        record.check("tests ran", 0, ">=", 1)
        return
    for folder in TOY_TESTS if context.toy else GPU_TESTS:
        limit_s = context.left_s - _KEEP_S
        if limit_s < 10:
            record.note(f"{folder} did not run: no time was left")
            continue
        _folder(context.root, folder, limit_s, record)
    if lacking:
        record.note("hypothesis is not installed: tests that import it count as errors of collection")


def _folder(root: Path, folder: str, limit_s: float, record: Record) -> None:
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", folder, "-q", "-p", "no:cacheprovider", "--junit-xml", str(report),
            "--continue-on-collection-errors",
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
                cut = False
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                said, _ = process.communicate()
                cut = True
        counts, failures = _read(report) if report.exists() else _from_text(said)
    record.row("tests", folder=folder, cut_off=cut, limit_s=limit_s, **counts, failures=failures)
    if cut:
        record.note(f"{folder} was cut off after {limit_s:.0f} s")
    bad = counts["failed"] + counts["errors"]
    record.check(f"{folder}: failures and errors", bad, "<=", 0, always=True)
    if not cut and not counts["passed"] and not counts["skipped"]:
        record.note(f"{folder} ran nothing: {said[-_SHOWN:]}")
        record.check(f"{folder}: tests that ran", 0, ">=", 1, always=True)


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
