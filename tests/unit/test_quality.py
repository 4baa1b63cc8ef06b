"""The quality budget of `auto`: the pure rule, by hand and against every subset; options, artifact and figures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import greedy, prepared, serving
from serving import settings as local_settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.policies.quality import (
    ACTIONS,
    DROP,
    NARROW,
    SUBSTITUTE,
    LossTable,
    Offer,
    QualityBudget,
    changed,
    choose,
    offers_of,
    price_of,
)
from tiermoe.actors.policies.registry import PolicyContext, make
from tiermoe.actors.policies.routing import MissCosts, RerouteView, SequenceRows
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, ShardSettings, check_combination
from tiermoe.actors.store.artifacts import LOSSES_NAME, encode_losses
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.api.metrics import RuntimeCounters
from tiermoe.cluster.config import chosen_policy, load_policy, load_run_config
from tiermoe.cluster.jobs.bench.experiment import load_experiment
from tiermoe.cluster.jobs.options import checked_settings
from tiermoe.cluster.report.status import charged
from tiermoe.errors import ConfigError, StoreError

LOADS = MissCosts(copy_s=1.0, near_s=math.inf, message_s=0.0)
TABLE = LossTable({"substitute": np.array([1.0, 1.0]), "narrow": np.array([4.0, 4.0]), "drop": np.array([9.0, 9.0])})
EXPERTS, TOP_K = 8, 3


def routed(rows: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """ids, weights and probabilities of a plain router."""
    z = np.random.default_rng(seed).normal(size=(rows, EXPERTS)) * 2
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :TOP_K]
    weights = np.take_along_axis(p, ids, axis=1)
    return ids, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32), p


def here(*experts: int) -> Any:
    return np.isin(np.arange(EXPERTS), experts)


def offer(expert: int, **rows: float) -> Offer:
    """rows: amplitude of each row, such as r0=0.1."""
    return Offer(expert, tuple(int(r[1:]) for r in rows), tuple(rows.values()), (DROP,) * len(rows))


# -- seconds -----------------------------------------------------------------------------------------------------------


def test_misses_are_shared_between_link_and_near_data() -> None:
    assert [LOADS.seconds(n) for n in range(3)] == [0.0, 1.0, 2.0]
    both = MissCosts(copy_s=1.0, near_s=1.0, message_s=1.0)
    assert [both.seconds(n) for n in (0, 1, 3, 5)] == [0.0, 1.0, 2.0, 3.0]


# -- what is offered ---------------------------------------------------------------------------------------------------


def test_a_miss_is_offered_by_its_share_and_the_action_of_least_loss() -> None:
    ids, weights, p = routed(1)
    order = ids[0].tolist()
    amplitudes = TABLE.amplitudes(0, ACTIONS)
    assert amplitudes == [1.0, 2.0, 3.0]
    others = [e for e in range(EXPERTS) if e not in order]
    found = offers_of(ids, weights, p, here(order[0], *others[:2]), amplitudes, [False])
    assert found.misses == 2
    assert [o.expert for o in found.offers] == order[1:]
    for one, weight in zip(found.offers, weights[0, 1:], strict=True):
        assert one.amplitudes[0] == pytest.approx(float(weight))
        assert one.actions == (SUBSTITUTE,)
    # no resident stands by: the next cheapest action
    found = offers_of(ids, weights, p, here(order[0]), amplitudes, [False])
    assert {action for o in found.offers for action in o.actions} == {NARROW}
    assert offers_of(ids, weights, p, here(order[0]), TABLE.amplitudes(0, ["substitute"]), [False]) == ([], 2)


def test_the_heaviest_and_what_an_exact_row_needs_are_not_offered() -> None:
    ids, weights, p = routed(1)
    order = ids[0].tolist()
    assert offers_of(ids, weights, p, here(*order[1:]), TABLE.amplitudes(0, ACTIONS), [False]) == ([], 1)
    two, both, q = np.concatenate([ids, ids]), np.concatenate([weights, weights]), np.concatenate([p, p])
    assert offers_of(two, both, q, here(*order[:2]), TABLE.amplitudes(0, ACTIONS), [False, True]) == ([], 1)
    found = offers_of(two, both, q, here(*order[:2]), TABLE.amplitudes(0, ACTIONS), [False, False])
    assert [(o.expert, o.rows) for o in found.offers] == [(order[2], (0, 1))]


def test_a_router_whose_picks_are_not_the_most_probable_has_no_substitutes() -> None:
    ids, weights, p = routed(1)
    p = p.copy()
    outsider = next(e for e in range(EXPERTS) if e not in ids[0])
    p[0, outsider] = 1.0
    found = offers_of(ids, weights, p, here(ids[0, 0], outsider, 0, 1, 2), TABLE.amplitudes(0, ACTIONS), [False])
    assert all(action == NARROW for o in found.offers for action in o.actions)


# -- the choice --------------------------------------------------------------------------------------------------------


def test_the_cheapest_go_first_and_the_price_ends_it() -> None:
    three = [offer(1, r0=0.3), offer(2, r1=0.1), offer(3, r2=0.2)]
    accounts, rich = (0, 1, 2), (9.0, 9.0, 9.0)

    def avoided(price: float) -> list[int]:
        return [o.expert for o in choose(three, 3, accounts, rich, LOADS, price).avoided]

    assert [avoided(price) for price in (0.0, 0.01, 0.02, 0.05, 0.1)] == [[], [], [2], [2, 3], [2, 3, 1]]
    assert choose(three, 3, accounts, rich, LOADS, 0.05).spent == pytest.approx({1: 0.01, 2: 0.04})


def test_no_request_pays_for_another() -> None:
    """An expert that two rows need is avoided only if both can pay; a spent budget changes nothing of its row."""
    shared, own = offer(1, r0=0.1, r1=0.1), offer(2, r0=0.2)
    found = choose([shared, own], 2, (0, 1), (1.0, 0.009), LOADS, 100.0)
    assert [o.expert for o in found.avoided] == [2]
    assert found.spent == pytest.approx({0: 0.04})
    assert choose([shared, own], 2, (0, 1), (0.0, 0.0), LOADS, 100.0).avoided == ()


def test_savings_that_need_several_misses_are_seen() -> None:
    """Without the last miss near data there is no message: two together are worth what neither is alone."""
    costs = MissCosts(copy_s=10.0, near_s=0.1, message_s=1.0)
    cheap = [offer(1, r0=0.1), offer(2, r1=0.1)]
    assert len(choose(cheap, 2, (0, 1), (9.0, 9.0), costs, 0.02).avoided) == 2


@settings(max_examples=200, deadline=None)
@given(
    amplitudes=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    rows=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    balances=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), price=st.floats(0.0, 1.0), near=st.booleans(),
)  # fmt: skip
def test_against_every_subset(
    amplitudes: list[float], rows: list[int], balances: list[float], price: float, near: bool
) -> None:
    """Never above a balance, never worse than nothing; the best where no balance binds and no row moves twice."""
    offers = [Offer(e, (rows[e],), (a,), (DROP,)) for e, a in enumerate(amplitudes)]
    costs = MissCosts(1.0, 0.5, 0.3) if near else LOADS
    found = choose(offers, len(offers), (0, 1, 2), balances, costs, price)

    def nats(some: tuple[Offer, ...], row: int) -> float:
        return sum(o.amplitudes[0] for o in some if o.rows == (row,)) ** 2

    def value(some: tuple[Offer, ...]) -> float:
        saved_s = costs.seconds(len(offers)) - costs.seconds(len(offers) - len(some))
        return price * saved_s - sum(nats(some, row) for row in range(3))

    for row in range(3):
        assert nats(found.avoided, row) <= balances[row] + 1e-12
        assert found.spent.get(row, 0.0) == pytest.approx(nats(found.avoided, row), abs=1e-9)
    assert value(found.avoided) >= 0
    every = [s for n in range(len(offers) + 1) for s in itertools.combinations(offers, n)]
    payable = [s for s in every if all(nats(s, row) <= balances[row] for row in range(3))]
    if len(payable) == len(every) and len({o.rows for o in offers}) == len(offers):
        assert value(found.avoided) == pytest.approx(max(map(value, payable)), abs=1e-9)


def test_the_price_is_what_would_have_spent_the_target() -> None:
    offered = [(0.04, 1.0), (0.01, 1.0), (0.02, 1.0)]
    assert price_of(offered, 0.03) == pytest.approx(0.02)
    assert price_of(offered, 0.01) == pytest.approx(0.01)
    assert price_of(offered, 0.005) == pytest.approx(0.005)
    assert price_of(offered, 1.0) == math.inf
    with pytest.raises(ValueError, match="price"):
        price_of([], 1.0)


# -- the routing that runs ---------------------------------------------------------------------------------------------


def test_substitutes_have_their_own_weight_and_the_sum_stays() -> None:
    ids, weights, p = routed(1)
    order = np.argsort(-p[0]).tolist()
    available = here(order[0], order[1], order[5], order[4])
    out, shares, counts = changed(ids, weights, p, available, [Offer(order[2], (0,), (0.1,), (SUBSTITUTE,))], True)
    assert out[0].tolist() == [order[0], order[1], order[4]]  # the best resident that it had not picked
    assert counts == [1, 0, 0]
    assert shares[0].sum() == pytest.approx(1.0)
    assert shares[0, 2] / shares[0, 0] == pytest.approx(p[0, order[4]] / p[0, order[0]])


@pytest.mark.parametrize(("action", "left"), [(NARROW, 1.0), (DROP, None)])
def test_a_pair_that_does_not_run(action: int, left: float | None) -> None:
    ids, weights, p = routed(1)
    gone = Offer(int(ids[0, 2]), (0,), (0.1,), (action,))
    out, shares, counts = changed(ids, weights, p, here(*ids[0, :2]), [gone], True)
    assert out[0].tolist() == [ids[0, 0], ids[0, 1], ids[0, 0]]
    assert shares[0, 2] == 0
    assert shares[0].sum() == pytest.approx(1 - weights[0, 2] if left is None else left)
    assert shares[0, 1] / shares[0, 0] == pytest.approx(weights[0, 1] / weights[0, 0])
    assert counts[action] == 1
    assert ids[0, 2] != ids[0, 0]  # the input stays


# -- requests ----------------------------------------------------------------------------------------------------------


def served(rule: QualityBudget, seed: int, *rows: tuple[str, bool], layers: int = 2, resident: Any = None) -> list[Any]:
    """One forward with one row of each request: the routing of each layer that ran, against the model's."""
    rule.begin_forward([SequenceRows(name, i, i + 1, decode) for i, (name, decode) in enumerate(rows)], LOADS)
    seen = []
    for layer in range(layers):
        ids, weights, p = routed(len(rows), seed * 97 + layer)
        view = RerouteView(here(0, 1, 2, 3) if resident is None else resident, 0, TOP_K)
        found = rule.reroute(layer, ids, weights, p, view)
        seen.append((ids, weights, found))
    return seen


def test_a_request_s_mean_never_exceeds_its_budget_and_most_of_it_is_spent() -> None:
    rule = QualityBudget(0.02, TABLE)
    for token in range(200):
        served(rule, token, ("a", True))
        assert rule.report().kl_most <= 0.02
    found = rule.report()
    assert (found.budget, found.requests, found.tokens) == (0.02, 1, 200)
    assert 0.6 * 0.02 < found.kl <= 0.02
    assert found.avoided > 0
    assert found.substituted + found.narrowed + found.dropped == found.avoided
    few = QualityBudget(0.0005, TABLE)
    for token in range(200):
        served(few, token, ("a", True))
    assert few.report().avoided < found.avoided / 2


def test_a_request_that_is_exact_in_a_batch_stays_exact() -> None:
    """Rows of prompts, and rows of a request whose budget is spent, are those of the model, whoever is beside them."""
    rule = QualityBudget(0.05, TABLE)
    for token in range(50):
        for ids, weights, found in served(rule, token, ("prompt", False), ("a", True)):
            assert found.ids[0].tolist() == ids[0].tolist()
            assert found.weights[0].tolist() == weights[0].tolist()
    assert rule.report().avoided > 0
    rule._accounts["a"].spent = 1e9  # spent
    for token in range(50, 60):
        for ids, weights, found in served(rule, token, ("b", True), ("a", True)):
            assert found.ids[1].tolist() == ids[1].tolist()
            assert found.weights[1].tolist() == weights[1].tolist()


def test_requests_end_and_counters_are_reset_apart_from_budgets() -> None:
    rule = QualityBudget(0.02, TABLE)
    for token in range(30):
        served(rule, token, ("a", True))
    spent = rule._accounts["a"].spent
    rule.reset()
    assert (rule.report().tokens, rule.report().avoided) == (0, 0)
    assert rule._accounts["a"].spent == spent
    rule.end_sequence("a")
    rule.end_sequence("of nobody")
    served(rule, 31, ("b", True))
    assert set(rule._accounts) == {"b"}
    assert rule.report().requests == 1  # nothing of the other one since the reset
    for token in range(20):
        served(rule, token, ("b", True))
    rule.end_sequence("b")
    before = rule.report()
    served(rule, 31, ("c", True))
    assert (before.requests, rule.report().requests) == (1, 2)
    assert rule.report().kl_most >= before.kl_most


def test_nothing_changes_without_costs_in_unannounced_forwards_and_while_slots_are_free() -> None:
    rule = QualityBudget(1.0, TABLE)
    served(rule, 0, ("a", True))
    ids, weights, p = routed(1)
    views = [RerouteView(here(0), free, TOP_K, vacant=free) for free in (0, TOP_K, TOP_K - 1)]
    rule.begin_forward([SequenceRows("a", 0, 1, True)], None)
    assert rule.keeps(ids, views[0])
    rule.begin_forward([SequenceRows("a", 0, 1, True)], LOADS)
    assert not rule.keeps(ids, views[0])
    assert rule.keeps(ids, views[1])  # the free slots hold all misses, of which there are three
    assert not rule.keeps(ids, views[2])
    assert rule.keeps(np.concatenate([ids, ids]), views[0])
    assert rule.keeps(ids, RerouteView(np.ones(EXPERTS, bool), 0, TOP_K))
    assert rule.reroute(0, ids, weights, p, views[1]).ids is ids


def test_a_request_that_is_cancelled_after_its_rows_were_chosen_ends_once() -> None:
    rule = QualityBudget(1.0, TABLE)
    served(rule, 0, ("a", True))
    rule.end_sequence("a")
    served(rule, 1, ("a", True))  # the forward that still carries it
    served(rule, 2, ("b", True))
    assert rule.report().requests == 2
    assert list(rule._accounts) == ["b"]


def test_what_was_not_measured_is_not_free() -> None:
    """Guards a layer in which no row of the calibration qualified for an action: its 0 nats won every comparison."""
    table = LossTable({"substitute": np.zeros(1), "drop": np.ones(1)})
    assert table.amplitudes(0, ("substitute", "drop")) == [math.inf, math.inf, 1.0]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_lossless_is_the_preset_itself() -> None:
    assert chosen_policy("auto") == chosen_policy("auto", "Lossless ") == load_policy("auto")
    assert make("routing", load_policy("auto").routing, PolicyContext(2, EXPERTS)) is None  # no rule runs in a layer


def test_a_budget_makes_the_policy_lossy() -> None:
    found = chosen_policy("auto", "kl=0.01")
    assert (found.name, found.lossless, found.needs) == ("auto kl=0.01", False, {"losses"})
    assert found.routing.model_dump() == {"kind": "quality", "kl": 0.01, "min_top_k": 1, "actions": ACTIONS}
    rule = make("routing", found.routing, PolicyContext(2, EXPERTS, losses=TABLE))
    assert isinstance(rule, QualityBudget)
    with pytest.raises(ValueError, match="measured losses of 3 layers"):
        make("routing", found.routing, PolicyContext(3, EXPERTS, losses=TABLE))


@pytest.mark.parametrize(
    ("policy", "quality", "what", "remedy"),
    [
        ("next-gate", "kl=0.01", "is for the policy auto, and this one is next-gate", "--policy auto"),
        ("cache-conditional", "kl=0.01", "this one is cache-conditional", "--policy auto"),
        ("auto", "kl=0", "neither lossless nor a budget", "such as kl=0.01"),
        ("auto", "kl=-1", "neither lossless nor a budget", "such as kl=0.01"),
        ("auto", "kl=nan", "neither lossless nor a budget", "such as kl=0.01"),
        ("auto", "0.01", "neither lossless nor a budget", "such as kl=0.01"),
        ("on-demand", "good", "quality 'good'", "such as kl=0.01"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(policy: str, quality: str, what: str, remedy: str) -> None:
    config = load_run_config(None, {"policy": policy, "quality": quality, "model": "/nowhere"})
    with pytest.raises(ConfigError, match=what) as refused:
        checked_settings(config)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"routing": {"kind": "quality", "kl": 0.01, "actions": ["buddy"]}}, "no action buddy yet.*buddymoe-own"),
        ({"routing": {"kind": "quality", "kl": 0.01, "actions": ["replica"]}}, "no action replica yet.*hobbit"),
        ({"routing": {"kind": "quality", "kl": 0.01, "actions": ["shrink"]}}, "no action 'shrink'"),
        ({"routing": {"kind": "quality", "kl": 0}}, "greater than 0"),
        ({"placement": {"kind": "cache"}, "eviction": "lru"}, "for placement auto"),
        ({"lossless": True}, "not lossless"),
    ],
)
def test_presets_of_one_s_own_are_refused_by_name(changes: dict[str, Any], what: str) -> None:
    values = chosen_policy("auto", "kl=0.01").model_dump(mode="json") | changes
    with pytest.raises(ValueError, match=what):
        PolicySettings(**values)


def test_several_gpus_are_refused() -> None:
    chosen = EngineSettings(policy=chosen_policy("auto", "kl=0.01"), budget=0.5, shards=ShardSettings(count=2))
    with pytest.raises(ConfigError, match="misses of one GPU; there are to be 2") as refused:
        check_combination(chosen)
    assert "--quality lossless" in str(refused.value)


def test_comparisons_run_auto_at_each_quality() -> None:
    given: dict[str, Any] = {"policies": "on-demand,auto", "prompts": "p.txt", "quality": "lossless,kl=0.01"}
    (section,) = load_experiment("compare", given).sections
    assert [(v.name, v.policy().lossless) for v in section.rows()] == [
        ("on-demand", True), ("auto", True), ("auto kl=0.01", False)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="this one is on-demand"):
        load_experiment("compare", given | {"policies": "on-demand"})
    with pytest.raises(ConfigError, match="nor a budget"):
        load_experiment("compare", given | {"quality": "kl=good"})


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_summary_and_the_metrics_say_what_was_charged() -> None:
    rule = QualityBudget(0.02, TABLE)
    for token in range(40):
        served(rule, token, ("a", True))
    report = rule.report()
    record = {name: getattr(report, name) for name in report.__dataclass_fields__}
    words = charged(record)
    assert f"of 0.02; {report.avoided} of {report.avoided + report.paid} misses avoided (" in words
    counters = RuntimeCounters()
    counters.stats = {"quality": record}
    samples = {(s.name, *s.labels.values()): s.value for family in counters.collect() for s in family.samples}
    assert samples["tiermoe_quality_charged_nats", "mean"] == report.kl
    assert samples["tiermoe_quality_charged_nats", "most"] == report.kl_most
    assert samples["tiermoe_quality_misses_avoided_total",] == report.avoided
    assert samples["tiermoe_quality_actions_total", "dropped"] == report.dropped
    counters.stats = {"quality": None}
    assert not [f for f in counters.collect() if "quality" in f.name]


# -- in an engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("quality")
    model = save_tiny_checkpoint("qwen3_moe", folder / "model", num_experts_per_tok=3)
    return prepared(model, folder / "store")


def _table(store: ExpertStore, nats: float) -> None:
    layers = len(store.manifest.layers)
    table = LossTable({name: np.full(layers, nats) for name in ACTIONS})
    (Path(store.describe().path) / LOSSES_NAME).write_bytes(encode_losses(table, store.manifest, 1))


def test_an_engine_avoids_misses_within_the_budget(store: ExpertStore) -> None:
    """Actions that cost more than there is change no token; cheap ones avoid loads, and each request is charged."""
    prompts = [[5, 9, 77, 30, 12], [64, 101, 8], [3, 90, 17, 17]]
    with serving(store, local_settings(0.5, policy=load_policy("auto"))) as worker:
        lossless = greedy(worker, prompts, 12)
        assert worker.stats().quality is None
        assert worker.batcher._manager.batch_processor.scheduler.shares_decoded
    paid = local_settings(0.5, policy=chosen_policy("auto", "kl=0.01"))
    _table(store, 1e9)
    with serving(store, paid) as worker:
        assert greedy(worker, prompts, 12) == lossless
        found = worker.stats().quality
        assert (found.avoided, found.kl, found.tokens) == (0, 0.0, 33)
        assert found.paid > 0
    _table(store, 0.02)
    with serving(store, paid) as worker:
        greedy(worker, prompts, 12)
        found = worker.stats().quality
        assert found.requests == 3
        assert found.avoided > 0
        assert not worker.batcher._manager.batch_processor.scheduler.shares_decoded  # its prompts run exactly
        assert 0 < found.kl <= found.kl_most <= 0.01
        assert worker.stats().as_dict()["quality"]["kl"] == found.kl
        assert worker.stats().substitutions == found.substituted
        worker.reset_stats()
        assert worker.stats().quality.avoided == 0


def test_an_engine_without_measured_losses_is_refused(store: ExpertStore) -> None:
    (Path(store.describe().path) / LOSSES_NAME).unlink(missing_ok=True)
    with (
        pytest.raises(StoreError, match=r"losses of lossy actions .* cannot be read") as refused,
        serving(store, local_settings(0.5, policy=chosen_policy("auto", "kl=0.01"))),
    ):
        pass
    assert "tiermoe prepare MODEL --losses TEXT" in str(refused.value)
