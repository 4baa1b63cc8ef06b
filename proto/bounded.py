"""Work that a request may make endless or enormous, in processes that end without harm to another request.

Templates and grammars are programs that come with checkpoints and requests. A thread cannot be ended, and a library
that overflows its stack ends its process. So they run in workers:

    Workers     of the process that asks: a pool of workers, and the helper that makes them
    serve       the helper, main function of a module with jobs: it imports the libraries, and forks a worker for each
                connection, in milliseconds where a start takes a second

A worker answers one request at a time, on its connection: a length in eight bytes, then JSON. Its memory has a limit,
and its alarm kills it when the time of the request is over. It ends with its connection, the helper with the process
that started it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import told

START_S = 60.0  # of a helper: libraries are imported, on a busy machine
ANSWER_BYTES = 2**28
MEMORY_BYTES = 2**30  # of a worker, over what it has at its start
_END_S = 2.0
_LATE_S = 1.0  # after its time a worker that has not ended is given up: it is stopped
_LENGTH_BYTES = 8
_IDLE = 8  # workers that are kept for the next request
_LONG_S = 0.5

CarryOut = Mapping[str, Callable[..., Any]]  # for each request `{name: arguments}`: what gets the arguments


class NotStarted(OSError):
    """No worker can be started: nothing that was asked is the cause."""


class Worker:
    """A process that answers, at the other end of a connection; `pid` is its id."""

    def __init__(self, name: str) -> None:
        self._lane = socket.socket(socket.AF_UNIX)
        try:
            self._lane.connect(f"\0{name}")
            self.pid = int(self._take(time.monotonic() + START_S))
        except BaseException:
            self._lane.close()
            raise

    def ask(self, request: Mapping[str, Any], within_s: float) -> Any:
        """What it found.

        Raises:
            ValueError: it failed, and why. TimeoutError: it was not done, and has ended. OSError: it has ended.
        """
        due_s = time.monotonic() + within_s
        self._lane.settimeout(within_s + _LATE_S)
        try:
            self._lane.sendall(pack([within_s, request]))
            answer = self._take(due_s + _LATE_S)
        except ConnectionError:
            if time.monotonic() >= due_s:
                raise TimeoutError from None
            raise
        if "failed" in answer:
            raise ValueError(answer["failed"])
        return answer["found"]

    def close(self) -> None:
        """It ends once it is idle, or once the time of its request is over."""
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
    """Workers, and the process that makes them: started on first use, and again after it died.

    Args:
        module: that calls `serve` as its main program.
        given: what `serve` gives to its jobs.
    """

    def __init__(self, module: str, given: bytes = b"") -> None:
        self._module, self._given = module, given
        self._lock = threading.Lock()
        self._name = ""
        self._finish: weakref.finalize[..., Workers] | None = None  # ends it, at the latest with this process
        self.helper: subprocess.Popen[bytes] | None = None
        self.idle: list[Worker] = []
        weakref.finalize(self, _close_all, self.idle)

    def worker(self) -> Worker:
        """A new worker for its caller alone. Raises NotStarted."""
        try:
            with contextlib.suppress(ConnectionError):
                return Worker(self._name)
            with self._lock:
                with contextlib.suppress(ConnectionError):  # another thread has started it meanwhile
                    return Worker(self._name)
                self._start()
                return Worker(self._name)
        except OSError as error:
            raise NotStarted(str(error) or type(error).__name__) from error

    def ask(self, request: Mapping[str, Any], within_s: float) -> Any:
        """What a worker found. As many work as callers ask at a time. A request may be asked twice: it changes nothing.

        Raises:
            ValueError: it failed, and why. TimeoutError: it was not done in time. NotStarted: there is no worker.
            OSError: two workers ended over it.
        """
        for last in (False, True):
            worker = self._taken()
            begun_s = time.monotonic()
            try:
                found = worker.ask(request, within_s)
            except ValueError:  # it has answered
                self._give_back(worker)
                raise
            except OSError as error:
                worker.close()
                if isinstance(error, TimeoutError) or last:
                    raise
                _close_all(self.idle)  # they may have ended with it
            else:
                if time.monotonic() - begun_s < _LONG_S:
                    self._give_back(worker)
                else:  # the memory that it took goes with it
                    worker.close()
                return found
        raise AssertionError

    def close(self) -> None:
        """End the helper and the idle workers. The next use starts it again."""
        with self._lock:
            self._end()
        _close_all(self.idle)

    def _taken(self) -> Worker:
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        return self.worker()

    def _give_back(self, worker: Worker) -> None:
        if len(self.idle) < _IDLE:
            self.idle.append(worker)
        else:
            worker.close()

    def _start(self) -> None:
        self._end()
        self.helper = helper = subprocess.Popen(  # its own session: Ctrl-C is for the server, which ends it
            [sys.executable, "-P", "-m", self._module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._finish = weakref.finalize(self, _end, helper)
        assert helper.stdin is not None
        assert helper.stdout is not None
        helper.stdin.write(len(self._given).to_bytes(_LENGTH_BYTES) + self._given)
        helper.stdin.flush()
        if not select.select([helper.stdout], [], [], START_S)[0]:
            raise TimeoutError(f"it took more than {START_S:g} s")
        self._name = helper.stdout.readline().decode().strip()

    def _end(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = self.helper = None


def _end(helper: subprocess.Popen[bytes]) -> None:
    for stream in (helper.stdin, helper.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    try:
        helper.wait(_END_S)
    except subprocess.TimeoutExpired:  # it is being started
        helper.kill()
        helper.wait()


def _close_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().close()


def pack(value: Any) -> bytes:
    """A message of a worker's connection."""
    encoded = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(_LENGTH_BYTES) + encoded


def unpack(encoded: bytes) -> Any:
    """What a message says, without its length."""
    return json.loads(encoded.decode("utf-8", "surrogatepass"))


def serve(prepare: Callable[[bytes], Callable[[], CarryOut]]) -> None:
    """Be a helper, until the process that started this one ends.

    Args:
        prepare: gets what `Workers` was given, imports what takes time, and returns what makes the jobs of a worker.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that have ended leave no zombies
    make = prepare(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES))))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux chooses a name that is in no folder, and goes with the socket
        listener.listen(128)
        sys.stdout.buffer.write(listener.getsockname()[1:] + b"\n")
        sys.stdout.flush()
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            lane, _ = listener.accept()
            with lane:
                _, user, _ = struct.unpack("3i", lane.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user == os.geteuid() and os.fork() == 0:
                    listener.close()
                    with contextlib.suppress(OSError), lane.makefile("rwb") as stream:
                        _work(stream, make())
                    os._exit(0)


def _work(stream: io.BufferedRWPair, carry_out: CarryOut) -> None:
    """A worker's life."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES,) * 2)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a stack that overflows writes no file, and no lines
    with open(os.devnull, "r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which kills, whatever code runs
    stream.write(pack(os.getpid()))
    stream.flush()
    while head := stream.read(_LENGTH_BYTES):
        within_s, request = unpack(stream.read(int.from_bytes(head)))
        signal.setitimer(signal.ITIMER_REAL, within_s)
        found = pack(_answer(carry_out, request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        stream.write(found)
        stream.flush()


def _answer(carry_out: CarryOut, request: Mapping[str, Any]) -> dict[str, Any]:
    """`{"found": result}`, or `{"failed": why}` in one line: what a job meets is not trusted."""
    try:
        ((name, given),) = request.items()
        return {"found": carry_out[name](**given)}
    except MemoryError:
        return {"failed": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
    except Exception as error:
        return {"failed": told(error)[:300] or type(error).__name__}
