"""One simulated GPU: the engine's cache over a link on a virtual clock, and layers whose kernels let time pass.

The layers are `core::VirtualLayer`, whose pass is the engine's (`core::Layer::run`) with the engine's parts in Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from ...actors.core import _core
from ...actors.core._core import Clock, VirtualLink, VirtualRun
from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.cache.links import CacheLink
from ...actors.engine.cache.slot_map import SlotMap
from ...actors.engine.cache.slots import LowBitPart
from ...actors.engine.host_view import Asked
from ...actors.engine.layer import MoeLayer, install
from ...actors.engine.stats import EngineStats, LayerStats, Timeline
from ...actors.policies.cost import load_s
from ...actors.policies.eviction import EvictionPolicy
from ...actors.policies.moepic.split import SplitLayout
from .machine import Machine
from .recorded import RecordedRouter
from .trace import TraceHeader


class PoolSize(NamedTuple):
    """Of slots that nobody allocates: a copy moves nothing."""

    bytes: int
    neurons: int = 1
    total_neurons: int = 1


class VirtualExecutor:
    """Runs recorded layers, all of a forward in one call (`core::VirtualRun`).

    Attributes:
        core: the layer in native code. asked: its routers, by number.
        on_host: each of Python's parts reads for itself.
    """

    on_host, looks = True, False

    def __init__(self, step: MoeLayer, run: VirtualRun) -> None:
        self.core: _core.VirtualLayer = run.layers[step.index]
        self.asked: list[Asked] = []
        install(step, self)

    def finds(self, asked: Asked) -> bool:
        """As of `hooks.Native`."""
        return True

    def router(self, asked: Asked | None) -> int:
        """As of `hooks.Native`."""
        if asked is None:
            return -1
        self.asked.append(asked)
        return self.core.router(asked.probe.layers if isinstance(asked.probe, RecordedRouter) else 1)

    def run(self, *inputs: Any) -> Any:
        raise AssertionError("recorded layers run together")


class SimulatedGpu:
    """A GPU with a clock of its own.

    Args:
        slots: for whole experts. The others are as of `ExpertCache`.

    Attributes:
        run: the layers. link: its own.
    """

    def __init__(
        self, header: TraceHeader, machine: Machine, slots: int, eviction: EvictionPolicy, min_useful: float = 0.0,
        split: SplitLayout | None = None, writeback: bool = False, low_bit: LowBitPart | None = None,
    ) -> None:  # fmt: skip
        keys, nbytes, neurons = header.layers * header.experts, header.slot_bytes, 1 if split is None else split.neurons
        self.clock = Clock()
        link = self.link = virtual_link(self.clock, machine)
        self.stats = EngineStats(
            layers=[LayerStats() for _ in range(header.layers)], slots=slots, experts=keys, executor="simulated"
        )
        nowhere: Any = None
        pool = cast(Any, PoolSize(slots * nbytes, neurons, slots * neurons))
        where = SlotMap(pool, [nowhere] * header.layers, header.experts, slots, nbytes, split, low_bit)
        self.cache = ExpertCache(
            where, CacheLink(link, self.clock), eviction, self.stats, Timeline(False), min_useful, writeback
        )
        self.run = VirtualRun(
            self.cache.core, link, self.clock, machine.expert_s, machine.expert_row_s, machine.kernel_share,
            machine.load_s / nbytes, machine.miss_s, neurons,
        )  # fmt: skip


def virtual_link(clock: Clock, machine: Machine) -> VirtualLink:
    """The link of one of a machine's GPUs."""
    link = machine.link
    return VirtualLink(clock, lambda nbytes: 0.0 if link is None else load_s(nbytes, link), machine.wait_s)
