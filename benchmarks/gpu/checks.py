"""Parts `tests` and `recovery`: the tests that need a GPU, and the kernels' tests that run interpreted elsewhere.

Each file is a pytest process of its own, in parallel: a fault on the GPU ends only one file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from .build import installed
from .run_parts import NO_TIME, Context, Record, end

RECOVERY = ["tests/cuda/test_graphs.py::test_serving_goes_on_after_a_failed_capture"]
_TOY_TARGET = "tests/unit/test_bench_gpu_routing.py"
_RESERVE_S = 5.0  # of the part's time, to write the results
_SHOWN = 600  # characters of a failure
# of pytest-xdist, if it is there, for the longest
_WORKERS = {"tests/cuda/test_identity.py": 8, "tests/cuda/test_graphs.py": 3, "tests/kernels": 3}

Counts = dict[str, int]
Failures = list[dict[str, str]]


def run(context: Context, record: Record) -> None:
    """All of them."""
    _run(targets(context), context, record)


def recovery(context: Context, record: Record) -> None:
    """Whether serving goes on after a capture that failed, and after one without memory."""
    _run(RECOVERY if not context.toy else [_TOY_TARGET], context, record)


def _run(wanted: Sequence[str], context: Context, record: Record) -> None:
    if not installed("pytest"):
        record.note("the tests did not run: pytest is not installed")
        record.check("tests ran", 0, ">=", 1, always=True)
        return
    if not installed("hypothesis"):
        record.note("hypothesis is not installed: files that import it count as errors")
    with TemporaryDirectory() as folder:
        scratch, processes = Path(folder), list[subprocess.Popen[bytes]]()
        try:
            for i, target in enumerate(wanted):
                command = [
                    sys.executable, "-m", "pytest", target, "-q", "-p", "no:cacheprovider",
                    "--junit-xml", str(scratch / f"{i}.xml"), "--continue-on-collection-errors",
                ]  # fmt: skip
                if target in _WORKERS and installed("xdist"):
                    command += ["-n", str(_WORKERS[target]), "--dist", "load"]
                with (scratch / f"{i}.log").open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            command, cwd=context.root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                        )
                    )
            for i, (target, process) in enumerate(zip(wanted, processes, strict=True)):
                _finish(target, process, scratch / f"{i}.xml", scratch / f"{i}.log", context, record)
        finally:
            for process in processes:
                end(process)


def targets(context: Context) -> list[str]:
    """The arguments of pytest: each file that needs a GPU; the kernels' as one. A toy run tries one file."""
    files = sorted(path.relative_to(context.root) for path in (context.root / "tests/cuda").glob("test_*.py"))
    if context.toy:
        return [_TOY_TARGET]
    return [*map(str, files), "tests/kernels"]


def _finish(
    target: str, process: subprocess.Popen[bytes], report: Path, log: Path, context: Context, record: Record
) -> None:
    """Wait for a process while time is left. One that was cut off, or left no report, has failed."""
    cut_off = False
    try:
        process.wait(max(1.0, context.left_s - _RESERVE_S))
    except subprocess.TimeoutExpired:
        cut_off = True
        end(process)
    printed = log.read_text(encoding="utf-8", errors="replace")
    counts, failures = read_report(report) if report.exists() else read_progress(printed)
    status = process.returncode
    record.row("tests", folder=target, cut_off=cut_off, status=status, failures=failures, **counts)
    record.check(f"{target}: failures and errors", counts["failed"] + counts["errors"], "<=", 0, always=True)
    if cut_off:
        record.note(f"{target} was cut off: {NO_TIME}")
    elif status not in (0, 1, 5):  # 5: nothing collected, as where a module skips itself
        record.note(f"{target} ended with status {status}: {printed[-_SHOWN:]}")
    elif not report.exists():
        record.note(f"{target} ended with status {status} and no report: {printed[-_SHOWN:]}")
    else:
        return
    record.check(f"{target}: ran to its end", 0, ">=", 1, always=True)


def read_report(report: Path) -> tuple[Counts, Failures]:
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    failures: Failures = []
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


def read_progress(printed: str) -> tuple[Counts, Failures]:
    """Counts from the progress lines of a run that was cut off: one character a test."""
    marks = "".join(re.findall(r"^([.FEsx]+)(?:\s+\[ *\d+%\])?$", printed, re.MULTILINE))
    counts = {"passed": marks.count("."), "failed": marks.count("F"), "errors": marks.count("E")}
    return counts | {"skipped": marks.count("s")}, [{"test": "(cut off)", "why": printed[-_SHOWN:]}] if printed else []
