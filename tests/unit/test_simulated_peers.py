"""Several simulated GPUs and near-data devices, against times by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import traces
from orders_reference import Lru

from tiermoe.actors.budget import Budget
from tiermoe.actors.policies.cost import NdpDevice, Work, expert_cost, load_s
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.replay import Replay
from tiermoe.cluster.simulate.executor import (
    Policies,
    SimulatedEngine,
    context_of,
    eviction_of,
    neurons_of,
    policies_of,
)
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.predictors import routing_profile
from tiermoe.cluster.simulate.trace import Iteration, Trace, TraceHeader
from tiermoe.errors import ConfigError

SLOT = 1000
DEVICE = NdpDevice("d", 1.0, 10**9, 1, 4, 4, 1.0, 1, 1.0, 1.0)
HALF, QUARTER = Budget(share=0.5), Budget(share=0.25)


def step(header: TraceHeader, ids: list[int], rows: int = 1) -> Iteration:
    """One token that picks these experts in each layer."""
    made = traces.rows_of(header, [1] * rows, np.random.default_rng(0))
    fields = vars(made) | {"ids": np.broadcast_to(np.array(ids, np.uint8), (rows, header.layers, len(ids)))}
    return Iteration(decode=rows == 1, embedding=np.zeros(4, np.float32), **fields)


def machine(**changes: object) -> Machine:
    fields = {
        "name": "m", "forward_s": 0, "dense_s": 0, "dense_row_s": 0, "expert_s": 1.0, "expert_row_s": 0.5,
        "link_gbps": 1e-6,  # an expert's 1000 bytes take a second
    }  # fmt: skip
    return Machine.model_validate(fields | changes)


def engine_of(
    settings: PolicySettings, header: TraceHeader, box: Machine, budget: float, counts: np.ndarray | None = None
) -> SimulatedEngine:
    share = Budget(share=budget)
    policies = policies_of(settings, header, box, share, eviction_of(settings, header), None, popularity=counts)
    return SimulatedEngine(header, box, share, policies)


def test_two_gpus_load_over_their_own_links() -> None:
    """Experts 0 and 1 of two GPUs: each loads one (1 s) and runs it (1 s); the message takes 0.25 s each way."""
    header = traces.header(layers=1, experts=4, top_k=2, slot_bytes=SLOT)
    settings = load_policy("on-demand")
    for gpus, want_s in ((1, 1 + 1 + 1), (2, 0.25 + 1 + 1 + 0.25)):  # one GPU: the second copy beside the first kernel
        box = machine(gpus=gpus, peer_us=0.25e6)
        engine = engine_of(settings, header, box, 0.5)
        engine.forward([("a", step(header, [0, 1]))])
        assert engine.clock.now_s == pytest.approx(want_s)
        stats = engine.live_stats().total()
        assert (stats.hits, stats.misses, stats.bytes_loaded) == (0, 2, 2 * SLOT)
        engine.forward([("a", step(header, [0, 1]))])
        assert engine.live_stats().total().hits == 2
        assert engine.clock.now_s - want_s == pytest.approx(2.0 if gpus == 1 else 1.5)


def test_prefetch_goes_to_the_owner(tmp_path: Path) -> None:
    """A perfect next gate loads on both links ahead: fewer waits than on demand, the same misses in layer 0 only."""
    header = traces.header(layers=4, experts=8, slot_bytes=SLOT)
    traces.write(tmp_path / "t", header, [[1], [2], [3]], decodes=6)
    trace = Trace(tmp_path / "t")
    found = {}
    for name in ("on-demand", "mixtral-offloading"):
        settings = load_policy(name)
        found[name] = Replay(trace, settings, context_of(header), machine(gpus=2, dense_s=5.0), QUARTER)()
    assert found["mixtral-offloading"]["bytes_loaded_prefetch"] > 0
    assert found["mixtral-offloading"]["hit_rate"] > found["on-demand"]["hit_rate"]
    assert found["mixtral-offloading"]["virtual_s"] < found["on-demand"]["virtual_s"]


def test_each_gpu_streams_its_part_of_the_next_layer_where_a_prompt_sweeps(tmp_path: Path) -> None:
    header, settings = traces.header(layers=4, experts=8, top_k=4, slot_bytes=SLOT), load_policy("next-gate")
    traces.write(tmp_path / "t", header, [[token % 50 for token in range(200)]], decodes=0)
    box, prefetch = machine(gpus=2, dense_s=5.0), settings.make_prefetch(context_of(header))
    policies = policies_of(settings, header, box, HALF, eviction_of(settings, header), prefetch)
    engine = SimulatedEngine(header, box, HALF, policies)
    serve(engine, Trace(tmp_path / "t").requests())
    caches = [engine.cache, *(shard.cache for shard in engine._shards)]
    assert [cache.live_stats().prefetch_sources["next-gate"].queued for cache in caches] == [12, 12]
    assert [cache.live_stats().total().misses for cache in caches] == [4, 4]  # of the first layer


def test_a_replay_on_one_of_several_gpus_alone_is_refused() -> None:
    header, settings = traces.header(layers=1, slot_bytes=960), load_policy("hobbit")
    with pytest.raises(ConfigError, match="one GPU"):
        engine_of(settings, header, machine(gpus=2), 0.5)


def ndp_s(header: TraceHeader, rows: list[int], bits: int, tokens: int) -> float:
    """A batch of the device, by the cost model: experts in turn, activations in and out."""
    group = None if bits == 16 else 64
    each = sum(expert_cost(DEVICE, Work(header.hidden, 20, n, bits, group)).total_s for n in rows)
    return each + 2 * load_s(4 * header.hidden * tokens, DEVICE.link)


@pytest.mark.parametrize("workers", [1, 2])
def test_near_data_devices_work_beside_the_gpu(workers: int) -> None:
    """A static hot set of one expert: expert 0 is there and takes 1 s, 1 and 2 run near data at 4 bits.

    Two devices share them: by number, experts 1 and 2 are on different ones.
    """
    header = traces.header(layers=1, experts=4, top_k=3, slot_bytes=960)  # 20 neurons
    settings = load_policy("static-ndp")
    counts = np.array([[9, 3, 2, 1]])
    for expert_s in (0.0, 1.0):  # the device is the slower side, then the GPU
        box = machine(ndp=DEVICE, ndp_workers=workers, expert_s=expert_s)
        engine = engine_of(settings, header, box, 0.25, counts)
        begin_s = engine.clock.now_s  # after the preload
        engine.forward([("a", step(header, [0, 1, 2]))])
        total = engine.live_stats().total()
        assert (total.hits, total.misses, total.ndp_experts) == (1, 0, 2)
        stats = engine.live_stats()  # the rates were 1.0: what ran near data was not among what was needed
        assert stats.hit_rate == pytest.approx(1 / 3)
        assert stats.as_dict()["needed_shares"]["near_data"] == pytest.approx(2 / 3)
        assert sorted([stats.decode_hit_rate or 0.0, stats.prefill_hit_rate or 0.0]) == pytest.approx([0.0, 1 / 3])
        bits = settings.precision.widths[0] if settings.precision.widths else 16
        want_s = max(expert_s, ndp_s(header, [1] * (2 // workers), bits, 1))
        assert engine.clock.now_s - begin_s == pytest.approx(want_s)


@pytest.mark.parametrize(
    ("copy", "share", "slower"), [(0.5, 1.0, 1.0), (0.5, 0.5, 1.25), (4.0, 0.5, 2.0), (0.0, 0.5, 1.0)]
)
def test_copies_slow_near_data_workers_in_their_memory(copy: float, share: float, slower: float) -> None:
    """A batch beside a copy of so many times its length: at `share` of its speed while the copy runs."""
    header = traces.header(layers=1, experts=5, top_k=2, slot_bytes=960)  # 20 neurons
    alone_s = ndp_s(header, [1] * 2, 16, 1)
    box = machine(ndp=DEVICE, ndp_share=share, link_gbps=960e-9 / (max(copy, 1e-9) * alone_s))
    engine = engine_of(load_policy("ktransformers"), header, box, 0.4, np.array([[9, 3, 2, 1, 1]]))
    begin_s = engine.clock.now_s
    if copy:
        engine.cache.core.prefetch([4], [], 1)
    engine.forward([("a", step(header, [2, 3]))])
    assert engine.clock.now_s - begin_s == pytest.approx(slower * alone_s)
    total = engine.live_stats().total()
    assert total.ndp_experts == 2
    message_s = 2 * load_s(4 * header.hidden, DEVICE.link)
    assert total.ndp_measured_s == pytest.approx(slower * alone_s - message_s)  # the kernels'
    assert total.ndp_wait_s == pytest.approx(slower * alone_s)
    late = machine(ndp=DEVICE, ndp_share=share, expert_s=1.0, link_gbps=box.link_gbps)  # expert 1 takes far longer
    engine = engine_of(load_policy("ktransformers"), header, late, 0.4, np.array([[9, 3, 2, 1, 1]]))
    if copy:
        engine.cache.core.prefetch([4], [], 1)
    engine.forward([("a", step(header, [1, 2]))])
    total, kernel_s = engine.live_stats().total(), ndp_s(header, [1], 16, 1) - message_s
    assert total.ndp_wait_s == pytest.approx(0.0, abs=1e-15)
    assert kernel_s - 1e-15 <= total.ndp_measured_s <= kernel_s / share + 1e-15  # not until somebody asks


def test_context_placement_and_monde_replay(tmp_path: Path) -> None:
    """Lossy widths are faster near data than full precision, and only the prefill's migration loads during decode."""
    header = traces.header(layers=2, experts=8, top_k=2, slot_bytes=960)
    traces.write(tmp_path / "t", header, [[1, 2, 3], [4, 5]], decodes=8)
    trace, tpot = Trace(tmp_path / "t"), {}
    box = machine(link_gbps=1e-4, expert_s=1e-9, expert_row_s=0, ndp=DEVICE)
    for name in ("context-ndp-full", "context-ndp-3bit", "context-ndp-2bit", "monde"):
        record = Replay(trace, load_policy(name), context_of(header), box, HALF)()
        tpot[name] = record["tpot_s"]
        assert record["ndp_experts"] > 0
        assert record["migrations"] == (0 if name == "monde" else 2)
    assert tpot["context-ndp-2bit"] < tpot["context-ndp-3bit"] < tpot["context-ndp-full"]


@pytest.mark.parametrize("name", ["llama-cpp-cache", "freetoken", "hybrimoe"])
def test_rules_of_other_systems_replay(name: str, tmp_path: Path) -> None:
    """They need a near-data device. The first fills its slots in the background only, the second by its own loads, the
    third by prefetch, too."""
    header = traces.header(layers=2, experts=8, top_k=4, slot_bytes=960)
    traces.write(tmp_path / "t", header, [[1, 2, 3], [4, 5]], decodes=8)
    trace, settings = Trace(tmp_path / "t"), load_policy(name)
    copy_s, box = 960 / 1e6, machine(link_gbps=1e-3, expert_s=1e-9, expert_row_s=0, dense_s=4e-3, ndp=DEVICE)
    near_s = expert_cost(DEVICE, Work(header.hidden, neurons_of(header), 1)).total_s
    assert near_s < copy_s
    record = Replay(trace, settings, context_of(header), box, HALF)()
    assert record["ndp_experts"] > 0
    if name == "llama-cpp-cache":
        assert record["bytes_loaded_demand"] == 0 < record["bytes_loaded_prefetch"]
        assert record["hits"] > 0
    elif name == "freetoken":
        assert record["bytes_loaded_prefetch"] == 0 < record["bytes_loaded_demand"]
    else:
        assert record["bytes_loaded_prefetch"] > 0
    with pytest.raises(ConfigError, match="has none"):
        Replay(trace, settings, context_of(header), machine(), HALF)()


def test_one_gpu_is_as_without_peers(tmp_path: Path) -> None:
    header = traces.header(layers=3, experts=6, slot_bytes=SLOT)
    traces.write(tmp_path / "t", header, [[1, 2], [3]])
    trace, settings = Trace(tmp_path / "t"), load_policy("on-demand")
    plain = SimulatedEngine(header, machine(), Budget(share=0.5), Policies(Lru()))
    made = engine_of(settings, header, machine(), 0.5)
    assert serve(plain, trace.requests()) == serve(made, trace.requests())


def test_prompts_near_data_and_placement_again(tmp_path: Path) -> None:
    """A prompt near data loads nothing, and the second placement only what the first had not; `renew` places more."""
    header = traces.header(layers=2, experts=8, top_k=2, slot_bytes=960)
    traces.write(tmp_path / "t", header, [[1, 2, 3], [4, 5]], decodes=8)
    trace, found = Trace(tmp_path / "t"), {}
    box = machine(link_gbps=1e-4, expert_s=1e-9, expert_row_s=0, ndp=DEVICE)
    preset = load_policy("context-ndp-full")
    for label, changes in (("gpu", {}), ("ndp", {"prompts": "ndp"}), ("renew", {"prompts": "ndp", "renew": 3})):
        settings = preset.model_copy(update={"placement": preset.placement.model_copy(update=changes)})
        found[label] = Replay(trace, settings, context_of(header), box, HALF)()
    assert found["gpu"]["bytes_loaded_demand"] > 0 == found["ndp"]["bytes_loaded_demand"]
    assert 8 * 960 <= found["ndp"]["bytes_loaded_migration"] < 2 * 8 * 960
    assert found["ndp"]["migrations"] == 2
    assert found["renew"]["migrations"] == 2 + 2 * 2  # 8 tokens: again after 3 and after 6
    assert found["renew"]["bytes_loaded_migration"] > found["ndp"]["bytes_loaded_migration"]


@pytest.mark.parametrize("kind", ["cache", "static", "monde"])
def test_prompts_and_renew_are_of_context_alone(kind: str) -> None:
    values = load_policy("static-ndp").model_dump() | {"placement": {"kind": kind, "renew": 4}}
    with pytest.raises(ValueError, match="placement context"):
        PolicySettings(**values)


@pytest.mark.parametrize("rule", ["buddymoe", "random-replacement", "drop"])
def test_missing_experts_are_replaced_or_left_out(rule: str, tmp_path: Path) -> None:
    """Less is loaded for misses than by `original`, and no more time passes; buddies are of the trace's own routing."""
    header = traces.header(layers=3, experts=12, top_k=4, slot_bytes=SLOT)
    traces.write(tmp_path / "t", header, [[1, 2, 3], [4, 5]], decodes=12)
    trace, found = Trace(tmp_path / "t"), {}
    profile = routing_profile(trace.header, trace.requests())
    assert profile.activations.sum() == trace.header.layers * trace.header.rows * trace.header.top_k
    for name in ("original", rule):
        settings = load_policy(name)
        found[name] = Replay(trace, settings, context_of(header), machine(expert_s=0.01, expert_row_s=0), HALF)()
    counted = found[rule]
    assert (counted["substitutions"] > 0) == (rule != "drop")
    assert (counted["dropped"] > 0) == (rule == "drop")
    assert counted["bytes_loaded_demand"] < found["original"]["bytes_loaded_demand"]
    assert counted["virtual_s"] < found["original"]["virtual_s"]


def test_monde_without_a_cache_forgets_what_it_loaded(tmp_path: Path) -> None:
    """A prompt's experts are loaded; without a cache none of them is there for the decode."""
    header = traces.header(layers=2, experts=4, top_k=2, slot_bytes=960)
    traces.write(tmp_path / "t", header, [[1, 2, 3, 4, 5, 6]], decodes=6)
    trace, hits = Trace(tmp_path / "t"), {}
    box = machine(link_gbps=1.0, expert_s=1e-9, expert_row_s=0, ndp=DEVICE)
    for kept in (None, 0):
        values = load_policy("monde").model_dump() | {"placement": {"kind": "monde", "hot_per_layer": kept}}
        hits[kept] = Replay(trace, PolicySettings(**values), context_of(header), box, Budget(share=1.0))()["hits"]
    assert hits[None] > 0 == hits[0]
    with pytest.raises(ValueError, match="keeps what it loads, or nothing"):
        PolicySettings(**values | {"placement": {"kind": "monde", "hot_per_layer": 2}})
