"""Parts `mapped`, `machine` and `loads`: the best bandwidths in this run, and what expert loads reach of them."""

from __future__ import annotations

import gc
import mmap
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, Literal

import numpy as np
import torch

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.cuda.device import fill_pages
from tiermoe.actors.engine.cuda.runtime import runtime_of
from tiermoe.actors.engine.make_cache import ModelExperts, make_cache
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.settings import CopySettings, EngineSettings, LinkSettings
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.host import cpu
from tiermoe.cluster.jobs.bench.metrics import Spread
from tiermoe.limits import usable_cores

from .models import REAL, TOY, HostExperts, Weights
from .run_parts import ROOT, Context, Record

_PEAK_BYTES = 1 << 30
_TOY_BYTES = 8 << 20
_REPEATS = 7

LOAD_REPEATS, LOAD_WARM = 9, 2
_FILE_S = 12.0  # to write a layer of 2.8 GB and to load from it
# shape, experts of a batch, least share of the link's peak; None: not judged
LOADS = (
    ("mixtral", 1, 0.9), ("mixtral", 2, 0.9),
    ("qwen", 4, None), ("qwen", 16, 0.8), ("qwen", 32, 0.8),
)  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Best bandwidths in 1e9 bytes per second: h2d and d2h over the link; hbm of a copy on the device, both ways."""

    h2d: float
    d2h: float
    hbm: float


def machine(context: Context, record: Record) -> None:
    found: dict[str, Any] = {"cpu": cpu(), "torch_cuda": torch.version.cuda, "device": context.device.type}
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        found |= {
            "gpu": properties.name, "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        } | _nvidia_smi()  # fmt: skip
    record.row("machine", **found)
    record_peaks(context, record)
    for threads in sorted({1, usable_cores()}):
        record.row("host read", threads=threads, gbps=host_read_gbps(threads, context.toy))


def _nvidia_smi() -> dict[str, str]:
    """Driver and present PCIe link by nvidia-smi; an idle link may show a lower generation."""
    fields = ("driver_version", "pcie.link.gen.max", "pcie.link.gen.current", "pcie.link.width.current")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"driver": "nvidia-smi said nothing"}
    values = [value.strip() for value in printed.splitlines()[0].split(",")]
    return dict(zip(("driver", "pcie_gen_max", "pcie_gen_now", "pcie_width"), values, strict=False))


def record_peaks(context: Context, record: Record) -> Peaks:
    """The best of several large copies; on the stand-in all three are copies in host memory."""
    nbytes = _TOY_BYTES if context.toy else _PEAK_BYTES
    pinned = context.device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    other = torch.empty_like(there)

    def best(copy: Callable[[], Any], copied: int) -> float:
        def synchronous() -> None:
            copy()
            context.synchronize()

        context.synchronize()
        return copied / _best_s(synchronous, _REPEATS) / 1e9

    found = Peaks(
        best(lambda: there.copy_(host, non_blocking=True), nbytes),
        best(lambda: host.copy_(there, non_blocking=True), nbytes),
        best(lambda: other.copy_(there), 2 * nbytes),
    )
    record.row("peaks", h2d_gbps=found.h2d, d2h_gbps=found.d2h, hbm_gbps=found.hbm)
    return found


def host_read_gbps(threads: int, toy: bool) -> float:
    """The best rate of reading host memory: a sum over 64-bit numbers by `threads` threads."""
    nbytes = _TOY_BYTES if toy else 4 * _PEAK_BYTES
    block = torch.ones(nbytes // 8, dtype=torch.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return nbytes / _best_s(block.sum, 3) / 1e9
    finally:
        torch.set_num_threads(before)


def _best_s(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return min(times)


def spread_of(values: list[float]) -> dict[str, float]:
    spread = Spread.of(values)
    return {"median": spread.median, "minimum": spread.minimum, "maximum": spread.maximum}


def mapped(context: Context, record: Record) -> None:
    """Whether kernels read a file's pages that are mapped read-only and registered, and how fast; first of all parts,
    since designs depend on it.
    """
    nbytes = _TOY_BYTES if context.toy else _PEAK_BYTES
    gpu = context.device.type == "cuda"
    with TemporaryFile(dir=ROOT) as file:
        written = np.random.default_rng(0).integers(0, 1 << 31, nbytes // 4, np.int32)
        file.write(written.tobytes())
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        with warnings.catch_warnings():  # nothing writes to it
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            source = torch.frombuffer(memory, dtype=torch.int32)
        fill_pages(source)
        there = torch.empty(nbytes // 4, dtype=torch.int32, device=context.device)
        runtime = runtime_of(context.device) if gpu else None
        refusal = None if runtime is None else runtime.register(source.data_ptr(), nbytes)
        record.row("registration", file="mapped read-only", refused=refusal)
        record.check("a file that is mapped read-only is registered", refusal is None, ">=", 1, always=True)
        if refusal is not None:
            return
        try:
            copies: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {}
            if runtime is not None:
                copies["kernel"] = runtime.kernel_copy
            copies["copy engine"] = lambda to, of: to.copy_(of, non_blocking=True)
            for by, copy in copies.items():
                there.zero_()
                copy(there, source)
                context.synchronize()
                record.check(f"a mapped file by {by}: equal", torch.equal(there.cpu(), source), ">=", 1, always=True)
                for count in (1 << 14, 1 << 18, 1 << 22, nbytes // 4):
                    some = slice(0, min(count, nbytes // 4))

                    def once(copy: Any = copy, some: slice = some) -> None:
                        copy(there[some], source[some])
                        context.synchronize()

                    gbps = 4 * (some.stop - some.start) / _best_s(once, _REPEATS) / 1e9
                    record.row("mapped read", by=by, kib=4 * some.stop >> 10, gbps=gbps)
        finally:
            if runtime is not None:
                runtime.unregister(source.data_ptr())


def loads(context: Context, record: Record) -> None:
    """Measure expert loads through the cache's own copy queue, against the link's peak in this run.

    Random experts of a pinned layer are loaded in batches, as a layer's misses are, into empty slots; the time ends
    when every copy has arrived. Mixtral's memory is freed before Qwen's is taken. By memory:

        huge pages      anonymous memory of this process
        mapped file     pages of the page cache, mapped read-only and shared, as the product maps a store
        copied          the same file's experts, copied to huge pages (`copies.pin: copy`)
        staged          memory that is not registered
    """
    peak = record_peaks(context, record).h2d
    for name in dict.fromkeys(case[0] for case in LOADS):
        _loads_of(name, context, record, peak)
        gc.collect()


def _loads_of(name: str, context: Context, record: Record, peak_gbps: float) -> None:
    shape = (TOY if context.toy else REAL)[name]
    expert = shape.expert
    label = f"{expert.nbytes(context.dtype.itemsize) / (1 << 20):.4g} MiB"
    device = make_device(context.device.type, LinkSettings(gbps=None))
    host = HostExperts()

    def measured(layers: Sequence[Weights], size: int, memory: str, pin_s: float | None = None) -> float:
        rate = spread_of(_rates(expert, layers, size, device, context))
        share = rate["median"] / peak_gbps
        nbytes = sum(tensor.nbytes for tensor in layers[0].tensors)
        record.row(
            "load", shape=shape.name, expert=label, batch=size, memory=memory, share=share, gbps=rate["median"],
            gbps_minimum=rate["minimum"], gbps_maximum=rate["maximum"], pin_s_per_gib=None if pin_s is None
            else pin_s * (1 << 30) / nbytes,
        )  # fmt: skip
        return share

    with closing(device), closing(host):
        host.add(shape, context.dtype, context.device, seed=1)
        layers = [layer for layer in host.layers if isinstance(layer, LayerWeights)]  # as all of a plain shape are
        batches = [(size, limit) for case, size, limit in LOADS if case == name]
        for size, limit in batches:
            share = measured(layers, size, f"huge pages ({host.how[0]})", host.pin_s[0])
            if limit is not None:
                record.check(f"expert loads over the link's peak, {shape.name}, {size} at a time", share, ">=", limit)
        if context.toy or record.has_time(context, _FILE_S, f"{shape.name}, loads from a mapped file"):
            _loads_of_a_file(layers[0], batches[-1], measured, device, record, shape.name)
        # written to: pages that never were are all the same one, which the processor's caches hold
        plain = [LayerWeights(tuple(tensor.clone() for tensor in layers[0].tensors))]
        measured(plain, batches[-1][0], "pageable (staged)")


def _loads_of_a_file(
    layer: Weights, batch: tuple[int, float | None], measured: Callable[..., float], device: Any, record: Record,
    shape: str,
) -> None:  # fmt: skip
    """From a file's pages, pinned where they are mapped and copied to huge pages, as the two values of `copies.pin`."""
    size, limit = batch
    with TemporaryFile(dir=ROOT) as file:
        for tensor in layer.tensors:
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        file.flush()
        mapped, first = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), 0
        tensors = list[torch.Tensor]()
        for tensor in layer.tensors:
            flat = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=first)
            tensors.append(flat.view(tensor.shape))
            first += tensor.nbytes
        ways: tuple[Literal["copy", "mapped"], ...] = ("copy", "mapped")  # the second leaves the file registered
        for pin in ways:
            begin_s = time.perf_counter()
            layers, report = device.pin([LayerWeights(tuple(tensors))], CopySettings(pin=pin))
            pin_s = time.perf_counter() - begin_s
            name = "mapped file" if pin == "mapped" else "copied"
            if report is not None and report.staged:
                name, limit = f"{name}: not pinned ({report.problem})", None
            share = measured(layers, size, name, pin_s)
            if limit is not None:
                what = f"expert loads over the link's peak, {shape}, {size} at a time, {name}"
                (record.check if pin == "mapped" else record.goal)(what, share, ">=", limit)


def _rates(expert: Any, layers: Sequence[Weights], size: int, device: Any, context: Context) -> list[float]:
    """1e9 bytes per second of batches of `size` random experts of one layer."""
    size = min(size, expert.num_experts)
    nbytes = expert.nbytes(context.dtype.itemsize)
    budget = Budget(nbytes=size * nbytes)
    settings = EngineSettings(policy=load_policy("on-demand"), budget=budget, device=context.device.type)
    cache = make_cache(settings, ModelExperts(expert, layers, context.dtype), device, range(expert.num_experts))
    rng, rates = np.random.default_rng(size), list[float]()
    try:
        for turn in range(LOAD_WARM + LOAD_REPEATS):
            keys = rng.choice(expert.num_experts, size, replace=False).tolist()
            context.synchronize()
            begin_s = time.perf_counter()
            cache.core.preload(keys)
            context.synchronize()
            if turn >= LOAD_WARM:
                rates.append(size * nbytes / (time.perf_counter() - begin_s) / 1e9)
            cache.flush()
    finally:
        cache.close()
    return rates
