"""Part `references`: transformers' experts with all of them resident, and accelerate's offload, the common way where
they do not fit. The routing of the decode parts is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from statistics import median

import torch

from tiermoe.actors.engine.model.attention import steady_sdpa

from .decode import Bench, Pieces, free_memory, trace_of
from .models import REAL, TOY, HostExperts, moe_layers
from .run_parts import Context, Record
from .transfers import spread_of

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
_OFFLOAD_TOKENS = 2
_OFFLOAD_S = 12.0


def run(context: Context, record: Record) -> None:
    """Time between tokens of Qwen1.5-MoE-A2.7B's shape."""
    shape = (TOY if context.toy else REAL)["qwen"]
    torch.set_num_threads(1)
    steady_sdpa()
    layers = moe_layers(shape, context)
    with closing(HostExperts()) as host:
        bench = Bench.of(context, record, shape, host, layers, trace_of(context, shape, layers))
        bench.replay.attach(bench.built.modules)
        with bench.built.own_experts(context.device):
            fastest = _resident(bench)
        free_memory(context)
        _offload(bench, fastest)
        bench.replay.close()


def _resident(bench: Bench) -> str:
    """Time each of transformers' experts implementations with all experts resident; the fastest one's name."""
    shape, record = bench.shape, bench.record
    found: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
        with record.trying(f"{shape.name}, transformers {name}"):  # what this machine cannot run is no reference
            bench.built.use(name)
            session = bench.session(name)
            session.decode(3)
            values = [session.decode(Pieces.of(bench.context).tokens // 2) * 1e3 for _ in range(3)]
            found[name] = median(values)
            record.row("reference", shape=shape.name, case=f"transformers {name}", tpot_ms=spread_of(values))
    if not found:
        raise RuntimeError("none of transformers' experts implementations runs")
    return min(found, key=lambda name: found[name])


def _offload(bench: Bench, reference: str) -> None:
    """Measure accelerate's offload of the experts."""
    context, record, case = bench.context, bench.record, f"{bench.shape.name}, accelerate's CPU offload"
    if find_spec("accelerate") is None:
        record.note(f"{case} was not measured: accelerate is not installed")
        return
    if not record.has_time(context, _OFFLOAD_S / 2, case):
        return
    bench.built.use(reference)
    with record.trying(case), _offloaded(bench):  # what this machine cannot run is no reference
        session = bench.session("offload")
        session.decode(1)
        values = [session.decode(_OFFLOAD_TOKENS) * 1e3 for _ in range(2)]
        record.row("offload", shape=bench.shape.name, case="accelerate CPU offload", tpot_ms=spread_of(values))


@contextmanager
def _offloaded(bench: Bench) -> Iterator[None]:
    """Experts in host memory under accelerate's own hooks; their parameters are on meta before and after.

    The hooks copy whole layers from views of our pinned experts (random numbers fit any layout): faster than the
    pageable copies of `cpu_offload`, and without further memory.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    device = bench.context.device
    for module, layer in zip(bench.built.modules, bench.host.layers, strict=True):
        gate_up, down = layer.tensors
        weights = {
            "gate_up_proj": gate_up.view(module.gate_up_proj.shape), "down_proj": down.view(module.down_proj.shape),
        }  # fmt: skip
        hook = AlignDevicesHook(execution_device=device, offload=True, io_same_device=False, weights_map=weights)
        add_hook_to_module(module, hook)
    try:
        yield
    finally:
        for module in bench.built.modules:
            remove_hook_from_module(module)
