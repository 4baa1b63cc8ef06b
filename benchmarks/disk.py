"""`disk`: a store three times the memory, read past the page cache into bounded slots, against its mapped files.

Each measurement is a process of its own, in a control group whose memory holds the process and a third of the store. It
starts with a cold page cache.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.actors.store.disk import read_gbps
from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, interleaved, median_ratio, rows_of
from tiermoe.cluster.jobs.bench.random_model import Form
from tiermoe.errors import ConfigError, RuntimeFailure

from .random_model import NamedModel

if TYPE_CHECKING:
    from rich.progress import Progress

    from .cases import Disk

SPEED, STALL_S = 1.5, 2.0  # the bars
MAPPED, READ = "mapped files", "read from the disk"
_SLACK = 96 << 20  # of the control group: libraries' pages, and what Python allocates from time to time
_REMEDY = "run it as root, or in a delegated group"
_GROUPS = Path("/sys/fs/cgroup")
_BUFFERS = 32 << 20  # of the readers, rounded up
_LEAVE_S = 10.0  # for a process that was ended


def disk(options: Disk, progress: Progress | None) -> Report:
    """Decoding one request with random weights: tokens a second, bytes read, the longest time between two tokens.

    The limit is what the process has without experts, a share of the store, and 96 MiB. Bars: tokens a second of slots
    read from the disk over mapped files >= 1.5 (median of the rounds' ratios); memory of the process beyond that of the
    mapped run within the budget of the slots; no two tokens further apart than 2 s. Both give the same tokens.

    Raises:
        RuntimeFailure: a process failed, or the tokens differ.
    """
    model = NamedModel(options.shape, Form.Q4_0, options.layers)
    folder = model.made()
    budget, gguf = round(options.share * model.expert_bytes), folder / "model.gguf"
    report = Report("disk", "real", settings=options.settings(store_bytes=model.expert_bytes, budget_bytes=budget))
    run = {"model": str(folder), "tokens": options.tokens, "threads": options.threads, "policy": options.policy}
    _measured(run)  # prepares the store
    own = _measured(run | {"tokens": 2, "host_bytes": 64 << 20})["anonymous"] - (64 << 20)
    known: list[list[int]] = []
    with _group(round(own) + budget + _SLACK) as group:

        def case(name: str, host_bytes: int | None) -> Case:
            def measure() -> Measures:
                _forget(gguf)
                found = _measured(run | {"host_bytes": host_bytes, "group": str(group)})
                known.append(found.pop("generated"))
                if known[-1] != known[0]:
                    raise RuntimeFailure(f"{name}: other tokens than before", "report it")
                return found

            return Case(name, measure)

        results = interleaved([case(MAPPED, None), case(READ, budget)], options.repeats, 0, progress, "disk")
    report.rows = rows_of(results)
    mapped, read = results[MAPPED], results[READ]
    speed = median_ratio(read["tokens_per_s"], mapped["tokens_per_s"])
    more = max(a - b for a, b in zip(read["anonymous"].values, mapped["anonymous"].values, strict=True))
    report.bars = [
        Bar("tokens/s over mapped files", speed, ">=", SPEED),
        Bar("memory beyond the mapped run's, of the budget", more / (budget + _BUFFERS), "<=", 1.0),
        Bar("longest time between tokens (s)", read["longest_s"].maximum, "<=", STALL_S),
    ]
    gbps, direct = read_gbps(gguf, 256 << 20)
    how = "past the page cache" if direct else "through the page cache"
    report.rows.append({"case": f"the disk, {how}", "measure": "gbps", "median": gbps})
    return report


@contextmanager
def _group(limit: int) -> Iterator[Path]:
    """A control group with this memory, without swap.

    Raises:
        ConfigError: none can be made here.
    """
    first = _GROUPS / "memory"
    folder = (first if first.is_dir() else _GROUPS) / f"tiermoe-disk-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"no control group can be made ({error})", _REMEDY) from error
    try:
        (folder / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text(str(limit))
        yield folder
    except OSError as error:
        raise ConfigError(f"{folder} cannot be limited ({error})", _REMEDY) from error
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """A control group whose processes have ended, which the kernel takes out of it a moment later."""
    until_s = time.monotonic() + _LEAVE_S
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return


def _forget(file: Path) -> None:
    """Take a file that nobody maps out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _measured(run: dict[str, Any]) -> Any:
    """What `main` prints in a process of its own."""
    command = [sys.executable, "-m", "tiermoe.benchmarks.disk", json.dumps(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise RuntimeFailure(f"a measured process ended with {done.returncode}: {done.stderr[-2000:]}", "see above")
    return json.loads(done.stdout.splitlines()[-1])


def main(run: dict[str, Any]) -> dict[str, Any]:
    """One request in this process.

    Returns:
        tokens_per_s and longest_s, after the first token; bytes read from the disk, and seconds waited for them;
        anonymous memory at the end in bytes; the tokens.
    """
    if group := run.get("group"):
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    from tiermoe.cluster.config import chosen_policy, engine_settings, load_run_config
    from tiermoe.cluster.jobs.bench.serving import serve
    from tiermoe.cluster.jobs.prepare.needs import prepared_store
    from tiermoe.cluster.local import LocalWorker

    config = load_run_config(None, {"model": run["model"], "threads": run["threads"], "device": "cpu"})
    settings = engine_settings(config)
    if (host_bytes := run.get("host_bytes")) is not None:
        settings = settings.model_copy(update={"host_bytes": host_bytes, "policy": chosen_policy(run["policy"])})
    store = prepared_store(config, settings)
    with closing(LocalWorker(settings, store, 0)) as worker:
        worker.start()
        between_s: list[float] = []
        measures, (tokens,) = serve(worker.submit, [tuple(range(3, 35))], run["tokens"], between_s=between_s)
        total = worker.stats().total()
    return {
        "tokens_per_s": 1 / measures["tpot_s"], "ttft_s": measures["ttft_s"], "longest_s": max(between_s),
        "bytes_read": total.bytes_loaded, "waited_s": total.blocked_io_s,
        "hit_rate": total.hits / max(1, total.hits + total.misses), "anonymous": _anonymous(), "generated": tokens,
    }  # fmt: skip


def _anonymous() -> int:
    """Bytes of this process's memory that are of no file."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
