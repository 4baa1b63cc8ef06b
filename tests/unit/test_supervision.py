"""A lead that dies is started again, but not for ever. A service ends in time, whatever its main thread waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tiermoe.cluster import deploy, supervision
from tiermoe.cluster.attach import ActorRecord, Lead
from tiermoe.cluster.config import RunConfig, engine_settings
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.deployed_actors import remake
from tiermoe.cluster.launch import Launch
from tiermoe.cluster.supervision import LeadKeeper, WorkerKeeper
from tiermoe.errors import LoopDied, RuntimeFailure, StoreError, TierMoeError


class FakeRay:
    """Calls of a lead give what `answers` has for the method; None: no answer yet.

    Attributes:
        record: what the head node says of the lead.
        calls: methods that were called.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record: ActorRecord | None = self.lead(0, "ALIVE")
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {"health": {"state": "serving"}, "start": {}}
        self.now_s = 100.0
        self.remade: list[int | None] = []
        monkeypatch.setattr(supervision, "lead_record", lambda deployment: self.record)
        monkeypatch.setattr(supervision, "remake", lambda actor, pid: self.remade.append(pid))
        monkeypatch.setattr(supervision.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(supervision.ray, "wait", self._wait)
        monkeypatch.setattr(supervision.ray, "get", self._get)
        context = SimpleNamespace(get_node_id=lambda: "here")
        monkeypatch.setattr(supervision.ray, "get_runtime_context", lambda: context)

    @staticmethod
    def lead(restarts: int, state: str) -> ActorRecord:
        return ActorRecord("abcdef", "lead", "GpuWorker", state, "127.0.0.1", "here", 7 + restarts, restarts)

    @property
    def handle(self) -> Any:
        def method(name: str) -> Any:
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.calls.append(name) or name))

        return SimpleNamespace(start=method("start"), health=method("health"))

    def _wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout == 0  # a look never blocks
        return (refs, []) if self.answers[refs[0]] is not None else ([], refs)

    def _get(self, ref: str) -> Any:
        if isinstance(self.answers[ref], Exception):
            raise self.answers[ref]
        return self.answers[ref]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(fake: FakeRay, said: list[str]) -> LeadKeeper:
    return LeadKeeper("abcdef", Lead(fake.handle), said.append)


def test_a_dead_lead_is_started_once_ray_has_made_it_again(fake: FakeRay, keeper: LeadKeeper, said: list[str]) -> None:
    keeper.look()
    fake.answers["start"] = None
    for state in ("RESTARTING", "ALIVE", "ALIVE"):
        fake.record = fake.lead(1, state)
        keeper.look()
    assert fake.calls == ["health", "start"]
    assert said == ["the lead died; it is started again"]
    fake.answers["start"], fake.now_s = {}, fake.now_s + 12
    keeper.look()
    assert said[1:] == ["the lead serves again, 12 s after it died"]
    keeper.look()
    assert fake.calls[2:] == ["health"]


def test_a_lead_whose_loop_died_is_started_again(fake: FakeRay, keeper: LeadKeeper, said: list[str]) -> None:
    """Guards `serve`, which ended four seconds after one request had failed in a step."""
    died = LoopDied("the generation loop died (IndexError: out of range)", "send the request again")
    fake.answers["health"] = RayTaskError("health", "traceback", died)
    keeper.look()
    assert fake.remade == [7]
    assert said == [f"the lead: {died.what}; its process is started again"]
    fake.answers["health"] = {"state": "serving"}
    fake.record = fake.lead(1, "ALIVE")
    keeper.look()
    assert fake.calls == ["health", "start"]


def test_deaths_of_the_loop_do_not_end_the_runtime(fake: FakeRay, keeper: LeadKeeper) -> None:
    """Each is of a request, which has a bound of its own: several of them stopped everybody's streams for good."""
    died = RayTaskError("health", "traceback", LoopDied("the generation loop died", "send the request again"))
    for restarts in range(1, 8):
        fake.answers["health"] = died
        keeper.look()
        assert len(fake.remade) == restarts
        fake.record, fake.answers["health"] = fake.lead(restarts, "ALIVE"), {"state": "serving"}
        keeper.look()
    fake.record = fake.lead(9, "ALIVE")  # of another cause
    keeper.look()
    fake.record = fake.lead(10, "ALIVE")
    with pytest.raises(RuntimeFailure, match="died 3 times"):
        keeper.look()


@pytest.mark.parametrize(("apart_s", "ends"), [(10.0, True), (40.0, False)])
def test_three_deaths_within_a_minute_are_the_end(
    fake: FakeRay, keeper: LeadKeeper, apart_s: float, ends: bool
) -> None:
    for deaths in (1, 2):
        fake.record, fake.now_s = fake.lead(deaths, "ALIVE"), fake.now_s + apart_s
        fake.answers["start"] = ActorDiedError() if deaths == 2 else {}  # also while it starts
        keeper.look()
    fake.record, fake.now_s = fake.lead(3, "RESTARTING"), fake.now_s + apart_s
    if ends:
        with pytest.raises(RuntimeFailure, match="died 3 times within 60 s"):
            keeper.look()
    else:
        keeper.look()


def test_a_lead_that_died_too_often_rests_and_is_made_anew(fake: FakeRay, keeper: LeadKeeper, said: list[str]) -> None:
    fake.record = fake.lead(3, "ALIVE")
    for _ in range(2):
        with pytest.raises(RuntimeFailure, match="died 3 times"):
            keeper.look()
        fake.now_s += 30
    assert (fake.calls, fake.remade) == ([], [])
    fake.now_s += 1
    keeper.look()
    assert fake.remade == [10]
    fake.record = fake.lead(4, "ALIVE")
    for _ in range(2):
        keeper.look()
    assert fake.calls[0] == "start"
    assert said == ["the lead died; it is started again", "the lead serves again, 0 s after it died"]


_REFUSED = StoreError("store/dense.safetensors changed", "put the file back")


def test_a_lead_whose_file_does_not_verify_is_started_until_it_does(
    fake: FakeRay, keeper: LeadKeeper, said: list[str]
) -> None:
    """Guards: the server ended, or putting the file back changed nothing."""
    fake.record, fake.answers["start"] = fake.lead(1, "ALIVE"), RayTaskError("start", "traceback", _REFUSED)
    for _ in range(6):
        keeper.look()
        fake.now_s += 1
    assert fake.calls == ["start"] * 3
    assert said == ["the lead died; it is started again", f"the lead stopped serving: {_REFUSED}"]
    fake.answers["start"], fake.now_s = {}, fake.now_s + 1
    for _ in range(2):
        keeper.look()
    assert said[2:] == ["the lead serves again, 7 s after it died"]
    assert fake.remade == []


def test_a_worker_whose_file_does_not_verify_is_made_until_it_does(fake: FakeRay, said: list[str]) -> None:
    """Guards: Ray gives up an actor whose constructor fails, and nobody made it again."""
    actor = SimpleNamespace(health=SimpleNamespace(remote=lambda: "health"))
    made: list[str] = []
    refused: list[tuple[str, TierMoeError]] = []
    group = SimpleNamespace(actors={"store/0": actor}, make_again=made.append, refuse=lambda *why: refused.append(why))
    keeper = WorkerKeeper("store/0", group, said.append)  # type: ignore[arg-type]
    fake.answers["health"] = ActorDiedError()  # it died: Ray makes it again
    keeper.look()
    fake.answers["health"] = RayTaskError("__init__", "traceback", _REFUSED)
    for _ in range(5):
        keeper.look()
        fake.now_s += 1
    assert made == ["store/0"] * 2
    assert said == [f"store/0 stopped serving: {_REFUSED}"]
    assert set(refused) == {("store/0", _REFUSED)}
    fake.answers["health"], fake.now_s = {"state": "serving"}, fake.now_s + 1
    keeper.look()
    assert said[1:] == ["store/0 serves again: its files are whole"]


class FakeGroup:
    """One replica group: its lead fails with `failure`."""

    def __init__(self) -> None:
        self.failure: TierMoeError | None = None
        self.ended = False

    def look(self) -> None:
        if self.failure is not None:
            raise self.failure


def test_one_lead_that_fails_ends_nothing_while_another_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three deaths of one of two leads ended the server."""
    config, said = RunConfig(threads=1, cluster={"replicas": 2}), list[str]()
    deployment = Deployment(Launch(config, engine_settings(config), "store", notify=said.append))
    first, second = FakeGroup(), FakeGroup()
    deployment._groups = [first, second]  # type: ignore[list-item]
    first.failure = RuntimeFailure("lead 1 of 2 died 3 times within 60 s", "see its log")
    assert deployment.watch()
    assert deployment.watch()
    assert said == [f"{first.failure.what}; it is tried again after a minute, the other leads serve"]
    second.failure = StoreError("the disk is gone", "mount it")
    with pytest.raises(RuntimeFailure, match="lead 1 of 2"):
        deployment.watch()
    first.failure = None
    assert deployment.watch()
    assert said[1:] == ["the disk is gone; it is tried again after a minute, the other leads serve"]
    first.ended = True
    monkeypatch.setattr(deploy, "node_lives", lambda: True)
    assert not deployment.watch()


def test_a_raylet_that_leaves_is_no_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GCS removes the reservations of a node that leaves: `serve` ended with exit code 0 and without a word."""
    config = RunConfig(threads=1)
    deployment = Deployment(Launch(config, engine_settings(config), "store"))
    group = FakeGroup()
    deployment._groups = [group]  # type: ignore[list-item]
    group.ended, group.failure = True, RuntimeFailure("the worker failed: its process ended", "start it again")
    monkeypatch.setattr(deploy, "node_lives", lambda: False)
    with pytest.raises(RuntimeFailure, match="raylet on this machine ended"):
        deployment.watch()


@pytest.mark.parametrize("record", [None, FakeRay.lead(0, "DEAD")])
def test_a_lead_that_ray_gave_up_is_the_end(fake: FakeRay, keeper: LeadKeeper, record: ActorRecord | None) -> None:
    fake.record = record
    with pytest.raises(RuntimeFailure, match="its process ended"):
        keeper.look()


def test_a_lead_that_hangs_is_said_then_killed(fake: FakeRay, keeper: LeadKeeper, said: list[str]) -> None:
    fake.answers["health"] = None
    for _ in range(32):
        keeper.look()
        fake.now_s += 1
    assert said == ["the lead has not answered for 7 s", "the lead has not answered for 31 s and is ended"]
    assert fake.remade == [7]


def test_a_lead_is_not_silent_while_this_process_is_stopped(fake: FakeRay, keeper: LeadKeeper, said: list[str]) -> None:
    """A machine that was suspended for a minute had its lead killed, and Ray given up for lost, when it woke."""
    fake.answers["health"] = None
    for _ in range(3):
        keeper.look()
        fake.now_s += 1
    fake.now_s += 60
    for _ in range(3):
        keeper.look()
        fake.now_s += 1
    assert (said, fake.remade) == ([], [])


def test_an_actor_that_is_gone_for_good_has_ended_and_the_lead_is_its_keepers(
    fake: FakeRay, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = {"a": "ndp/0", "b": "shard/1", "c": "lead", "d": "store/0"}

    def entry(role: str, state: str, restarts: int = 0) -> dict[str, Any]:
        address = {"IPAddress": "127.0.0.1", "Port": 1, "NodeID": "elsewhere"}
        return {"Name": f"abcdef/{role}", "State": state, "NumRestarts": restarts, "Address": address, "Pid": 7}

    table = {key: entry(role, "ALIVE") for key, role in roles.items()}
    monkeypatch.setattr(supervision, "actor_table", lambda: table)
    watch = supervision.RayWatch.__new__(supervision.RayWatch)  # without its thread
    watch._deployment, watch._here, watch._actors, watch._notify = "abcdef", "here", {}, said.append
    watch.look()
    assert said == []
    table["a"], table["b"] = entry("ndp/0", "DEAD"), entry("shard/1", "RESTARTING")
    table["c"], table["d"] = entry("lead", "DEAD"), entry("store/0", "ALIVE", restarts=1)
    watch.look()
    assert said == ["ndp/0 ended", "shard/1 died; it is started again", "store/0 died; it is started again"]
    table["b"] = entry("shard/1", "ALIVE", restarts=1)
    watch.look()
    del table["b"]  # the GCS has forgotten it
    watch.look()
    assert said[3:] == ["shard/1 ended"]
    for process in watch._actors.values():
        process.channel.close()


@pytest.mark.parametrize(("title", "killed"), [("ray::GpuWorker", True), ("another program", False)])
def test_a_pid_that_another_program_has_by_now_gets_no_signal(title: str, killed: bool) -> None:
    with subprocess.Popen([title, "30"], executable="/bin/sleep") as process:
        while psutil.Process(process.pid).cmdline()[:1] != [title]:
            pass
        remake(None, process.pid)
        if not killed:
            assert process.poll() is None
            process.terminate()
        assert process.wait(20) == -(signal.SIGKILL if killed else signal.SIGTERM)
    remake(None, process.pid)  # it has ended


_STUCK = """
import os, signal, sys, time
from tiermoe.cluster.jobs.ending import BoundedEnd
def late(number, frame):  # as in a call of Ray's that returns late
    print("signal", flush=True)
    while os.readlink("/proc/self/fd/2") != os.devnull:
        time.sleep(0.01)
    os.write(2, b"Ray's client failed a call")
    print("in order", file=sys.stderr)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, late)
with BoundedEnd(lambda: print("forced", flush=True) or True) as ending:
    {before}
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("before", "signals", "code", "words"),
    [
        ("pass", [signal.SIGINT], 130, "ending ...\n"),
        ("pass", [signal.SIGTERM], 0, "ending ...\n"),
        ("ending.serving()", [signal.SIGINT, signal.SIGINT], 130, "ending ...\n"),
        ("ending.serving(); ending.lost('Ray ended')", [], 1, "error: Ray ended; start it again\n"),
    ],
    ids=["ctrl-c while it starts", "sigterm while it starts", "ctrl-c twice", "ray is lost"],
)
def test_the_end_is_bounded(before: str, signals: list[signal.Signals], code: int, words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK.format(before=before)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        for i, number in enumerate(signals):
            assert i == 0 or process.stdout.readline() == "signal\n"  # two signals that are pending at once are one
            process.send_signal(number)
        out, errors = process.communicate(timeout=20)
        assert (process.returncode, out.replace("signal\n", "")) == (code, "forced\n")
        assert errors == words + "in order\n" * len(signals)  # native code's words are dropped, the program's are not
    finally:
        process.kill()
