"""Work that a request may make endless or enormous, in processes that can be killed.

Templates and grammars are programs that come with checkpoints and requests. A thread cannot be ended, and a library
that overflows its stack ends its process. So they run in workers:

    this process  --control-->  helper (libraries are imported, no job runs)  --fork-->  a worker for each socket

The helper has one thread, and a fork of it takes milliseconds where its start takes a second. Control messages are the
id of a worker to kill (0: none), with or without a socket for a new one. Workers answer one request at a time, under a
limit of memory: a length in eight bytes, then JSON. All end with the process that started them, whose end closes the
sockets.

    Helper, Worker, Workers     of the process that asks
    serve                       the helper: the main function of a module that has jobs
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..errors import told

START_S = 60.0  # of a helper: libraries are imported, on a busy machine
ANSWER_BYTES = 2**28
_END_S = 2.0
_LENGTH_BYTES = 8
_IDLE = 8  # workers that are kept for the next request
_LONG_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class NotStarted(OSError):
    """No worker can be started: nothing that was asked is the cause."""


class Helper:
    """The process that forks workers: started on first use, and again after it died.

    Args:
        module: that calls `serve` as its main program.
        given: what `serve` gives to its jobs.
    """

    def __init__(self, module: str, given: bytes = b"") -> None:
        self._module, self._given = module, given
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._finish: weakref.finalize[..., Helper] | None = None  # ends it, at the latest with this process

    def worker(self) -> Worker:
        """A new worker. Raises NotStarted."""
        try:
            ours, theirs = socket.socketpair()
            try:
                with theirs, self._lock:
                    try:
                        self._send(0, theirs)
                    except OSError:  # it has died
                        self._start()
                        self._send(0, theirs)
                return Worker(ours)
            except BaseException:
                ours.close()
                raise
        except OSError as error:
            raise NotStarted(str(error) or type(error).__name__) from error

    def kill(self, pid: int) -> None:
        """End a worker; that of a process which has died has ended with it."""
        with self._lock, contextlib.suppress(OSError):
            self._send(pid, None)

    def close(self) -> None:
        """End it, and its workers. The next use starts it again."""
        with self._lock:
            self._end()

    def _send(self, pid: int, lane: socket.socket | None) -> None:
        if self._control is None:
            raise ConnectionError("it has not been started")
        socket.send_fds(self._control, [b"%d" % pid], [] if lane is None else [lane.fileno()])

    def _start(self) -> None:
        self._end()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, tempfile.TemporaryFile() as given:
                given.write(self._given)
                given.seek(0)
                command = [sys.executable, "-P", "-m", self._module, str(given.fileno())]
                process = subprocess.Popen(  # its own session: Ctrl-C is for the server, which ends it
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, pass_fds=[given.fileno()],
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            control.close()
            raise
        self._control, self._process = control, process
        self._finish = weakref.finalize(self, _end, control, process)

    def _end(self) -> None:
        if self._finish is not None:
            self._finish()
        self._control = self._process = self._finish = None


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # it is being started
        process.kill()
        process.wait()


class Worker:
    """A process that answers; `pid` is its id."""

    def __init__(self, lane: socket.socket) -> None:
        self._lane = lane
        self.pid = int(self._take(time.monotonic() + START_S))

    def ask(self, request: Mapping[str, Any], within_s: float) -> Any:
        """What it found.

        Raises:
            ValueError: it failed, and why. TimeoutError: it is not done. OSError: it has ended.
        """
        due_s = time.monotonic() + within_s
        self._lane.settimeout(within_s)
        self._lane.sendall(pack(request))
        answer = self._take(due_s)
        if "failed" in answer:
            raise ValueError(answer["failed"])
        return answer["found"]

    def close(self) -> None:
        """It ends once it is idle."""
        self._lane.close()

    def _take(self, due_s: float) -> Any:
        size = int.from_bytes(self._read(_LENGTH_BYTES, due_s))
        if size > ANSWER_BYTES:
            raise ConnectionError("its answer is too long")
        return unpack(self._read(size, due_s))

    def _read(self, size: int, due_s: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._lane.settimeout(left_s)
            part = self._lane.recv(min(2**20, size - len(found)))
            if not part:
                raise ConnectionError("it has ended")
            found += part
        return bytes(found)


class Workers:
    """Workers of one helper, all begun with the same request. One that is killed or dies is replaced.

    Args:
        first: what each is asked first; None: nothing.
    """

    def __init__(self, helper: Helper, first: Mapping[str, Any] | None = None) -> None:
        self._helper, self._first = helper, first
        self.idle: list[Worker] = []
        weakref.finalize(self, _close_all, self.idle)

    def ask(self, request: Mapping[str, Any], within_s: float) -> Any:
        """What a worker found. As many work as callers ask at a time. A request may be asked twice: it changes nothing.

        Raises:
            ValueError: it failed, and why. TimeoutError: it was not done in time, and was killed. NotStarted: there is
                no worker. OSError: two workers ended over it.
        """
        for last in (False, True):
            worker: Worker | None = None
            try:
                worker = self.take()
                begun_s = time.monotonic()
                found = worker.ask(request, within_s)
            except ValueError:
                if worker is not None:  # it has answered
                    self.give_back(worker)
                raise
            except TimeoutError:
                self.end(worker)
                raise
            except OSError:
                self.end(worker)
                _close_all(self.idle)  # they may have ended with it
                if last:
                    raise
            else:
                if time.monotonic() - begun_s < _LONG_S:
                    self.give_back(worker)
                else:  # the memory that it took goes with it
                    worker.close()
                return found
        raise AssertionError

    def take(self) -> Worker:
        """A worker for its caller alone, which gives it back or ends it. Raises NotStarted."""
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        worker = self._helper.worker()
        try:
            if self._first is not None:
                worker.ask(self._first, START_S)
            return worker
        except OSError as error:
            self.end(worker)
            raise NotStarted("it did not begin") from error

    def give_back(self, worker: Worker) -> None:
        """It is idle."""
        if len(self.idle) < _IDLE:
            self.idle.append(worker)
        else:
            worker.close()

    def end(self, worker: Worker | None) -> None:
        """Kill it."""
        if worker is not None:
            worker.close()
            self._helper.kill(worker.pid)


def _close_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().close()


class Jobs(Protocol):
    """What a worker does: `carry_out[name](**arguments)` for each request `{name: arguments}`.

    memory_bytes: of a worker, over what it has at its start.
    """

    @property
    def memory_bytes(self) -> int: ...

    @property
    def carry_out(self) -> Mapping[str, Callable[..., Any]]: ...


def serve(prepare: Callable[[bytes], Callable[[], Jobs]]) -> None:
    """Be a helper, until the process that started this one ends.

    Args:
        prepare: gets what `Helper` was given, imports what takes time, and returns what makes the jobs of a worker.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have chosen another: workers would be lost
    with open(os.devnull, "rb") as nothing, socket.socket(fileno=os.dup(0)) as control:
        os.dup2(nothing.fileno(), 0)
        with os.fdopen(int(sys.argv[1]), "rb") as given:
            make = prepare(given.read())
        _fork_workers(control, make)


def pack(value: Any) -> bytes:
    """A message of a worker's socket."""
    encoded = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(_LENGTH_BYTES) + encoded


def unpack(encoded: bytes) -> Any:
    """What a message says, without its length."""
    return json.loads(encoded.decode("utf-8", "surrogatepass"))


def answer(jobs: Jobs, request: Mapping[str, Any]) -> dict[str, Any]:
    """`{"found": result}`, or `{"failed": why}` in one line: what a job meets is not trusted."""
    try:
        ((name, given),) = request.items()
        return {"found": jobs.carry_out[name](**given)}
    except MemoryError:
        return {"failed": f"it needs more than {jobs.memory_bytes >> 20} MiB"}
    except Exception as error:
        return {"failed": told(error)[:300] or type(error).__name__}


def _work(lane: socket.socket, server: int, make: Callable[[], Jobs]) -> None:
    """A worker's life."""
    with contextlib.suppress(OSError, AttributeError):  # of Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    jobs, stream = make(), lane.makefile("rwb")
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + jobs.memory_bytes,) * 2)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a stack that overflows writes no file, and no lines
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
    stream.write(pack(os.getpid()))
    stream.flush()
    while head := stream.read(_LENGTH_BYTES):
        stream.write(pack(answer(jobs, unpack(stream.read(int.from_bytes(head))))))
        stream.flush()


def _fork_workers(control: socket.socket, make: Callable[[], Jobs]) -> None:
    workers = set[int]()
    ended, tells = os.pipe()  # written by the signal of a worker's end
    os.set_blocking(ended, False)
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        readable, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
        # a worker that is not waited for keeps its id, so no other process is killed
        workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
        if control.fileno() not in readable:
            continue
        said, sockets, _, _ = socket.recv_fds(control, 32, 1)
        for pid in list(workers):
            if not said or pid == int(said):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                workers.discard(pid)
        if not said:
            return
        for number in sockets:
            own = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(ended)
                os.close(tells)
                control.close()
                with socket.socket(fileno=number) as lane, contextlib.suppress(OSError):
                    _work(lane, own, make)
                os._exit(0)
            workers.add(pid)
            os.close(number)
