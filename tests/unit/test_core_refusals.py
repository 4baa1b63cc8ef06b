"""The core's own objects: native orders and capsules of other builds refuse what would corrupt memory; a carrier."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, cast

import numpy as np
import pytest

from tiermoe.actors import core
from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.links import Carrier
from tiermoe.errors import RuntimeFailure
from tiermoe.kernels import _cpu

LRU, MAP, WORTH = "lru", "expert-map", "worth"
HUGE, HALF = 2**62, 2**32


def test_orders_of_impossible_sizes_are_refused() -> None:
    for layers, experts in ((HALF, HALF), (HUGE, 4), (-1, 4), (4, -1)):
        with pytest.raises(ValueError, match="a model has"):
            _core.WholeOrder(LRU, layers, experts)
    for kind in ("", MAP, "fifo"):
        with pytest.raises(ValueError, match="no such order"):
            _core.WholeOrder(kind, 2, 4)
    told = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="by key"):
        _core.WholeOrder(MAP, 2, 4, probabilities=np.ones(7), told=told)


def test_an_order_refuses_keys_and_masks_of_other_sizes() -> None:
    worth, lru = _core.WholeOrder(WORTH, 2, 4), _core.WholeOrder(LRU, 2, 4)
    with pytest.raises(ValueError, match="a share"):
        worth.bind(-1, np.zeros(8))
    for key in (-1, 8, HUGE):
        for call in (worth.refuse, worth.admit, worth.admitted, lru.removed):
            with pytest.raises(ValueError, match="no such expert"):
                call(key)
    for size in (0, 7, 9):
        with pytest.raises(ValueError, match="by key"):
            worth.victims(0, 1, np.zeros(size, np.uint8))
    for ask in (lru.settled, lru.note, lru.noted, lambda: lru.refuse(0), lambda: lru.refused):
        with pytest.raises(ValueError, match="not by worth"):
            ask()
    with pytest.raises(ValueError, match="has no slot"):
        lru.used([0])


def test_a_prefetch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="wants experts"):
        _core.ByScores(True, 0, False, False, 1)


def test_maps_of_other_shapes_are_refused() -> None:
    for rows, capacity, layers in ((3, 2, 1), (2, 2, 2), (0, 0, 1)):
        arrays = np.zeros((rows, 4), np.float32), np.zeros((1, capacity, 5), np.float32), np.zeros((layers, capacity))
        with pytest.raises(ValueError, match="a store has"):
            _core.MapStore(*arrays, 0.5)
    store = _core.MapStore(np.zeros((2, 4), np.float32), np.zeros((1, 2, 5), np.float32), np.zeros((1, 2)), 0.5)
    for entries in (-1, 3):
        with pytest.raises(ValueError, match="fewer entries"):
            store.fill(entries)


def test_kernels_of_another_build_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale `_cpu` beside a new `_core` has called functions at the places of others."""
    api = ctypes.pythonapi.PyCapsule_New
    api.restype, api.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    other: Any = api(1, b"tiermoe.kernels.Table", None)
    assert not _core.takes(other)
    assert _core.takes(_cpu.table())
    monkeypatch.setattr(_cpu, "table", lambda: other)
    with pytest.raises(RuntimeFailure, match="different builds"):
        importlib.reload(core)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(_core, "takes", None)  # as where it is missing; the names of the module keep their order
        with pytest.raises(RuntimeFailure, match="build both again"):
            importlib.reload(core)
    importlib.reload(core)


def test_a_carrier_keeps_no_error_of_a_prefetch_that_nobody_needed() -> None:
    """Each failed prefetch left its error, with the tensors of its traceback, for ever."""
    carrier, clock = Carrier(cast(Any, None)), _core.Clock()  # whose `where` is missing, so each copy fails
    link = _core.CarryingLink(clock, lambda nbytes: 1.0, 0.0, carrier)
    layout = _core.Layout(1, 2, 1, [], [1], [], [8, 8], False)
    cache = _core.Core(layout, link, _core.WholeOrder(LRU, 1, 2), _core.Governor())
    for _ in range(3):
        assert cache.prefetch([0], [], 1) == 1
        clock.advance(2.0)
        cache.arrive()
    assert cache.summed.failed_prefetches == 3
    assert carrier._errors == {}
    with pytest.raises(RuntimeFailure, match="copying an expert of MoE layer 0 failed"):
        cache.preload([0])
    assert carrier._errors == {}
