"""Part `loads`: bandwidth of expert loads through the cache's own copy queue, against the link's peak in this run.

Random experts of a pinned layer are loaded in batches, as a layer's misses are, into slots that are then emptied; the
time is from asking until every copy has arrived. Staged: the same from memory that is not registered.
"""

from __future__ import annotations

import gc
import time
from contextlib import closing
from typing import Any

import numpy as np

from .....actors.engine.cache.allocate import make_cache
from .....actors.engine.cache.device import make_device
from .....actors.engine.cache.slots import LayerWeights
from .....actors.settings import EngineSettings, LinkSettings
from ....config import load_policy
from .host_experts import HostExperts
from .machine import Peaks, peaks, spread_of
from .options import Context
from .record import Record
from .shapes import REAL, TOY

REPEATS, WARM = 9, 2
# shape, experts of a batch, least share of the link's peak; None: not judged
CASES = (
    ("mixtral", 1, 0.9), ("mixtral", 2, 0.9),
    ("qwen", 4, None), ("qwen", 16, 0.8), ("qwen", 32, 0.8),
)  # fmt: skip


def run(context: Context, record: Record) -> None:
    """Measure all cases; Mixtral's memory is given back before Qwen's is taken."""
    found = peaks(context)
    record.row("peaks", h2d_gbps=found.h2d, d2h_gbps=found.d2h, hbm_gbps=found.hbm)
    for name in dict.fromkeys(case[0] for case in CASES):
        _shape(name, context, record, found)
        gc.collect()


def _shape(name: str, context: Context, record: Record, found: Peaks) -> None:
    shape = (TOY if context.toy else REAL)[name]
    batches = [(size, limit) for case, size, limit in CASES if case == name]
    device = make_device(context.device.type, LinkSettings(gbps=None))
    host = HostExperts()
    with closing(device), closing(host):
        host.add(shape.expert, context.dtype, context.device, seed=1)
        label = f"{shape.expert.nbytes(context.dtype.itemsize) / (1 << 20):.4g} MiB"
        for size, limit in batches:
            rate = _rate(shape.expert, host.layers, size, device, context)
            share = rate["median"] / found.h2d
            record.row(
                "load", shape=shape.name, expert=label, batch=size, memory=host.how[0], share=share,
                gbps=rate["median"], gbps_minimum=rate["minimum"], gbps_maximum=rate["maximum"],
            )  # fmt: skip
            if limit is not None:
                record.check(f"expert loads over the link's peak, {shape.name}, {size} at a time", share, ">=", limit)
        size = batches[-1][0]
        # written to: pages that never were are all the same one, which the processor's caches hold
        plain = [LayerWeights(tuple(tensor.clone() for tensor in host.layers[0].tensors))]
        rate = _rate(shape.expert, plain, size, device, context)
        record.row(
            "load", shape=shape.name, expert=label, batch=size, memory="pageable (staged)", gbps=rate["median"],
            share=rate["median"] / found.h2d, gbps_minimum=rate["minimum"], gbps_maximum=rate["maximum"],
        )  # fmt: skip


def _rate(expert: Any, layers: list[LayerWeights], size: int, device: Any, context: Context) -> dict[str, float]:
    """1e9 bytes per second of batches of `size` random experts of one layer."""
    size = min(size, expert.num_experts)
    nbytes = expert.nbytes(context.dtype.itemsize)
    settings = EngineSettings(policy=load_policy("on-demand"), budget=size * nbytes, device=context.device.type)
    cache = make_cache(settings, expert, layers, device, context.dtype, expert.num_experts)
    rng, rates = np.random.default_rng(size), list[float]()
    try:
        for turn in range(WARM + REPEATS):
            keys = rng.choice(expert.num_experts, size, replace=False).tolist()
            context.synchronize()
            begin_s = time.perf_counter()
            cache.preload(keys)
            context.synchronize()
            if turn >= WARM:
                rates.append(size * nbytes / (time.perf_counter() - begin_s) / 1e9)
            cache.flush()
    finally:
        cache.close()
    return spread_of(rates)
