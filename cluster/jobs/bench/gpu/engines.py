"""An expert engine of a preset on a random model, without a store: weights, routers, peers as a benchmark has them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from .....actors.engine.device import make_device
from .....actors.engine.engine import ExpertEngine
from .....actors.engine.matching import MatcherLink
from .....actors.engine.model import RouterProbe
from .....actors.map_file import MapShape
from .....actors.settings import EngineSettings, LinkSettings, NdpSettings
from ....config import load_hardware, load_policy
from ....worker_process import Role, WorkerProcess
from .host_experts import HostExperts
from .ndp_child import ndp_process, random_tables
from .options import Context
from .random_models import RandomModel
from .shapes import RealShape


@contextmanager
def engine_of(
    preset: str,
    budget: float,
    shape: RealShape,
    built: RandomModel,
    host: HostExperts,
    probes: Sequence[RouterProbe],
    context: Context,
    ndp_threads: int,
) -> Iterator[ExpertEngine]:
    """The engine with its processes: the matcher and the NDP worker, where the preset uses them.

    Args:
        probes: in place of each layer's router. ndp_threads: of the NDP worker's kernels.

    Raises:
        TierMoeError: the preset does not work with that budget or model.
    """
    policy = load_policy(preset)
    layers, expert = len(host.layers), shape.expert
    settings = EngineSettings(
        policy=policy, budget=budget, device=context.device.type, link=LinkSettings(gbps=None),
        ndp=NdpSettings(threads=ndp_threads, hardware=asdict(load_hardware("cpu-ndp"))),
    )  # fmt: skip
    blocks = [replace(block, router=probe) for block, probe in zip(built.blocks, probes, strict=True)]
    embedding = built.model.get_input_embeddings()
    watching = set(embedding._forward_hooks)
    with ExitStack() as stack:
        links, matcher = [], None
        if policy.uses_ndp:
            links = [stack.enter_context(ndp_process(settings.ndp, expert, layers))]
        if policy.prefetch.uses_maps:
            maps = MapShape(shape.name, layers, shape.experts, shape.hidden)
            process = stack.enter_context(WorkerProcess(Role.matcher(settings.matcher_settings, maps, shape.top_k)))
            matcher = MatcherLink(process.link, settings.matcher_settings, maps)
        device = stack.enter_context(closing(make_device(context.device.type, settings.link)))
        engine = ExpertEngine(
            settings, expert, host.layers, blocks, shape.top_k, device, context.dtype, links,
            random_tables(layers, shape.experts) if policy.replica_widths else None, (), matcher,
        )  # fmt: skip
        stack.callback(_let_go, embedding, watching)
        stack.enter_context(closing(engine))
        if engine.prefetching is not None:
            engine.prefetching.watch_embeddings(built.model)
        engine.follow_maps()
        yield engine


def _let_go(embedding: Any, watching: set[int]) -> None:
    """Forget the hooks that were added meanwhile, which would keep the engine's memory."""
    for number in set(embedding._forward_hooks) - watching:
        del embedding._forward_hooks[number]


def free_memory(device: torch.device) -> None:
    """Give back the memory of what was dropped."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
