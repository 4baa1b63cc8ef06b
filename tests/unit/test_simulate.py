"""The virtual clock and loader, exact times on tiny cases, replays and recall.

Hit rates of eviction policies on routing made by hand, and Belady's against every other way of evicting.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces
from commands import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from orders_reference import Lru

from tiermoe.actors.budget import Budget
from tiermoe.actors.core import _core
from tiermoe.actors.policies.cost import Link
from tiermoe.actors.policies.moepic import SpeculativePrefetch
from tiermoe.actors.policies.prefetch import LayerwisePrefetch, NextGatePrefetch, PopularityPrefetch
from tiermoe.actors.policies.residency import State
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.store.artifacts import encode_predictors
from tiermoe.cluster.config import configs_dir
from tiermoe.cluster.simulate.executor import PLAIN, Policies, SimulatedEngine
from tiermoe.cluster.simulate.hit_rates import POLICIES, hit_rates, policies, result, serve
from tiermoe.cluster.simulate.machine import Machine, load_machine, machine_of
from tiermoe.cluster.simulate.predictors import load_predictors, predictors_for, recall, split, train_predictors
from tiermoe.cluster.simulate.recorded import RecordedForward, RecordedLayer, see, spans_of
from tiermoe.cluster.simulate.trace import Iteration, Trace
from tiermoe.cluster.simulate.trace_writer import TraceWriter
from tiermoe.cluster.topology.machine_costs import MachineCosts, PolicyCosts
from tiermoe.errors import BudgetError, ConfigError, RuntimeFailure, TraceError

PROMPTS = [[1, 2, 3], [7], [9, 9, 1, 4], [5, 6]]


def machine(gbps: float | None = None) -> Machine:
    return Machine(name="tiny", **traces.COSTS.model_dump(), link_gbps=gbps)


class Linked:
    """Layers of 4 experts, slots for all, on a link that copies one in a second."""

    def __init__(self, layers: int = 3) -> None:
        self.clock, keys = _core.Clock(), 4 * layers
        self.link = _core.VirtualLink(self.clock, lambda nbytes: nbytes / 1000, 0.0)
        layout = _core.Layout(layers, 4, 1, [], [keys], [], [1000] * keys, False)
        self.core = _core.Core(layout, self.link, _core.PythonOrder(Lru(), keys), _core.Governor())
        self.seen = _core.Watched()
        self.core.watch(self.seen)

    def demand(self, layer: int, *experts: int) -> None:
        """A layer's pass."""
        keys = [4 * layer + expert for expert in experts]
        self.core.arrive(layer)
        self.core.plan(self.core.open(layer, keys, [1] * len(keys), 1, []), [])
        self.core.begin()
        self.core.load()
        while len(set(self.core.next())) > 1:
            pass
        self.core.close()

    @property
    def copies(self) -> list[tuple[int, float, float]]:
        """Key, start and end of each that has landed since the last time."""
        return [(key, start_s, end_s) for wait, _, key, _, start_s, end_s, _ in self.seen.take() if not wait]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    traces.write(tmp_path / "t", traces.header(), PROMPTS)
    return Trace(tmp_path / "t")


def test_demand_overtakes_queued_prefetches_and_not_the_copy_under_way() -> None:
    linked = Linked()
    clock, core = linked.clock, linked.core
    core.prefetch([4, 5], [], 1)
    clock.advance(0.5)
    linked.demand(0, 2)
    assert clock.now_s == pytest.approx(2.0)
    core.arrive()
    assert sorted(linked.copies) == [(2, 1.0, 2.0), (4, 0.0, 1.0)]
    assert core.state(5) == State.LOADING
    linked.demand(1, 1)
    assert clock.now_s == pytest.approx(3.0)
    assert linked.link.pending == 0
    clock.advance(5.0)
    linked.demand(0, 3)
    assert clock.now_s == pytest.approx(9.0)  # the idle link starts when it is asked


def test_queued_copies_can_be_cancelled_and_promoted() -> None:
    linked = Linked()
    clock, core = linked.clock, linked.core
    core.prefetch([4, 8, 5, 6, 9, 10], [], 1)  # the first is begun at once
    linked.demand(1, 2)
    assert clock.now_s == pytest.approx(2.0)  # before 8, which is of a later layer
    assert core.state(5) == State.ABSENT  # not needed, and not begun
    assert core.state(4) == State.LOADING  # as 5, and begun
    core.arrive()
    assert core.state(4) == State.RESIDENT
    linked.link.close()
    assert linked.link.pending == 1  # what is under way arrives
    clock.advance(1.0)
    assert linked.link.busy_s() == pytest.approx(3.0)  # which looks
    assert linked.link.pending == 0
    with pytest.raises(RuntimeFailure, match="closed"):
        core.prefetch([11], [], 1)


def test_resident_experts_give_the_machine_s_times(trace: Trace) -> None:
    """TTFT is the prompt's forward, TPOT a forward of one row; a second request does not wait for the first."""
    engine = SimulatedEngine(trace.header, machine(), Budget(share=1.0), Policies(Lru()), check=True)
    engine.cache.core.preload(range(18))
    request = list(trace.requests())[1]  # one prompt token, then three
    served = serve(engine, [request])
    one = 1e-3 + 3 * (1e-4 + 2 * 2e-4)
    assert served.ttft_s == pytest.approx(one)
    assert served.tpot_s == pytest.approx(one)
    assert served.wall_s == pytest.approx(4 * one)
    assert (served.tokens, served.generated, served.forwards) == (4, 4, 4)
    assert engine.live_stats().total().misses == 0


def test_prefill_rows_cost_what_the_machine_says(trace: Trace) -> None:
    engine = SimulatedEngine(trace.header, machine(), Budget(share=1.0), Policies(Lru()))
    engine.cache.core.preload(range(18))
    (step, *_) = next(trace.requests()).iterations
    engine.forward([("a", step)])
    expected = 1e-3
    for layer in range(3):
        experts = len(set(step.ids[:, layer].ravel().tolist()))
        expected += 1e-4 + 2 * 1e-6 + experts * 2e-4 + (6 - experts) * 1e-5
    assert engine.clock.now_s == pytest.approx(expected)


def test_a_miss_blocks_for_its_copy(trace: Trace) -> None:
    """Everything absent, slots for all: each layer waits for two copies, less what its experts' computing hides."""
    slow = machine(gbps=1e-3)  # 1 ms a copy
    engine = SimulatedEngine(trace.header, slow, Budget(share=1.0), Policies(Lru()), check=True)
    engine.forward([("a", list(trace.requests())[1].iterations[0])])
    # per layer: wait 1 ms, run one for 0.2 ms while the second is copied, wait 0.8 ms, run the second
    total = engine.live_stats().total()
    assert total.misses == 6
    assert total.blocked_io_s == pytest.approx(3 * 1.8e-3)
    assert total.io_path_s == pytest.approx(3 * 1.8e-3)
    assert total.total_io_s == pytest.approx(6e-3)
    assert engine.clock.now_s == pytest.approx(1e-3 + 3 * (1e-4 + 2e-3 + 2e-4))


def test_the_host_spends_time_on_misses_loads_and_waits(trace: Trace) -> None:
    """As above, with 0.1 ms for a layer's miss and 0.05 for each load, while the copy runs, and 0.2 after each wait."""
    costs = machine(gbps=1e-3).model_copy(update={"miss_s": 1e-4, "load_s": 5e-5, "wait_s": 2e-4})
    engine = SimulatedEngine(trace.header, costs, Budget(share=1.0), Policies(Lru()), check=True)
    step = list(trace.requests())[1].iterations[0]
    engine.forward([("a", step)])
    # per layer: 0.2 ms of host and a wait of 0.8, 0.2 late, one runs for 0.2, a wait of 0.6, 0.2 late, the other
    assert engine.live_stats().total().blocked_io_s == pytest.approx(3 * (0.8e-3 + 0.2e-3 + 0.6e-3 + 0.2e-3))
    first_s = 1e-3 + 3 * (1e-4 + 2e-3 + 2e-4 + 2e-4)
    assert engine.clock.now_s == pytest.approx(first_s)
    engine.forward([("a", step)])  # all resident
    assert engine.clock.now_s == pytest.approx(first_s + 1e-3 + 3 * (1e-4 + 2 * 2e-4))


def test_a_perfect_gate_hits_and_synchronous_waiting_counts(trace: Trace) -> None:
    figures = {}
    for synchronous in (False, True):
        policy = NextGatePrefetch(3, 6, 2, distance=1, synchronous=synchronous)
        half, slow = Budget(share=0.5), machine(gbps=2e-3)
        engine = SimulatedEngine(trace.header, slow, half, Policies(Lru(), policy), check=True)
        figures[synchronous] = result(engine, serve(engine, trace.requests()))
    for found in figures.values():
        later = found["layers"][1:]
        assert sum(layer["hits"] + layer["late_prefetches"] for layer in later) >= 0.9 * sum(
            layer["hits"] + layer["misses"] for layer in later
        )
        assert found["bytes_loaded_prefetch"] > 0
        assert found["executor"] == "simulated"
    assert figures[True]["late_prefetches"] == 0
    assert figures[False]["late_prefetches"] > 0
    assert figures[True]["hit_rate"] > figures[False]["hit_rate"]


def test_whole_layers_on_demand_bring_every_expert(trace: Trace) -> None:
    engine = SimulatedEngine(
        trace.header, machine(gbps=1.0), Budget(nbytes=6000),
        Policies(Lru(), LayerwisePrefetch(3, 6, 0, synchronous=True)), check=True,
    )
    served = serve(engine, trace.requests())
    total = engine.live_stats().total()
    assert total.bytes_loaded == served.forwards * 3 * 6 * 1000  # a pool of one layer: nothing survives
    assert total.hits == 0


def test_a_governor_rests_a_policy_that_guesses_badly(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.header(), PROMPTS * 4)
    trace = Trace(tmp_path / "t")
    strict = PolicySettings(name="x", lossless=True, prefetch={"kind": "popularity", "min_useful": 1.0})  # type: ignore[arg-type]
    engine, always = (
        SimulatedEngine(
            trace.header, machine(gbps=1.0), Budget(nbytes=4000),
            Policies(Lru(), PopularityPrefetch(3, 6, 2), settings=settings),
        )
        for settings in (strict, PLAIN)
    )
    serve(engine, trace.requests())
    serve(always, trace.requests())
    assert 0 < engine.live_stats().total().bytes_loaded_prefetch < always.live_stats().total().bytes_loaded_prefetch


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_requests_share_forwards(trace: Trace, at_once: int) -> None:
    policies = Policies(Lru(), NextGatePrefetch(3, 6, 2))
    engine = SimulatedEngine(trace.header, machine(), Budget(share=1.0), policies, check=True)
    ended: list[int] = []
    served = serve(engine, trace.requests(), at_once, lambda: ended.append(1))
    assert (served.requests, len(ended), served.tokens, served.generated) == (4, 4, 10 + 12, 16)
    assert served.forwards == {1: 16, 2: 8, 9: 4}[at_once]
    assert engine.live_stats().layers[0].forwards == served.forwards


def test_a_budget_without_room_is_refused(trace: Trace) -> None:
    with pytest.raises(BudgetError):
        SimulatedEngine(trace.header, machine(), Budget(nbytes=10), Policies(Lru()))


def test_recall_of_a_perfect_gate_is_one(trace: Trace) -> None:
    learn, measure = split(list(trace.requests()), 0.5)
    assert (len(learn), len(measure)) == (2, 2)
    sources = {
        "gate": lambda d: NextGatePrefetch(3, 6, 2, d) if d <= 2 else None,
        "popular": lambda d: PopularityPrefetch(3, 6, 2, d),
    }
    table = {(row.source, row.distance): row for row in recall(trace.header, sources, (1, 2, 3), learn, measure)}
    assert table["gate", 1].overall == table["gate", 2].overall == 1.0
    assert ("gate", 3) not in table
    assert table["gate", 1].predictions == 2 * 3 * 2  # requests, decodes, layers with one before them
    assert table["popular", 3].predictions == 0
    popular = table["popular", 1]
    assert 0 < popular.overall < 1
    assert popular.overall == pytest.approx(sum(popular.per_layer[1:]) / 2)


def test_predictors_file(trace: Trace, tmp_path: Path) -> None:
    file = tmp_path / "predictors.safetensors"
    made = train_predictors(trace.header, trace.requests(), 1)
    assert len(made) == 2
    file.write_bytes(encode_predictors(made, predictors_for(trace.header, 1)))
    for read, wanted in zip(load_predictors(file, trace.header, 1), made, strict=True):
        assert (read.w1 == wanted.w1).all()
        assert (read.scale == wanted.scale).all()
    for path, header, stride in (
        (file, trace.header, 2),
        (file, traces.header(fingerprint="0" * 64), 1),
        (tmp_path / "none", trace.header, 1),
    ):
        with pytest.raises(TraceError):
            load_predictors(path, header, stride)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(TraceError, match="holds no predictors"):
        load_predictors(file, trace.header, 1)
    with pytest.raises(TraceError, match="no layer of 3 is 3 ahead"):
        train_predictors(trace.header, trace.requests(), 3)


def test_machines(trace: Trace, tmp_path: Path) -> None:
    recorded = load_machine(trace.header, None, 2.0, None)
    assert (recorded.name, recorded.link_gbps, recorded.expert_s) == ("recorded", 2.0, 2e-4)
    file = tmp_path / "m.yaml"
    lines = [f"{key}: {value}" for key, value in ({"name": "m"} | traces.COSTS.model_dump() | {"link_gbps": 9}).items()]
    file.write_text("\n".join(lines))
    assert load_machine(trace.header, file, None, 3.0).link == Link(9.0, 3.0)
    file.write_text("name: m\nforward_s: -1\n")
    with pytest.raises(ConfigError):
        load_machine(trace.header, file, None, None)
    with pytest.raises(ConfigError, match="has no times of computing"):
        load_machine(traces.header(costs=None), None, 1.0, None)
    with pytest.raises(ConfigError):
        load_machine(trace.header, None, -1.0, None)


@pytest.mark.parametrize(
    "kind", ["none", "next-gate", "popularity", "expert-map", "activation-matrix", "stride", "layerwise"]
)
def test_replay_command(trace: Trace, command: Command, kind: str) -> None:
    record = command.json(
        "replay", trace.path, "--prefetch", kind, "--learn", "0.5", "--budget", "0.5", "--link-gbps", "1",
        "--at-once", "2",
    )  # fmt: skip
    assert (record["executor"], record["prefetch"], record["requests"]) == ("simulated", kind, 2)
    assert record["hits"] + record["misses"] > 0
    assert (record["bytes_loaded_prefetch"] > 0) == (kind != "none")
    assert record["machine"]["link_gbps"] == 1


def test_recall_command(trace: Trace, command: Command) -> None:
    found = command.json("replay", trace.path, "--recall")["rows"]
    rows = {(row["source"], row["distance"]): row["overall"] for row in found}
    assert set(rows) == {(s, d) for s in ("next-gate", "popularity", "activation-matrix", "stride") for d in (1, 2)}
    assert rows["next-gate", 2] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prefetch", "stride"], "needs predictors"),
        (["--prefetch", "magic"], "no prefetch policy 'magic'"),
        (["--prefetch", "next-gate", "--distance", "3"], "greater --distances"),
        (["--prefetch", "layerwise", "--distance", "2"], "not 2"),
        (["--eviction", "magic"], "give one of lru"),
        (["--policy", "monde"], "machine 'recorded' has none"),
        (["--policy", "all-resident"], "keeps all experts resident"),
        (["--learn", "1"], "--learn is 1"),
        (["--at-once", "0"], "--at-once is 0"),
        (["--budget", "0.01"], "holds no expert"),
        (["--predictors", "x"], "are for stride"),
    ],
)
def test_replay_refuses(trace: Trace, command: Command, args: list[str], message: str) -> None:
    assert message in command.refusal("replay", trace.path, *args)


def test_replay_without_a_trace(tmp_path: Path, command: Command) -> None:
    assert "is not a routing trace" in command.refusal("replay", tmp_path)


def test_shipped_machines() -> None:
    files = sorted((configs_dir() / "machines").glob("*.yaml"))
    assert files
    for file in files:
        assert load_machine(traces.header(), file, None, None).name == file.stem


def test_attention_grows_with_the_context() -> None:
    """A prompt of 3 and two decode tokens read 3, 4 and 5 tokens' keys and values in each of the layers."""
    shape = traces.header()
    grows = machine().model_copy(update={"context_s": 0.5})
    times = []
    for step in (machine(), grows):
        engine = SimulatedEngine(shape, step, Budget(share=1.0), Policies(Lru()))
        for tokens in ([1, 2, 3], [4], [5]):
            rows = traces.rows_of(shape, tokens, np.random.default_rng(0))
            part = Iteration(decode=len(tokens) == 1, embedding=np.zeros(4, np.float32), **vars(rows))
            engine.forward([("a", part)])
        times.append(engine.clock.now_s)
    assert times[1] - times[0] == pytest.approx(0.5 * shape.layers * (3 + 4 + 5))


def test_kernels_share_memory_with_the_copy_beside_them() -> None:
    """Two copies of 1 s: 3 s of kernels at half speed do 1 s of work beside them, 2 s after them."""
    linked = Linked(layers=1)
    run = _core.VirtualRun(linked.core, linked.link, linked.clock, 0.0, 0.0, 0.5, 0.0, 0.0, 1)
    linked.core.prefetch([0, 1], [], 1)
    for want_s in (4.0, 7.0):  # in the second forward no copy is left
        run.forward(np.array([[[0]]]), 3.0)
        assert linked.clock.now_s == pytest.approx(want_s)


class ScriptedPass:
    """Python's parts of each pass (`engine.layer.Pass`): expert 2 in the place of 0, and a peer runs 1."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.said = fails, list[object]()

    def _said(self, name: str, answer: Any = None, *given: object) -> Any:
        self.said.append((name, *given))
        if name == self.fails:
            raise ZeroDivisionError(name)
        return answer

    def reroute(self) -> Any:
        return self._said("reroute", (np.array([[2, 1]]), np.ones((1, 2), np.float32), ()))

    def place(self, routing: _core.Routing, needed: list[int]) -> Any:
        return self._said("place", ([2], (), True), needed, routing.experts, routing.counts)

    def send(self) -> None:
        self._said("send")

    def ahead(self) -> None:
        self._said("ahead")

    def lost(self) -> Any:
        return self._said("lost", [])

    def add(self, out: None) -> None:
        self._said("add")

    def peer_s(self) -> Any:
        return self._said("peer_s", (9.0, 5.0))

    def ran(self) -> None:
        self._said("ran")


def with_parts(linked: Linked, made: ScriptedPass) -> _core.VirtualRun:
    run = _core.VirtualRun(linked.core, linked.link, linked.clock, 1.0, 0.0, 1.0, 0.0, 0.0, 1)
    run.layers[0].parts(lambda: made, _core.Planned(), rule=True, ahead=True, watched=True, alone=False)
    return run


def test_the_parts_of_a_pass_that_are_called() -> None:
    linked, made = Linked(layers=1), ScriptedPass()
    with_parts(linked, made).forward(np.array([[[0, 1]]]), 0.0)
    assert made.said == [
        ("reroute",), ("place", [2, 1], [2, 1], [1, 1]), ("send",), ("ahead",), ("lost",), ("add",), ("peer_s",),
        ("ran",),
    ]  # fmt: skip
    assert linked.core.planned == ([2], 0)
    assert linked.clock.now_s == pytest.approx(2.0)  # a copy and an expert
    counts = linked.core.counts(0)
    assert (counts.io_path_s, counts.link_path_s) == (9.0, 5.0)  # the peer's, which waited longer


@pytest.mark.parametrize("part", ["reroute", "place", "send", "ahead", "lost", "add", "peer_s", "ran"])
def test_an_error_of_a_part_of_a_pass_leaves_nothing_pinned(part: str) -> None:
    linked, made = Linked(layers=1), ScriptedPass(part)
    run = with_parts(linked, made)
    with pytest.raises(ZeroDivisionError, match=part):
        run.forward(np.array([[[0, 1]]]), 0.0)
    assert not linked.core.pins.any()
    made.fails = ""
    run.forward(np.array([[[0, 1]]]), 0.0)
    assert not linked.core.check()


def test_a_prefetch_by_scores_that_were_not_recorded_is_refused() -> None:
    linked = Linked(layers=2)
    run = _core.VirtualRun(linked.core, linked.link, linked.clock, 1.0, 0.0, 1.0, 0.0, 0.0, 1)
    first, announced = run.layers[0], _core.Announced()
    first.ask_routers(first.router(1), 1, 1, _core.ByScores(True, 1, False, False, 1), announced)
    with pytest.raises(ValueError, match="recorded"):
        run.forward(np.array([[[0, 1]], [[0, 1]]]), 0.0)
    assert not linked.core.pins.any()


@pytest.mark.parametrize(
    ("layer", "experts", "counts"), [(1, [0], [1]), (-1, [0], [1]), (0, [4], [1]), (0, [0, 0], [1, 1]), (0, [0], [0])]
)
def test_a_part_of_a_layer_that_there_is_not_is_refused(layer: int, experts: list[int], counts: list[int]) -> None:
    linked = Linked(layers=1)
    run = _core.VirtualRun(linked.core, linked.link, linked.clock, 1.0, 0.0, 1.0, 0.0, 0.0, 1)
    with pytest.raises(ValueError, match=r"there is no such|experts come once"):
        run.run(layer, 1, experts, counts)
    run.run(0, 1, [0], [1])
    assert linked.core.counts(0).forwards == 1


def test_a_machine_from_bandwidths() -> None:
    """Host, kernels and links of a table, by hand."""
    shape = traces.header(hidden=10, slot_bytes=1_000_000, expert_dtype="bfloat16")
    costs = MachineCosts(
        machine="m", tiermoe="1", copy_us=10, copy_gbps=10, wait_us=7, dense_layer_us=30, dense_gbps=1, expert_us=10,
        expert_gbps=100, tflops=1, host_gbps=100, peer_us=5, peer_gbps=2,
        policies={"on-demand": PolicyCosts(step_us=300, layer_us=15, miss_us=4, load_us=2)},
    )  # fmt: skip
    found = machine_of(costs, costs.policies["on-demand"], shape, dense_bytes=800, kv_bytes=40)
    assert found.dense_s == pytest.approx(30e-6 + 800e-9 + 15e-6)
    assert found.expert_s == pytest.approx(20e-6)
    assert found.expert_row_s == pytest.approx(1e6 / 1e12)  # two operations a weight of two bytes
    assert (found.link, found.forward_s, found.miss_s, found.load_s) == (Link(10, 10), 300e-6, 4e-6, 2e-6)
    assert found.context_s == pytest.approx(40e-9)
    assert found.kernel_share == 1.0  # 50 GB/s of kernels beside 20 of a copy
    assert found.hop(2000) == pytest.approx(6e-6)
    slower = machine_of(
        costs.model_copy(update={"host_gbps": 40}), costs.policies["on-demand"], shape, dense_bytes=800, kv_bytes=40,
        link=Link(1.0, 10.0),
    )  # fmt: skip
    assert slower.link == Link(1.0, 10.0)
    assert slower.kernel_share == pytest.approx(38 / 50)


def independent_hits(ids: np.ndarray, size: int, policy: str) -> int:
    """Hits of one layer's tokens [n, K] on `size` slots, from the definitions alone: the whole past is scanned."""
    tokens, held, hits = ids.tolist(), list[int](), 0

    def rank(key: int, now: int) -> tuple[int, int, int]:
        """Lowest goes first."""
        uses = [(i, token.index(key)) for i, token in enumerate(tokens[:now]) if key in token]
        if policy == "belady":
            return -next((i for i in range(now + 1, len(tokens)) if key in tokens[i]), len(tokens)), key, 0
        return (len(uses) if policy == "lfu" else 0), *uses[-1]

    for now, token in enumerate(tokens):
        hits += sum(key in held for key in token)
        for key in token:
            if key in held:
                continue
            if len(held) == size:
                held.remove(min((k for k in held if k not in token), key=lambda k: rank(k, now)))
            held.append(key)
    return hits


@pytest.mark.parametrize("size", [3, 5, 8])
def test_hit_rates_equal_an_independent_computation(size: int) -> None:
    """LRU, LFU and Belady on one trace of 150 tokens whose popularity drifts, to the last digit."""
    draw = np.random.default_rng(5)
    weights = np.exp(draw.normal(size=(2, 10)) + draw.normal(size=(150, 2, 10)).cumsum(axis=0) / 5)  # [n, L, E]
    ids = np.stack([[draw.choice(10, 3, replace=False, p=w / w.sum()) for w in layers] for layers in weights])
    ids = ids.transpose(1, 0, 2)  # [L, n, K]
    for row in hit_rates(ids, [size], policies(["lru", "lfu", "belady"])):
        found = tuple(independent_hits(layer, size, row.policy) / (150 * 3) for layer in ids)
        assert row.per_layer == found


def test_a_replay_imports_no_torch() -> None:
    """It did once, by what the loader took from the pool's module: a second of each start."""
    code = (
        "import sys, tiermoe.cluster.jobs.replay; "
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_speculation_past_the_last_layer_is_replayed_where_the_trace_holds_it(tmp_path: Path) -> None:
    """Traces recorded before they held it have zeros there."""
    shape = traces.header(distances=2)
    rng = np.random.default_rng(0)
    old, new = (traces.rows_of(shape, [1, 2], rng) for _ in range(2))
    new.next_ids[:, 2, 0], new.next_probabilities[:, 2, 0] = [[3, 1], [5, 0]], [[0.5, 0.25], [0.75, 0.125]]
    writer = TraceWriter(tmp_path / "t", shape, traces.embed, 1 << 20)
    for rows in (old, new):
        writer.begin([1, 2])
        writer.add(rows, decode=False)
    writer.close(True, traces.COSTS)
    found = []
    for request in Trace(tmp_path / "t").requests():
        parts = [("a", request.iterations[0]), ("b", request.iterations[0])]
        seen = see(2, spans_of(parts), RecordedLayer(2, RecordedForward(parts)))
        policy = SpeculativePrefetch(shape.layers, shape.experts, 2)
        found.append([want.key for want in policy.observed(seen)])
        if policy.predicted is not None:
            assert policy.predicted.shape == (2, shape.experts)  # the last row of each sequence
    assert found == [[], [5, 0]]


def rates(ids: list[list[int]], size: int, names: tuple[str, ...] = POLICIES) -> dict[str, float]:
    found = hit_rates(np.array([ids]), [size], policies(names))
    return {row.policy: row.overall for row in found}


def best_hits(ids: tuple[tuple[int, ...], ...], size: int) -> int:
    """The most hits of any demand cache, by trying every victim."""

    @cache
    def most(step: int, held: frozenset[int]) -> int:
        if step == len(ids):
            return 0
        needed = frozenset(ids[step])
        after, spare = held | needed, sorted(held - needed)
        going = max(0, len(after) - size)

        def drop(left: frozenset[int], count: int, options: list[int]) -> list[frozenset[int]]:
            if count == 0:
                return [left]
            return [
                out
                for i in range(len(options) - count + 1)
                for out in drop(left - {options[i]}, count - 1, options[i + 1 :])
            ]

        return len(held & needed) + max(most(step + 1, left) for left in drop(after, going, spare))

    return most(0, frozenset())


class TestByHand:
    def test_priority_forgets_what_was_hot_long_ago(self) -> None:
        """0 was picked 300 times, then no more: who only counts keeps it to the end, LCP for about one window."""
        found = rates([[0]] * 300 + [[1], [2]] * 150, 2, ("lcp", "lfu", "lru"))
        assert found["lfu"] == 299 / 600
        assert found["lru"] == 597 / 600
        assert 440 / 600 < found["lcp"] < 470 / 600

    @pytest.mark.parametrize("name", POLICIES)
    def test_all_fit(self, name: str) -> None:
        assert rates([[0, 1], [2, 3], [0, 3], [1, 2]], 4, (name,)) == {name: 4 / 8}

    @pytest.mark.parametrize("name", POLICIES)
    def test_a_cache_smaller_than_a_token(self, name: str) -> None:
        assert 0 <= rates([[0, 1, 2], [0, 1, 2], [2, 3, 0]], 1, (name,))[name] <= 2 / 9

    def test_counted_tokens_only(self) -> None:
        ids = np.array([[[0], [0], [1], [0]], [[1], [1], [1], [1]]])
        [row] = hit_rates(ids, [1], policies(("lru",)), np.array([False, True, False, True]))
        assert row.per_layer == (0.5, 1.0)
        assert row.overall == 0.75
        assert row.size == 1

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match="fifo"):
            policies(("fifo",))


class TestBelady:
    @settings(max_examples=40, deadline=None)
    @given(
        ids=st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2).map(sorted), min_size=1, max_size=12),
        size=st.integers(2, 4),
    )
    def test_is_the_most(self, ids: list[list[int]], size: int) -> None:
        found = rates(ids, size)
        assert found["belady"] * 2 * len(ids) == pytest.approx(best_hits(tuple(map(tuple, ids)), size))
        assert all(found["belady"] >= other - 1e-12 for other in found.values())
