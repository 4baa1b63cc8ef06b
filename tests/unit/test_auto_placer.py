"""The placer of `auto` on tiny caches: a scripted planner's choice is carried out to the letter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest
import torch
from cache_rigs import BIASED, EXPERTS, LAYERS, SHAPE, GatedDevice
from fake_engine import virtual_cache
from hypothesis import given
from hypothesis import strategies as st
from native_rigs import Stack
from orders_reference import Worth

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.links import loader_link
from tiermoe.actors.engine.cache.loader import Loader
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotMemory, SlotPool
from tiermoe.actors.engine.dense.native import Joined
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.layer import MoeLayer, Shared
from tiermoe.actors.engine.peers.auto import SOURCE, STREAM, AutoPlacer
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.auto import Action, Auto, Costs, Followed, LayerPlan, Part, Wanted
from tiermoe.actors.policies.residency import State
from tiermoe.actors.policies.worth import WorthOrder

COSTS = Costs(1.0, 0.1, 0.01, 0.2, 0.3, 4.0, 0.05, 0.5)
CALLS = ["come", "come", "come", "leave", "use", "route", "refuse", "admit", "bind", "prompt"]  # of an order


class Scripted:
    """Answers what a test sets, and notes what it is told."""

    costs, keeps_prompt, top_k = COSTS, True, 2

    @property
    def native(self) -> Any:
        return self

    def __init__(self) -> None:
        self.actions: dict[int, Action] = {}  # by expert; others: load
        self.wanted: list[Wanted] = []
        self.worths = np.zeros((LAYERS, EXPERTS))
        self.admits: dict[int, tuple[bool, int | None]] = {}
        self.told: list[Any] = []
        self.room = 0
        self.held: list[int] | None = None  # what other GPUs were said to hold

    def plan(self, layer: int, needed: Any, rows: Any, now_s: float, *rest: Any) -> Any:
        _, keys, _, prompt_tokens, owners, self.room = rest
        assert prompt_tokens in (0, 4)
        gpus = [0] * len(needed) if owners is None else owners[0].tolist()
        self.held = None if owners is None else owners[1].tolist()
        self.told.append(("plan", layer, needed.tolist(), rows.tolist(), keys.tolist()))
        usual = [Action.OWNER if gpu else Action.LOAD for gpu in gpus]
        actions = [self.actions.get(e, other) for e, other in zip(needed.tolist(), usual, strict=True)]
        near = actions.count(Action.NEAR_DATA)
        wanted, self.wanted = self.wanted, []
        codes, workers = np.array(actions, np.uint8), np.zeros(len(needed), np.uint8)
        owner_s = 0.5 * actions.count(Action.OWNER)
        return LayerPlan(codes, workers, wanted, now_s + 1, 0.2 * near, 0, 0, near, 0, owner_s)

    def used(self, layer: int, needed: Any) -> None:
        self.told.append(("used", layer, needed.tolist()))

    def prompt_end(self, counts: Any, tokens: int, requests: int, batch: int) -> None:
        self.told.append(("prompt_end", counts.tolist(), tokens, requests, batch))

    def resize(self, slots: int) -> None:
        self.told.append(("resize", slots))

    def admit(self, key: int) -> tuple[bool, int | None]:
        return self.admits.get(key, (True, None))

    def saw(self, part: Part, expected_s: float, seen_s: float) -> None:
        self.told.append(("saw", Part(part), round(expected_s, 6), round(seen_s, 6)))

    def took(self, seen_s: float) -> None:
        self.told.append(("took",))

    def filled(self) -> None:
        self.told.append(("filled",))

    def followed(self) -> Followed:
        return Followed("auto", 0.5, {"on-demand": 1.0})

    def error(self) -> float:
        return 0.25


class Pool:
    """NDP workers; key k is of worker k % 2."""

    members = ("ndp/0", "ndp/1")
    owners = 2

    def __init__(self) -> None:
        self.available = True

    def choose(self, keys: Sequence[int]) -> list[str] | None:
        return [self.members[key % 2] for key in keys] if self.available else None


class _Parts:
    """Of one pass, whose experts take no time; the pass gives its plan and who else runs what."""

    def __init__(self, rig: Rig, layer: int, ids: Any, answer_s: float, waited_s: float) -> None:
        self._rig, self._layer, self._view = rig, layer, SimpleNamespace(ids=ids)
        self._answer_s, self._waited_s = answer_s, waited_s
        self.remote: list[Any] = []

    def route(self) -> Any:
        return _core.Routing(self._layer, EXPERTS, self._view.ids), ()

    def routed(self, routing: Any) -> None:
        self._rig.placer.show(self._layer, cast(Any, self._view))

    def send(self) -> None:
        return None

    def ahead(self) -> None:
        return None

    def begin(self, routing: Any) -> None:
        run, self._resident = self._rig.cache.core.planned
        self._run = tuple(run)

    def run(self, groups: Any, replicas: Any) -> None:
        return None

    def lost(self) -> Sequence[int]:
        return ()

    def peer_s(self) -> tuple[float, float]:
        return 0.0, 0.0

    def ran(self) -> None:
        return None

    def combine(self) -> Any:
        if self._answer_s:
            answer: Any = SimpleNamespace(measured_s=self._answer_s, modelled_s=0.0)
            self._rig.stats.layers[self._layer].count_answer("ndp", self._waited_s, 1, 1, answer)
        return SimpleNamespace(run=self._run, resident=self._resident, remote=self.remote)


def _parts_of(rig: ref[Rig]) -> Any:
    found = rig()
    assert found is not None
    return found.parts


class Rig:
    """A cache of `slots` slots, one share of which is each layer's, and its placer. most: slots that it may get."""

    def __init__(self, slots: int, shards: Any = None, most: int | None = None, **more: Any) -> None:
        device = GatedDevice()
        memory = None if most is None else SlotMemory(device, slots, most)
        generator = torch.Generator().manual_seed(0)
        weights = [
            LayerWeights(tuple(torch.randn(s, generator=generator).bfloat16() for s in BIASED.stacked().values()))
            for _ in range(LAYERS)
        ]
        pool = SlotPool.allocate(BIASED, slots, torch.float32, torch.device("cpu"), memory)
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        self.planner, self.pool = Scripted(), Pool()
        where = SlotMap(pool, weights, EXPERTS, slots, BIASED.nbytes(4), memory=memory)
        self.cache = ExpertCache(
            where, loader_link(Loader(device), where), WorthOrder(LAYERS, EXPERTS), self.stats, Timeline(False)
        )
        self.residency, order = self.cache.residency, self.cache.eviction
        assert isinstance(order, WorthOrder)
        self.order = order
        ndp: Any = self.pool
        self.made = 0  # planners
        self.placer = AutoPlacer(self.cache, EXPERTS, shards, ndp, lambda: COSTS, self._make, **more)
        self.placer.preload()
        self.parts: Any = None
        begin, all_of = partial(_parts_of, ref(self)), _core.CpuLayers()
        self.layers = [_core.PythonLayer(self.cache.core, i, EXPERTS, 1, all_of, begin) for i in range(LAYERS)]
        for layer in self.layers:
            layer.placement(self.placer.native)

    def _make(self, *given: Any) -> Any:
        self.made += 1
        return self.planner

    def begin(self, *rows: tuple[str, int, bool]) -> None:
        """The sequences of the next forward: name, rows, whether it decodes."""
        found, at = [], 0
        for name, count, decode in rows:
            found.append(SimpleNamespace(name=name, start=at, stop=at + count, decode=decode))
            at += count
        self.cache.core.decode_only = all(decode for *_, decode in rows)
        self.placer.begin_forward(found)

    def layer(self, layer: int, *ids: Sequence[int], answer_s: float = 0.0, waited_s: float = 0.001) -> Any:
        """A layer's pass; ids: of each row. answer_s: of an NDP worker's kernels; waited_s: for its answer."""
        self.parts = _Parts(self, layer, np.array(ids, np.int64), answer_s, waited_s)
        found = self.layers[layer].run()
        self.cache.check_integrity()
        return found

    def settle(self) -> None:
        self.cache.core.wait_all()

    def resident(self) -> set[int]:
        return {key for key in self.residency.held() if self.residency.state(key) == State.RESIDENT}

    def told(self, what: str) -> list[Any]:
        return [one[1:] for one in self.planner.told if one[0] == what]


@pytest.fixture
def rig() -> Any:
    made = Rig(6)  # two slots a layer
    yield made
    made.cache.close()


def test_each_miss_goes_where_the_planner_says(rig: Rig) -> None:
    rig.begin(("a", 1, True))
    rig.planner.actions = {1: Action.NEAR_DATA, 2: Action.NEAR_DATA}
    plan = rig.layer(0, [0, 1, 2])
    assert plan.run == (0,)
    assert plan.remote == [("ndp/1", [1], [0]), ("ndp/0", [2], [0])]
    assert rig.told("plan") == [(0, [0, 1, 2], [1, 1, 1], [])]
    assert rig.told("used") == [(0, [0, 1, 2])]
    assert rig.resident() == {0}


def test_without_a_living_worker_every_miss_is_loaded(rig: Rig) -> None:
    rig.begin(("a", 1, True))
    rig.pool.available = False
    rig.planner.actions = {1: Action.NEAR_DATA}
    assert rig.layer(0, [0, 1]).run == (0, 1)
    assert rig.told("plan") == []
    assert rig.told("used") == [(0, [0, 1])]  # it learns all the same


def test_a_background_copy_takes_its_victims_slot_and_is_judged_when_it_comes(rig: Rig) -> None:
    rig.begin(("a", 1, True))
    for layer in range(LAYERS):
        rig.layer(layer, [0, 1])  # every slot is taken
    rig.planner.actions = {2: Action.NEAR_DATA}
    rig.planner.wanted = [Wanted(2, 1, 0.5)]
    rig.layer(0, [0, 2])
    rig.settle()
    assert rig.resident() == {0, 2, 4, 5, 8, 9}
    assert rig.cache.live_stats().prefetch_sources[SOURCE].queued == 1
    rig.planner.admits[2] = (False, None)
    rig.layer(1, [0])
    assert rig.told("filled") == [()]
    assert list(rig.order.refused) == [2]  # the planner refused it, so it leaves first
    rig.planner.actions = {}
    rig.layer(2, [2])
    assert rig.resident() == {0, 4, 5, 8, 9, 10}


def test_what_was_loaded_and_not_admitted_leaves_first(rig: Rig) -> None:
    rig.begin(("a", 1, True))
    for layer in range(LAYERS):
        rig.layer(layer, [0, 1])
    rig.planner.worths[0, :2] = 1.0, 2.0
    rig.planner.admits = {2: (False, None), 3: (True, 1)}
    rig.layer(0, [2])  # in the place of 0, the least of the layer's own
    assert (rig.resident(), list(rig.order.refused)) == ({1, 2, 4, 5, 8, 9}, [2])
    rig.layer(0, [3])
    assert (rig.resident(), list(rig.order.refused)) == ({1, 3, 4, 5, 8, 9}, [1])


def test_after_a_prompt_what_it_used_most_stays(rig: Rig) -> None:
    rig.begin(("a", 4, False))
    for layer in range(LAYERS):
        rig.layer(layer, [0, 3], [1, 3], [2, 3], [2, 3])  # 0 and 1 once, 2 twice, 3 four times
    assert rig.told("used") == []  # a prompt's rows are no tokens of a decode
    assert rig.told("took") == [()] * LAYERS  # before, no prompt's layer told what it took
    assert rig.resident() == {2, 3, 6, 7, 10, 11}
    rig.begin(("a", 1, True))
    assert rig.told("prompt_end") == [([[1, 1, 2, 4]] * LAYERS, 4, 1, 1)]
    rig.layer(0, [3])
    assert rig.told("used") == [(0, [3])]


def test_a_prompt_streams_into_slots_that_hold_nothing_of_worth() -> None:
    """Before, nothing was copied behind a prompt's layer."""
    rig = Rig(8)  # a share of two slots a layer, and two more
    rows = [[0, 3], [1, 3], [2, 3], [2, 3]]
    rig.begin(("a", 4, False))
    rig.planner.wanted = [Wanted(EXPERTS + e, None, 0.5) for e in range(EXPERTS)]
    rig.layer(0, *rows)
    assert rig.planner.room == 4  # of eight slots the layer's own loads take four
    rig.settle()
    assert rig.resident() == set(range(8))
    assert rig.cache.live_stats().prefetch_sources[STREAM].queued == EXPERTS
    rig.planner.wanted = [Wanted(2 * EXPERTS + e, None, 0.5) for e in range(EXPERTS)]
    plan = rig.layer(1, *rows)
    assert (plan.resident, len(plan.run)) == (4, 4)
    assert rig.planner.room == 2  # of layer 0 what exceeds its share
    rig.settle()
    assert rig.resident() == {2, 3, 4, 5, 6, 7, 8, 9}  # what the prompt used most stays
    rig.layer(2, *rows)
    assert rig.resident() >= {2, 3, 6, 7}
    assert rig.cache.live_stats().prefetch_sources[STREAM].hits == 6
    assert not rig.order.refused
    rig.begin(("a", 1, True))
    rig.layer(0, [3])
    assert rig.planner.room == 0
    rig.cache.close()


def test_a_planner_that_does_not_keep_prompts_ranks_during_them_too(rig: Rig) -> None:
    rig.planner.keeps_prompt = False
    rig.planner.worths[0] = 3.0, 0.0, 2.0, 0.0
    rig.begin(("a", 4, False))
    for layer in range(LAYERS):
        rig.layer(layer, [0, 1], [0, 1], [1, 0], [1, 2])  # 1 four times, 0 three times
    assert rig.resident() >= {0, 2}  # 1 was used most, and is worth least


def test_a_reader_of_scores_sees_this_layer_and_in_decodes_those_behind_it() -> None:
    shown, asked = list[Any](), list[int]()
    reader = SimpleNamespace(
        ahead=1, scored=lambda layer, logits: shown.append(("now", layer, logits)),
        foreseen=lambda layer, logits: shown.append(("later", layer, logits)),
    )  # fmt: skip

    def score(layer: int, view: Any) -> Any:
        asked.append(layer)
        return f"logits of {layer}"

    rig = Rig(6, score=score, reader=reader)
    assert [list(rig.placer.scored_at(layer)) for layer in range(LAYERS)] == [[0, 1], [1, 2], [2]]
    rig.begin(("a", 4, False))
    rig.layer(0, [0, 1], [0, 1], [0, 1], [0, 1])
    assert shown == [("now", 0, "logits of 0")]
    rig.begin(("a", 1, True))
    rig.layer(1, [0])
    rig.layer(2, [0])
    assert shown[1:] == [("now", 1, "logits of 1"), ("later", 2, "logits of 2"), ("now", 2, "logits of 2")]
    assert asked == [0, 1, 2, 2]
    rig.cache.close()


def test_costs_are_corrected_by_what_was_measured_apart(rig: Rig) -> None:
    """Before, a layer's whole time against the predicted one was a copy's, or a near-data expert's."""
    rig.begin(("a", 1, True))
    for actions in ({}, {0: Action.NEAR_DATA, 1: Action.NEAR_DATA}, {1: Action.NEAR_DATA}):
        rig.planner.actions = actions
        rig.cache.flush()
        rig.layer(0, [0, 1], answer_s=0.0625 if actions else 0.0)
    found = rig.told("saw")
    copies = [(expected, seen) for part, expected, seen in found if part is Part.COPY]
    assert len(copies) == 3
    assert all(expected == COSTS.copy_s and 0.0 <= seen < 1.0 for expected, seen in copies)
    near = [(part, expected, seen) for part, expected, seen in found if part in (Part.NEAR, Part.NEAR_MIXED)]
    assert near == [(Part.NEAR, 0.4, 0.0625), (Part.NEAR_MIXED, 0.2, 0.0625)]  # as the plan said
    assert [expected for part, expected, _ in found if part is Part.MESSAGE] == [COSTS.message_s] * 2
    assert Part.GPU in [part for part, *_ in found]  # two experts here took less than two tenths of a second
    assert rig.told("took") == [()] * 3
    rig.begin(("a", 1, True))
    assert rig.stats.planner is not None
    assert rig.stats.planner.error == 0.25
    assert rig.stats.planner.follows == "auto"
    assert rig.stats.planner.token_s == {"seen": 0.5, "on-demand": 1.0}


def test_a_layer_of_a_local_forward_that_comes_to_the_page_loads_every_miss(rig: Rig) -> None:
    """Native code leaves layers with many rows of an expert to the page. Before, a local prompt was planned there, so
    that the two ways were compared with themselves, and prompts of small experts waited for near data."""
    rig.planner.actions = {1: Action.NEAR_DATA}
    for local in (False, True):
        rig.begin(("a", 4, False))
        rig.placer.native.local = local
        plan = rig.layer(0, *[[0, 1]] * 4)
        assert [keys for _, keys, _ in plan.remote] == ([] if local else [[1]])
        assert len(rig.told("plan")) == 1
        rig.cache.flush()


def test_a_local_prompts_misses_find_slots_side_by_side(rig: Rig) -> None:
    """Before, a layer had its share of two slots: of four misses each waited for the one before it, and ran alone."""
    rig.begin(("a", 1, True))
    for layer in range(LAYERS):
        rig.layer(layer, [0, 1])
    kept = list[set[int]]()
    rig.planner.worths[:] = [[9.0] * EXPERTS, [1.0, 4.0, 0.0, 0.0], [2.0, 3.0, 0.0, 0.0]]
    for local in (False, True):
        rig.begin(("b", 4, False))
        rig.placer.native.local = local
        rig.layer(0, [0, 1], [2, 3], [0, 1], [2, 3])
        kept.append({key for key in rig.resident() if key >= EXPERTS})
    assert kept == [{4, 5, 8, 9}, {5, 9}]  # of layers 1 and 2, then those of greater worth


def test_a_layer_that_ends_with_its_experts_here_says_nothing_of_a_message(rig: Rig) -> None:
    """Before, taking an answer that had come was a wait of a microsecond, and so the layer's time was the message's."""
    rig.planner.costs = COSTS._replace(message_s=1e-9)
    rig.planner.actions = {1: Action.NEAR_DATA}
    rig.begin(("a", 1, True))
    for layer in (0, 1):
        rig.layer(layer, [0])
    rig.settle()
    rig.layer(0, [0, 1], answer_s=1e-9, waited_s=1e-9)
    assert Part.MESSAGE not in [part for part, *_ in rig.told("saw")]
    rig.layer(1, [0, 1], answer_s=1e-9, waited_s=1.0)
    assert Part.MESSAGE in [part for part, *_ in rig.told("saw")]


def test_what_copies_cost_beside_near_data_is_no_messages(rig: Rig) -> None:
    """Before, it was, and so near data alone was put at what it takes beside the link."""
    rig.planner.costs = COSTS._replace(message_s=1e-9)
    rig.planner.actions = {1: Action.NEAR_DATA}
    rig.begin(("a", 1, True))
    rig.layer(0, [0, 1], answer_s=1e-9, waited_s=1.0)  # 0 is loaded
    assert Part.MESSAGE not in [part for part, *_ in rig.told("saw")]
    told = [one[:2] for one in rig.planner.told]
    assert told.index(("saw", Part.NEAR_MIXED)) < told.index(("took",))  # which is what `saw` leaves


def test_a_layers_dense_part_is_learned_by_the_planner_that_heard_the_prompt(rig: Rig) -> None:
    """After 32 layers there was a new planner, which knew nothing of the first request."""
    rig.begin(("a", 4, False))
    rig.layer(0, [0], [1], [2], [0])
    for _ in range(40):
        rig.begin(("a", 1, True))
        for layer in range(LAYERS):
            rig.layer(layer, [0])
    assert rig.made == 1
    dense = [(expected, seen) for part, expected, seen in rig.told("saw") if part is Part.DENSE]
    assert len(dense) == 40 * (LAYERS - 1)  # not what lies between two forwards
    assert all(expected == COSTS.dense_s and 0.0 <= seen < 1.0 for expected, seen in dense)
    rig.cache.close()


def test_experts_of_other_gpus_run_there_or_near_data() -> None:
    """Before, they always ran on their owner, and the planner did not see them."""
    lost = set[int]()
    shards: Any = SimpleNamespace(
        peer_of=lambda key: ("shard/1", None) if key % 2 and 1 not in lost else None, owner_of=lambda key: key % 2,
        place=lambda keys, keep_others: lambda: True, holds=lambda keys: [key == 1 for key in keys],
    )  # fmt: skip
    rig = Rig(6, shards)
    rig.begin(("a", 1, True))
    rig.planner.actions = {2: Action.NEAR_DATA, 3: Action.NEAR_DATA}
    plan = rig.layer(0, [0, 1, 2, 3])
    assert plan.run == (0,)
    assert plan.remote == [("shard/1", [1], [0]), ("ndp/0", [2], [0]), ("ndp/1", [3], [0])]
    assert rig.told("plan") == [(0, [0, 1, 2, 3], [1, 1, 1, 1], [])]
    assert rig.planner.held == [0, 1, 0, 0]
    assert rig.told("used") == [(0, [0, 1, 2, 3])]  # the worth of another GPU's experts is learned, too
    owners = [seen for part, expected, seen in rig.told("saw") if part is Part.OWNER and expected == 0.5]
    assert len(owners) == 1
    assert 0.0 <= owners[0] < 0.5  # it answered sooner than was expected
    rig.pool.available = False
    plan = rig.layer(1, [0, 1, 2, 3])
    assert plan.remote == [("shard/1", [5, 7], [0, 0])]
    lost.add(1)
    rig.pool.available, rig.planner.actions = True, {}
    plan = rig.layer(2, [0, 1, 2, 3])
    assert (plan.run, plan.remote, rig.planner.held) == ((8, 9, 10, 11), [], None)  # a lost GPU's are loaded here
    rig.cache.close()


def test_some_forwards_are_local_in_native_calls_and_the_planner_hears_of_both(rig: Rig) -> None:
    """Before, every layer of auto ran on the page in Python: on the default model 27 ms a token, on-demand 15."""
    native, python = Stack(6, "worth"), Stack(6, "worth", native=False)
    cache, planner, rng = native.cache, Scripted(), np.random.default_rng(3)
    planner.costs = COSTS._replace(copy_s=1e-6, gpu_s=1e-7, message_s=1e-7)  # planning is expected to lose little
    pool: Any = Pool()
    placer = AutoPlacer(cache, EXPERTS, None, pool, lambda: COSTS, lambda *given: planner)
    placer.preload()
    backend, kernel = native.layers[0].backend, native.layers[0].kernel
    layers = native.layers_of(cast(Any, backend), placer, kernel, Hooks())
    local, used, now_s = 0, [], 1.0
    placer._clock = lambda: now_s
    for _ in range(40):
        rows: Any = [SimpleNamespace(name="a", start=0, stop=1, decode=True)]
        cache.core.decode_only = True
        placer.begin_forward(rows)
        local += placer.local
        now_s += 1.0 if placer.local else 2.0
        for index, layer in enumerate(layers):
            picked = rng.permutation(EXPERTS)[:2]
            ids = torch.from_numpy(picked.reshape(1, 2).copy())
            inputs = torch.randn(1, SHAPE.hidden), ids, torch.rand(1, 2)
            assert torch.equal(layer.forward(*inputs), python.layers[index].forward(*inputs))
            used.append((index, sorted(picked.tolist())))
        cache.check_integrity()
    placer.begin_forward([])
    assert local == 36  # planned are four, after the first eight
    assert [(layer, sorted(ids)) for what, layer, ids in [one for one in planner.told if one[0] == "used"]] == used
    assert len([one for one in planner.told if one[0] == "plan"]) == (40 - local) * LAYERS
    native.cache.close(), python.cache.close()
    assert not rig.placer.may_be_local  # its loads are in Python


def test_prompts_that_stream_ahead_give_the_same_outputs() -> None:
    native, python = Stack(8, "worth"), Stack(8, "worth", native=False)
    cache, rng = native.cache, np.random.default_rng(5)
    costs = Costs(1e-3, 1e-4, 1e-5, 1e-3, 1e-3, 4.0, 1e-4, 0.1)  # the link is idle most of the time

    def make(start: Costs, workers: int, slots: int, states: Any) -> Auto:
        return Auto(LAYERS, EXPERTS, 2, slots, costs, workers, states)

    placer = AutoPlacer(cache, EXPERTS, None, None, lambda: costs, make)
    placer.faster.only = 0
    placer.preload()
    backend, kernel = native.layers[0].backend, native.layers[0].kernel
    shared = Shared(cache, backend, placer)
    layers = [MoeLayer(i, EXPERTS, shared, kernel) for i in range(LAYERS)]
    for name, count in [("a", 6), *[("a", 1)] * 10, ("b", 8), *[("b", 1)] * 10]:
        rows: Any = [SimpleNamespace(name=name, start=0, stop=count, decode=count == 1)]
        cache.core.decode_only = count == 1
        placer.begin_forward(rows)
        for index, layer in enumerate(layers):
            picked = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(count)])
            inputs = torch.randn(count, SHAPE.hidden), torch.from_numpy(picked), torch.rand(count, 2)
            assert torch.equal(layer.forward(*inputs), python.layers[index].forward(*inputs))
        cache.check_integrity()
    assert cache.live_stats().prefetch_sources[STREAM].hits > 0
    native.cache.close(), python.cache.close()


def _local(slots: int, planner: Any, pool: Any = None) -> tuple[Stack, AutoPlacer, list[MoeLayer]]:
    """Layers in native calls; pool: of NDP workers."""
    stack = Stack(slots, "worth")
    placer = AutoPlacer(stack.cache, EXPERTS, None, pool, lambda: COSTS, lambda *given: planner)
    placer.preload()
    backend, kernel = stack.layers[0].backend, stack.layers[0].kernel
    layers = stack.layers_of(cast(Any, backend), placer, kernel, Hooks())
    return stack, placer, layers


def test_beside_workers_the_prefetch_of_local_forwards_is_made_before_there_are_layers() -> None:
    """Before, it was asked of layers that were not made yet: beside a worker no local forward prefetched."""
    stack, pool = Stack(6, "worth"), cast(Any, Pool())
    placer = AutoPlacer(stack.cache, EXPERTS, None, pool, lambda: COSTS, lambda *given: Scripted())
    stack.cache.native_steps = False  # as it is until layers are made
    assert placer.may_prefetch
    placer.faster.only = 0  # a rule that decides every layer
    assert not placer.may_prefetch
    stack.cache.close()


def test_the_share_of_misses_is_learned_from_decodes() -> None:
    stack = Stack(6, "worth")
    placer = AutoPlacer(stack.cache, EXPERTS, None, cast(Any, Pool()), lambda: COSTS, lambda *given: Scripted())
    placer.preload()
    stack.cache.native_steps, placer.faster.only = True, 0
    layer = MoeLayer(0, EXPERTS, Shared(stack.cache, stack.layers[0].backend, placer), stack.layers[0].kernel)
    inputs = torch.randn(1, SHAPE.hidden), torch.tensor([[0, 1]]), torch.rand(1, 2)
    assert placer.native.missed is None
    for share in (1.0, 0.98):  # both are loaded, and there the second time
        stack.cache.core.decode_only = True
        placer.begin_forward(cast(Any, [SimpleNamespace(name="a", start=0, stop=1, decode=True)]))
        layer.forward(*inputs)
        assert placer.native.missed == pytest.approx(share)
    stack.cache.close()


def test_without_workers_prompts_are_local_too_and_native_code_counts_their_experts() -> None:
    """Before, every layer of a prompt ran on the page in Python: the first token of the default model took 1.2 to 2.0
    times as long as with next-gate.
    """
    planner, rng = Scripted(), np.random.default_rng(5)
    stack, placer, layers = _local(9, planner)

    def forward(*rows: tuple[str, int, bool]) -> list[Any]:
        found, at = [], 0
        for name, count, decode in rows:
            found.append(SimpleNamespace(name=name, start=at, stop=at + count, decode=decode))
            at += count
        stack.cache.core.decode_only = all(decode for *_, decode in rows)
        placer.begin_forward(cast(Any, found))
        assert placer.local
        picked = [np.stack([rng.permutation(EXPERTS)[:2] for _ in range(at)]) for _ in layers]
        for layer, ids in zip(layers, picked, strict=True):
            layer.forward(torch.randn(at, SHAPE.hidden), torch.from_numpy(ids), torch.rand(at, 2))
            stack.cache.check_integrity()
        return [np.bincount(ids.ravel(), minlength=EXPERTS) for ids in picked]

    alone = np.array(forward(("a", 5, False))) + forward(("a", 3, False))
    both = np.array(forward(("b", 6, False), ("c", 2, False)))
    forward(("a", 1, True), ("b", 1, True), ("c", 1, True))
    parts = np.rint(both * 0.75).astype(int) + np.rint(both * 0.25).astype(int)
    assert planner.told[0] == ("prompt_end", (alone + parts).tolist(), 16, 3, 3)
    assert not [one for one in planner.told if one[0] == "plan"]
    placer.begin_forward([])
    assert [one[1] for one in planner.told if one[0] == "used"] == list(range(LAYERS))  # of the decode alone
    stack.cache.close()


def test_worth_orders_by_refusal_share_and_rank() -> None:
    order = WorthOrder(2, 4)  # keys 0-3 and 4-7
    for key in (0, 1, 2, 3, 4, 5):
        order.admitted(key)
    order.bind(6, np.array([[4.0, 3.0, 2.0, 1.0]] * 2))  # the last key is worth least
    order.routed([4], [1], 1)  # layer 1 holds less than its share of three
    assert order.victims(6, lambda key: True) == [3, 2, 1, 0, 5, 4]
    order.refuse(1)
    order.routed([0], [1], 1)  # layer 0 holds more
    assert order.victims(2, lambda key: key != 3) == [1, 2]
    assert order.settled() == {4, 5}
    order.routed([4], [1], 1)
    assert order.settled() == {0, 1, 2}  # its best three
    order.routed([0], [1], 1)
    order.admit(1)
    order.removed(3)
    assert order.victims(3, lambda key: True) == [2, 1, 0]


@given(data=st.data())
def test_the_native_order_by_worth_is_the_policy(data: st.DataObject) -> None:
    """The same victims, refused and settled residents after any calls; what was used is noted, and uses by prompts are
    counted.
    """
    layers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    policy, native, keys = Worth(layers, experts), WorthOrder(layers, experts), layers * experts
    few = st.floats(0.0, 3.0).map(round)  # with ties
    held, noted = set[int](), [set[int]() for _ in range(layers)]
    uses: list[Any] = [None, None]  # by prompts, of each order
    native.note()
    for _ in range(data.draw(st.integers(0, 30))):
        call, key = data.draw(st.sampled_from(CALLS)), data.draw(st.integers(0, keys - 1))
        for order in (policy, native):
            if call == "come" and key not in held:
                order.admitted(key)
            elif call == "leave" and key in held:
                order.removed(key)
            elif call == "use" and key in held:
                order.used([key])
            elif call == "route":
                order.routed([key], [2], 2)
                if order is policy and uses[0] is not None:
                    uses[0].ravel()[key] += 2  # as the placer does, where it reads the routing
            elif call == "refuse":
                order.refuse(key)
            elif call == "admit":
                order.admit(key)
        if call in ("bind", "prompt"):
            numbers = np.array(data.draw(st.lists(few, min_size=keys, max_size=keys))).reshape(layers, experts)
            slots, runs = data.draw(st.integers(0, keys)), data.draw(st.booleans())
            for i, order in enumerate((policy, native)):
                if call == "bind":
                    order.bind(slots, numbers.astype(np.float64))
                else:
                    uses[i] = numbers.astype(np.int64) if runs else None
                    order.prompt(uses[i])
        if call == "use" and key in held:
            noted[key // experts].add(key % experts)
        held = held | {key} if call == "come" else held - {key} if call == "leave" else held
        mask = data.draw(st.integers(0, 2**keys - 1))
        count = data.draw(st.integers(-1, keys + 1))
        want = policy.victims(count, lambda key, mask=mask: bool(mask >> key & 1))  # type: ignore[misc]
        may = bytearray(mask >> key & 1 for key in range(keys))
        assert native.victims(count, lambda key, may=may: bool(may[key])) == want  # type: ignore[misc]
        assert native.victims(count, may.__getitem__) == want  # type: ignore[arg-type]
        assert list(native.refused) == list(policy.refused)
        assert native.settled() == policy.settled()
        assert native.layer == policy.layer
        assert uses[0] is None or np.array_equal(*uses)
    assert [(layer, set(found.tolist())) for layer, found in native.noted()] == [
        (layer, found) for layer, found in enumerate(noted) if found
    ]
    assert native.noted() == []


def test_a_native_order_refuses_other_arrays_and_keys() -> None:
    order = WorthOrder(2, 3)
    for worths in (np.zeros((2, 3), np.float32), np.zeros((2, 6))[:, ::2]):
        with pytest.raises(TypeError, match="float64"):
            order.bind(2, worths)
    with pytest.raises(ValueError, match="by key"):
        order.bind(2, np.zeros((2, 2)))
    with pytest.raises(TypeError, match="int64"):
        order.prompt(np.zeros((2, 3), np.int32))  # type: ignore[arg-type]
    for key in (-1, 6):
        with pytest.raises(ValueError, match="no such expert"):
            order.refuse(key)
    with pytest.raises(ValueError, match="not by worth"):
        _core.WholeOrder("lru", 2, 3).settled()


def test_worth_that_is_no_number_leaves_first() -> None:
    order = WorthOrder(1, 4)
    for key in range(4):
        order.admitted(key)
    order.bind(4, np.array([[1.0, np.nan, -np.inf, np.nan]]))
    assert order.victims(4, lambda key: True) == [1, 2, 3, 0]


def test_layers_in_one_call_ask_the_placer_where_it_plans() -> None:
    (stack, placer, layers), calls = _local(6, Scripted(), cast(Any, Pool())), list[int]()

    def run_layers(at: int, handles: Any, *rest: Any) -> int:
        calls.append(len(handles))
        return len(handles)

    stored = [((SHAPE.hidden,), torch.float32), ((2,), torch.int64), ((2,), torch.float32)]
    joined = Joined(cast(Any, SimpleNamespace(run_layers=run_layers)), layers, [stored] * LAYERS)
    hidden = torch.zeros(1, SHAPE.hidden)
    for way in (0, 1, 0):
        placer.faster.only = way
        placer.begin_forward(cast(Any, [SimpleNamespace(name="a", start=0, stop=1, decode=True)]))
        assert joined.run(0, [hidden], hidden, hidden) == LAYERS
        assert layers[0].shared.planned.now == (way == 0)
    assert calls == [LAYERS] * 3
    stack.cache.close()


@pytest.mark.parametrize("slots", [4, 7])
def test_local_forwards_evict_by_what_the_planner_learns(slots: int) -> None:
    """One native call a layer: the outputs, loads and victims of the order in Python, whose planner hears the same."""
    native, python = Stack(slots, "worth"), Stack(slots, "worth", native=False)
    share, rng = slots // LAYERS, np.random.default_rng(slots)

    def planner(*_: Any) -> Auto:
        return Auto(LAYERS, EXPERTS, 2, share, COSTS, 0, np.zeros((LAYERS, EXPERTS), np.uint8))

    placer = AutoPlacer(native.cache, EXPERTS, None, None, lambda: COSTS, planner)
    placer.preload()
    reference = planner()
    cast(Worth, python.cache.eviction).bind(slots, reference.worths)
    backend, kernel = native.layers[0].backend, native.layers[0].kernel
    layers = native.layers_of(cast(Any, backend), placer, kernel, Hooks())
    told = list[tuple[int, Any]]()
    for _ in range(60):
        native.cache.core.decode_only = python.cache.core.decode_only = True
        placer.begin_forward(cast(Any, [SimpleNamespace(name="a", start=0, stop=1, decode=True)]))
        for index, used in told:
            reference.used(index, used)
        told.clear()
        assert placer.local
        assert placer.planner is not None
        assert np.array_equal(placer.planner.worths, reference.worths)
        for index, layer in enumerate(layers):
            picked = rng.choice(EXPERTS, 2, replace=False, p=[0.45, 0.3, 0.15, 0.1])
            ids = torch.from_numpy(picked.reshape(1, 2).copy())
            inputs = torch.randn(1, SHAPE.hidden), ids, torch.rand(1, 2)
            assert torch.equal(layer.forward(*inputs), python.layers[index].forward(*inputs))
            native.settle(), python.settle()
            told.append((index, picked.astype(np.int32)))
        assert native.known() == python.known()
    assert native.stats.layers[0].misses > 10
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize(("slots", "each"), [(2, 1), (6, 2), (11, 3)])
def test_another_number_of_slots_is_shared_anew(slots: int, each: int) -> None:
    """Of three layers of four experts."""
    rig, bound = Rig(1, most=12), list[int]()
    rig.order.bind = lambda slots, worths: bound.append(slots)  # type: ignore[method-assign]
    rig.cache.resize(slots)
    rig.placer.resized()
    assert rig.planner.told == [("resize", each)]
    assert bound == [slots]
    rig.cache.close()


class Theirs(WorthOrder):
    """An order of eviction from outside of this repository."""

    __module__ = "my_policies.worth"


@pytest.mark.parametrize(("order", "told"), [(WorthOrder, [4]), (Theirs, [])])
def test_an_order_from_outside_is_told_no_worths(
    order: type[WorthOrder], told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were bound to native code that the cache does not call."""
    bound = list[int]()
    monkeypatch.setattr(WorthOrder, "bind", lambda self, slots, worths: bound.append(slots))
    cache = virtual_cache(LAYERS, EXPERTS, 4, order(LAYERS, EXPERTS))
    placer = AutoPlacer(cache, EXPERTS, None, None, lambda: COSTS, lambda *given: cast(Any, Scripted()))
    placer.preload()
    assert bound == told
