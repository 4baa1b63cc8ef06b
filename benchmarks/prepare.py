"""`bench prepare`: memory, disk and seconds of `tiermoe prepare` in published forms, and going on after SIGKILL.

Each preparation is a process of its own, by the command line. Anonymous memory is what the kernel counts as RssAnon, of
the process and its children: pages of mapped files and the page cache are not in it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tiermoe.actors.store.files import hash_files
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing
from tiermoe.cluster.jobs.bench.random_model import Form, MoeShape
from tiermoe.cluster.jobs.prepare.job import PARTIAL
from tiermoe.cluster.jobs.prepare.writer import beside, discard, finished_names, require_space
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import ConfigError, RuntimeFailure

from .cases import Prepare
from .random_model import NamedModel, qwen3_layers, save_published

TINY = MoeShape(layers=2, experts=8, top_k=2, hidden=256, intermediate=256)
DISTINCT = 8  # experts that are quantized, and take turns
SLACK_BYTES = 128 << 20  # of memory beyond a layer and what a tiny checkpoint takes: blocks that are read ahead
DISK_OFF = 0.05
_POLL_S = 0.01
_SHOWN = (
    "form", "mapped", "layers", "checkpoint_gb", "layer_mb", "start_peak_mb", "peak_mb", "plan_mb", "disk_mb",
    "start_seconds", "seconds", "gb_per_s", "killed_at", "resumed_s", "same_files",
)  # fmt: skip
_ANON = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)


def prepare(options: Prepare, progress: Progress | None) -> Report:
    """Prepare a checkpoint of at least so many bytes in each form: once without and once with SIGKILL at half of it.

    Layers have Qwen3-30B-A3B's shape: 128 experts of 768 x 2048. `start_seconds`, `start_peak_mb`: of a checkpoint of
    some megabytes, which is what imports take. `gb_per_s`: the checkpoint's bytes over the seconds beyond that.
    `resumed_s`: of the same command after SIGKILL. `disk_mb`: of the finished store; `plan_mb`: what `plan` says
    of it before. The checkpoint has just been written, so what fits is read from the page cache.

    Bars, for each form: peak anonymous memory beyond `start_peak_mb` at most a layer's experts and 128 MiB; `disk_mb`
    within 5% of `plan_mb`; the store after SIGKILL is that of an uninterrupted run, to the bit.

    Raises:
        ConfigError: not Linux, or the package that writes a form is not installed. StoreError: the disk is too small.
        RuntimeFailure: a preparation failed.
    """
    if sys.platform != "linux":
        raise ConfigError("anonymous memory of a process is measured on Linux only", "run it there")
    report = Report("prepare", "real", settings=options.settings(distinct_experts=DISTINCT), shown=_SHOWN)
    with tempfile.TemporaryDirectory(prefix="tiermoe-prepare-", dir=options.folder) as folder:
        scratch = Path(folder)
        needed = round(3.5e9 * options.gigabytes)
        what = f"a checkpoint of {options.gigabytes:g} GB with its two stores"
        require_space(scratch, needed, what, scratch.parent, "name a folder on another disk with --folder")
        advance = advancing(progress, "preparing", len(options.form))
        for form in options.form:
            start = measure_form(form, TINY, scratch / f"{form}-tiny", kill=False)
            row = measure_form(form, large(form, options.gigabytes), scratch / form)
            for name in ("seconds", "peak_mb"):
                row[f"start_{name}"] = start[name]
            row["gb_per_s"] = row["checkpoint_gb"] / max(1e-3, row["seconds"] - start["seconds"])
            report.rows.append(row)
            report.bars += bars_of(row)
            advance()
    return report


def large(form: Form, gigabytes: float) -> MoeShape:
    """Layers of Qwen3-30B-A3B's shape that have at least so many bytes in this form."""
    layer = NamedModel("qwen3-30b-a3b", form, 1).expert_bytes
    return qwen3_layers(max(2, math.ceil(gigabytes * 1e9 / layer)))


def bars_of(row: dict[str, Any]) -> list[Bar]:
    form, memory = row["form"], row["peak_mb"] - row["start_peak_mb"]
    most = row["layer_mb"] + SLACK_BYTES / 1e6
    off = abs(row["disk_mb"] / row["plan_mb"] - 1)
    return [
        Bar(f"{form}: memory beyond the start over a layer and {SLACK_BYTES >> 20} MiB", memory / most, "<=", 1),
        Bar(f"{form}: disk of the store beside the plan's", off, "<=", DISK_OFF),
        Bar(f"{form}: share of equal files after SIGKILL", row["same_files"], ">=", 1),
    ]


def measure_form(form: Form, shape: MoeShape, folder: Path, kill: bool = True) -> dict[str, Any]:
    """The row of one checkpoint, which is written into `folder` and removed with its stores.

    Raises:
        RuntimeFailure: a preparation failed, or the killed one left nothing behind.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(discard, folder)
        model = save_published(form, shape, folder / "model", DISTINCT)
        facts = facts_of_checkpoint(model)
        whole = Preparation(model, folder / "whole")
        whole.run()
        row: dict[str, Any] = {
            "form": str(form), "layers": shape.layers, "checkpoint_gb": _bytes_of(model) / 1e9,
            "layer_mb": facts.all_bytes / facts.layers / 1e6, "peak_mb": whole.peak_bytes / 1e6,
            "seconds": whole.seconds,
            "plan_mb": facts.store_bytes / 1e6, "disk_mb": _bytes_of(whole.out) / 1e6,
            "mapped": "yes" if facts.mapped_bytes else "no",
        }  # fmt: skip
        if kill:
            killed = Preparation(model, folder / "killed")
            row["killed_at"] = killed.kill_at(shape.layers // 2) / shape.layers
            killed.run()
            row |= {"resumed_s": killed.seconds, "same_files": _same(whole.out, killed.out)}
        return row


@dataclass
class Preparation:
    """`tiermoe prepare MODEL OUT` in a process, and what it took."""

    model: Path
    out: Path
    seconds: float = 0.0
    peak_bytes: int = 0

    def run(self) -> None:
        """To the end. Raises RuntimeFailure: the command failed."""
        code, said = self._run(lambda: False)
        if code:
            raise RuntimeFailure(f"`tiermoe prepare` ended with {code}: {said[-300:]}", "its words say why")

    def kill_at(self, files: int) -> int:
        """SIGKILL once so many files of the store are finished; how many there were.

        Raises:
            RuntimeFailure: it ended before.
        """
        partial = beside(self.out, PARTIAL)

        def finished() -> int:
            return len(finished_names(partial) or ())

        code, said = self._run(lambda: finished() >= files)
        if code != -signal.SIGKILL:
            raise RuntimeFailure(f"`tiermoe prepare` ended with {code} by itself: {said[-300:]}", "use more layers")
        return finished()

    def _run(self, enough: Callable[[], bool]) -> tuple[int, str]:
        """The exit status and the last words of a process, which is killed once it is `enough`."""
        command = [sys.executable, "-P", "-m", "tiermoe.cluster.cli", "prepare", str(self.model), str(self.out)]
        environment = os.environ | {"XDG_CACHE_HOME": str(self.out.with_name("cache"))}
        started_s, self.peak_bytes = time.perf_counter(), 0
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=environment)
            try:
                while process.poll() is None:
                    self.peak_bytes = max(self.peak_bytes, sum(map(_anonymous_bytes, _family(process.pid))))
                    if enough():
                        process.kill()
                    time.sleep(_POLL_S)
            finally:
                process.kill()
                process.wait()
            self.seconds = time.perf_counter() - started_s
            words.seek(0)
            return process.returncode, words.read().decode(errors="replace")


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants. psutil reads all processes of the machine for it, 4 ms where a poll takes 10."""
    yield pid
    with contextlib.suppress(OSError):  # it ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))


def _anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = _ANON.search(Path(f"/proc/{pid}/status").read_text())
        return 0 if found is None else int(found[1]) << 10
    return 0


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def _same(one: Path, other: Path) -> float:
    """Share of the files of either store that both have with the same bytes, but for marks of verified ones."""
    names = [{path.name for path in store.iterdir() if "verified" not in path.name} for store in (one, other)]
    common = sorted(names[0] & names[1])
    pairs = zip(hash_files([one / name for name in common]), hash_files([other / name for name in common]), strict=True)
    return sum(a == b for a, b in pairs) / len(names[0] | names[1])
