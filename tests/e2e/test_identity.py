"""The default model gives the very tokens of the unmodified model with every lossless preset, at every budget.

Whole or split experts, whatever prefetches, evicts, splits anew or copies. Near-data workers and shards: test_peers.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_rigs import bytes_held
from fake_gpu import FakeGpu
from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from quick import quick
from serving import Reference, serving, serving_locally, settings

from tiermoe.actors.budget import MARGIN_BYTES, MARGIN_SHARE, AutoBudget, Budget
from tiermoe.actors.core import _core
from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.policies.moepic.configure import Times
from tiermoe.actors.policies.moepic.split import SplitLayout, SplitOptions
from tiermoe.actors.policies.residency import State
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import CopySettings, EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_policy
from tiermoe.errors import ConfigError, StoreError, TraceError

KV = KvSettings(page_size=32, num_blocks=128)
LINK = LinkSettings(gbps=2.0, latency_us=10)
STEPPED = LinkSettings(gbps=0.7, latency_us=10.0, layer_us=900.0)  # a clock that layers move
LAYERS, EXPERTS, NEURONS = 16, 32, 64
slow = pytest.mark.slow


def preset(name: str, budget: float | AutoBudget = 0.25, tau: int = 40, **more: Any) -> EngineSettings:
    """A preset; one that splits adaptively is asked every `tau` tokens and takes every gain."""
    made = load_policy(name)
    if made.split.kind == "adaptive":
        made = made.model_copy(update={"split": made.split.model_copy(update={"tau": tau, "min_gain": 0.0})})
        more.setdefault("link", LINK)
    return settings(budget, policy=made, kv=KV, **more)


def test_experts_run_where_the_store_maps_them(store: ExpertStore, reference: Reference) -> None:
    """Without slots: nothing is copied and no memory is taken, and experts of many rows and of few are exact."""
    with serving(store, settings(Budget(mapped=True), policy=load_policy("all-resident"), kv=KV)) as worker:
        reference.check(worker, 4)
        stats, plan = worker.stats(), worker.plan()
        assert (stats.executor, stats.expert_bytes_peak, stats.bytes_preloaded) == ("real", 0, 0)
        assert all(layer.hits and not layer.misses for layer in stats.layers)
        assert plan["mapped"]
        assert plan["slots"] == plan["experts"] == LAYERS * EXPERTS


@pytest.mark.parametrize(("slots", "policy"), [(0.34, "next-gate"), (0.03, "on-demand")])
def test_experts_are_read_from_the_disk(slots: float, policy: str, store: ExpertStore, reference: Reference) -> None:
    """Past the page cache into slots of the store's type, of which there are fewer than experts."""
    host_bytes = int(slots * LAYERS * EXPERTS) * 98_304  # of an expert as stored
    chosen = settings(Budget(mapped=True), policy=load_policy(policy), kv=KV, host_bytes=host_bytes)
    with serving(store, chosen) as worker:
        reference.check(worker, 4)
        reference.check(worker, 1)
        stats, plan = worker.stats(), worker.plan()
        _check_budget(worker)
        assert (stats.executor, stats.expert_budget_bytes, plan["mapped"]) == ("real", host_bytes, False)
        assert plan["slots"] == int(slots * LAYERS * EXPERTS)
        assert plan["link"]["gbps"] == pytest.approx(stats.host_memory.gbps)
        assert stats.host_memory.read_bytes >= stats.total().bytes_loaded > 0


@pytest.mark.parametrize(("executor", "policy"), [("emulated", "next-gate"), ("real", "next-gate"), ("real", "moepic")])
def test_slots_are_loaded_from_host_memory_that_is_read_from_the_disk(
    executor: str, policy: str, store: ExpertStore, reference: Reference, request: pytest.FixtureRequest
) -> None:
    """Three places: a quarter of the experts in slots, a half in host memory, all on the disk; also of a GPU, and of
    parts of experts.
    """
    if executor == "real":
        request.getfixturevalue("fake_gpu")
    host_bytes = LAYERS * EXPERTS // 2 * 98_304
    with serving(store, preset(policy, 0.25, host_bytes=host_bytes)) as worker:
        reference.check(worker, 4)
        reference.check(worker, 1)
        stats = worker.stats()
        _check_budget(worker)
        host = stats.host_memory
        assert (stats.executor, host.slots, host.budget_bytes) == (executor, LAYERS * EXPERTS // 2, host_bytes)
        assert host.hits + host.misses > 0
        assert 0 < host.bytes_demand + host.bytes_prefetch <= host.read_bytes
        assert worker._sources.tier.cache.residency.pins <= 1


def custom(
    prefetch: str = "none", theta: float | None = None, budget: float = 0.25, eviction: str = "lru", top: int = 0,
    buffer: int | None = None, **more: Any,
) -> EngineSettings:  # fmt: skip
    """A policy of parts; `theta` None: whole experts. Prefetches do not rest, however many were in vain."""
    wanted: dict[str, Any] = {} if prefetch == "none" else {"min_useful": 0.0}
    parts = {} if buffer is None else {"buffer": buffer}
    split = SplitOptions() if theta is None else SplitOptions(kind="fixed", theta=theta, **parts)
    made = PolicySettings(
        name="test", lossless=True, eviction=eviction, split=split,
        prefetch={"kind": prefetch, **wanted, **({"top": top} if top else {})},
    )  # fmt: skip
    return settings(budget, policy=made, kv=KV, **more)


def _check_budget(worker: Any) -> None:
    stats = worker.stats()
    assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
    assert bytes_held(worker.engine.cache) <= stats.expert_budget_bytes


# -- every lossless preset -----------------------------------------------------------------------------------------

# Each mechanism once in full, and once with few slots. All other lossless presets are made of the same parts: that they
# give the model's tokens is said by tests/golden/emulated.json (`test_lossless_presets_are_frozen_with_one_output`).
FAST = [("on-demand", 0.25), ("next-gate", 0.05), ("moepic", 0.25)]
PRESETS = quick(
    [
        *FAST, ("on-demand", 0.05), ("pre-gated", 0.25), ("prefetch-only", 0.25), ("cache-only", 0.25),
        ("fmoe", 0.25), ("fmoe", 0.03), ("activeevict-lossless", 0.25), ("activeevict-lossless", 0.03),
        ("deepspeed-inference", 0.03), ("moe-infinity", 0.03),
    ],
    FAST,
)  # fmt: skip


@pytest.mark.parametrize(("name", "budget"), PRESETS)
def test_presets(name: str, budget: float, reference: Reference, request: pytest.FixtureRequest) -> None:
    """Requests together, then one alone; and what a preset promises besides."""
    store = request.getfixturevalue("gated_store" if name == "pre-gated" else "store")
    with serving_locally(store, preset(name, budget)) as worker:
        if (name, budget) == ("on-demand", 0.05):
            reference.check(worker, 12, 48)
        reference.check(worker, 4)
        reference.check(worker, 1)
        _check_budget(worker)
        stats, total, made = worker.stats(), worker.stats().total(), load_policy(name)
        if name.startswith("fmoe"):
            assert stats.matcher["published"] > 0
            assert "expert-map" in stats.prefetch_sources or budget < 0.25  # no slot may be left for a prefetch
        else:
            assert stats.matcher is None
        assert (stats.configurator is not None) == (made.split.kind == "adaptive")
        if name in ("cache-only", "prefetch-only"):
            assert worker.plan()["split"]["top_ratio"] == [1.0 if name == "cache-only" else 0.0] * LAYERS
        if name in ("pre-gated", "prefetch-only"):
            _check_source(made.prefetch.kind, stats)
        if name == "activeevict-lossless":
            assert total.vacated > 0
            assert total.bytes_loaded == total.bytes_loaded_demand  # nothing is fetched that no router has chosen
            assert total.bytes_wasted == total.bytes_written_back == stats.dropped == 0


def _check_source(kind: str, stats: Any) -> None:
    """Prefetches by scores: of the first layer they are foreseen at the last one, by a trained gate they are not."""
    source = stats.prefetch_sources[kind]
    assert source.queued > 0
    first = stats.layers[0].bytes_loaded_prefetch + stats.layers[0].late_prefetches
    if kind == "speculative":
        assert first > 0
        assert source.hits + source.late > 0
    elif kind == "pre-gated":
        assert first == 0


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("pre-gated", StoreError, "--gates TEXT"),
        ("buddymoe", StoreError, "--profile TEXT"),
        ("hobbit", ConfigError, r"needs replicas of 4 bits, the store has none.*--bits 4"),
        ("promoe", TraceError, r"(?s)predictors-3\.safetensors.*tiermoe prepare MODEL --predictors TEXT --stride 3"),
    ],
)
def test_what_a_preset_measures_must_be_there(
    name: str, error: type[Exception], match: str, bare_store: ExpertStore
) -> None:
    with pytest.raises(error) as raised, serving_locally(bare_store, preset(name)):
        pass
    raised.match(match)


# -- links and copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "link"),
    quick(
        [("on-demand", STEPPED), ("next-gate", STEPPED), ("next-gate", LINK)],
        [("on-demand", STEPPED), ("next-gate", STEPPED)],
    ),
    ids=["stepped, on demand", "stepped", "throttled"],
)
def test_under_a_throttled_link(name: str, link: LinkSettings, store: ExpertStore, reference: Reference) -> None:
    with serving(store, preset(name, link=link)) as worker:
        reference.check(worker, *((12, 24) if link is LINK else (2, 8)))
        assert worker.stats().total().blocked_io_s > 0
        assert worker.stats().total().late_prefetches > 0 or link is LINK or name == "on-demand"
        _check_budget(worker)


@slow
def test_swapping_presets_write_back(store: ExpertStore, reference: Reference) -> None:
    with serving(store, preset("moe-offloading", link=LinkSettings(gbps=8.0))) as worker:
        reference.check(worker, 2)
        total = worker.stats().total()
        assert 0 < total.bytes_written_back <= total.bytes_loaded
        carried = (total.bytes_written_back + total.bytes_loaded) / 8e9
        assert total.link_s == pytest.approx(carried, rel=0.05)


@pytest.mark.parametrize(
    ("budget", "copies"),
    [pytest.param(0.25, CopySettings(), marks=slow), (0.1, CopySettings(pinned_gib=0.025))],  # half of it staged
)
def test_through_a_gpus_streams(
    budget: float, copies: CopySettings, store: ExpertStore, reference: Reference, fake_gpu: FakeGpu
) -> None:
    with serving(store, preset("next-gate", budget, copies=copies)) as worker:
        plan, cache, waits = worker.plan(), worker.engine.cache, fake_gpu.synchronized
        reference.check(worker, 2, 8)
        stats = worker.stats().total()
        assert isinstance(cache.link, _core.StreamLink)
        assert plan["executor"] == "real"
        everything = sum(sum(t.nbytes for t in layer.tensors) for layer in worker._sources.mapped)
        assert plan["pinned_bytes"] + plan["staged_bytes"] == everything
        assert plan["pinned"] == (plan["staged_bytes"] == 0) == (copies.pinned_gib is None)
        assert any("pinned" in note for note in plan["notes"]) == (not plan["pinned"])
        assert stats.bytes_loaded_demand > 0
        assert stats.link_s > 0
        assert not plan["pinned"] or fake_gpu.synchronized == waits  # the host waits for no copy
        assert fake_gpu.registered
    assert not fake_gpu.registered
    assert not fake_gpu.hazards


def test_the_budget_sets_itself_beside_other_processes(
    store: ExpertStore, reference: Reference, fake_gpu: FakeGpu
) -> None:
    """The worker asks its own GPU: what the driver assumed, a free one, holds four times as many experts."""
    slot, most = 196_608, LAYERS * EXPERTS * 196_608
    terms = AutoBudget(free=8 << 30, dense=11 << 20, kv=32 << 20, activations=60 << 20, slot=slot, most=most)
    assert terms.nbytes == most
    free = int(((103 << 20) + MARGIN_BYTES + 120.5 * slot) / (1 - MARGIN_SHARE))
    fake_gpu.memory, fake_gpu.others = 8 << 30, (8 << 30) - free
    with serving(store, preset("next-gate", terms)) as worker:
        plan = worker.plan()
        assert plan["budget_auto"]["free"] == free
        assert plan["budget_auto"]["experts"] // slot == plan["shared"]["slots_least"] == 120
        assert plan["slots"] == plan["shared"]["slots_most"] > 200  # the KV cache's memory, until requests need it
        assert plan["slots"] * slot == plan["expert_budget_bytes"]
        reference.check(worker, 2, 8)
        _check_budget(worker)


# -- random eviction -----------------------------------------------------------------------------------------------


def press(worker: Any, seed: int, share: float) -> None:
    """Before every pass of a layer, evict a random share of the pool and prefetch random experts."""
    rng, cache = random.Random(seed), worker.engine.cache
    residency = cache.residency

    def pressed(index: int, forward: Any) -> Any:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            cache.poll()
            for key in [k for k in residency.held() if rng.random() < share]:
                cache.core.leave([key], index)
            cache.prefetch(rng.sample(range(residency.keys), 4))
            return forward(hidden, ids, weights)

        return run

    for layer in worker.engine.layers:
        layer.forward = pressed(layer.index, layer.forward)


# a failing example is shown as it is: shrinking one would serve the model a hundred times
@examples(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([0.02, 0.05, 0.25, 0.6]), share=st.floats(0.0, 0.9))
@pytest.mark.slow
def test_under_random_eviction(
    seed: int, budget: float, share: float, store: ExpertStore, reference: Reference
) -> None:
    with serving(store, preset("next-gate", budget)) as worker:
        press(worker, seed, share)
        reference.check(worker, 4)
        _check_budget(worker)


# -- speculation, and experts that are split -----------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("kind", "theta", "top"),
    [("speculative", None, 0), ("speculative", 0.5, 9), ("random", 0.5, 0), ("pre-gated", 0.5, 0)],
)
def test_prefetches_by_score(
    kind: str, theta: float | None, top: int, gated_store: ExpertStore, reference: Reference
) -> None:
    with serving(gated_store, custom(kind, theta, top=top, link=LinkSettings(gbps=4.0))) as worker:
        reference.check(worker, 1, 12)
        _check_source(kind, worker.stats())
        reference.check(worker, 3, 12)
        _check_budget(worker)


@slow
def test_speculation_finds_more_than_chance(gated_store: ExpertStore, reference: Reference) -> None:
    useful = {}
    for kind in ("speculative", "pre-gated", "random"):
        with serving(gated_store, custom(kind, link=LinkSettings(gbps=4.0))) as worker:
            reference.check(worker, 1, 12)
            source = worker.stats().prefetch_sources[kind]
            useful[kind] = (source.hits + source.late) / source.queued
    assert useful["speculative"] > useful["random"]
    assert useful["pre-gated"] > useful["random"]


@slow
@pytest.mark.parametrize("theta", [None, 0.5])
def test_what_a_routing_rule_is_told_of_the_cache(
    theta: float | None, store: ExpertStore, reference: Reference
) -> None:
    with serving(store, custom("none", theta, link=LinkSettings(gbps=4.0))) as worker:
        reference.check(worker, 1, 12)
        cache, there = worker.engine.cache, 0
        for layer, residency in enumerate(worker.engine.residency()):
            available, slots = cache.occupancy(layer)
            assert available.tolist() == [state != State.ABSENT for state in residency.states]
            there += residency.states.count(State.RESIDENT)
            if theta is None:
                assert slots == cache.residency.slots
            else:
                assert slots == cache.split.slots[layer]
        assert there > 0


@slow
@pytest.mark.parametrize(
    ("theta", "prefetch"),
    [(0.5, "none"), (0.0, "next-gate"), (0.25, "next-gate"), (0.75, "next-gate"), (1.0, "next-gate")],
)
def test_split_at_every_ratio(theta: float, prefetch: str, store: ExpertStore, reference: Reference) -> None:
    with serving(store, custom(prefetch, theta, eviction="lcp")) as worker:
        reference.check(worker, 5)
        reference.check(worker, 1)
        total = worker.stats().total()
        _check_budget(worker)
        assert (total.top_hits > 0) == (0 < theta < 1)
        assert total.top_hits <= total.misses
        assert total.prefetched_hits <= total.hits
        assert (total.prefetched_hits > 0) == (prefetch != "none")


# -- splits that change while requests are served ------------------------------------------------------------------


@slow
def test_one_buffer_slot_and_one_top_of_each_layer(store: ExpertStore, reference: Reference) -> None:
    slots = LAYERS // 2 + 1  # half an expert of each layer, and one buffer slot
    with serving(store, custom("next-gate", 0.5, slots / (LAYERS * EXPERTS), "lcp", buffer=1)) as worker:
        worker.engine.cache.set_split(SplitLayout(NEURONS, (NEURONS // 2,) * LAYERS, (1,) * LAYERS, 1))
        reference.check(worker, 5)


QUARTER = LAYERS * EXPERTS // 4 * NEURONS
MIXED = SplitLayout(NEURONS, (64, 48, 32, 0, 7, 25, 63, 1) * 2, (4, 6, 10, 0, 32, 8, 3, 1) * 2, 6)
CUTS = [MIXED, *(SplitLayout.uniform(LAYERS, EXPERTS, NEURONS, QUARTER, theta, 4) for theta in (0.0, 0.75, 1.0, 0.25))]


def recut_every(engine: ExpertEngine, forwards: int) -> Callable[[], int]:
    """Split the cache anew before every so many forwards, on their thread; how often that was."""
    begin, seen = engine.begin_forward, [0]

    def begin_forward(sequences: Any) -> None:
        seen[0] += 1
        turn, rest = divmod(seen[0], forwards)
        if rest == 0:
            engine.cache.set_split(CUTS[(turn - 1) % len(CUTS)], engine.cache.eviction.ranked(range(LAYERS * EXPERTS)))
            engine.cache.check_integrity()
        begin(sequences)

    engine.begin_forward = begin_forward  # type: ignore[method-assign]
    return lambda: seen[0] // forwards


@slow
@pytest.mark.parametrize(("together", "prefetch"), [(False, "none"), (True, "next-gate")])
def test_across_live_recuts(together: bool, prefetch: str, store: ExpertStore, reference: Reference) -> None:
    with serving(store, custom(prefetch, 0.5, eviction="lcp")) as worker:
        address = worker.engine.cache.pool.gate_up.data_ptr()
        recuts = recut_every(worker.engine, 3)
        if together:
            reference.check(worker, 5)
        else:
            for number in range(5):
                reference.check(worker, 1, first=number)
        assert recuts() >= len(CUTS)
        assert worker.engine.cache.pool.gate_up.data_ptr() == address
        assert worker.stats().total().bytes_loaded_migration > 0
        _check_budget(worker)


def test_the_configurator_splits_anew_in_mid_generation(
    store: ExpertStore, reference: Reference, slow_link: list[Times | None]
) -> None:
    """Asked in mid-generation, it changes the split before the next forward; the sequence goes on as if nothing was."""
    with serving(store, preset("moepic", tau=1 << 30)) as worker:
        configuring, cache = worker.engine.configuring, worker.engine.cache
        before, apply, forwards = cache.split, configuring.begin_forward, [0]

        def ask_after_twenty() -> None:
            forwards[0] += 1
            if forwards[0] == 20:
                assert configuring.ask().wait(120)
            apply()

        configuring.begin_forward = ask_after_twenty  # type: ignore[method-assign]
        reference.check(worker, 1, 32)
        after, found = cache.split, worker.stats().configurator
        assert found.problem is None
        assert (found.configurations, found.reconfigurations) == (1, 1)
        assert found.expected_after_s < found.expected_before_s
        assert found.record_s > 0
        [times] = slow_link
        assert min(times.moe_s, times.attention_s) > 0
        assert after != before
        assert after.total_neurons <= cache.pool.total_neurons
        assert worker.stats().total().bytes_loaded_migration > 0
        reference.check(worker, 3, 32)
        worker.reset_stats()
        again = worker.stats().configurator
        assert again.reconfigurations == 0
