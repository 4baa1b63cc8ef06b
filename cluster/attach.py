"""Runtimes that run already: find them by their actors' names, ask them, send them requests, end them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from ..actors.requests import GenerationRequest, TokenEvent
from ..actors.sample import Counters, ProcessSample
from ..errors import ConfigError, RuntimeFailure, TierMoeError
from .deployed_actors import EDGE, ENDPOINTS, LEAD, family, split_name
from .ray_internals import actor_table
from .ray_session import NAMESPACE, as_failure, join, leave, refuse_second, without_ray_notices

CONTROL = "control"  # the concurrency group of calls that must get through while every request thread is busy
CONTROL_THREADS = 4
EVENTS = "events"  # that of calls that wait for the tokens of all requests of one server
EVENT_THREADS = 16
_CALL_DEADLINE_S = 30.0
_CANCEL_DEADLINE_S = 2.0
_ANSWER_DEADLINE_S = 10.0
_END_DEADLINE_S = 20.0
_SAMPLE_S = 2.0
_POLL_S = 0.1
_ENDED = ("DEAD",)


class Lead:
    """Calls of a lead actor, with deadlines; usable from several threads. The HTTP server, on its event loop, calls a
    lead by `api.lead.LeadClient`.

    Args:
        handle: of an actor made of `GpuWorker`; None before there is one and after it has ended.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def generate(self, request: GenerationRequest, deadline_s: float) -> Iterator[TokenEvent]:
        """Stream the tokens of one request; leaving the iteration early cancels the request.

        Raises:
            RuntimeFailure: the worker died, reported an error, or the request took more than `deadline_s`.
            TierMoeError: what ended the request in the worker, such as StoreError: an expert is on no living node.
        """
        deadline = time.monotonic() + deadline_s
        stream = self.handle.generate.options(num_returns="streaming").remote(request)
        ended = False
        try:
            while not ended:
                event = _next_event(stream, deadline, deadline_s)
                ended = event.finish is not None
                if event.failure is not None:
                    raise event.failure
                yield event
        finally:
            if not ended:
                self.cancel(request.request_id)

    def cancel(self, request_id: str) -> None:
        """Stop a request; a worker that is dead or closed has nothing left to stop."""
        if self.handle is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self._control("cancel", request_id, deadline_s=_CANCEL_DEADLINE_S)

    def ask(self, method: str, *args: Any, deadline_s: float = _CALL_DEADLINE_S) -> Any:
        """What a method of the worker returns.

        Raises:
            RuntimeFailure: it does not answer within `deadline_s`, or is dead.
        """
        try:
            return self._control(method, *args, deadline_s=deadline_s)
        except ray.exceptions.RayError as error:
            raise as_failure(error, f"the worker did not answer '{method}'", deadline_s) from error

    def _control(self, method: str, *args: Any, deadline_s: float) -> Any:
        call = getattr(self.handle, method).options(concurrency_group=CONTROL)
        return ray.get(call.remote(*args), timeout=deadline_s)


def _next_event(stream: Any, deadline: float, deadline_s: float) -> TokenEvent:
    try:
        ready, _ = ray.wait([stream], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeFailure(
                f"the request passed its deadline of {deadline_s:g} s",
                "raise request_deadline_s, or ask for fewer tokens",
            )
        return ray.get(next(stream))
    except StopIteration:
        raise RuntimeFailure(
            "the worker ended a request without saying why", "run again, and report it if it stays"
        ) from None
    except ray.exceptions.RayError as error:
        raise as_failure(error, "the worker failed during a request") from error


def lead_of(deployment: str) -> Lead:
    """The lead of a deployment in the Ray of this process.

    Raises:
        RuntimeFailure: it has none.
    """
    try:
        return Lead(ray.get_actor(f"{deployment}/{LEAD}", namespace=NAMESPACE))
    except ValueError as error:
        raise RuntimeFailure(
            f"deployment '{deployment}' has no lead", "wait until it is up, look at `tiermoe status`, or end it"
        ) from error


def leads_of(deployment: str) -> dict[str, Lead]:
    """The leads of a deployment's replica groups in the Ray of this process, by the group's id, the first one first.

    Raises:
        RuntimeFailure: it has none.
    """
    named = ray.util.list_named_actors(all_namespaces=True)
    parts = [split_name(entry["name"]) for entry in named if entry["namespace"] == NAMESPACE]
    ids = {part[0] for part in parts if part is not None and part[1] == LEAD and family(part[0]) == deployment}
    return {found: lead_of(found) for found in sorted(ids | {deployment}, key=lambda found: (len(found), found))}


@dataclass(frozen=True)
class ActorRecord:
    """One actor of a deployment, as Ray's head node knows it.

    Attributes:
        deployment, role: the two parts of its name.
        kind: name of its class.
        state: Ray's: PENDING_CREATION, ALIVE, RESTARTING or DEAD.
        host, node, pid: address and id of its node, and its process there; None before it is placed.
        restarts: times that Ray has started it again.
    """

    deployment: str
    role: str
    kind: str
    state: str
    host: str | None
    node: str | None
    pid: int | None
    restarts: int


def actor_records(table: Sequence[dict[str, Any]] | None = None) -> list[ActorRecord]:
    """The actors of all living deployments, by name.

    Args:
        table: Ray's; None: that of the Ray of this process.
    """
    records = []
    for entry in table if table is not None else list(actor_table().values()):
        parts = split_name(str(entry.get("Name") or ""))
        if parts is None:
            continue
        address = entry.get("Address") or {}
        records.append(
            ActorRecord(
                deployment=parts[0],
                role=parts[1],
                kind=str(entry.get("ActorClassName", "")),
                state=str(entry.get("State", "")),
                host=address.get("IPAddress") or None,
                node=address.get("NodeID") or None,
                pid=int(entry.get("Pid") or 0) or None,
                restarts=int(entry.get("NumRestarts") or 0),
            )
        )
    living = {record.deployment for record in records if record.state not in _ENDED}
    return sorted((r for r in records if r.deployment in living), key=lambda r: (r.deployment, r.role))


def lead_record(deployment: str) -> ActorRecord | None:
    """The lead of a deployment as Ray's head node knows it; None: all actors of the deployment have ended."""
    return next((r for r in actor_records() if r.deployment == deployment and r.role == LEAD), None)


@dataclass(frozen=True)
class Sample:
    """One process of a deployment and what it has counted: `actors.sample.ProcessSample`, beside what Ray knows.

    Attributes:
        deployment: id of its replica group.
        worker: its role, such as "ndp/0"; in a further replica group with that group's number, as in "ndp/0.1".
        kind: the role without a number: lead, shard, ndp, store, matcher, endpoints or edge.
        host, node: address and id of its node; None before it is placed.
        restarts: times that Ray has started it again, each with counters at 0.
        problem: why it did not answer, in which case it has no counters; None: it did.
    """

    deployment: str
    worker: str
    kind: str
    host: str | None
    node: str | None
    restarts: int
    pid: int | None = None
    at_s: float = 0.0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    counters: Counters = field(default_factory=dict)
    peers: dict[str, Counters] = field(default_factory=dict)
    problem: str | None = None

    def since(self, before: Sample) -> SampleRates | None:
        """What it counted a second since an earlier sample; None: one has no answer, or it was started again."""
        took_s = self.at_s - before.at_s
        if self.problem is not None or before.problem is not None or self.pid != before.pid or took_s <= 0:
            return None
        return SampleRates(
            took_s, (self.cpu_s - before.cpu_s) / took_s, _rates(self.counters, before.counters, took_s),
            {name: _rates(now, before.peers.get(name, {}), took_s) for name, now in self.peers.items()},
        )  # fmt: skip


@dataclass(frozen=True)
class SampleRates:
    """What a process counted a second, over `over_s` seconds; of counters in seconds the share of the time.

    Attributes:
        cpu: processor seconds a second.
        counters, peers: by the names of `Sample`.
    """

    over_s: float
    cpu: float
    counters: Counters
    peers: dict[str, Counters]


def _rates(now: Counters, before: Counters, took_s: float) -> Counters:
    """A second; counters that somebody has set to 0 in between count from there."""
    return {
        name: (value - earlier if value >= (earlier := before.get(name, 0)) else value) / took_s
        for name, value in now.items()
    }


def samples(deployment: str, deadline_s: float = _SAMPLE_S) -> list[Sample]:
    """What each process of a deployment has counted, asked side by side in the Ray of this process.

    What does not answer within `deadline_s` is named, not waited for.
    """
    found = _living(record for record in actor_records() if family(record.deployment) == deployment)
    asked = {record: _ask_sample(record) for record in found if record.state == "ALIVE"}
    calls = [call for call in asked.values() if call is not None]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=deadline_s)
    return [_sample(record, asked.get(record)) for record in found]


def _living(records: Iterable[ActorRecord]) -> list[ActorRecord]:
    """Of each name the actor that lives, or else one that has died; without servers that have ended."""
    found: dict[tuple[str, str], ActorRecord] = {}
    for record in records:
        name = (record.deployment, record.role)
        ended = record.state in _ENDED
        if not (ended and (name in found or record.role.startswith(EDGE))):
            found[name] = record
    return list(found.values())


def _ask_sample(record: ActorRecord) -> Any:
    """The call of an actor's `sample`; None: it is gone by now, or has none."""
    try:
        method = ray.get_actor(f"{record.deployment}/{record.role}", namespace=NAMESPACE).sample
    except (ValueError, AttributeError, ray.exceptions.RayError):
        return None
    return (method.options(concurrency_group=CONTROL) if record.role == LEAD else method).remote()


def _sample(record: ActorRecord, call: Any) -> Sample:
    """An actor's answer, without waiting for it."""
    suffix, kind = record.deployment.removeprefix(family(record.deployment)), record.role.partition("/")[0]
    made = Sample(record.deployment, record.role + suffix, kind, record.host, record.node, record.restarts)
    if call is None:
        return replace(made, problem=f"it is {record.state.lower()}")
    try:
        answer: ProcessSample = ray.get(call, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return replace(made, problem="it does not answer")
    except ray.exceptions.RayError as error:
        return replace(made, problem=as_failure(error, "it did not answer").what)
    counted = {part.name: getattr(answer, part.name) for part in fields(answer)}
    return replace(made, **counted | {"peers": {name + suffix: peer for name, peer in answer.peers.items()}})


class Attachment:
    """This process as one more driver of a running Ray; leaving it does not change any actor.

    Args:
        address: HOST:PORT of the head node.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._quiet = contextlib.ExitStack()

    def __enter__(self) -> Attachment:
        """Join.

        Raises:
            RuntimeFailure: no Ray answers there, or its authentication differs.
        """
        refuse_second()
        try:
            self._quiet.enter_context(without_ray_notices())
            join(self.address)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave. Idempotent."""
        leave()
        self._quiet.close()

    def actors(self) -> list[ActorRecord]:
        """The actors of all living deployments."""
        return actor_records()

    def deployments(self) -> list[str]:
        """Ids of the living deployments, by name; also of those that have reserved or wait for room only."""
        waiting = {deployment for deployment, _ in _groups()}
        return sorted({record.deployment for record in self.actors()} | waiting)

    def choose(self, deployment: str | None) -> str:
        """The id of the deployment that is meant; of one with several replica groups, that of its first.

        Raises:
            RuntimeFailure: no deployment runs, or none with this id.
            ConfigError: there are several and none was named.
        """
        ids = [found for found in self.deployments() if family(found) == found]
        if not ids:
            raise RuntimeFailure(f"no deployment runs in the Ray at '{self.address}'", "start one with `tiermoe up`")
        if deployment is not None and deployment not in ids:
            raise RuntimeFailure(f"no deployment '{deployment}' runs at '{self.address}'", f"it has {', '.join(ids)}")
        if deployment is None and len(ids) > 1:
            raise ConfigError(
                f"{len(ids)} deployments run at '{self.address}'", f"pass --deployment with one of {', '.join(ids)}"
            )
        return deployment or ids[0]

    def ask(self, deployment: str, method: str) -> Any:
        """What a method of the deployment's lead returns. Raises as `Lead.ask`."""
        return lead_of(deployment).ask(method, deadline_s=_ANSWER_DEADLINE_S)

    def samples(self, deployment: str, deadline_s: float = _SAMPLE_S) -> list[Sample]:
        """As `samples`."""
        return samples(deployment, deadline_s)

    def ask_actor(self, deployment: str, role: str, method: str) -> Any:
        """What a method of another actor than the lead returns.

        Raises:
            RuntimeFailure: it does not answer in time, or is dead.
        """
        try:
            handle = ray.get_actor(f"{deployment}/{role}")
            return ray.get(getattr(handle, method).remote(), timeout=_ANSWER_DEADLINE_S)
        except (ray.exceptions.RayError, ValueError, AttributeError) as error:  # ValueError: its name is gone by now
            raise as_failure(error, f"'{deployment}/{role}' did not answer", _ANSWER_DEADLINE_S) from error

    def check(self, deployment: str) -> None:
        """Return while the deployment's lead lives, is busy, or is started again after its death.

        Raises:
            RuntimeFailure: it has ended.
        """
        record = lead_record(deployment)
        if record is None or record.state in _ENDED:
            raise RuntimeFailure(f"deployment '{deployment}' has ended", "start it again")

    def health(self, record: ActorRecord) -> dict[str, Any]:
        """An actor's reported state; it has `error` if the actor does not answer."""
        try:
            if record.role == LEAD:
                return self.ask(record.deployment, "health")
            if record.role == ENDPOINTS:
                return {"state": f"{len(self.ask_actor(record.deployment, record.role, 'entries'))} endpoints"}
            answer = self.ask_actor(record.deployment, record.role, "health")
            return asdict(answer) if is_dataclass(answer) and not isinstance(answer, type) else answer
        except TierMoeError as error:
            return {"error": error.what}

    def end(self, deployment: str) -> None:
        """Kill the actors of a deployment's groups and free what it reserved; the process that started it notices.

        Raises:
            RuntimeFailure: some are not dead after 20 s.
        """
        # first: their state tells the process that started the deployment that the end is intended
        for owner, name in _groups():
            if family(owner) == deployment:
                with contextlib.suppress(ValueError):  # it is removed already
                    remove_placement_group(get_placement_group(name))
        end_s = time.monotonic() + _END_DEADLINE_S
        while living := [r for r in self.actors() if family(r.deployment) == deployment and r.state not in _ENDED]:
            if time.monotonic() > end_s:
                names = ", ".join(f"{r.role} (pid {r.pid} on {r.host})" for r in living)
                raise RuntimeFailure(f"these actors have not ended: {names}", "look at their nodes with `ray status`")
            for record in living:
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    ray.kill(ray.get_actor(f"{record.deployment}/{record.role}"), no_restart=True)
            time.sleep(_POLL_S)


def _groups() -> list[tuple[str, str]]:
    """(deployment, name) of the placement groups that stand or wait."""
    names = [str(entry["name"]) for entry in placement_group_table().values() if entry["state"] != "REMOVED"]
    return [(parts[0], name) for name in names if (parts := split_name(name)) is not None]
