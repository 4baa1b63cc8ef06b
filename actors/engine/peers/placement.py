"""Placers: which process computes each expert that a layer needs.

A placer follows sequences and asks the pure policies whether an expert runs on a GPU or near data. On a GPU an expert
runs on its owner, or on the lead while the owner is lost; near data on the NDP worker that the pool chooses. Experts
of this GPU are planned by its cache's core, all others go to `Where.remote`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from ....errors import ConfigError
from ....kernels.expert_ffn import ExpertKernel
from ...core import _core
from ...policies.context_ndp import (
    HotSet,
    HotSlots,
    PlacementOptions,
    PrecisionOptions,
    RoutingCounts,
    monde_split,
    prefix_split,
    static_hot,
)
from ...policies.cost import FULL_BITS, NdpDevice, SplitCosts, Work, split_costs
from ...policies.plan import Remote, Where
from ...policies.residency import State
from ...policies.routing import SequenceRows
from ...policy_settings import PolicySettings
from ...settings import EngineSettings
from ...store.format import ExpertShape, Published
from ...store.learned import Uses
from ...store.replicas import ReplicaTables
from ..cache.cache import ExpertCache
from ..cache.slots import MappedPool
from ..host_view import LayerView
from ..model.kernels import expert_seconds, link_seconds
from ..model.model import MoeBlock
from ..placer import Placer
from .remote import NdpPool
from .shards import Shards, owners

_ABSENT = int(State.ABSENT)
_FIRST_ROWS = 32  # after which popularity that is counted online first decides


class PeerPlacer(Placer):
    """A placer with other processes. experts: of a layer. shards: the other GPUs; None where there are none."""

    local = False

    def __init__(self, cache: ExpertCache, experts: int, shards: Shards | None) -> None:
        super().__init__(cache)
        self._experts, self._shards = experts, shards

    def _gpu_of(self, key: int) -> str | None:
        """The other GPU that computes an expert; None: this GPU, as its owner or because its owner is lost."""
        found = self._shards.peer_of(key) if self._shards is not None else None
        return None if found is None else found[0]

    def _on_gpus(self, needed: Sequence[int], keep: frozenset[int] = frozenset()) -> Where:
        """Every expert on the GPU that owns it."""
        found = [(key, self._gpu_of(key)) for key in needed] if self._shards is not None else []
        return self._split(needed, [Remote(key, 0, gpu) for key, gpu in found if gpu is not None], keep)

    def _split(self, needed: Sequence[int], remote: Sequence[Remote], keep: frozenset[int] = frozenset()) -> Where:
        away = {r.key for r in remote}
        return Where([key for key in needed if key not in away] if away else needed, keep, remote)


class GpuPlacer(PeerPlacer):
    """Every expert runs on the GPU that owns it; the lead runs experts of a lost GPU."""

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: LayerView) -> Where:
        return self._on_gpus(needed)


class HotPlacer(PeerPlacer):
    """Placements with a hot set: hot experts run on their GPUs, cold experts near data without a load.

    An expert of this GPU runs here if it is resident or loading; for other GPUs the hot set decides. A hot expert that
    is on no GPU runs near data on its widest replica (`widest` bits). Without NDP workers all experts run on the GPUs;
    the hot set is loaded again once a worker is available.
    """

    def __init__(self, cache: ExpertCache, experts: int, shards: Shards | None, pool: NdpPool, widest: int) -> None:
        super().__init__(cache, experts, shards)
        self._pool, self._widest = pool, widest
        self._hot_keys: frozenset[int] = frozenset()  # of all GPUs; `keep`: of this GPU
        self._displaced = False

    def begin_with(self, uses: Uses) -> bool:
        return False

    def displaced(self) -> None:
        self._displaced = True

    def resized(self) -> None:
        self._displaced = True  # hot experts may have left with their slots

    def _plan_hot(
        self, layer: int, needed: Sequence[int], bits: Mapping[int, int], warm: AbstractSet[int] = frozenset()
    ) -> Where:
        """Plan a layer by the hot set. bits: of its cold experts. warm: further experts that run on the GPUs."""
        base, states = layer * self._experts, self._cache.residency.states.data
        remote, cold, alone = [], [], self._shards is None
        for key in needed:
            gpu = None if alone else self._gpu_of(key)
            there = states[key] != _ABSENT if gpu is None else key in self._hot_keys
            if not there and key - base not in warm:
                cold.append(key)
            elif gpu is not None:
                remote.append(Remote(key, 0, gpu))
        workers = self._pool.choose(cold) if cold else []
        if workers is None:
            self._displaced = True
            return self._on_gpus(needed, self.keep)
        remote += [Remote(k, bits.get(k - base, self._widest), w) for k, w in zip(cold, workers, strict=True)]
        return self._split(needed, remote, self.keep)

    def _load_hot(self, keys: Sequence[int], *, keep_others: bool) -> None:
        """Every GPU loads its hot experts, most urgent first."""
        mine, placed = self._set_hot(keys), None
        if self._shards is not None:
            placed = self._shards.place(keys, keep_others=keep_others)
        self._cache.core.migrate(mine, keep_others)
        if placed is not None:
            placed()
        self._displaced = False

    def _set_hot(self, keys: Sequence[int]) -> list[int]:
        """Make these experts the hot set; returns the ones of this GPU."""
        mine = [key for key in keys if self._shards is None or self._shards.owner_of(key) == 0]
        self._hot_keys, self.keep = frozenset(keys), frozenset(mine)
        return mine


Bits = Callable[[int, Sequence[int]], dict[int, int]]  # (layer, its cold experts by importance) -> bits of each


class StaticPlacer(HotPlacer):
    """The most popular experts are hot; all other experts run near data, for prompts too.

    Popularity of a calibration text is known at once: the hot set is preloaded, and stays. Popularity that is counted
    online begins with nothing hot; the hot set is loaded when `_FIRST_ROWS` rows are counted, and again whenever they
    have doubled, so it changes ever more seldom. A layer's counting takes O(experts that it needs).

    Args:
        hot_slots: of each GPU and layer.
        bits: chooses the widths of a layer's cold experts.
        popularity: selections of each expert over a calibration text [L, E]; None: counted online.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts: int,
        shards: Shards | None,
        pool: NdpPool,
        widest: int,
        hot_slots: HotSlots,
        bits: Bits,
        popularity: NDArray[np.int64] | None,
    ) -> None:
        super().__init__(cache, experts, shards, pool, widest)
        self._slots, self._choose_bits, self._online = hot_slots, bits, popularity is None
        self._counts = np.zeros((hot_slots.layers, experts), np.int64) if popularity is None else popularity
        self._rows, self._due = 0, _FIRST_ROWS  # rows counted, and at how many the hot set is placed again
        self._hot: list[int] = []
        self._bits: list[dict[int, int]] = []
        self._place(empty=self._online)
        self.hot_per_layer = hot_slots.per_layer

    def preload(self) -> None:
        mine = self._set_hot(self._hot)
        loaded = None if self._shards is None else self._shards.preload(self._hot)
        self._cache.core.preload(mine)
        if loaded is not None:
            loaded()

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        if self._online and self._rows >= self._due:
            while self._due <= self._rows:
                self._due *= 2
            self._place()
            self._displaced = True
        if self._displaced and self._pool.available:
            self._load_hot(self._hot, keep_others=False)

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: LayerView) -> Where:
        if self._online:
            self._counts[layer, routing.experts] += routing.counts
            self._rows += routing.tokens if layer == 0 else 0
        return self._plan_hot(layer, needed, self._bits[layer])

    def _place(self, empty: bool = False) -> None:
        """Choose the hot set and the widths of the others by what is counted. empty: nothing is hot."""
        hot = [frozenset[int]()] * self._slots.layers if empty else static_hot(self._counts, self._slots)
        self._hot = [layer * self._experts + e for layer, chosen in enumerate(hot) for e in sorted(chosen)]
        self._bits = []
        for layer, chosen in enumerate(hot):
            order = np.argsort(-self._counts[layer], kind="stable").tolist()
            self._bits.append(self._choose_bits(layer, [e for e in order if e not in chosen]))


class MondePlacer(PeerPlacer):
    """MoNDE on one GPU: each layer's experts with the most tokens run here, as far as that pays.

    choose: (token rows and residency of each needed expert, available NDP workers) -> whether each runs here
    (`policies.context_ndp.monde_split`). bits: of the other experts. keeps: what is loaded stays for later forwards.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts: int,
        pool: NdpPool,
        choose: Callable[[Sequence[int], Sequence[bool], int], list[bool]],
        bits: int,
        keeps: bool = True,
    ) -> None:
        super().__init__(cache, experts, None)
        self._pool, self._choose, self._bits, self._keeps = pool, choose, bits, keeps

    def begin_with(self, uses: Uses) -> bool:
        return self._keeps

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        if not self._keeps:
            self._cache.flush()

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: LayerView) -> Where:
        there = self._pool.living
        if not there:
            return self._split(needed, ())
        states = self._cache.residency.states[list(needed)]
        here = self._choose(routing.counts, (states != State.ABSENT).tolist(), there)
        away = [k for k, h in zip(needed, here, strict=True) if not h]
        workers = self._pool.choose(away)
        if workers is None:  # the last one was lost just now
            return self._split(needed, ())
        return self._split(needed, [Remote(k, self._bits, w) for k, w in zip(away, workers, strict=True)])


class ContextPlacer(HotPlacer):
    """Prefill-guided placement and precision (Context-aware MoE inference on GPU-NDP, Algorithm 1).

    Rows of a prompt run on the GPUs under the caches' ordinary rule and are counted (P, W). Before a sequence's first
    decode row its counts enter the hot set, the hot set is loaded (the sequence's one migration) and the widths of the
    cold experts are chosen. After that, decode rows load nothing of their own, except by `renew`. A prompt that ends
    without a decode row has displaced hot experts; they are loaded again.

    Args:
        hot: the hot set over the active sequences.
        bits: chooses the widths of a layer's cold experts.
        widest: bits for a hot expert that is on no GPU.
        options: with `prompts` "ndp" rows of a prompt run as decode rows do, on the hot set as it is and near data;
            after `renew` tokens of a sequence's decode their counts take the place of the sequence's.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts: int,
        shards: Shards | None,
        pool: NdpPool,
        widest: int,
        hot: HotSet,
        bits: Bits,
        options: PlacementOptions,
    ) -> None:
        super().__init__(cache, experts, shards, pool, widest)
        self._hot, self._choose_bits = hot, bits
        self._prompts_near_data, self._renew = options.prompts == "ndp", options.renew
        self._recent: dict[str, tuple[RoutingCounts, int]] = {}  # of a decode's last tokens, and how many they are
        self.hot_per_layer = hot.hot_slots.per_layer
        self._layers = len(cache.stats.layers)
        self._counting: dict[str, RoutingCounts] = {}
        self._decoding: set[str] = set()
        self._ended: deque[str] = deque()
        self._rows: list[SequenceRows] = []
        self._bits: list[dict[int, int]] = [{} for _ in range(self._layers)]

    def preload(self) -> None:
        if self._shards is not None:
            self._shards.place((), keep_others=True)()  # drop the placement of an earlier lead

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        self._remove_ended()
        self._rows = list(sequences)
        prompts = [s.name for s in sequences if not s.decode]
        for name in prompts:
            self._decoding.discard(name)  # if it lost its KV cache and is fed again
            if name not in self._counting:
                self._counting[name] = RoutingCounts(self._layers, self._experts)
        admitted = {s.name: self._counting.pop(s.name) for s in sequences if s.decode and s.name in self._counting}
        placed = self._renewed(sequences) | admitted
        for name, counts in placed.items():
            self._hot.admit(name, counts)
            self._decoding.add(name)
            self._cache.stats.migrations += 1
        if placed:
            for layer in range(self._layers):
                hot = self._hot.hot(layer)
                self._bits[layer] = self._choose_bits(layer, [e for e in self._hot.order(layer) if e not in hot])
        if placed or (self._displaced and self._decoding and self._pool.available):
            self._load_hot(self._by_importance(), keep_others=bool(self._counting))

    def end_sequence(self, name: str) -> None:
        self._ended.append(name)

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: LayerView) -> Where:
        if not self._rows or self._rows[-1].stop != routing.tokens:  # a forward that was not announced
            return self._on_gpus(needed)
        near, prompts = self._prompts_near_data, [s for s in self._rows if not s.decode]
        warm: set[int] = set()  # experts that the prompts need on the GPUs
        for s in self._rows if self._renew is not None else prompts:
            rows = view.ids[s.start : s.stop]
            counts = self._recent[s.name][0] if s.decode else self._counting[s.name]
            counts.add(layer, rows, view.weights[s.start : s.stop])
            if not s.decode and not near:
                warm.update(np.unique(rows).tolist())
        if len(prompts) == len(self._rows) and not near:
            return self._on_gpus(needed, self.keep)
        return self._plan_hot(layer, needed, self._bits[layer], warm)

    def _renewed(self, sequences: Sequence[SequenceRows]) -> dict[str, RoutingCounts]:
        """Counts of the decodes that have gone on for `renew` tokens; their next ones are counted from now on."""
        found: dict[str, RoutingCounts] = {}
        if self._renew is None:
            return found
        for s in sequences:
            if s.decode:
                counts, tokens = self._recent.pop(s.name, (RoutingCounts(self._layers, self._experts), 0))
                if tokens >= self._renew:
                    found[s.name] = counts
                    counts, tokens = RoutingCounts(self._layers, self._experts), 0
                self._recent[s.name] = counts, tokens + s.stop - s.start
        return found

    def _by_importance(self) -> list[int]:
        """Hot keys, nearest layer first."""
        keys: list[int] = []
        for layer in range(self._layers):
            hot = self._hot.hot(layer)
            keys += [layer * self._experts + e for e in self._hot.order(layer) if e in hot]
        return keys

    def _remove_ended(self) -> None:
        while self._ended:
            name = self._ended.popleft()
            self._recent.pop(name, None)
            if self._counting.pop(name, None) is not None:
                self._displaced = True  # by a prompt without a placement
            self._decoding.discard(name)
            if name in self._hot.active:
                self._hot.release(name)
        if self._prompts_near_data:
            return
        if not self._decoding and self._hot_keys:  # nothing decodes: a prompt may use every slot
            self._set_hot(())
            if self._shards is not None:
                self._shards.place((), keep_others=True)()


def refuse_unsuitable(policy: PolicySettings, shape: ExpertShape, blocks: Sequence[MoeBlock]) -> str:
    """The activation of the model's experts, which NDP workers compute.

    Raises:
        ConfigError: NDP workers cannot compute experts without gate, with biases, own gating or a norm after them.
    """
    activations = {block.activation for block in blocks}
    activation = next(iter(activations)) if len(activations) == 1 else None
    plain = shape.gates == 2 and not shape.has_bias and all(block.post is None for block in blocks)
    if activation is None or not plain:
        raise ConfigError(
            f"policy {policy.name} runs experts on NDP workers, which compute plain gated experts without biases",
            "choose a policy that needs no NDP worker, such as next-gate",
        )
    return activation


def make_placer(
    settings: EngineSettings,
    cache: ExpertCache,
    shape: ExpertShape,
    shards: Shards | None,
    pool: NdpPool,
    kernel: ExpertKernel,
    tables: ReplicaTables | None,
) -> Placer:
    """The placer of `settings.policy`, which uses NDP workers.

    Args:
        kernel: runs experts here; timed where the policy compares GPU and NDP costs.
        tables: of the store's replicas; None where the store has none.

    Raises:
        ConfigError: the policy needs replicas that the store lacks, or more slots than there are.
    """
    policy, experts = settings.policy, shape.num_experts
    placement = policy.placement
    published: Published | None = getattr(cache.pool, "published", None)
    bits, widest = replica_bits(policy.precision, policy.name, tables, published)
    if placement.kind == "monde":
        choose = _monde_choice(settings, cache, shape, kernel)
        return MondePlacer(cache, experts, pool, choose, widest, placement.hot_per_layer is None)
    hot_slots = _hot_slots(settings, cache, experts)
    if placement.kind == "context":
        hot_set = HotSet(hot_slots, placement.alpha)
        return ContextPlacer(cache, experts, shards, pool, widest, hot_set, bits, placement)
    popularity = tables.counts if tables is not None and tables.counts.any() else None  # data-free ones know none
    return StaticPlacer(cache, experts, shards, pool, widest, hot_slots, bits, popularity)


def _hot_slots(settings: EngineSettings, cache: ExpertCache, experts: int) -> HotSlots:
    """The hot slots of each GPU and layer. Raises ConfigError: the policy wants more than there are slots."""
    layers = len(cache.stats.layers)
    owner = np.asarray(owners(layers, experts, settings.shards)).reshape(layers, experts)
    most = cache.stats.expert_budget_bytes // cache.residency.slot_bytes  # of each GPU
    slots = [min(most, int((owner == gpu).sum())) for gpu in range(settings.shards.count)]
    try:
        return HotSlots.fit(owner, slots, settings.policy.placement.hot_per_layer)
    except ValueError as error:
        raise ConfigError(
            f"policy {settings.policy.name}: {error}", "raise --budget, or lower placement.hot_per_layer"
        ) from error


def replica_bits(
    precision: PrecisionOptions, name: str, tables: ReplicaTables | None, published: Published | None
) -> tuple[Bits, int]:
    """Chooses the widths of a layer's cold experts; and the width of a hot expert that is on no GPU.

    Experts in a published form are their own replicas at and above that form's width: without loss, and 0 bits here.
    """
    widths = precision.widths
    below = widths if published is None else published.narrower(widths)
    if not below:
        return lambda layer, order: dict.fromkeys(order, 0), 0
    if tables is None:
        raise ConfigError(
            f"policy {name} needs quantized replicas, which the store lacks",
            f"run `tiermoe prepare MODEL OUT --bits {','.join(map(str, below))}`",
        )
    have = tables.widths
    if any(b not in have for b in below):
        raise ConfigError(
            f"policy {name} needs replicas of {', '.join(map(str, below))} bits, the store has {have}",
            f"run `tiermoe prepare MODEL OUT --bits {','.join(map(str, below))}`",
        )
    if precision.kind == "uniform":
        return lambda layer, order: dict.fromkeys(order, below[0]), below[0]
    assert precision.bits is not None  # the settings refused
    average = precision.bits
    losses = np.zeros((*tables.counts.shape, len(widths)))  # [L, E, W]
    losses[..., : len(below)] = tables.losses[..., [have.index(b) for b in below]]

    def split(layer: int, order: Sequence[int]) -> dict[int, int]:
        chosen = prefix_split(losses[layer, list(order)], widths, average)
        return {expert: width if width in below else 0 for expert, width in zip(order, chosen, strict=True)}

    return split, widths[-1] if below == widths else 0


def _monde_choice(
    settings: EngineSettings, cache: ExpertCache, shape: ExpertShape, kernel: ExpertKernel
) -> Callable[[Sequence[int], Sequence[bool], int], list[bool]]:
    """MoNDE's rule with measured seconds of this device and modelled seconds of the NDP devices.

    NDP workers share a layer's experts: an expert's NDP time is divided by the number of workers.
    """
    device = settings.ndp.device
    assert not isinstance(cache.pool, MappedPool)  # nothing is placed where all experts are here
    first_s, further_s = expert_seconds(kernel, cache.pool)
    emulated = cache.stats.executor == "emulated"
    load = link_seconds(settings.link, cache.residency.slot_bytes, emulated, device.link_gbps)
    row_bytes = 4 * shape.hidden  # float32 over the channel
    published = getattr(cache.pool, "published", None)
    bits = FULL_BITS if published is None else min(FULL_BITS, published.bits)
    return monde_choice(
        device, shape.hidden, shape.intermediate, lambda rows: first_s + (rows - 1) * further_s, load, row_bytes, bits
    )


def monde_choice(
    device: NdpDevice, hidden: int, intermediate: int, gpu_s: Callable[[int], float], one_load_s: float,
    row_bytes: int, bits: int,
) -> Callable[[Sequence[int], Sequence[bool], int], list[bool]]:  # fmt: skip
    """MoNDE's rule for experts of one shape. gpu_s: seconds of an expert on the GPU, by rows. bits: near data."""

    @functools.cache
    def priced(rows: int) -> SplitCosts:
        work = Work(hidden, intermediate, rows, bits)
        return split_costs(device, [work], [gpu_s(rows)], one_load_s, row_bytes)

    def choose(rows: Sequence[int], resident: Sequence[bool], workers: int) -> list[bool]:
        each = [priced(n) for n in rows]
        on_gpu = tuple([cost.gpu_s[0] for cost in each])
        ndp_s = tuple([cost.ndp_s[0] / workers for cost in each])
        return monde_split(rows, resident, SplitCosts(on_gpu, ndp_s, one_load_s, once_s))

    once_s = priced(1).ndp_once_s
    return choose
