"""Part `resident`: layers with residency on the device, as launches and as one CUDA graph, beside the host's path.

One token's routed experts through the layers of a shape, in the order of a random routing. With everything resident a
graph needs no host; with a share of the experts absent, misses are read over the link by the kernels.
"""

from __future__ import annotations

from contextlib import closing

import torch

from tiermoe.actors.engine.cache.slots import SlotPool
from tiermoe.actors.engine.cuda.resident import DeviceResidency
from tiermoe.actors.engine.cuda.runtime import runtime_of
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.settings import LinkSettings
from tiermoe.kernels.device import seconds_of

from .job import Context, Record
from .models import REAL, TOY, HostExperts, RealShape
from .transfers import record_peaks

LAYERS, SHARES, REPEATS, STEPS = 4, (1.0, 0.5), 20, 256
_FILL_S = 5.0  # of a shape with less time left nothing is measured


def run(context: Context, record: Record) -> None:
    if context.device.type == "cpu":
        record.note("residency on the device needs a GPU: its kernels are only interpreted here, by tests/kernels")
        return
    peak = record_peaks(context, record).h2d
    for name in ("qwen3", "qwen"):
        shape = (TOY if context.toy else REAL)[name]
        for share in SHARES if record.has_time(context, _FILL_S, shape.name) else ():
            _measure(context, record, shape, share, peak)


def _measure(context: Context, record: Record, shape: RealShape, share: float, peak_gbps: float) -> None:
    """Microseconds of a layer: launched one by one, and replayed; checked to give the same values."""
    device, expert, dtype = context.device, shape.expert, context.dtype
    keys = LAYERS * shape.experts
    chosen = torch.Generator().manual_seed(0)
    routing = [torch.randperm(shape.experts, generator=chosen)[: shape.top_k] for _ in range(LAYERS)]
    ids = torch.stack(routing).to(device)
    hidden = torch.randn(1, shape.hidden, device=device).to(dtype)
    weights = torch.rand(1, shape.top_k, device=device)
    outs: list[torch.Tensor] = []
    with closing(HostExperts()) as host, closing(make_device("cuda", LinkSettings())):
        for layer in range(LAYERS):
            host.add(expert, dtype, device, seed=layer)
        runtime, pool = runtime_of(device), SlotPool.allocate(expert, int(share * keys), dtype, device)
        residency = DeviceResidency(runtime, pool, host.layers, "silu", shape.top_k, steps=STEPS)

        def step(i: int = 0) -> None:
            residency.kernels.begin()
            outs[:] = [
                residency.kernels.run(layer, hidden, ids[layer][None], weights).clone() for layer in range(LAYERS)
            ]

        step()
        absent = [out.clone() for out in outs]  # every expert was read from host memory
        for slot in range(len(pool.gate_up)):
            residency.load(slot * keys // len(pool.gate_up), slot)
        context.synchronize()
        launched_s = seconds_of(device, step, REPEATS)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replayed_s = seconds_of(device, lambda _: graph.replay(), REPEATS)[0]
        same = all(torch.equal(a, b) for a, b in zip(absent, outs, strict=True))
        entries = list(residency.routed(int(residency.tables.step.item())))[-LAYERS:]
    misses = sum(entry.misses for entry in entries) / LAYERS
    read_us = misses * expert.nbytes(dtype.itemsize) / peak_gbps / 1e3
    record.row(
        "resident", shape=shape.name, resident=share, misses_per_layer=misses, launched_us=launched_s / LAYERS * 1e6,
        graph_us=replayed_s / LAYERS * 1e6, link_floor_us=read_us,
    )  # fmt: skip
    record.check(f"{shape.name}, {share:.0%} resident on the device: values of the graph are those of host memory",
                 float(same), ">=", 1.0)  # fmt: skip
