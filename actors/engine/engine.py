"""The expert engine of one process: slot pool, cache and MoE layers, attached to a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from ...errors import ConfigError
from ...kernels.packed_slots import PackedKernel
from ...proto.peers import PeerLink
from ..combinations import check_combination
from ..core import _core
from ..policies.drafts import DecodeCounts, MissPrice
from ..policies.foreign import METER
from ..policies.hobbit import MixedPrecision
from ..policies.prefetch_trials import PrefetchTrials
from ..policies.routing import Rerouting, SequenceRows
from ..policy_settings import PolicySettings
from ..settings import EngineSettings, shared_bytes
from ..store.artifacts import PolicyArtifacts
from ..store.format import ExpertShape
from ..store.learned import Uses
from ..store.replicas import ReplicaTables
from .cache.device import Device
from .cache.low_bits import ReplicaPool
from .cache.slots import MappedPool
from .calls import RemoteExperts
from .dispatch import DeviceBackend
from .executors import executor_of
from .hooks import Hooks, RerouteHook
from .host_view import Asker, HostViews, share
from .layer import MoeLayer, Shared
from .make_cache import ModelExperts, make_cache
from .make_device import activations_of, fetch_from
from .make_policies import (
    gate_probes,
    make_policy,
    make_pre_evicting,
    make_rerouting,
    router_scores,
    scores_asked,
    unasked_layers,
)
from .model.form_kernels import kernels_of, make_packed_kernel
from .model.kernels import SteppedKernel, expert_seconds, run_seconds
from .model.model import MoeBlock, attach, detach
from .peers.auto import AutoPlacer, make_auto
from .peers.matcher import MatcherLink
from .peers.placement import GpuPlacer, make_placer, refuse_unsuitable
from .peers.remote import NdpPool
from .peers.shards import Shards, owners
from .peers.start_costs import PROBED, probe_costs
from .placer import Placer
from .pre_evicting import PreEvicting, last_rows
from .prefetching import RouterPrefetching
from .rerouting import LowBits, Rerouter, report_link_speed
from .split import Configuring, make_configuring
from .stats import EngineStats, LayerResidency

_MATCHER_START_S = 5.0  # seconds to reach the matcher, which starts before the lead; serving works without it
_NDP_START_S = 60.0  # seconds to reach the NDP workers, which start before the lead


@dataclass(frozen=True)
class PeerLinks:
    """Connections to the other processes of a runtime.

    ndp: the NDP workers; needed if the policy uses them. shards: the shards 1..G-1, as many as the settings say.
    matcher: which the engine starts and closes; needed if the policy uses expert maps.
    """

    ndp: Sequence[PeerLink] = ()
    shards: Sequence[PeerLink] = ()
    matcher: MatcherLink | None = None


_NO_PEERS, _NO_ARTIFACTS = PeerLinks(), PolicyArtifacts()


class ExpertEngine:
    """Runs a model's experts out of a bounded slot pool.

    Args:
        model: the experts; with replicas if the policy loads those.
        blocks: the model's MoE layers, in the order of `model.sources`.
        device: where the pool is allocated.
        links: to the peers that the policy and the settings need.
        artifacts: results of `tiermoe prepare` that the policy needs.
        tables: of the store's replicas; None: the store has none.

    Raises:
        BudgetError: no slot fits. ConfigError: the policy needs something that the model, store or budget lacks.
        RuntimeFailure: preloading failed, or an NDP worker or a shard was not reached. After an error no thread runs.
    """

    def __init__(
        self,
        settings: EngineSettings,
        model: ModelExperts,
        blocks: Sequence[MoeBlock],
        device: Device,
        links: PeerLinks = _NO_PEERS,
        artifacts: PolicyArtifacts = _NO_ARTIFACTS,
        tables: ReplicaTables | None = None,
    ) -> None:
        layers, policy, shape, matcher = len(model.sources), settings.policy, model.shape, links.matcher
        METER.clock = time.perf_counter
        mine = [key for key, owner in enumerate(owners(layers, shape.num_experts, settings.shards)) if owner == 0]
        self.experts, self.top_k, self.device = shape.num_experts, model.top_k, device
        self._mine = mine if policy.preload == "none" and not model.mapped else []  # what may be loaded on demand
        self.slot_bytes = model.slot_bytes
        self.notes: list[str] = []  # facts about the policy's execution, for the user
        if policy.low_bit is not None:
            _check_low_bits(settings, model)
        self._clock = _core.Clock() if device.executor == "emulated" and settings.link.layer_us is not None else None
        self._layer_s = (settings.link.layer_us or 0.0) * 1e-6
        self.activations, self._fetch = activations_of(device.torch_device), fetch_from(device.torch_device)
        shared = shared_bytes(settings)
        if shared and (problem := device.arena_problem()) is not None:
            shared = 0
            self.notes.append(f"the KV cache has memory of its own: {problem}")
        self.cache = make_cache(settings, model, device, mine, self._clock, shared)
        # held by a thread that runs forwards, or changes the cache, beside an idle batching loop
        self.alone = threading.Lock()
        self.timeline, self._stats = self.cache.timeline, self.cache.stats
        self.layers: list[MoeLayer] = []
        self._handles: list[int] = []
        self.ndp: NdpPool | None = None
        self.shards: Shards | None = None
        self.matcher = matcher
        if matcher is not None:
            matcher.timeline = self.timeline
        self.prefetching: RouterPrefetching | None = None
        self.pre_evicting: PreEvicting | None = None
        self.configuring: Configuring | None = None
        self._placer = Placer(self.cache)
        self._rule: Rerouting | None = None
        self._at_begin: list[Callable[[Sequence[SequenceRows]], None]] = []
        self.packed_kernel: PackedKernel | None = None  # runs low-bit replicas
        try:
            self.kernels = kernels_of(self.cache.pool, settings, blocks)  # before anything is loaded
            self._placer = self._make_placer(settings, shape, blocks, links, tables)
            if self.shards is not None:
                self.shards.start()
            if self.ndp is not None:
                self.ndp.start(_NDP_START_S)
            self._placer.preload()
            self.prefetching = self._make_prefetching(settings, blocks, artifacts)
            self.pre_evicting = make_pre_evicting(policy, self.cache, blocks, self.experts, self.top_k)
            self.configuring = make_configuring(
                policy, self.cache, self.experts, self.top_k, self.slot_bytes, self.prefetching
            )
            self._attach_layers(settings, shape, blocks, self._make_rerouter(policy, blocks, artifacts))
            self._at_begin += self._begin_hooks()
            if isinstance(self.cache.pool, MappedPool):
                self.cache.fill_mapped()
            elif policy.preload == "all":
                self.cache.core.preload(mine)
        except BaseException:
            self.close()
            raise

    def _make_placer(
        self, settings: EngineSettings, shape: ExpertShape, blocks: Sequence[MoeBlock], links: PeerLinks,
        tables: ReplicaTables | None,
    ) -> Placer:  # fmt: skip
        """The placer, after `shards` and `ndp`."""
        if settings.shards.count > 1 or links.shards:
            self.shards = Shards(
                settings.shards, links.shards, len(blocks), shape.num_experts, shape.hidden, self._stats,
                self.activations.supply,
            )  # fmt: skip
        placement = settings.policy.placement
        if placement.planned:
            make_ndp = self._make_optional_ndp if placement.optional_workers else self._make_ndp
            self.ndp = make_ndp(settings, shape, blocks, links.ndp)
            kernel, pool, together = self.kernels.of(blocks[0]), self.cache.pool, min(self.top_k, PROBED)
            assert not isinstance(pool, MappedPool)  # nothing is planned where all experts are here
            gpu_s = expert_seconds(kernel, pool, together)
            here = partial(run_seconds, kernel, pool, together)
            probe = partial(probe_costs, self.cache, self.ndp, gpu_s, here, self.activations, self.top_k)
            score = router_scores(settings.policy, blocks) if placement.scored else None
            return make_auto(placement, self.cache, self.experts, self.top_k, self.shards, self.ndp, probe, score)
        if settings.policy.uses_ndp:
            self.ndp = self._make_ndp(settings, shape, blocks, links.ndp)
            return make_placer(settings, self.cache, shape, self.shards, self.ndp, self.kernels.of(blocks[0]), tables)
        return self._placer if self.shards is None else GpuPlacer(self.cache, shape.num_experts, self.shards)

    def _make_optional_ndp(
        self, settings: EngineSettings, shape: ExpertShape, blocks: Sequence[MoeBlock], links: Sequence[PeerLink]
    ) -> NdpPool | None:
        """The workers of a placement that loads every miss where there are none, or none that can compute."""
        try:
            return self._make_ndp(settings, shape, blocks, links) if links else None
        except ConfigError as error:
            self.notes.append(f"every miss is loaded: {error.what}")
            return None

    def _make_ndp(
        self, settings: EngineSettings, shape: ExpertShape, blocks: Sequence[MoeBlock], links: Sequence[PeerLink]
    ) -> NdpPool:
        policy = settings.policy
        activation = refuse_unsuitable(policy, shape, blocks)
        if not links:
            raise ConfigError(f"policy {policy.name} needs an NDP worker", "start one, or choose another policy")
        each = [self.slot_bytes] * self._stats.experts  # equal sizes, as the replicas have
        return NdpPool(links, settings.ndp, activation, self._stats, each, self.activations.supply)

    def begin_with(self, uses: Uses) -> int:
        """Fill free slots with the experts that earlier runs used most, behind demand; how many. Before requests.

        On a GPU it waits for the copies: between requests nothing would submit them.
        """
        if not self._mine or not self._placer.begin_with(uses):
            return 0
        mine = frozenset(self._mine)
        with self.alone:
            filled = self.cache.core.fill([key for key in uses.hottest() if key in mine])
            if self.device.executor == "real":
                self.cache.core.wait_all()
                self.cache.settle_times()
        return filled

    def follow_maps(self) -> None:
        """Connect to the matcher and publish to it from now on; earlier forwards are no user's."""
        if self.matcher is not None:
            self.matcher.start()
            if not self.matcher.wait_until_found(_MATCHER_START_S):
                self.notes.append(f"prefetch begins with next-gate: {self.matcher.problem}")

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward pass carries these rows; on the thread that runs it."""
        self.cache.core.decode_only = bool(sequences) and all(s.decode for s in sequences)
        for begin in self._at_begin:
            begin(sequences)
        if self.timeline.enabled:
            self._show_forward(sequences)

    def _show_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """A forward, and what is made around it, begin on the timeline."""
        rows = sum(sequence.stop - sequence.start for sequence in sequences)
        kind = "decode" if self.cache.core.decode_only else "prefill"
        name, args = f"{kind}, {rows} rows", {"sequences": [sequence.name for sequence in sequences], "rows": rows}
        self.timeline.begin("token", name, args)
        self.timeline.begin("forward", name, args)

    def _begin_hooks(self) -> Iterator[Callable[[Sequence[SequenceRows]], None]]:
        """What runs when a forward begins, in this order."""
        ndp, shards, configuring, rule, ahead = self.ndp, self.shards, self.configuring, self._rule, self.pre_evicting
        if ndp is not None:
            yield lambda sequences: ndp.refresh()
        if shards is not None:
            yield lambda sequences: shards.begin_forward()
        yield self._placer.begin_forward
        if configuring is not None:
            yield lambda sequences: configuring.begin_forward()
        if self.prefetching is not None:
            yield self._begin_prefetching
        if rule is not None:
            yield lambda sequences: report_link_speed(rule, self.cache)
        if ahead is not None:
            yield lambda sequences: ahead.begin_forward(last_rows(sequences))

    def _begin_prefetching(self, sequences: Sequence[SequenceRows]) -> None:
        """Prefetch by the policy, but not in a forward whose layers a planner decides."""
        assert self.prefetching is not None
        if isinstance(self._placer, AutoPlacer) and not self._placer.prefetches:
            self.prefetching.rest()
        else:
            self.prefetching.begin_forward(sequences)

    def resize(self, slots: int) -> None:
        """Another number of slots, between forwards. Raises as `ExpertCache.resize`."""
        self.cache.resize(slots)
        self._placer.resized()

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread."""
        self._placer.end_sequence(name)
        self.timeline.end("token")
        if self.prefetching is not None:
            self.prefetching.end_sequence(name)

    def _make_rerouter(
        self, policy: PolicySettings, blocks: Sequence[MoeBlock], artifacts: PolicyArtifacts
    ) -> Rerouter | None:
        normalised = blocks[0].normalised
        rule = self._rule = make_rerouting(
            policy, len(blocks), self.experts, normalised, artifacts, self.slot_bytes,
            1 if self.shards is None else len(self.shards.peers) + 1,
        )  # fmt: skip
        if rule is None:
            return None
        return Rerouter(rule, self.cache, blocks, self.top_k, None if self.shards is None else self.shards.caches.join)

    def _make_views(self, blocks: Sequence[MoeBlock], rerouter: Rerouter | None) -> HostViews:
        """The layers' host views: on a GPU one fetch for all that the policies read."""
        askers: list[Asker] = [hook.asks for hook in (rerouter, self.prefetching) if hook is not None]
        if self.pre_evicting is not None:
            askers.append(scores_asked(self.pre_evicting, blocks))
        if self._placer.scored_at(0):
            askers.append(scores_asked(self._placer, blocks))
        weighed = any(user is not None for user in (rerouter, self.shards, self.ndp, self.cache.low_bit))
        return HostViews(self._fetch, self._fetch is not share, askers, weighed)

    def _attach_layers(
        self, settings: EngineSettings, shape: ExpertShape, blocks: Sequence[MoeBlock], rerouter: Rerouter | None
    ) -> None:
        cache, part, low = self.cache, self.cache.low_bit, settings.policy.low_bit
        rules: list[RerouteHook] = [] if rerouter is None else [rerouter]
        if part is not None and low is not None:
            pool = cast(ReplicaPool, part.pool)
            self.packed_kernel = make_packed_kernel(
                settings.policy, pool, shape, blocks, cache.pool.dtype, settings.threads, self.notes
            )
            rules.append(LowBits(MixedPrecision(low.t1, low.t2, blocks[0].normalised), cache, self.experts))
        hooks = Hooks(
            rules,
            [] if self.shards is None else [self.shards],
            [hook for hook in (self.prefetching, self.pre_evicting) if hook is not None],
            None if self.configuring is None else self.configuring.passed,
        )
        peer_named = self._peer if self.shards is not None or self.ndp is not None else None
        views = self._make_views(blocks, rerouter)
        if self.device.torch_device.type == "cuda":
            row = torch.zeros(1, shape.hidden, dtype=cache.pool.dtype, device=self.device.torch_device)
            views.warm(len(blocks), row, self.top_k)
        backend = DeviceBackend(cache, views, self.activations, peer_named, self.packed_kernel)
        shared = Shared(cache, backend, self._placer, hooks, len(blocks) - 1, settings.integrity_checks)
        if self.prefetching is not None:
            shared.at_end.append(self.prefetching.ended)
        for i, block in enumerate(blocks):
            kernel = self.kernels.of(block)
            if self._clock is not None:
                kernel = SteppedKernel(kernel, self._clock, self._layer_s)
            layer = MoeLayer(i, self.experts, shared, kernel, block.post, executor_of)
            self.layers.append(layer)
            self._handles.append(attach(block.experts, layer))

    def _make_prefetching(
        self, settings: EngineSettings, blocks: Sequence[MoeBlock], artifacts: PolicyArtifacts
    ) -> RouterPrefetching | None:
        if isinstance(self._placer, AutoPlacer) and not self._placer.may_prefetch:
            return None
        policy = make_policy(
            settings.policy, blocks, self.experts, self.top_k, self.cache.eviction, self.matcher, self.shards,
            artifacts.predictors,
        )  # fmt: skip
        if policy is None:
            return None
        gates = None
        if policy.needs_gates:
            gates = gate_probes(settings.policy, artifacts, len(blocks), self.device.torch_device)
        elif policy.needs_lookahead:
            mute = unasked_layers(blocks)
            self.notes += [f"MoE layer {i} exposes no router logits and is not prefetched for" for i in mute]
        streams = self.shards is None or settings.policy.shards_stream
        made = RouterPrefetching(policy, self.cache, blocks, self.experts, self.shards, gates, self._fetch, streams)
        if settings.policy.adapts_prefetch:
            made.adapt(PrefetchTrials(), time.perf_counter if self._clock is None else self._clock)
        return made

    @property
    def peers(self) -> dict[str, RemoteExperts]:
        """The NDP workers and other shards, by name."""
        shards = self.shards.peers if self.shards is not None else {}
        return (self.ndp.peers if self.ndp is not None else {}) | shards

    def _peer(self, name: str) -> RemoteExperts:
        """One of `peers`, without merging the dicts."""
        if self.ndp is not None and name in self.ndp.peers:
            return self.ndp.peers[name]
        assert self.shards is not None  # plans name no others
        return self.shards.peers[name]

    @property
    def hot_per_layer(self) -> int | None:
        """Experts of each layer in the hot set; None: the placement has no fixed number."""
        return self._placer.hot_per_layer

    def stats(self) -> EngineStats:
        """The counters so far; the record is live."""
        self.cache.live_stats()
        self._stats.matcher = None if self.matcher is None else self.matcher.report()
        self._stats.policy_s = dict(METER.spent_s)
        return self._stats

    def decode_counts(self) -> DecodeCounts:
        """As of `policies.drafts.CountedExperts`."""
        stats, totals = self._stats, self.cache.core.totals
        near = stats.decode_ndp_experts + stats.decode_shard_experts
        missed = totals.decode_misses + near
        waited_s = totals.decode_blocked_io_s
        if near:  # prompts' waits for them are among these; no step that decodes has any
            waited_s += sum(layer.ndp_wait_s + layer.shard_wait_s for layer in stats.layers)
        return DecodeCounts(totals.decode_hits + missed, missed, waited_s)

    def miss_price(self) -> MissPrice:
        """As of `policies.drafts.CountedExperts`."""
        planner = self._stats.planner
        miss_s = self.cache.copy_s() if planner is None else min(planner.copy_s, planner.near_s)
        return MissPrice(miss_s, self.cache.absent())

    def residency(self) -> list[LayerResidency]:
        """The residency of each layer now; from any thread."""
        return self.cache.layer_residency()

    def begin_serving(self) -> None:
        """Drop the experts of the requests by which the start tried itself: every run starts with an empty cache."""
        self.cache.flush()
        self._placer.begin_serving()

    def reset_stats(self) -> None:
        """Zero the counters and the timeline; residency stays."""
        if self.matcher is not None:
            self.matcher.reset()
        self.cache.reset_stats()
        METER.reset()
        self.timeline.clear()

    def close(self) -> None:
        """Close the connections, stop the loader and detach the layers. Safe to call twice."""
        for part in (self.configuring, self.ndp, self.shards, self.matcher, self.cache):
            if part is not None:
                part.close()
        for handle in self._handles:
            detach(handle)
        self._handles = []


def _check_low_bits(settings: EngineSettings, model: ModelExperts) -> None:
    """Raise ConfigError unless the policy's replicas are given, and can be loaded with these settings."""
    check_combination(settings)
    if model.replicas is None:
        bits = settings.policy.replica_widths[0]
        raise ConfigError(
            f"policy '{settings.policy.name}' loads replicas of {bits} bits, which were not given",
            f"run `tiermoe prepare MODEL OUT --bits {bits}`",
        )
