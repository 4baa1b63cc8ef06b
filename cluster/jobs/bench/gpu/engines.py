"""An expert engine of a preset on a random model, without a store: weights, routers, peers as a benchmark has them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from .....actors.engine.cache.device import make_device
from .....actors.engine.engine import ExpertEngine
from .....actors.engine.model.model import RouterProbe
from .....actors.engine.peers.matcher import MatcherLink
from .....actors.settings import EngineSettings, LinkSettings, NdpSettings
from .....actors.store.artifacts import MapShape
from .....actors.store.format import ExpertShape
from .....proto.peers import PeerLink
from ....config import load_hardware, load_policy
from ....worker_process import Role, WorkerProcess
from .host_experts import HostExperts
from .ndp_child import ndp_process, random_tables
from .options import Context
from .random_models import RandomModel
from .shapes import RealShape


class NearData:
    """One NDP worker for all engines of a shape, begun by the first that asks: its replicas take seconds to make.

    Args:
        shape: of the experts. layers: of the model. threads: of its kernels.
    """

    def __init__(self, shape: ExpertShape, layers: int, threads: int) -> None:
        self.settings = NdpSettings(threads=threads, hardware=asdict(load_hardware("cpu-ndp")))
        self._shape, self._layers = shape, layers
        self._stack = ExitStack()
        self._link: PeerLink | None = None

    def link(self) -> PeerLink:
        """The way to it.

        Raises:
            RuntimeFailure: it did not start.
        """
        if self._link is None:
            self._link = self._stack.enter_context(ndp_process(self.settings, self._shape, self._layers))
        return self._link

    def close(self) -> None:
        """End it; whoever asks again gets another one."""
        self._link = None
        self._stack.close()


@contextmanager
def engine_of(
    preset: str,
    budget: float,
    shape: RealShape,
    built: RandomModel,
    host: HostExperts,
    probes: Sequence[RouterProbe],
    context: Context,
    near_data: NearData,
) -> Iterator[ExpertEngine]:
    """The engine, with a matcher and the NDP worker where the preset uses them.

    Args:
        probes: in place of each layer's router. near_data: outlives the engine, unless something fails.

    Raises:
        TierMoeError: the preset does not work with that budget or model.
    """
    policy = load_policy(preset)
    layers, expert = len(host.layers), shape.expert
    settings = EngineSettings(
        policy=policy, budget=budget, device=context.device.type, link=LinkSettings(gbps=None),
        ndp=near_data.settings,
    )  # fmt: skip
    blocks = [replace(block, router=probe) for block, probe in zip(built.blocks, probes, strict=True)]
    embedding = built.model.get_input_embeddings()
    watching = set(embedding._forward_hooks)
    with ExitStack() as stack:
        links, matcher = [], None
        if policy.uses_ndp:
            links = [near_data.link()]
            stack.push(lambda kind, *_: near_data.close() if kind is not None else None)
        if policy.prefetch.uses_maps:
            maps = MapShape(shape.name, layers, shape.experts, shape.hidden)
            process = stack.enter_context(WorkerProcess(Role.matcher(settings.matcher_settings, maps, shape.top_k)))
            matcher = MatcherLink(process.link, settings.matcher_settings, maps)
        replicas = None
        if policy.on_miss == "low-bit":
            replicas = host.replicas(expert, policy.low_bit.bits, settings.ndp.group_size, context.device)
        device = stack.enter_context(closing(make_device(context.device.type, settings.link)))
        engine = ExpertEngine(
            settings, expert, host.layers, blocks, shape.top_k, device, context.dtype, links,
            random_tables(layers, shape.experts) if policy.uses_ndp and policy.replica_widths else None, (), matcher,
            replicas=replicas,
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
