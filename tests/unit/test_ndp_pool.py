"""Several NDP workers as one: whose an expert is, who stands in for the lost, and how one joins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from fake_engine import FakeLink
from hypothesis import given
from hypothesis import strategies as st
from serving import prepared
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine.peers.remote import NdpPool
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.policies.sharding import reassigned, spread_by_bytes
from tiermoe.actors.settings import NdpSettings
from tiermoe.actors.store.files import StoreView
from tiermoe.errors import ConfigError, RuntimeFailure

_KEYS = range(8)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> StoreView:
    folder = tmp_path_factory.mktemp("pool")
    return prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store").describe()


@pytest.fixture
def links(view: StoreView) -> list[FakeLink]:
    return [FakeLink(view, index) for index in range(3)]


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


def test_who_was_never_reached_has_no_share(pool: NdpPool, links: list[FakeLink]) -> None:
    links[2].up.clear()
    pool.add(links[2])  # type: ignore[arg-type]
    pool.refresh()
    assert _numbers(pool) == "01010101"
    assert not pool.peers["ndp/2"].available


def test_a_worker_of_another_number_is_not_taken(links: list[FakeLink]) -> None:
    links[0].name = "ndp/1"
    with closing(_pool(links[:1])) as pool, pytest.raises(RuntimeFailure, match="has index 0, this side 1"):
        pool.start(0.3)


def test_names_that_are_none_are_refused(pool: NdpPool, links: list[FakeLink]) -> None:
    with pytest.raises(ConfigError, match="two NDP workers"):
        _pool([links[0], links[0]])
    for name in ("shard/1", "ndp/x", "ndp/01", "ndp"):
        links[2].name = name
        with pytest.raises(ConfigError, match=f"'{name}' is no name"):
            pool.add(links[2])  # type: ignore[arg-type]
    assert list(pool.peers) == ["ndp/0", "ndp/1"]


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


def test_nobody_to_give_it_to() -> None:
    with pytest.raises(ValueError, match="0 workers"):
        reassigned((0, 1), [1, 1], ())
    with pytest.raises(ValueError, match="2 items, but sizes of 1"):
        reassigned((0, 1), [1], (0,))
