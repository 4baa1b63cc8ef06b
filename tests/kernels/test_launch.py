"""Launch handles: what the driver is given, when a kernel is compiled anew, and what Triton has to launch itself.

There is no GPU here: a function stands in the driver's place, and kernels are compiled for a GPU that is not there.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fake_gpu import FakeGpu
from kernel_cases import Forbidden, groups_of, pool_of, rows_for

from tiermoe.actors.engine.cuda.tables import TableRing
from tiermoe.kernels import _launch
from tiermoe.kernels.expert_ffn import Group
from tiermoe.kernels.triton import launch, tables
from tiermoe.kernels.triton.expert_ffn import TritonKernel
from tiermoe.kernels.triton.launch import Launch

_NO_CONTEXT, _OUT_OF_MEMORY = 201, 2
_AT, _SIZES = ctypes.c_void_p, [ctypes.c_uint] * 7
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, _AT, *_SIZES, _AT, ctypes.POINTER(_AT), _AT)
_TEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
_CURRENT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_READ = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


class Recorder:
    """In the driver's place. sizes: the parameters' types, letters of `_READ`. codes: what the next calls return."""

    def __init__(self) -> None:
        self.sizes = ""
        self.codes: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.contexts: list[int] = []
        self._kept = _CALL(self._call), _TEXT(self._text), _CURRENT(self._current)
        self.driver = _launch.Driver(*(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._kept))

    def _call(self, function: int, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        values = [ctypes.cast(parameters[i], ctypes.POINTER(_READ[c]))[0] for i, c in enumerate(self.sizes)]
        self.calls.append((function, tuple(sizes), stream, values, extra))
        return self.codes.pop(0) if self.codes else 0

    def _text(self, code: int, text: Any) -> int:
        text[0] = b"out of memory"
        return 0

    def _current(self, context: int) -> int:
        self.contexts.append(context)
        return 0


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Parameter:
    def __init__(self, do_not_specialize: bool) -> None:
        self.do_not_specialize = do_not_specialize


class Jit:
    """As `triton.JITFunction`: a launch compiles and returns the compiled kernel, which can be launched as it is."""

    __name__ = "kernel"

    def __init__(self, arg_names: list[str], loose: set[str]) -> None:
        self.arg_names = arg_names
        self.params = [Parameter(name in loose) for name in arg_names]
        self.bound: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **fixed: (self.bound.append((grid, args, fixed)), Compiled(self))[1]


class Compiled:
    function = 4096

    def __init__(self, jit: Jit) -> None:
        self.jit = jit

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.jit.direct.append((grid, args))


@pytest.fixture
def addressed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Callable[[launch.Address | None], None]:
    """Makes `Launch` find this for each compiled kernel."""

    def find(address: launch.Address | None) -> None:
        library = SimpleNamespace(cuCtxGetCurrent=lambda at: setattr(at._obj, "value", 77))
        monkeypatch.setattr(launch, "_driver", lambda: (recorder.driver, library))
        monkeypatch.setattr(launch, "stream_of", lambda device: partial(int, 5))
        monkeypatch.setattr(launch, "address_of", lambda compiled, count: address)

    return find


def test_a_kernel_is_bound_once_for_what_triton_specialises(addressed: Any, recorder: Recorder) -> None:
    jit = Jit(["x", "first", "size", "BLOCK", "EVEN"], {"first"})
    addressed(launch.Address(128, 4096, bytes([1, 2, 2]), 2))
    recorder.sizes = "piipp"
    launched = Launch(jit, BLOCK=32, EVEN=True, num_warps=4)
    x, odd = torch.zeros(8), torch.zeros(9)[1:]
    launched((1, 1, 1), x, 3, 16)
    assert jit.bound == [((1, 1, 1), (x, 3, 16), {"BLOCK": 32, "EVEN": True, "num_warps": 4})]
    launched((2, 3, 1), x, -4, 16)  # an integer that is not specialised, another grid
    assert recorder.calls == [(4096, (2, 3, 1, 128, 1, 1, 4096), 5, [x.data_ptr(), -4, 16, 0, 0], None)]
    for args in ((odd, 4, 16), (x, 4, 17), (x.double(), 4, 16), (x, 1 << 40, 16), (x, 1 << 63, 16)):
        launched((1, 1, 1), *args)
    assert (len(jit.bound), len(recorder.calls), launched.known) == (6, 1, 6)
    for args in ((odd, 1, 16), (x, 2, 17), (x.double(), 3, 16), (x, 1 << 41, 16), (x, (1 << 63) + 1, 16)):
        launched((1, 1, 1), *args)
    assert (len(jit.bound), len(recorder.calls)) == (6, 6)
    launched((4, 0, 1), x, 3, 16)  # nothing to do
    assert len(recorder.calls) == 6


def test_a_refusal_is_heard_and_a_thread_without_a_context_gets_one(addressed: Any, recorder: Recorder) -> None:
    addressed(launch.Address(32, 0, bytes([2]), 0))
    launched = Launch(Jit(["count"], {"count"}))
    launched((1, 1, 1), 2)
    recorder.codes = [_NO_CONTEXT, 0]
    launched((1, 1, 1), 2)
    assert (len(recorder.calls), recorder.contexts) == (2, [77])
    recorder.codes = [_OUT_OF_MEMORY]
    with pytest.raises(RuntimeError, match=r"refused a kernel: out of memory \(2\)"):
        launched((1, 1, 1), 2)
    for wrong in (True, None, "x"):
        with pytest.raises((TypeError, AttributeError)):
            launched((1, 1, 1), wrong)
    with pytest.raises(TypeError, match="at most 32"):
        launched((1, 1, 1), *range(33))


def test_every_kernel_is_packed_as_triton_compiles_it(tmp_path: Path) -> None:
    """Against the PTX of each kernel that a layer launches, and of integers that are compiled in."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).with_name("compile_launches.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pointers, two = [1] * 6, [2] * 4
    assert found == {
        "_copy": [128, [1, 1, 2], 2], "_gate_up": [128, pointers + two, 2], "_down": [128, pointers + [2] * 3, 2],
        "_combine": [128, [1, 1, 1, 2, 2], 2], "_copy of one": [128, [1, 1, 0], 2],
        "_read": [128, [1] * 10 + [2] * 17, 2],
        "_read of one router": [128, [1] * 10 + [2] * 17, 2],
    }  # fmt: skip


# -- a layer's experts ----------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, interpreted."""
    found: list[str] = []
    run = Launch._interpreted

    def first(self: Launch, grid: Any, *args: Any) -> Any:
        counted(self, grid, *args)
        return partial(counted, self)

    def counted(self: Launch, grid: Any, *args: Any) -> None:
        found.append(self.name)
        run(self, grid, *args)

    monkeypatch.setattr(Launch, "first", first)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
@pytest.mark.parametrize("rows", [1, 4])
def test_a_layers_experts_take_three_launches(rows: int, launches: list[str]) -> None:
    """Beside the table of tiles, which takes one; the same of any number of experts."""
    pool = pool_of(3, 8, 16)
    hidden, pairs = rows_for([rows, rows, rows], 1, 16, torch.float32)
    kernel = TritonKernel(pool, "silu", Forbidden())
    y = torch.empty(3 * rows, 16)
    kernel.run(hidden, pairs, groups_of([rows, rows, rows], [0, 1, 2], 8), 1, y)
    kernel.combine(y, torch.ones(3 * rows, 1))
    assert launches == ["_gate_up", "_down", "_combine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
def test_dropped_experts_combine_by_the_same_kernel(launches: list[str]) -> None:
    """Guards against a kernel for each number of experts that a rule leaves, compiled in a request."""
    kernel = TritonKernel(pool_of(1, 4, 16), "silu", Forbidden())
    for top_k in (8, 6, 1, 9):
        y, weights = torch.randn(2 * top_k, 16), torch.rand(2, top_k)
        found = kernel.combine(y, weights)
        torch.testing.assert_close(found, (y.view(2, top_k, 16) * weights[:, :, None]).sum(dim=1))
    assert list(kernel._combines) == [8, 16]
    assert launches == ["_combine"] * 4


class _Native:
    """`Launch.first` as on a GPU: from the second on launches are the driver's, which copies and notes the rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[tuple[str, str]] = []  # name and parameters of a function, whose number is the place
        self.calls: list[tuple[str, tuple[int, ...], list[int]]] = []  # name, grid, parameters
        self._call = _CALL(self._called)
        self._driver = _launch.Driver(ctypes.cast(self._call, ctypes.c_void_p).value or 0)
        monkeypatch.setattr(Launch, "first", lambda launched, grid, *args: self._first(launched, *args))
        copy = tables.copying.__wrapped__()
        monkeypatch.setattr(FakeGpu, "copier", tables.copier_of(torch.device("cpu"), copy, partial(int, 5)))

    def _first(self, launched: Launch, *args: Any) -> tuple[Any, ...]:
        packed = bytes(1 if isinstance(arg, torch.Tensor) else 2 for arg in args)
        self.kinds.append((launched.name, "".join("p" if way == 1 else "i" for way in packed)))
        if launched.name == "_copy":
            args[1].view(-1)[: args[2]].copy_(args[0].view(-1))
        return self._driver, len(self.kinds), 0, 128, 0, packed, 0, partial(int, 5)

    def _called(self, function: int, *rest: Any) -> int:
        name, kinds = self.kinds[function - 1]
        values = [ctypes.cast(rest[8][i], ctypes.POINTER(_READ[kind]))[0] for i, kind in enumerate(kinds)]
        if name == "_copy":
            source, target, count = values
            ctypes.memmove(target, source, 4 * count)
        self.calls.append((name, rest[:3], values))
        return 0


def test_the_driver_gets_the_table_and_the_launches_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three classes of rows, and two segments of one expert."""
    native, gpu = _Native(monkeypatch), FakeGpu()
    ring = TableRing(gpu, entries=4, nbytes=64)
    pool = pool_of(4, 8, 16)
    kernel = TritonKernel(pool, "silu", Forbidden(), ring)
    hidden, pairs = rows_for([1, 20, 70], 1, 16, torch.float32)
    groups: list[Group] = [(0, 1, 8, 3, False), (0, 1, 20, 5, True), (1, 21, 0, 8, False), (21, 91, 16, 8, False)]
    y, weights = torch.empty(len(pairs), 16), torch.ones(len(pairs), 1)
    kernel.run(hidden, pairs, groups, 1, y)
    kernel.combine(y, weights)
    up_at, down_at = pool.gate_up.data_ptr(), pool.down.data_ptr()
    x, order, out = hidden.data_ptr(), pairs.data_ptr(), y.data_ptr()
    for _ in range(9):  # round the ring
        native.calls.clear()
        kernel.run(hidden, pairs, groups, 1, y)
        sums = kernel.combine(y, weights)
        (_, _, (_, table, count)), *rest = native.calls
        rows = torch.tensor((ctypes.c_int32 * count).from_address(table)).view(-1, 8).tolist()
        assert rows == [
            [0, 1, 8, 3, 0, 0, 0, 0], [0, 1, 20, 5, 1, 1, 0, 0], [1, 20, 0, 8, 2, 0, 0, 0],
            [21, 64, 16, 8, 22, 0, 0, 0], [85, 6, 16, 8, 86, 0, 0, 0],
        ]  # fmt: skip
        up, down = [up_at, up_at], [down_at, down_at]  # there are no biases
        a = rest[0][2][4]  # activations
        tail = [16, 128]
        assert rest == [
            ("_gate_up", (2, 8, 1), [x, order, *up, a, table, 0, 1, *tail]),
            ("_down", (1, 1, 1), [a, order, *down, out, table, 0, *tail]),
            ("_down", (1, 1, 1), [a, order, *down, out, table, 1, *tail]),
            ("_gate_up", (1, 8, 1), [x, order, *up, a, table, 2, 1, *tail]),
            ("_down", (1, 1, 1), [a, order, *down, out, table, 2, *tail]),
            ("_gate_up", (2, 4, 1), [x, order, *up, a, table, 3, 1, *tail]),
            ("_down", (2, 1, 1), [a, order, *down, out, table, 3, *tail]),
            ("_combine", (91, 1, 1), [out, weights.data_ptr(), sums.data_ptr(), 1, 16]),
        ]
    assert gpu.calls.get("kernel_copy") is None
    assert gpu.calls["record"] >= 8  # a section of one buffer each


def test_arrays_through_a_native_ring_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several sizes, larger than a buffer, too; a section is marked on each stream that read from it."""
    native, gpu = _Native(monkeypatch), FakeGpu()
    monkeypatch.setattr(FakeGpu, "copier", gpu.copier._replace(stream=lambda: gpu.compute.number))
    ring, streams = TableRing(gpu, entries=16, nbytes=64), [gpu.compute, gpu.stream()]
    marked = list[int]()
    record = gpu.record
    monkeypatch.setattr(gpu, "record", lambda event, on: (marked.append(on.number), record(event, on)))
    for i in range(33):
        gpu.compute = streams[i == 6 or i > 29]
        array = np.arange(i, i + 1 + 30 * (i % 3), dtype=np.int32)
        np.testing.assert_array_equal(ring.put(array).numpy(), array)
    # the first of each size is Triton's own; compiled, the size is no part of what it specialises
    firsts = 1 if torch.cuda.is_available() else 3
    assert [name for name, _, _ in native.calls] == ["_copy"] * (33 - firsts)
    first, second = (stream.number for stream in streams)
    assert marked == [first] * 3 + [second, first] + [first] * 11 + [second]
    assert ring.put(np.zeros((0, 4), np.int32)).shape == (0, 4)


@pytest.mark.parametrize("natively", [True, False])
def test_threads_share_a_ring(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may wait for a section, or be about to copy from it, while another takes a buffer."""
    if natively:
        _Native(monkeypatch)
    gpu = FakeGpu()
    gpu.eager = True
    ring, wrong = TableRing(gpu, entries=3, nbytes=64), list[tuple[int, list[int]]]()
    turned = ring.turned

    def slowly(left: int, entered: int) -> None:
        time.sleep(1e-4)  # gives up the interpreter's lock
        turned(left, entered)

    monkeypatch.setattr(ring, "turned", slowly)

    def put(first: int) -> None:
        for i in range(first, first + 60):
            found = ring.put([i] * 16).tolist()
            if found != [i] * 16:
                wrong.append((i, found))

    threads = [threading.Thread(target=put, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_sums_are_new_memory_and_those_of_another_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a layer's output that the next layer overwrites."""
    _Native(monkeypatch)
    kernel = TritonKernel(pool_of(1, 4, 16), "silu", Forbidden())
    y, weights = torch.randn(4, 16), torch.rand(2, 2)
    outs = [kernel.combine(y, weights) for _ in range(4)] + [kernel.combine(y, torch.rand(4, 1)) for _ in range(2)]
    assert [tuple(out.shape) for out in outs] == [(2, 16)] * 4 + [(4, 16)] * 2
    assert len({out.data_ptr() for out in outs}) == 6
    with pytest.raises(ValueError, match=re.escape("y is (4, 16) for 3 tokens, top-2 and width 16")):
        kernel.combine(y, torch.rand(3, 2))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(0, 4, 0, 8, False)], "group (0, 4, 0, 8) has more pairs or neurons than there are"),
        ([(2, 1, 0, 8, False)], "group (2, 1, 0, 8) has more"), ([(0, 3, 0, 9, False)], "group (0, 3, 0, 9) has more"),
        ([(0, 3, 25, 8, False)], "neurons 25 to 33 are out of range 0 to 32"),
        ([(0, 3, -1, 8, False)], "neurons -1 to 7"),
    ],
)  # fmt: skip
def test_groups_that_lie_outside_are_refused(groups: list[Group], message: str) -> None:
    kernel = TritonKernel(pool_of(4, 8, 16), "silu", Forbidden())
    hidden, pairs = rows_for([3], 1, 16, torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel.run(hidden, pairs, groups, 1, torch.empty(3, 16))
