"""What the process that started a runtime watches: its lead, which it starts again, and every process below it.

Ray makes a dead lead's process anew, without its weights. `LeadKeeper` notices, starts it, and gives up when it dies
too often. A start that is refused because a file of the store does not verify is said, and tried again. The other
actors register and serve again by themselves. One whose constructor is refused is dead for Ray; `WorkerKeeper` makes it
again once its files verify.
`RayWatch` says so, ends what hangs, and detects the loss of Ray itself, which is final.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..errors import LoopDied, RuntimeFailure, StoreError, TierMoeError
from .attach import CONTROL, ActorRecord, Lead, lead_record
from .deployed_actors import LEAD, family, remake, split_name
from .ray_internals import actor_table, ray_processes
from .ray_session import as_failure, ray_addresses

if TYPE_CHECKING:
    from .actor_group import ActorGroup

DEATHS, WITHIN_S = 3, 60.0  # a lead that dies so often so soon is not started again
REST_S = 60.0  # after which a lead that failed is tried again, while others serve
SILENT_S = 6.0  # without an answer: said
AGAIN_S = 2.0  # at least, between starts that a file refuses
HUNG_S = 30.0  # ended, and started again
REFUSALS = 3  # of Ray's own processes
STOPPED_S = 5.0  # between two looks that should be a second apart: this process was stopped
_STEP_S = 1.0
_ANSWER_S = 1.0


class Pauses:
    """Finds out that this process itself did not run: a suspended laptop, SIGSTOP to all, a machine that was frozen.

    The processes that it asked had no time to answer either: those seconds do not count.
    """

    def __init__(self) -> None:
        self._looked_s: float | None = None

    def look(self) -> float:
        """Seconds that it was stopped since the last look; 0.0: it was not. To be called about once a second."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        gap_s = 0.0 if before_s is None else self._looked_s - before_s
        return gap_s if gap_s > STOPPED_S else 0.0


class _Refusals:
    """Starts that are refused for a file: said once for each reason, tried again after as long as it took.

    Args:
        name: of the process, for people.
    """

    def __init__(self, name: str, notify: Callable[[str], None]) -> None:
        self._name, self._notify = name, notify
        self._said: str | None = None
        self._begun_s: float | None = None  # None: Ray began the last one by itself
        self._again_s = 0.0

    @property
    def due(self) -> bool:
        """Whether the next start may begin."""
        return time.monotonic() >= self._again_s

    def begin(self) -> None:
        """A start begins."""
        self._begun_s = time.monotonic()

    def refused(self, refusal: StoreError) -> None:
        """The start was refused."""
        now_s = time.monotonic()
        took_s = 0.0 if self._begun_s is None else now_s - self._begun_s
        self._begun_s, self._again_s = None, now_s + max(AGAIN_S, took_s)  # each hashes a file
        if refusal.what != self._said:
            self._said = refusal.what
            self._notify(f"{self._name} stopped serving: {refusal}")

    def over(self) -> bool:
        """It serves; whether a start was refused before."""
        before, self._said = self._said, None
        return before is not None


class LeadKeeper:
    """Starts a lead again that has died, hangs, or whose generation loop died. No call blocks on the lead.

    Args:
        deployment: its id.
        lead: that serves.
        notify: called with a line for each death, each silence and each return.
        label: of the lead, for people.
    """

    def __init__(self, deployment: str, lead: Lead, notify: Callable[[str], None], label: str = "the lead") -> None:
        self._deployment, self._lead, self._notify, self._label = deployment, lead, notify, label
        record = lead_record(deployment)
        self._restarts = 0 if record is None else record.restarts
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._died_s = 0.0
        self._loop_died = False  # its process is ended for that
        self._failure: TierMoeError | None = None  # why it rests
        self._failed_s = 0.0
        self._dead = False  # not started since its death
        self._start: Any = None  # its start under way
        self._health: Any = None  # a call without an answer yet
        self._asked_s = 0.0  # when it was made; later by what this process was stopped meanwhile
        self._pauses = Pauses()
        self._silent = False
        self._refusals = _Refusals(label, notify)

    def look(self) -> None:
        """Check once, and act. A lead whose files do not verify is started until they do; one that failed otherwise is
        restarted after `REST_S`.

        Raises:
            RuntimeFailure: the lead has ended for good, or has died `DEATHS` times within `WITHIN_S` (deaths of its
                loop do not count); again at each look while it rests.
            TierMoeError: it refused to start again, or a policy of its own failed.
        """
        self._allow_for_pause()
        if self._failure is not None and time.monotonic() < self._failed_s + REST_S:
            raise self._failure
        again, self._failure = self._failure is not None, None
        try:
            self._look(again)
        except TierMoeError as error:
            self._failure, self._failed_s = error, time.monotonic()
            raise

    def _look(self, again: bool) -> None:
        record = lead_record(self._deployment)
        if record is None or record.state == "DEAD":
            raise RuntimeFailure("the worker failed: its process ended", "start it again")
        if again:
            self._deaths.clear()
            if record.state == "ALIVE":
                self._remake(record)
                return
        if record.restarts > self._restarts:
            self._died(record.restarts)
        if self._dead and record.state == "ALIVE" and self._refusals.due:
            self._dead, self._start = False, self._call("start")
            self._refusals.begin()
        if self._start is not None:
            self._follow_start()
        elif not self._dead:
            self._follow_health(record)

    def _died(self, restarts: int) -> None:
        now_s = self._died_s = time.monotonic()
        # a loop dies of what a request does, after the start's own was served, and each request has its own bound
        self._deaths.extend([now_s] * (restarts - self._restarts - self._loop_died))
        self._loop_died = False
        self._restarts, self._dead, self._start, self._health = restarts, True, None, None
        if len(self._deaths) == DEATHS and now_s - self._deaths[0] < WITHIN_S:
            what = f"{self._label} died {DEATHS} times within {WITHIN_S:g} s"
            raise RuntimeFailure(what, "see its log in Ray's session folder, or lower --budget")
        self._notify(f"{self._label} died; it is started again")

    def _follow_start(self) -> None:
        if not ray.wait([self._start], timeout=0)[0]:
            return
        start, self._start = self._start, None
        try:
            ray.get(start)
        except ray.exceptions.RayActorError:
            return  # it died again: the next look finds out
        except ray.exceptions.RayError as error:
            failure = as_failure(error, f"{self._label} did not start again")
            if not isinstance(failure, StoreError):
                raise failure from error
            self._refusals.refused(failure)
            self._dead = True
            return
        self._refusals.over()
        self._notify(f"{self._label} serves again, {time.monotonic() - self._died_s:.0f} s after it died")

    def _follow_health(self, record: ActorRecord) -> None:
        if self._health is None:
            self._health, self._asked_s, self._silent = self._call("health"), time.monotonic(), False
        if ray.wait([self._health], timeout=0)[0]:
            health, self._health = self._health, None
            try:
                ray.get(health)
            except ray.exceptions.RayActorError:
                return  # the table says so at the next look
            except ray.exceptions.RayError as error:
                failure = as_failure(error, "the worker failed")
                if not isinstance(failure, LoopDied):
                    raise failure from error
                self._notify(f"{self._label}: {failure.what}; its process is started again")
                self._loop_died = True
                self._remake(record)
                return
            return
        self._allow_for_pause()
        silent_s = time.monotonic() - self._asked_s
        if silent_s > HUNG_S:
            self._notify(f"{self._label} has not answered for {silent_s:.0f} s and is ended")
            self._remake(record)
        elif silent_s > SILENT_S and not self._silent:
            self._silent = True
            self._notify(f"{self._label} has not answered for {silent_s:.0f} s")

    def _allow_for_pause(self) -> None:
        self._asked_s = min(self._asked_s + self._pauses.look(), time.monotonic())

    def _remake(self, record: ActorRecord) -> None:
        self._start = self._health = None
        here = record.node == ray.get_runtime_context().get_node_id()
        remake(self._lead.handle, record.pid if here else None)

    def _call(self, method: str) -> Any:
        return getattr(self._lead.handle, method).options(concurrency_group=CONTROL).remote()


class WorkerKeeper:
    """Makes a worker again whose files do not verify, and says which one.

    A worker opens its files in its constructor. An actor whose constructor fails is dead, and Ray does not try again.

    Args:
        role: of the worker.
        group: of its actors; it makes the worker again.
        notify: called with a line for each change.
    """

    def __init__(self, role: str, group: ActorGroup, notify: Callable[[str], None]) -> None:
        self._role, self._group, self._notify = role, group, notify
        self._refusals = _Refusals(role, notify)
        self._health: Any = None  # a call without an answer yet
        self._dead = False

    def look(self) -> None:
        """Look once, without blocking on the worker."""
        if self._dead:
            if not self._refusals.due:
                return
            try:
                self._group.make_again(self._role)
            except ValueError:
                return  # its name is not free yet
            self._dead, self._health = False, None
            self._refusals.begin()
        if self._health is None:
            self._health = self._group.actors[self._role].health.remote()
        if not ray.wait([self._health], timeout=0)[0]:
            return
        health, self._health = self._health, None
        try:
            ray.get(health)
        except ray.exceptions.RayError as error:  # else it died: Ray starts it again, and `RayWatch` says so
            failure = as_failure(error, f"{self._role} did not start again")
            if isinstance(failure, StoreError):
                self._dead = True
                self._refusals.refused(failure)
                self._group.refuse(self._role, failure)
            return
        if self._refusals.over():
            self._notify(f"{self._role} serves again: its files are whole")


@dataclass(eq=False)
class _Process:
    """A process of Ray's, which answers gRPC's health check whatever Python does in it.

    Attributes:
        name: for people.
        actor: its process, where it is an actor's on this machine.
    """

    name: str
    address: str
    actor: psutil.Process | None = None
    answered_s: float = field(default_factory=time.monotonic)
    silent: bool = False
    refused: int = 0  # consecutive refused connections

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address)
        self._check = health_pb2_grpc.HealthStub(self.channel).Check

    def ask(self) -> Any:
        return self._check.future(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)


class RayWatch:
    """Looks once a second whether Ray's processes live and answer; a thread.

    - GCS or raylet has ended, or was silent for `HUNG_S`: `lost` is called with the reason, once.
    - An actor's process was silent for `HUNG_S`: it is killed, and Ray starts another.
    - Any was silent for `SILENT_S`, or an actor has died: a line says so.
    - This process itself was stopped: a line says so, and no process counts as silent.

    Args:
        deployment: its id; the actors of others are left alone.
        serves: whether this process serves, or has started Ray: a GCS or raylet that refuses connections is lost at
            once. Else the cluster has time to start it again.
        notify: called with each line.
        lost: called on the thread.
    """

    def __init__(
        self, deployment: str, serves: bool, notify: Callable[[str], None], lost: Callable[[str], None]
    ) -> None:
        self._deployment, self._serves, self._notify, self._lost = deployment, serves, notify, lost
        self._own: dict[str, subprocess.Popen[bytes]] = ray_processes()
        self._here = ray.get_runtime_context().get_node_id()
        found = [_Process(f"Ray's {name}", address) for name, address in ray_addresses().items()]
        self._servers = [server for server in found if _answers(server.ask())]  # not with Ray's own TLS
        self._actors: dict[str, _Process] = {}  # by Ray's id and the times that it was started
        self._pauses = Pauses()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiermoe-ray-watch", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Bring the list of actors up to date, and say which died. Blocks while the GCS does."""
        found: dict[str, _Process] = {}
        table = actor_table()
        for actor_id, entry in table.items():
            name = self._name(entry)
            if name is None or entry["State"] != "ALIVE":
                continue
            key, address = f"{actor_id}/{entry['NumRestarts']}", entry["Address"]
            found[key] = self._actors.get(key) or _Process(
                name, f"{address['IPAddress']}:{address['Port']}",
                _process(entry["Pid"]) if address["NodeID"] == self._here else None,
            )  # fmt: skip
        for key, process in self._actors.items():
            if key not in found:
                process.channel.close()
                if process.name != LEAD:  # its keeper says that
                    for_good = table.get(key.partition("/")[0], {}).get("State", "DEAD") == "DEAD"
                    self._notify(f"{process.name} {'ended' if for_good else 'died; it is started again'}")
        self._actors = found

    def close(self) -> None:
        """Stop looking. Bounded."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _ANSWER_S)

    def _run(self) -> None:
        while not self._end.wait(_STEP_S):
            reason = self._ended() or self._silence()
            if reason is not None and not self._end.is_set():
                self._lost(reason)
                return

    def _allow_for_pause(self) -> None:
        if (stopped_s := self._pauses.look()) == 0.0:
            return
        self._notify(f"this process was stopped for {stopped_s:.0f} s (a suspended machine?); it resumes")
        for process in (*self._servers, *self._actors.values()):
            process.answered_s = min(process.answered_s + stopped_s, time.monotonic())
            process.refused = 0

    def _ended(self) -> str | None:
        for name, process in self._own.items():
            if (code := process.poll()) is not None:
                return f"Ray's {name} ended (exit code {code})"
        return None

    def _silence(self) -> str | None:
        """Ask all; why Ray is lost, or None."""
        processes = [*self._servers, *self._actors.values()]
        with contextlib.suppress(ValueError):  # the channel of an actor that was taken off the list meanwhile
            asked = [(process, process.ask()) for process in processes]
            for process, answer in asked:
                if _answers(answer):
                    process.answered_s = time.monotonic()
                    process.refused = 0
                    if process.silent:
                        process.silent = False
                        self._notify(f"{process.name} answers again")
                elif answer.code() is grpc.StatusCode.UNAVAILABLE:
                    process.refused += 1
        self._allow_for_pause()
        for process in processes:
            silent_s = time.monotonic() - process.answered_s
            if self._serves and process in self._servers and process.refused >= REFUSALS:
                return f"{process.name} ends"  # asked to by somebody, it takes ten seconds
            if silent_s > HUNG_S:
                if process in self._servers:
                    return f"{process.name} has not answered for {silent_s:.0f} s"  # it hangs
                if process.actor is not None:
                    self._notify(f"{process.name} has not answered for {silent_s:.0f} s and is ended")
                    with contextlib.suppress(psutil.Error):
                        process.actor.kill()
                process.answered_s = time.monotonic()
            elif silent_s > SILENT_S and not process.silent:
                process.silent = True
                self._notify(f"{process.name} has not answered for {silent_s:.0f} s")
        return None

    def _name(self, entry: dict[str, Any]) -> str | None:
        """Of an actor that belongs here, for people."""
        parts = split_name(str(entry.get("Name") or ""))
        return parts[1] if parts is not None and family(parts[0]) == self._deployment else None


def _answers(answer: Any) -> bool:
    try:
        return bool(answer.result().status == health_pb2.HealthCheckResponse.SERVING)
    except (grpc.RpcError, grpc.FutureCancelledError):
        return False


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
