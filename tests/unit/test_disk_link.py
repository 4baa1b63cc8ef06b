"""Slots in host memory whose experts are read from files past the page cache: the bytes, the decisions, the errors."""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_rigs import begin_layer, end_layer
from handmade_store import layer_values, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.host_tier import HostTier
from tiermoe.actors.engine.cache.places import disk_link
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import SlotPool
from tiermoe.actors.engine.cache.sources import host_layers
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.registry import PolicyContext, options
from tiermoe.actors.policies.slot_classes import make_eviction
from tiermoe.actors.store.files import ExpertStore, open_views
from tiermoe.actors.store.format import REBUILD, ExpertShape
from tiermoe.errors import RuntimeFailure, StoreError

LAYERS, EXPERTS = 2, 5
# an expert is 2.2 MiB: its arrays begin and end between pages, and some have a border of two pieces in them
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=500, intermediate=391, gates=2, has_bias=True)
POISON = -3e33


class Rig:
    """A cache of some slots over the files of a store."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.store = ExpertStore(folder, "stamp")
        self.weights = host_layers(open_views(self.store.describe()))
        self.pool = SlotPool.allocate(SHAPE, slots, torch.float32, torch.device("cpu"))
        self.where = SlotMap(self.pool, self.weights, EXPERTS, slots, SHAPE.nbytes(4))
        self.link: Any = disk_link(self.where)
        eviction = make_eviction(options("eviction", "lru"), PolicyContext(LAYERS, EXPERTS))
        stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        self.cache = ExpertCache(self.where, self.link, eviction, stats, Timeline(False))

    def poison(self, slot: int) -> None:
        for tensor in self.pool.slot(slot):
            tensor.fill_(POISON)

    def check(self, key: int) -> None:
        """An expert's bytes are in its slot, and beside them nothing was written."""
        layer, expert = divmod(key, EXPERTS)
        found = self.pool.slot(self.cache.residency.slot(key))
        for array, tensor in zip(layer_values(layer, shape=SHAPE).values(), found, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array[expert])

    def turn(self, layer: int, experts: list[int], prefetches: list[int] | None = None) -> None:
        """A layer's pass; each expert is checked when it is given, and its slot is poisoned when it has left."""
        keys = [layer * EXPERTS + expert for expert in experts]
        held = {slot for key in self.cache.residency.held() if (slot := self.cache.residency.slot(key)) >= 0}
        for slot in range(len(self.pool.gate_up)):
            if slot not in held and not self.cache.core.under_way:
                self.poison(slot)
        end_layer(self.cache, begin_layer(self.cache, layer, keys, prefetches or ()), self.check)
        self.cache.check_integrity()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("disk") / "store", LAYERS, shape=SHAPE)


@pytest.fixture
def rig(folder: Path) -> Iterator[Callable[[int], Rig]]:
    made: list[Rig] = []

    def make(slots: int, of: Path = folder) -> Rig:
        made.append(Rig(of, slots))
        return made[-1]

    yield make
    for one in made:
        one.cache.close()


TURNS = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True)),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TURNS, st.integers(1, 7))
def test_decisions_are_those_of_a_plain_cache(folder: Path, turns: list[tuple[int, list[int]]], slots: int) -> None:
    """Residents by last use, each with its bytes."""
    rig, plain = Rig(folder, slots), OrderedDict[int, None]()
    try:
        hits = misses = 0
        for layer, experts in turns:
            if len(experts) > slots:
                continue  # such a layer runs in waves: the other property
            rig.turn(layer, experts)
            keys = [layer * EXPERTS + expert for expert in experts]
            hits += sum(key in plain for key in keys)
            misses += sum(key not in plain for key in keys)
            for key in keys:
                if key in plain:
                    plain.move_to_end(key)
            for key in keys:
                if key not in plain:
                    if len(plain) == slots:
                        plain.pop(next(old for old in plain if old not in keys))
                    plain[key] = None
            assert sorted(rig.cache.residency.held()) == sorted(plain)
            for key in plain:
                rig.check(key)
        counts = rig.cache.core.summed
        assert (counts.hits, counts.misses) == (hits, misses)
        assert counts.bytes_loaded_demand == misses * SHAPE.nbytes(4)
    finally:
        rig.cache.close()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TURNS, st.lists(st.lists(st.integers(0, LAYERS * EXPERTS - 1), max_size=4, unique=True), max_size=12))
def test_prefetches_and_waves_bring_the_right_bytes(
    folder: Path, turns: list[tuple[int, list[int]]], prefetches: list[list[int]]
) -> None:
    """Whatever is prefetched, overtaken, dropped or waited for; and more experts than slots."""
    rig = Rig(folder, 3)
    try:
        for (layer, experts), ahead in zip(turns, [*prefetches, *[[]] * len(turns)], strict=False):
            rig.turn(layer, experts, ahead)
        rig.cache.core.settle()
        for key in rig.cache.residency.held():
            rig.check(key)
        rig.cache.check_integrity()
    finally:
        rig.cache.close()


def test_reads_are_direct_and_counted(rig: Callable[[int], Rig]) -> None:
    made = rig(10)
    for layer in range(LAYERS):
        made.turn(layer, list(range(EXPERTS)))
    core, experts = made.link.core, LAYERS * EXPERTS
    nbytes, pieces, longest_s = core.counts
    # with the rest of the first and the last page of each array
    assert 0 <= nbytes - experts * SHAPE.nbytes(4) <= experts * 4 * 2 * 4096 + pieces * 4096
    assert pieces >= experts * 4
    assert longest_s > 0
    assert core.measure(8 << 20) > 0
    if not core.direct:
        pytest.skip("this file system has no direct reads")


def test_demand_comes_before_prefetch(folder: Path) -> None:
    """A prefetch that has begun waits behind demand, too: its last piece is read after that of a later demand."""
    rig = Rig(folder, 10)
    try:
        rig.cache.prefetch(list(range(EXPERTS, 2 * EXPERTS)))
        rig.turn(0, [0, 1])
        rig.cache.core.settle()
        assert sorted(rig.cache.residency.held()) == [0, 1, *range(EXPERTS, 2 * EXPERTS)]
    finally:
        rig.cache.close()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _rewrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")


def _touch_back(path: Path) -> None:
    status = path.stat()
    _rewrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("strike", "says"),
    [
        (_truncate, "ends at byte|changed while it was served"), (_rewrite, "changed while it was served"),
        (_touch_back, "changed while it was served"),
    ],
)  # fmt: skip
def test_a_file_that_changes_is_named(
    strike: Callable[[Path], None], says: str, tmp_path: Path, rig: Callable[..., Rig]
) -> None:
    """In the pass that needs it, as a `StoreError`; experts of other files are served on, and nothing stays pinned."""
    made = rig(4, write_store(tmp_path / "store", LAYERS, shape=SHAPE))
    made.turn(0, [0, 1])
    file = Path(made.store.describe().layers[1].path)
    strike(file)
    with pytest.raises(StoreError, match=f"{file.name} ({says})"):
        made.turn(1, [4])
    made.cache.core.abandon()
    made.turn(0, [1, 2])
    assert made.cache.residency.pins == 0


def test_links_modes_and_names_change_nothing(tmp_path: Path, rig: Callable[..., Rig]) -> None:
    made = rig(4, write_store(tmp_path / "store", LAYERS, shape=SHAPE))
    file = Path(made.store.describe().layers[1].path)
    os.link(file, file.with_suffix(".link"))
    made.turn(1, [0])
    file.chmod(0o444)
    made.turn(1, [1])
    file.with_suffix(".link").unlink()
    file.unlink()
    made.turn(1, [2])


def test_a_disk_that_fails_is_named() -> None:
    """The memory of a process cannot be read at 0: the kernel says EIO, as of a broken disk."""
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        link = _core.DiskLink([("/disk/layer", descriptor, 4096, 1 << 20)], 2)
        with pytest.raises(StoreError, match=f"/disk/layer cannot be read.*{os.strerror(errno.EIO)}") as raised:
            link.measure(1 << 20)
        assert raised.value.remedy == REBUILD
        assert not link.direct
        link.close()
    finally:
        os.close(descriptor)


def test_a_file_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(StoreError, match="/gone cannot be opened"):
        _core.DiskLink([("/gone", 10_000, 4096, 1)], 1)


def test_what_is_in_no_file_is_refused(folder: Path) -> None:
    weights = host_layers(open_views(ExpertStore(folder, "stamp").describe()))
    copied = [layer.moved(tuple(t.clone() for t in layer.tensors)) for layer in weights]
    pool = SlotPool.allocate(SHAPE, 1, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="no mapped file"):
        disk_link(SlotMap(pool, copied, EXPERTS, 1, SHAPE.nbytes(4)))


def test_a_closed_link_ends_what_waits(rig: Callable[[int], Rig]) -> None:
    made = rig(4)
    made.cache.prefetch([0, 1, 2])
    made.cache.close()
    made.cache.close()
    with pytest.raises(RuntimeFailure, match="closed"):
        made.turn(1, [0])
    made.cache.core.abandon()


def test_a_prefetch_that_fails_is_dropped(tmp_path: Path, rig: Callable[..., Rig]) -> None:
    made = rig(4, write_store(tmp_path / "store", LAYERS, shape=SHAPE))
    _rewrite(Path(made.store.describe().layers[1].path))
    made.cache.prefetch([EXPERTS])
    while made.link.core.pending:
        time.sleep(1e-3)
    made.turn(0, [0])
    assert made.cache.core.summed.failed_prefetches == 1
    assert made.cache.residency.held() == [0]


def test_what_a_device_is_loaded_from_stays_meanwhile(rig: Callable[[int], Rig]) -> None:
    """A copy to a device read what a later prefetch had put in the expert's slot."""
    made = rig(2)
    tier = HostTier(made.cache)
    for key in (0, 7, 0):
        layer, expert = divmod(key, EXPERTS)
        found = tier.take(layer, expert)
        for ahead in range(LAYERS * EXPERTS):
            tier.layer(ahead // EXPERTS).expert(ahead % EXPERTS).ask([])
            while made.link.core.pending:
                time.sleep(1e-3)
        for array, tensor in zip(layer_values(layer, shape=SHAPE).values(), found, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array[expert])
        assert made.cache.residency.pins == 1
    tier.close()
    with pytest.raises(RuntimeFailure, match="closed"):
        tier.take(0, 3)
    assert made.cache.residency.pins == 0
