"""Several NDP workers as one: whose an expert is, who stands in for the lost, and how one joins.

The NDP placements in the engine, with a worker that computes exactly and dies when told to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_rigs import bytes_held
from fake_engine import FakeLink
from hypothesis import given
from hypothesis import strategies as st
from serving import Tiny, greedy, prepared, settings, struck_greedy
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine import engine
from tiermoe.actors.engine.calls import RemoteExperts
from tiermoe.actors.engine.peers import auto
from tiermoe.actors.engine.peers.remote import NdpPool
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.auto import Faster, Without
from tiermoe.actors.policies.context_ndp import PrecisionOptions, prefix_split
from tiermoe.actors.policies.sharding import reassigned, spread_by_bytes
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import LinkSettings, NdpSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_hardware
from tiermoe.errors import ConfigError, RuntimeFailure

_KEYS = range(8)


@pytest.fixture(scope="module")
def store(tiny: Callable[[str], Tiny]) -> ExpertStore:
    return tiny("mixtral").store


@pytest.fixture(scope="module")
def expected(tiny: Callable[[str], Tiny]) -> list[list[int]]:
    return tiny("mixtral").expected


@pytest.fixture
def links(store: ExpertStore) -> list[FakeLink]:
    return [FakeLink(store.describe(), index) for index in range(3)]


@pytest.fixture
def pool(links: list[FakeLink]) -> Iterator[NdpPool]:
    """Of workers 0 and 1."""
    with closing(_pool(links[:2])) as made:
        made.start(10.0)
        yield made


def _pool(links: list[FakeLink]) -> NdpPool:
    return NdpPool(links, NdpSettings(), "silu", EngineStats(), [1] * len(_KEYS))  # type: ignore[arg-type]


def _kill(pool: NdpPool, link: FakeLink) -> None:
    link.up.clear()
    pool.peers[link.name]._peer.connection.close()


def _numbers(pool: NdpPool) -> str:
    """The number of each key's worker."""
    return "".join(name.removeprefix("ndp/") for name in pool.choose(_KEYS) or [])


def test_every_expert_has_a_worker_of_its_own(pool: NdpPool) -> None:
    assert _numbers(pool) == "01010101"
    assert pool.choose([3, 0]) == ["ndp/1", "ndp/0"]
    assert [pool.experts_of(name) for name in ("ndp/0", "ndp/1", "ndp/2")] == [4, 4, 0]


def test_the_lost_ones_share_goes_to_who_is_there_until_it_is_back(pool: NdpPool, links: list[FakeLink]) -> None:
    _kill(pool, links[0])
    assert pool.available
    assert _numbers(pool) == "1" * 8
    _kill(pool, links[1])
    assert not pool.available
    assert pool.choose([0]) is None
    links[0].up.set()
    assert pool.peers["ndp/0"].wait_until_found(10.0)
    assert _numbers(pool) == "0" * 8
    links[1].up.set()
    assert pool.peers["ndp/1"].wait_until_found(10.0)
    assert _numbers(pool) == "01010101"


def test_who_joins_takes_its_share_when_a_forward_begins(pool: NdpPool, links: list[FakeLink]) -> None:
    pool.add(links[2])  # type: ignore[arg-type]
    assert pool.peers["ndp/2"].wait_until_found(10.0)
    assert _numbers(pool) == "01010101"  # the present forward goes on as it began
    pool.refresh()
    assert _numbers(pool) == "01201201"
    pool.add(links[2])  # type: ignore[arg-type]
    pool.refresh()
    assert [peer.name for peer in pool.members] == ["ndp/0", "ndp/1", "ndp/2"]
    _kill(pool, links[1])
    assert _numbers(pool) == "00202200"  # of 1, 4 and 7 the first and the last to 0, the other to 2


def test_who_stands_by_gets_work_where_all_owners_are_lost(pool: NdpPool, links: list[FakeLink]) -> None:
    pool.share_by(lambda members: [len(members) - 1])
    assert (_numbers(pool), pool.owners) == ("1" * 8, 1)
    _kill(pool, links[1])
    assert _numbers(pool) == "0" * 8
    links[1].up.set()
    assert pool.peers["ndp/1"].wait_until_found(10.0)
    assert _numbers(pool) == "1" * 8
    pool.add(links[2])  # type: ignore[arg-type]
    assert pool.peers["ndp/2"].wait_until_found(10.0)
    pool.refresh()
    assert (_numbers(pool), len(pool.members)) == ("2" * 8, 3)


def test_who_comes_back_is_judged_anew(pool: NdpPool, links: list[FakeLink]) -> None:
    judged = list[int]()

    def sharers(members: Sequence[RemoteExperts]) -> Sequence[int]:
        judged.append(len(members))
        return range(len(members))

    pool.share_by(sharers)
    pool.refresh()
    assert judged == [2]
    _kill(pool, links[1])
    pool.refresh()  # still lost
    links[1].up.set()
    assert pool.peers["ndp/1"].wait_until_found(10.0)
    for _ in range(2):
        pool.refresh()
    assert judged == [2, 2]


def test_a_worker_of_another_number_is_not_taken(links: list[FakeLink]) -> None:
    links[0].name = "ndp/1"
    with closing(_pool(links[:1])) as pool, pytest.raises(RuntimeFailure, match="has index 0, this side 1"):
        pool.start(0.3)


@given(nbytes=st.lists(st.integers(0, 9), max_size=30), workers=st.integers(1, 5), data=st.data())
def test_only_the_lost_ones_share_changes_hands(nbytes: list[int], workers: int, data: st.DataObject) -> None:
    owners = spread_by_bytes(nbytes, workers)
    living = data.draw(st.sets(st.integers(0, workers - 1), min_size=1))
    now = reassigned(owners, nbytes, living)
    assert set(now) <= living
    assert all(after == before for before, after in zip(owners, now, strict=True) if before in living)
    gained = {w: sum(n for n, a, b in zip(nbytes, owners, now, strict=True) if a != b == w) for w in living}
    assert max(gained.values()) - min(gained.values()) <= max(nbytes, default=0)
    assert now == reassigned(owners, nbytes, living)


_PROMPTS, _NEW = Tiny.PROMPTS, Tiny.TOKENS


def _policy(kind: str, precision: PrecisionOptions | None = None, **placement: Any) -> PolicySettings:
    precision = precision or PrecisionOptions()
    return PolicySettings(
        name="test", lossless=precision.kind == "full", eviction="worth" if kind in ("auto", "hybrimoe") else "lru",
        placement={"kind": kind, **placement}, precision=precision,
    )  # fmt: skip


@contextmanager
def _serving(
    store: ExpertStore, *links: FakeLink, policy: PolicySettings, budget: float = 0.5, over: LinkSettings | None = None
) -> Iterator[GpuWorker]:
    config = settings(budget, policy=policy, link=LinkSettings(gbps=None) if over is None else over)
    hardware = {**vars(load_hardware("paper-ndp"))}
    config = config.model_copy(update={"ndp": config.ndp.model_copy(update={"hardware": hardware, "deadline_s": 2.0})})
    worker = GpuWorker(config, store.describe(), links)  # type: ignore[arg-type]
    try:
        worker.start()
        for link in links:
            link.batches.clear()
        yield worker
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("kind", "together"),
    [("context", False), ("monde", True), ("auto", True), ("hybrimoe", True)],
)
def test_full_precision_placements_are_lossless(
    store: ExpertStore, expected: list[list[int]], kind: str, together: bool
) -> None:
    """The others on the default model: tests/golden/test_golden.py."""
    link, policy = FakeLink(store.describe()), _policy(kind)
    # planners go by what they measure: near data is cheaper by far, also on a busy machine
    slow = LinkSettings(gbps=1e-3) if policy.placement.planned else None
    with _serving(store, link, policy=policy, over=slow) as worker:
        if together:
            assert greedy(worker, _PROMPTS, _NEW) == expected
        else:
            assert [greedy(worker, [prompt], _NEW)[0] for prompt in _PROMPTS] == expected
        total = worker.stats().total()
        assert total.ndp_tokens == sum(len(batch.rows) for batch in link.batches) > 0
        assert worker.stats().ndp_losses == 0


def test_decode_loads_nothing_after_the_one_migration(store: ExpertStore) -> None:
    link = FakeLink(store.describe())
    with _serving(store, link, policy=_policy("context")) as worker:
        greedy(worker, _PROMPTS[:1], 1)  # no decode row: no migration
        assert worker.stats().migrations == 0
        before = worker.stats().total()
        assert before.ndp_tokens == 0  # a prompt runs under the cache's rule
        greedy(worker, _PROMPTS[:1], _NEW)
        stats, total = worker.stats(), worker.stats().total()
        assert stats.migrations == 1
        assert total.bytes_demanded_decode == 0
        assert total.ndp_tokens > 0
        slot = worker.engine.slot_bytes
        hot = worker.engine.hot_per_layer * len(stats.layers)
        assert total.bytes_loaded_migration <= hot * slot
        assert total.bytes_loaded == total.bytes_loaded_demand + total.bytes_loaded_migration
        assert bytes_held(worker.engine.cache) == hot * slot  # the hot set, and nothing besides


@pytest.mark.usefixtures("replica_tables")
def test_widths_are_those_of_the_prefix_split(store: ExpertStore) -> None:
    link = FakeLink(store.describe())
    policy = _policy("context", PrecisionOptions(kind="prefix-split", bits=2), hot_per_layer=1)
    with _serving(store, link, policy=policy) as worker:
        greedy(worker, _PROMPTS[:1], _NEW)
        experts = worker.engine.experts
    seen: dict[int, dict[int, int]] = {}
    for batch in link.batches:
        for expert, bits in zip(batch.experts.tolist(), batch.bits.tolist(), strict=True):
            assert seen.setdefault(batch.layer, {}).setdefault(expert, bits) == bits  # fixed during decode
    counts = sorted(prefix_split(np.float32([[8, 4, 2, 1]] * (experts - 1)), (1, 2, 3, 4), 2))
    for widths in seen.values():
        assert 0 not in widths.values()
        if len(widths) == experts - 1:  # all cold ones were seen
            assert sorted(widths.values()) == counts


@pytest.mark.usefixtures("replica_tables")
def test_static_placement_never_loads(store: ExpertStore, expected: list[list[int]]) -> None:
    link = FakeLink(store.describe())
    with _serving(store, link, policy=_policy("static")) as worker:
        assert greedy(worker, _PROMPTS, _NEW) == expected
        total = worker.stats().total()
        assert total.bytes_loaded == 0
        assert total.hits > 0
        assert total.ndp_tokens > 0
        hot = worker.engine.hot_per_layer
    assert all(expert >= hot for batch in link.batches for expert in batch.experts)


def test_static_placement_counts_where_no_calibration_is(store: ExpertStore, expected: list[list[int]]) -> None:
    """It was refused. Nothing is hot until 32 rows have run; then what has run most is, until 64 have."""
    link = FakeLink(store.describe())
    with _serving(store, link, policy=_policy("static")) as worker:
        assert greedy(worker, _PROMPTS, _NEW) == expected
        total, placer = worker.stats().total(), worker.engine._placer
        assert total.ndp_tokens > 0
        assert total.bytes_loaded == total.bytes_loaded_migration > 0  # nothing on demand
        assert total.hits > 0
        held = worker.engine.cache.residency.held()
        assert placer.keep == frozenset(held)
        assert len(held) == worker.engine.hot_per_layer * len(worker.stats().layers)


def test_a_model_with_a_cache_of_its_own_has_its_prefill_too(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("lfm2_moe", tmp_path / "checkpoint")
    lfm = prepared(checkpoint, tmp_path / "store")
    link = FakeLink(lfm.describe())
    with _serving(lfm, link, policy=_policy("context")) as worker:
        greedy(worker, _PROMPTS, _NEW)
        assert worker.stats().migrations == len(_PROMPTS)
        assert worker.stats().total().bytes_demanded_decode == 0


def test_experts_that_the_worker_cannot_compute_are_refused(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("gpt_oss", tmp_path / "checkpoint")
    oss = prepared(checkpoint, tmp_path / "store")
    with (
        pytest.raises(ConfigError, match="plain gated experts"),
        _serving(oss, FakeLink(oss.describe()), policy=_policy("context")),
    ):
        pass


@pytest.fixture
def _near_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner of `auto` decides every layer and computes every miss near data: its own choice depends on the
    machine's times.
    """
    planned = Faster()
    planned.only = 0
    monkeypatch.setattr(auto, "Faster", lambda: planned)
    monkeypatch.setattr(engine, "make_auto", functools.partial(auto.make_auto, without=Without.SPLIT))


@pytest.mark.usefixtures("_near_data")
@pytest.mark.parametrize("kind", ["context", "auto", "llama-cpp-cache"])
def test_a_lost_worker_is_replaced_by_loads_and_rejoins(
    store: ExpertStore, expected: list[list[int]], kind: str
) -> None:
    link = FakeLink(store.describe())
    with _serving(store, link, policy=_policy(kind)) as worker:
        link.dies_at = 3
        link.up.clear()
        assert greedy(worker, _PROMPTS[:1], _NEW) == expected[:1]
        stats = worker.stats()
        assert stats.ndp_losses == 1
        assert stats.ndp_last_failure is not None
        assert "died" in stats.ndp_last_failure
        assert stats.total().ndp_recomputed > 0
        assert len(link.batches) == 3
        link.up.set()
        assert worker.engine.peers["ndp/0"].wait_until_found(10.0)
        assert greedy(worker, _PROMPTS[1:], _NEW) == expected[1:]
        assert len(link.batches) > 3
        worker.engine.cache.check_integrity()


def test_a_refusal_is_computed_here_and_the_worker_stays(store: ExpertStore, expected: list[list[int]]) -> None:
    link = FakeLink(store.describe())
    link.refuses_at = 2
    with _serving(store, link, policy=_policy("context")) as worker:
        assert greedy(worker, _PROMPTS[:1], _NEW) == expected[:1]
        stats = worker.stats()
        assert (stats.ndp_refusals, stats.ndp_losses) == (1, 0)
        assert stats.total().ndp_recomputed > 0
        assert len(link.batches) > 2


def _layer_keys(link: FakeLink, experts: int) -> set[int]:
    return {batch.layer * experts + e for batch in link.batches for e in batch.experts.tolist()}


@pytest.mark.parametrize("policy", [_policy("context", hot_per_layer=1), _policy("monde")], ids=["context", "monde"])
def test_two_workers_share_the_cold_experts(
    store: ExpertStore, expected: list[list[int]], policy: PolicySettings
) -> None:
    links = [FakeLink(store.describe(), index) for index in (0, 1)]
    with _serving(store, *links, policy=policy) as worker:
        assert greedy(worker, _PROMPTS, _NEW) == expected
        stats, experts = worker.stats(), worker.engine.experts
        assert worker.health() == {"state": "serving", "running": 0, "ndp/0": "connected", "ndp/1": "connected"}
        for number, link in enumerate(links):
            assert {key % 2 for key in _layer_keys(link, experts)} == {number}
            seen = stats.ndp_workers[link.name]
            assert (seen.calls, seen.pairs) == (len(link.batches), sum(len(batch.rows) for batch in link.batches))
        assert sum(seen.pairs for seen in stats.ndp_workers.values()) == stats.total().ndp_tokens
        worker.reset_stats()
        assert worker.stats().ndp_workers == {}


def test_the_other_worker_takes_over_and_gives_back(store: ExpertStore, expected: list[list[int]]) -> None:
    links = [FakeLink(store.describe(), index) for index in (0, 1)]
    with _serving(store, *links, policy=_policy("context", hot_per_layer=1)) as worker:
        links[0].dies_at = 3
        links[0].up.clear()
        assert greedy(worker, _PROMPTS[:1], _NEW) == expected[:1]
        stats, experts = worker.stats(), worker.engine.experts
        assert stats.ndp_losses == 1
        assert stats.total().ndp_recomputed > 0  # what was under way, and nothing else
        assert stats.total().bytes_demanded_decode <= stats.total().ndp_recomputed * worker.engine.slot_bytes
        assert {key % 2 for key in _layer_keys(links[1], experts)} == {0, 1}
        assert worker.health()["ndp/0"] == "lost"
        links[0].up.set()
        assert worker.engine.peers["ndp/0"].wait_until_found(10.0)
        for link in links:
            link.batches.clear()
        assert greedy(worker, _PROMPTS[1:], _NEW) == expected[1:]
        assert [{key % 2 for key in _layer_keys(link, experts)} for link in links] == [{0}, {1}]
        worker.engine.cache.check_integrity()


def test_what_a_recomputation_displaced_comes_back(store: ExpertStore, expected: list[list[int]]) -> None:
    """The recomputed experts took slots of hot ones, which were then computed near data for good."""
    links = [FakeLink(store.describe(), index) for index in (0, 1)]
    with _serving(store, *links, policy=_policy("context", hot_per_layer=2)) as worker:
        links[1].dies_at = 2
        assert greedy(worker, _PROMPTS[:1], _NEW) == expected[:1]
        placer, residency = worker.engine._placer, worker.engine.cache.residency
        assert worker.stats().total().ndp_recomputed > 0
        assert set(residency.held()) == placer._hot_keys


def test_a_worker_joins_while_a_request_runs(store: ExpertStore, expected: list[list[int]]) -> None:
    links = [FakeLink(store.describe(), index) for index in (0, 1)]
    with _serving(store, links[0], policy=_policy("context", hot_per_layer=1)) as worker:
        joined = []

        def join() -> None:
            worker.add_ndp(links[1])  # type: ignore[arg-type]
            joined.append(worker.engine.peers["ndp/1"].wait_until_found(10.0))

        tokens, _ = struck_greedy(worker, _PROMPTS[0], _NEW, join)
        assert (tokens, joined) == (expected[0], [True])
        assert greedy(worker, _PROMPTS[:1], _NEW) == expected[:1]  # the first may have ended before it joined
        assert len(links[1].batches) > 0
        assert {key % 2 for key in _layer_keys(links[1], worker.engine.experts)} == {1}


def test_auto_loads_where_no_worker_is(store: ExpertStore, expected: list[list[int]]) -> None:
    with _serving(store, policy=_policy("auto")) as worker:
        assert greedy(worker, _PROMPTS, _NEW) == expected
        total = worker.stats().total()
        assert total.ndp_calls == 0
        assert total.bytes_loaded_demand > 0
        worker.engine.cache.check_integrity()


def test_auto_loads_experts_that_no_worker_computes(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("gpt_oss", tmp_path / "checkpoint")
    oss = prepared(checkpoint, tmp_path / "store")
    with _serving(oss, FakeLink(oss.describe()), policy=_policy("auto")) as worker:
        assert any("every miss is loaded" in note for note in worker.plan()["notes"])
        greedy(worker, _PROMPTS[:1], 2)


def test_no_worker_at_start_is_a_typed_error(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.actors.engine.engine._NDP_START_S", 0.2)
    link = FakeLink(store.describe())
    link.up.clear()
    with pytest.raises(RuntimeFailure, match="was not reached"), _serving(store, link, policy=_policy("context")):
        pass


def test_what_the_store_lacks_is_refused(store: ExpertStore) -> None:
    link = FakeLink(store.describe())
    lossy = _policy("context", PrecisionOptions(kind="uniform", bits=3))
    with pytest.raises(ConfigError, match="store lacks"), _serving(store, link, policy=lossy):
        pass
    greedy_policy = _policy("context", hot_per_layer=4)
    with pytest.raises(ConfigError, match="the budget holds"), _serving(store, link, policy=greedy_policy):
        pass
