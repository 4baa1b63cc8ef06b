"""A GPU whose kernels and copies take no time, for what the host does beside one (`bench host --device fake-gpu`).

The engine's own code for a GPU runs on it: `CudaDevice`, `StreamLink`, `PinnedFetch`, `TableRing`, and what the Triton
kernels do up to the driver's call, in whose place a function in C is called that does nothing, or copies the few bytes
of a table. While `works`, the host does what a GPU would, so that a model's tokens are right; then recorded layers run
again without, and routers' scores are those of each layer's first run, which is not timed. The driver's own calls cost
nothing here: an enqueued copy, event or launch of CUDA costs the host 1 to 10 us each in addition.

`tests/fake_gpu.py` finds hazards, at a cost that would hide the host's; this one finds none.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from cProfile import Profile
from functools import cache, partial
from pathlib import Path
from pstats import Stats
from typing import Any, NoReturn

import torch

from tiermoe.actors.core import _core
from tiermoe.actors.engine import engine as engine_module
from tiermoe.actors.engine import host_view, make_device
from tiermoe.actors.engine.cache.form_slots import FormPool
from tiermoe.actors.engine.cuda.activations import PinnedActivations
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.cuda.tables import TableRing
from tiermoe.actors.engine.executors import executor_of
from tiermoe.actors.engine.layer import Executor, PythonExecutor
from tiermoe.actors.engine.pinned_fetch import PinnedFetch
from tiermoe.actors.policies.prefetch_trials import PrefetchTrials
from tiermoe.errors import ConfigError
from tiermoe.kernels import _launch
from tiermoe.kernels.expert_ffn import ExpertKernel, Group, Operands

EXECUTOR = "fake GPU: kernels and copies take no time"


_ENTERED = nullcontext()


class InstantGpu:
    """`GpuRuntime` on the CPU.

    Attributes:
        works: whether experts are copied, and kernels run (`Launched`). Small arrays are always copied.
        late: a copy has ended when the host sees the end of compute that was enqueued after it, so that a layer has to
            wait for its loads, as for large experts; else at once.
    """

    device, mapped = torch.device("cpu"), True

    def __init__(self) -> None:
        self.copier: Any = None  # of `instant_gpu`
        self._driver = _core.Instant()
        self._compute = self._made = self._driver.compute
        self.works, self.late = True, False

    @property
    def works(self) -> bool:
        return self._works

    @works.setter
    def works(self, works: bool) -> None:
        self._works = self._driver.works = works
        _double().remember(not works)  # recorded inputs stay where they are

    @property
    def late(self) -> bool:
        return self._driver.late

    @late.setter
    def late(self, late: bool) -> None:
        self._driver.late = late

    @staticmethod
    def launches() -> int:
        """Launches since it was asked last."""
        return int(_double().launches())

    def enter(self) -> None: ...

    def free_bytes(self) -> int:
        return 80 << 30

    def stream(self, urgent: bool = False) -> int:
        self._made += 1
        return self._made

    def current(self) -> int:
        return self._compute

    def on(self, stream: int) -> Any:
        return _ENTERED

    def handle(self, stream: int) -> int:
        return stream

    def driver(self) -> _core.Driver:
        return self._driver.driver()

    def event(self, timing: bool = True) -> _core.InstantEvent:
        return self._driver.event()

    def record(self, event: _core.InstantEvent, stream: int) -> None:
        event.record(stream == self._compute)

    def wait_event(self, stream: int, event: _core.InstantEvent) -> None: ...

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if self._works:
            dst.copy_(src)

    def kernel_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        from tiermoe.kernels.triton.tables import kernel_copy

        kernel_copy(dst, src)

    def launch(self, act: Callable[[], None]) -> None:
        act()

    def query(self, event: _core.InstantEvent) -> bool:
        return event.done()

    def synchronize(self, event: _core.InstantEvent) -> None:
        event.synchronize()

    wait = synchronize

    def elapsed_s(self, earlier: _core.InstantEvent, later: _core.InstantEvent) -> float:
        return 0.0

    def settle(self) -> None:
        self._driver.settle()

    def page_driver(self) -> NoReturn:
        raise RuntimeError("a fake GPU has no pages")

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def register(self, address: int, nbytes: int) -> str | None:
        return None

    def unregister(self, address: int) -> None: ...


class Launched:
    """`ExpertKernel`: the host's part of a Triton kernel, then a kernel in the GPU's place while that works."""

    def __init__(self, triton: ExpertKernel, kernel: ExpertKernel, gpu: InstantGpu) -> None:
        self._triton, self._kernel, self._gpu = triton, kernel, gpu

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        self._triton.run(hidden, pairs, groups, top_k, y)
        if self._gpu.works:
            self._kernel.run(hidden, pairs, groups, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self._triton.combine(y, weights)
        return self._kernel.combine(y, weights) if self._gpu.works else out


# as `launch_nothing` and `read_on_host` of fake_gpu.cpp number them
_READS, _KINDS = 16, {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


@cache
def _double() -> ctypes.CDLL:
    """fake_gpu.cpp, compiled for this process.

    Raises:
        ConfigError: there is no C++ compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "fake_gpu.so"
        source, compiler = Path(__file__).with_name("fake_gpu.cpp"), os.environ.get("CXX", "c++")
        words = [*shlex.split(compiler), "-std=c++17", "-O3", "-shared", "-fPIC", str(source), "-o", str(made)]
        try:
            subprocess.run(words, check=True)
        except OSError as error:
            raise ConfigError(f"a fake GPU needs a C++ compiler: {error}", "install one, or name it in CXX") from error
        return ctypes.CDLL(str(made))


def _first(driver: _launch.Driver, launch: Any, grid: object, *args: Any) -> tuple[Any, ...]:
    """As `Launch.first`, of a kernel that the driver does not run; launches nothing itself but copies."""
    packed = bytes(1 if isinstance(arg, torch.Tensor) else 3 if isinstance(arg, float) else 2 for arg in args)
    stands_in = 0
    if launch.name == "_copy":
        args[1].view(-1)[: args[2]].copy_(args[0].view(-1))
        stands_in = args[0].element_size()
    elif launch.name == "_read":
        _read(*args)
        stands_in = _READS + sum(_KINDS.get(args[i].dtype, 0) << 2 * n for n, i in enumerate((4, 5, 6, 7, 8, 9)))
    return driver, stands_in, 0, 128, 0, packed, 2, int


def _read(target: torch.Tensor, *args: Any) -> None:
    """`_read` of `kernels.triton.tables`, once, in the place of Triton."""
    *sources, hidden, router, bias, next_router, next_bias = args[:9]
    counts, places, (_, rows, *sizes) = args[9:13], args[13:17], args[17:]
    floats = target.view(torch.float32)
    for source, count, at, to in zip(sources, counts, places, (target, target, target, floats), strict=True):
        to[at : at + count] = source.reshape(-1)[:count]
    for n, (weight, added) in enumerate(((router, bias), (next_router, next_bias))):
        outputs, at, biased = sizes[n], sizes[2 + n], sizes[4 + n]
        if outputs:
            scores = hidden.to(weight.dtype).float() @ weight.float().T
            floats[at : at + rows * outputs] = (scores + added.float() if biased else scores).view(-1)


@contextmanager
def instant_gpu() -> Iterator[InstantGpu]:
    """Workers that are started within the context run on it, until it ends.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        from tiermoe.kernels.triton import launch, tables
        from tiermoe.kernels.triton.expert_ffn import TritonKernel
        from tiermoe.kernels.triton.forms import TritonFormKernel, TritonPackedKernel
    except ImportError:
        raise ConfigError("a fake GPU runs the host's part of Triton kernels", "pip install triton") from None
    gpu: Any = InstantGpu()
    before = list[tuple[Any, str, Any]]()
    driver = _launch.Driver(ctypes.cast(_double().launch_nothing, ctypes.c_void_p).value or 0)
    copying = tables.copying()
    gpu.copier = tables.copier_of(gpu.device, copying, partial(int, gpu.current()))
    ring = TableRing(gpu)

    def launching(layer: Any) -> Executor:
        """The layer's executor; while the GPU works Python's kernels run its passes."""
        pool, kernel = layer.cache.pool, layer.kernel
        if isinstance(pool, FormPool):
            form = pool.published.of(layer.index)
            layer.kernel = TritonFormKernel(pool.parts(form), form, "silu", torch.relu, pool.dtype, ring)
        else:
            layer.kernel = TritonKernel(Operands(pool.gate_up, pool.down, None, None), "silu", kernel, ring)
        backend, low = layer.backend, layer.backend.low_bit
        if low is not None:
            replicas = layer.cache.low_bit.pool
            backend.low_bit = TritonPackedKernel(replicas.tensors, replicas.shape, "silu", pool.dtype, ring)
        native: Any = executor_of(layer)
        backend.low_bit = low
        layer.kernel = Launched(layer.kernel, kernel, gpu)
        python, run = PythonExecutor(layer), native.run
        if layer.placer.native is not None:
            python.core.placement(layer.placer.native)
        native.run = lambda *given: python.run(*given) if gpu.works else run(*given)
        return native

    for owner, name, made in (
        (launch.Launch, "first", lambda of, grid, *args: _first(driver, of, grid, *args)),
        (tables, "copying", lambda *_: copying),
        (make_device, "make_device", lambda *_: CudaDevice(gpu)),
        (engine_module, "fetch_from", lambda _: PinnedFetch(gpu)),
        (engine_module, "activations_of", lambda _: PinnedActivations(gpu)),
        (engine_module, "executor_of", launching),
        (host_view, "upload", lambda array, _: ring.put(array)),
    ):
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, made)
    try:
        yield gpu
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class Recorded:
    """The forwards of a started worker on such a GPU while `record` serves, to be run again.

    No request may be in flight.
    """

    def __init__(self, worker: Any, gpu: InstantGpu) -> None:
        self._engine, self._gpu = worker.engine, gpu
        self._embed = worker.model.get_input_embeddings()
        self._forwards: list[tuple[Any, list[Any], list[Any]]] = []  # rows; ids; each layer's inputs
        if self._engine.prefetching is not None:  # no trial: nothing here shows whether it pays
            self._engine.prefetching.adapt(PrefetchTrials(first=1 << 62), float)

    def record(self, serve: Callable[[], object]) -> None:
        engine, forwards = self._engine, self._forwards
        begin, self._gpu.works = engine.begin_forward, True

        def began(rows: Any) -> None:
            forwards.append((rows, [], []))
            begin(rows)

        def ran(layer: Any) -> Callable[..., Any]:
            forward = layer.forward

            def run(*inputs: torch.Tensor) -> Any:
                forwards[-1][2].append([given.clone() for given in inputs])
                return forward(*inputs)

            return run

        hook = self._embed.register_forward_pre_hook(lambda _, given: forwards[-1][1].append(given[0].clone()))
        engine.begin_forward = began
        for layer in engine.layers:
            layer.forward = ran(layer)
        try:
            serve()
        finally:
            hook.remove()
            del engine.begin_forward
            for layer in engine.layers:
                del layer.forward

    def run(self, late: bool, after: Callable[[], object] = lambda: None) -> None:
        """Run all layers again; kernels and copies do nothing.

        late: as of `InstantGpu`. after: is called when a forward has ended.
        """
        engine, self._gpu.works, self._gpu.late = self._engine, False, late
        with torch.inference_mode():
            for rows, ids, layers in self._forwards:
                engine.begin_forward(rows)
                for given in ids:
                    self._embed(given)
                for layer, inputs in zip(engine.layers, layers, strict=True):
                    layer.forward(*inputs)
                after()
        for name in {row.name for rows, *_ in self._forwards for row in rows}:
            engine.end_sequence(name)

    def launches(self, late: bool, rows: int) -> float:
        """Launches of a layer in forwards of so many rows."""
        counted = list[int]()
        self._gpu.launches()
        self.run(late, lambda: counted.append(self._gpu.launches()))
        of = zip(self._forwards, counted, strict=True)
        found = [(count, len(layers)) for ((spans, _, layers), count) in of if spans[-1].stop == rows]
        return sum(count for count, _ in found) / sum(layers for _, layers in found)

    def calls(self, late: bool) -> float:
        """Calls of functions in Python and from it, a layer, prompts and the forwards' begin included."""
        profile = Profile()
        profile.runcall(self.run, late)
        return Stats(profile).total_calls / sum(len(layers) for *_, layers in self._forwards)  # type: ignore[attr-defined]
