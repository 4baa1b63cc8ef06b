"""A GPU made of lists: it carries out what is enqueued in any order that streams and events allow, and finds hazards.

Two nets for the same bugs:

- Operations run late and in random order (`Random(seed)`), on real tensors: what is read too early is wrong.
- Each operation knows by vector clocks what is certain to come before it. Two that touch the same bytes, one of them
  writing, must be in order: else `Hazard` at once, whatever order this run happens to take.

What the host saw done (`query`, `synchronize`) is before all that it enqueues later. All tensors are on the CPU.

Times: an operation begins when its stream and its engine are free. Copies to the device share one engine, copies to
host memory that was made here another; kernels have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cuda.driver import CALLS

Clock = dict[int, int]  # of each stream, how many of its operations are before


class Hazard(BaseException):
    """Two operations touch the same bytes, one writes, and nothing says which comes first.

    No `Exception`, for nobody is to take it for a copy that failed.
    """


class FakeStream:
    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.queue: deque[Operation] = deque()
        self.enqueued = 0
        self.clock: Clock = {}  # before what is enqueued next
        self.done = 0  # operations carried out
        self.free_s = 0.0  # when the last of them ended


class FakeEvent:
    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.record: Record | None = None


@dataclass(eq=False)
class Record:
    """One recording of an event."""

    clock: Clock = field(default_factory=dict)
    done: bool = False
    at_s: float = 0.0


@dataclass(eq=False)
class Operation:
    stream: FakeStream
    number: int
    act: Callable[[], None]
    serial: int  # among the operations of all streams
    needs: Record | None = None
    seconds: float = 0.0
    engine: str | None = None
    clock: Clock = field(default_factory=dict)


@dataclass(frozen=True)
class Access:
    first: int
    last: int
    write: bool
    stream: int
    number: int
    name: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number


class FakeGpu:
    """`GpuRuntime` on the CPU.

    Args:
        seed: of the order. bytes_per_s: of copies, for the times.
        pin_all: whether host memory counts as pinned that was not made here.
        in_order: carry out the operations in the order of enqueueing as far as events allow, as the engines of a GPU
            do: for tests of times.

    Attributes:
        synchronized: times that the host waited. calls: of each method. refuse: whether registration fails.
        idle: carry out nothing before the host waits. eager: carry out everything at once, for compute that is torch's
        own and knows no streams. compute: the current stream, which a test may exchange. default: the stream of copies
        outside of any context; None: the compute's. memory, others: bytes of the device, and other processes' of them.
    """

    def __init__(self, seed: int = 0, bytes_per_s: float = 1e9, pin_all: bool = True, in_order: bool = False) -> None:
        self.device, self.mapped, self._in_order = torch.device("cpu"), True, in_order
        self._random, self._rate, self._pin_all = random.Random(seed), bytes_per_s, pin_all
        self._streams: list[FakeStream] = []
        self._of_thread = threading.local()
        self._lock = threading.RLock()
        self._host: Clock = {}
        self._accesses: list[Access] = []
        self._keep: list[torch.Tensor] = []  # so that addresses stay those of one tensor
        self._own: list[tuple[int, int]] = []  # pinned or device memory that was made here
        self._on_host: list[tuple[int, int]] = []  # the pinned memory of it
        self._engines: dict[str, float] = {}  # when each is free
        self._serial = 0
        self.registered: dict[int, int] = {}
        self.refuse: Callable[[int, int], bool] = lambda address, nbytes: False
        self.now_s = 0.0
        self.synchronized = 0
        self.hazards: list[str] = []
        self.calls: dict[str, int] = {}
        self.idle = self.eager = False
        self.memory, self.others = 80 << 30, 0
        self.compute = self.stream(name="compute")
        self.default: FakeStream | None = None
        self.pages = FakePages(self)
        self._calls = _Calls(self)

    # -- GpuRuntime --------------------------------------------------------------------------------------

    copier = None  # so that all copies are seen

    def enter(self) -> None:
        self._count("enter")

    def free_bytes(self) -> int:
        own = sum(last - first for first, last in self._own) - sum(last - first for first, last in self._on_host)
        return max(0, self.memory - self.others - own - self.pages.created * self.pages.granularity)

    def page_driver(self) -> FakePages:
        return self.pages

    def handle(self, stream: FakeStream) -> int:
        return stream.number + 1

    def stream_of(self, handle: int) -> FakeStream:
        return self._streams[handle - 1]

    def driver(self) -> _core.Driver:
        """The same GPU by calls of native code, each counted as the method of its kind."""
        return self._calls.driver

    def settle(self) -> None:
        with self._lock:
            while self._step():
                pass
            for stream in self._streams:
                assert not stream.queue, "streams wait for each other"
                _merge(self._host, stream.clock)

    def stream(self, urgent: bool = False, name: str = "") -> FakeStream:
        number = len(self._streams)
        self._streams.append(FakeStream(number, name or f"stream {number}"))
        return self._streams[-1]

    def current(self) -> FakeStream:
        return self.compute

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self._count("on")
        entered = self._entered()
        entered.append(stream)
        try:
            yield
        finally:
            entered.pop()

    def event(self, timing: bool = True) -> FakeEvent:
        return FakeEvent(timing)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._count("record")

        record = event.record = Record()

        def act() -> None:
            record.done, record.at_s = True, stream.free_s

        with self._lock:
            operation = self._enqueue(stream, act)
            record.clock = operation.clock | {stream.number: operation.number}

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        self._count("wait_event")
        assert event.record is not None, "CUDA lets nobody wait for an event that was never recorded"
        with self._lock:
            self._enqueue(stream, lambda: None, event.record)
            _merge(stream.clock, event.record.clock)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._move("copy", dst, src, "down" if _inside(self._on_host, dst) else "up")

    def kernel_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert dst.dtype == src.dtype
        self._move("kernel_copy", dst, src, None)

    def _move(self, name: str, dst: torch.Tensor, src: torch.Tensor, engine: str | None) -> None:
        self._count(name)
        assert dst.shape == src.shape
        assert dst.is_contiguous()
        assert src.is_contiguous()
        entered = self._entered()
        stream = entered[-1] if entered else self.default or self.compute

        def act() -> None:
            dst.copy_(src)

        with self._lock:
            self._enqueue(stream, act, seconds=src.nbytes / self._rate, engine=engine)
            self._touch(stream, src, write=False)
            self._touch(stream, dst, write=True)

    def query(self, event: FakeEvent) -> bool:
        self._count("query")
        with self._lock:
            self.run_some()
            record = event.record
            if record is None or not record.done:
                return record is None
            _merge(self._host, record.clock)
            return True

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            self.synchronized += 1
            record = event.record
            assert record is not None
            while not record.done:
                assert self._step(), "streams wait for each other"
            _merge(self._host, record.clock)

    def wait(self, event: FakeEvent) -> None:
        if not self.query(event):
            self.synchronize(event)

    def elapsed_s(self, earlier: FakeEvent, later: FakeEvent) -> float:
        assert earlier.timing
        assert later.timing
        assert earlier.record.done
        assert later.record.done
        return later.record.at_s - earlier.record.at_s

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self._made(nbytes)

    def pinned(self, nbytes: int) -> torch.Tensor:
        made = self._made(nbytes)
        self._on_host.append(self._own[-1])
        return made

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._pin_all or _inside(self._own, tensor)

    def register(self, address: int, nbytes: int) -> str | None:
        taken = any(a < address + nbytes and address < a + n for a, n in self.registered.items())
        if taken or self.refuse(address, nbytes):
            return "refused"
        self.registered[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        del self.registered[address]

    # -- compute and order -------------------------------------------------------------------------------

    def kernel(self, reads: Sequence[torch.Tensor], act: Callable[[], None], seconds: float = 1e-6) -> None:
        """Enqueue what reads these tensors on the compute's stream."""
        with self._lock:
            self._enqueue(self.compute, act, seconds=seconds)
            for tensor in reads:
                self._touch(self.compute, tensor, write=False)

    def launch(self, act: Callable[[], None]) -> None:
        entered = self._entered()
        with self._lock:
            self._enqueue(entered[-1] if entered else self.compute, act, seconds=1e-6)

    def run_some(self) -> None:
        """Let the GPU do a few things, or nothing."""
        if not self.idle:
            for _ in range(self._random.choice((0, 0, 1, 2, 5, 20))):
                if not self._step():
                    return

    def finish(self) -> None:
        """Let the GPU do everything."""
        while self._step():
            pass
        assert not any(stream.queue for stream in self._streams), "streams wait for each other"
        assert not self.hazards  # also those that a thread met

    def _step(self) -> bool:
        ready = [s for s in self._streams if s.queue and (s.queue[0].needs is None or s.queue[0].needs.done)]
        if not ready:
            return False
        stream = min(ready, key=lambda s: s.queue[0].serial) if self._in_order else self._random.choice(ready)
        operation = stream.queue.popleft()
        engine, needs = operation.engine, operation.needs
        start_s = max(stream.free_s, 0.0 if needs is None else needs.at_s)
        if engine is not None:
            start_s = max(start_s, self._engines.get(engine, 0.0))
        stream.free_s = start_s + operation.seconds
        if engine is not None:
            self._engines[engine] = stream.free_s
        self.now_s = max(self.now_s, stream.free_s)
        operation.act()
        stream.done += 1
        return True

    def _enqueue(
        self, stream: FakeStream, act: Callable[[], None], needs: Record | None = None, seconds: float = 0.0,
        engine: str | None = None,
    ) -> Operation:  # fmt: skip
        _merge(stream.clock, self._host)
        stream.enqueued += 1
        self._serial += 1
        operation = Operation(stream, stream.enqueued, act, self._serial, needs, seconds, engine, dict(stream.clock))
        stream.queue.append(operation)
        stream.clock[stream.number] = stream.enqueued
        while self.eager and self._step():
            pass
        return operation

    def _touch(self, stream: FakeStream, tensor: torch.Tensor, write: bool) -> None:
        """The operation that was enqueued last uses these bytes."""
        self.pages.check(tensor.data_ptr(), tensor.nbytes)
        self._keep.append(tensor)
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        mine = Access(first, last, write, stream.number, stream.enqueued, stream.name)
        kept = []
        for other in self._accesses:
            if other.first < last and first < other.last and (write or other.write):
                if not other.before(stream.clock):
                    what = "writes" if write else "reads"
                    did = "writes" if other.write else "reads"
                    self.hazards.append(f"{stream.name} {what} what {other.name} {did}, in no order")
                    raise Hazard(self.hazards[-1])
                if write and first <= other.first and other.last <= last:
                    continue  # whoever is after this write is after that one
            elif (other.first, other.last, other.write, other.stream) == (first, last, write, stream.number):
                continue  # and so of two reads on one stream
            kept.append(other)
        self._accesses = [*kept, mine]

    def forget(self, first: int, last: int) -> None:
        """These bytes go: everything that used them must have been seen done."""
        for access in self._accesses:
            if access.first < last and first < access.last and not access.before(self._host):
                self.hazards.append(f"memory goes that {access.name} may still use")
                raise Hazard(self.hazards[-1])
        self._accesses = [a for a in self._accesses if a.last <= first or last <= a.first]

    def _made(self, nbytes: int) -> torch.Tensor:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self._keep.append(tensor)
        self._own.append((tensor.data_ptr(), tensor.data_ptr() + max(1, nbytes)))
        return tensor

    def _entered(self) -> list[FakeStream]:
        if not hasattr(self._of_thread, "entered"):
            self._of_thread.entered = []
        found: list[FakeStream] = self._of_thread.entered
        return found

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


_C, _OUT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "enter": (_C,), "up": (ctypes.c_uint64, _C, ctypes.c_size_t, _C),
    "down": (_C, ctypes.c_uint64, ctypes.c_size_t, _C), "create": (_OUT, ctypes.c_uint), "destroy": (_C,),
    "record": (_C, _C), "wait": (_C, _C, ctypes.c_uint), "query": (_C,), "synchronize": (_C,),
    "elapsed": (ctypes.POINTER(ctypes.c_float), _C, _C),
    "describe": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}  # fmt: skip
_NOT_READY, _FAILED = 600, 999


class _Calls:
    """`core::Driver` of a fake GPU. A call that raises gives a code, and `describe` says the last exception."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._events, self._made, self._said = gpu, dict[int, FakeEvent](), 0, b""
        assert _SIGNATURES.keys() == CALLS.keys()
        self._kept = [self._native(name) for name in CALLS]
        addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in self._kept]
        self.driver = _core.Driver(1, dict(zip(CALLS, addresses, strict=True)))

    def _native(self, name: str) -> Any:
        def call(*given: Any) -> int:
            try:
                return getattr(self, f"_{name}")(*given) or 0
            except BaseException as error:  # it cannot pass through native code; a hazard is in `hazards`, too
                self._said = str(error).encode()
                return _FAILED

        return ctypes.CFUNCTYPE(ctypes.c_int, *_SIGNATURES[name])(call)

    def _enter(self, context: int) -> None:
        assert context == 1

    def _up(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(_bytes_at(to, nbytes), _bytes_at(source, nbytes), stream)

    def _down(self, to: int, source: int, nbytes: int, stream: int) -> None:
        assert _inside(self._gpu._on_host, _bytes_at(to, nbytes))
        self._copy(_bytes_at(to, nbytes), _bytes_at(source, nbytes), stream)

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
        gpu = self._gpu
        gpu._entered().append(gpu.stream_of(stream))
        try:
            gpu.copy(dst, src)
        finally:
            gpu._entered().pop()

    def _create(self, event: Any, flags: int) -> None:
        self._made += 1
        self._events[self._made] = self._gpu.event(timing=flags == 0)
        event[0] = self._made

    def _destroy(self, event: int) -> None:
        del self._events[event]

    def _record(self, event: int, stream: int) -> None:
        self._gpu.record(self._events[event], self._gpu.stream_of(stream))

    def _wait(self, stream: int, event: int, flags: int) -> None:
        self._gpu.wait_event(self._gpu.stream_of(stream), self._events[event])

    def _query(self, event: int) -> int:
        return 0 if self._gpu.query(self._events[event]) else _NOT_READY

    def _synchronize(self, event: int) -> None:
        self._gpu.synchronize(self._events[event])

    def _elapsed(self, milliseconds: Any, earlier: int, later: int) -> None:
        milliseconds[0] = self._gpu.elapsed_s(self._events[earlier], self._events[later]) * 1e3

    def _describe(self, code: int, text: Any) -> None:
        text[0] = self._said


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of memory that somebody keeps."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class FakePages:
    """`cuda.arena.CudaDriver`: pages of a `FakeGpu`'s memory, in ranges of host memory.

    A page comes with any content (here ones), and goes with its content. Attributes: created: pages that there are.
    mapped: their addresses. most: bytes of `mapped` at most.
    """

    granularity = 1 << 16

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._ranges: dict[int, tuple[mmap.mmap, torch.Tensor, int]] = {}
        self.created = self.most = 0
        self.mapped: set[int] = set()

    def reserve(self, nbytes: int) -> int:
        memory = mmap.mmap(-1, nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._ranges[tensor.data_ptr()] = memory, tensor, nbytes
        return tensor.data_ptr()

    def create(self) -> int:
        if self._gpu.free_bytes() < self.granularity:
            raise torch.OutOfMemoryError("the fake GPU has no memory left")
        self.created += 1
        return self.created

    def destroy(self, page: int) -> None:
        self.created -= 1

    def map(self, address: int, pages: Sequence[int]) -> None:
        for at in self._pages(address, len(pages)):
            assert at not in self.mapped
            self.mapped.add(at)
        self._bytes(address, len(pages)).fill_(255)
        self.most = max(self.most, len(self.mapped) * self.granularity)

    def unmap(self, address: int, pages: int) -> None:
        self._gpu.forget(address, address + pages * self.granularity)
        self.mapped.difference_update(self._pages(address, pages))
        base = self._base(address)
        self._ranges[base][0].madvise(mmap.MADV_DONTNEED, address - base, pages * self.granularity)

    def free(self, address: int, nbytes: int) -> None:
        assert not self.mapped.intersection(self._pages(address, nbytes // self.granularity))
        self._ranges.pop(address)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return self._ranges[address][1][:nbytes]

    def check(self, address: int, nbytes: int) -> None:
        """Raise Hazard where one of these bytes is reserved, and not there."""
        base = self._base(address)
        if base is None:
            return
        first, last = ((at - base) // self.granularity for at in (address, address + max(1, nbytes) - 1))
        if not self.mapped.issuperset(base + n * self.granularity for n in range(first, last + 1)):
            self._gpu.hazards.append("an operation uses memory that is not there")
            raise Hazard(self._gpu.hazards[-1])

    def _base(self, address: int) -> int | None:
        return next((b for b, (_, _, nbytes) in self._ranges.items() if b <= address < b + nbytes), None)

    def _pages(self, address: int, count: int) -> list[int]:
        return [address + n * self.granularity for n in range(count)]

    def _bytes(self, address: int, pages: int) -> torch.Tensor:
        base = self._base(address)
        return self._ranges[base][1][address - base :][: pages * self.granularity]


def _inside(ranges: Sequence[tuple[int, int]], tensor: torch.Tensor) -> bool:
    return any(first <= tensor.data_ptr() < last for first, last in ranges)


def _merge(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > into.get(stream, 0):
            into[stream] = number


class FakeCompute:
    """The runtime of `cuda.activations`.

    Args:
        lazy: whether copies wait for `run`, or for a wait for an event behind them; else they happen at once.

    Attributes:
        log: "copy", "record" and "synchronize" in their order.
    """

    device = torch.device("cpu")

    def __init__(self, lazy: bool = True) -> None:
        self._lazy = lazy
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._enqueued = self._done = 0
        self._pinned: list[torch.Tensor] = []
        self.log: list[str] = []

    def current(self) -> str:
        return "compute"

    def event(self, timing: bool = True) -> list[int]:
        return []

    def record(self, event: list[int], stream: str) -> None:
        assert stream == "compute"
        event[:] = [self._enqueued]
        self.log.append("record")

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert (dst.shape, dst.dtype) == (src.shape, src.dtype)
        assert self._is_pinned(dst) or self._is_pinned(src), "a copy to or from memory that is not registered"
        if self._is_pinned(dst):
            dst.fill_(float("nan") if dst.is_floating_point() else -1)
        self.log.append("copy")
        if not src.is_floating_point():  # numbers of rows: the compute here is not queued, and is about to read them
            dst.copy_(src)
            return
        self._queue.append((dst, src))
        self._enqueued += 1
        if not self._lazy:
            self.run()

    def kernel_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy(dst, src)

    def query(self, event: list[int]) -> bool:
        return self._done >= event[0]

    def synchronize(self, event: list[int]) -> None:
        self.log.append("synchronize")
        self.run(event[0])

    def wait(self, event: list[int]) -> None:
        if not self.query(event):
            self.synchronize(event)

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._pinned.append(torch.zeros(nbytes + 64, dtype=torch.uint8))
        begin = -self._pinned[-1].data_ptr() % 64
        return self._pinned[-1][begin : begin + nbytes]

    def run(self, until: int | None = None) -> None:
        """Let the copies happen, all or the first `until` of the run."""
        while self._queue and (until is None or self._done < until):
            dst, src = self._queue.pop(0)
            dst.copy_(src)
            self._done += 1

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(p.data_ptr() <= at and at + tensor.nbytes <= p.data_ptr() + p.nbytes for p in self._pinned)
