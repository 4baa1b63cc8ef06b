"""What the processes of a deployment have counted: who is asked, who is named, and what that is a second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from tiermoe.actors.sample import ProcessSample, take_sample
from tiermoe.cluster import attach
from tiermoe.cluster.attach import ActorRecord, Sample, samples

_ROW = ("host", "node", 7)


class FakeRay:
    """A deployment's actors. answers: by name; an exception is raised, None: it hangs, absent: it has no `sample`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, records: list[ActorRecord], answers: dict[str, Any]) -> None:
        self.answers, self.groups, self.waits = answers, dict[str, str](), 0
        monkeypatch.setattr(attach, "actor_records", lambda: records)
        monkeypatch.setattr(attach.ray, "get_actor", self._actor)
        monkeypatch.setattr(attach.ray, "wait", self._wait)
        monkeypatch.setattr(attach.ray, "get", self._get)

    def _actor(self, name: str, namespace: str) -> Any:
        if name not in self.answers:
            raise ValueError(name)

        def options(concurrency_group: str) -> Any:
            self.groups[name] = concurrency_group
            return method

        method = SimpleNamespace(remote=lambda: name, options=options)
        return SimpleNamespace(sample=method)

    def _wait(self, calls: list[str], num_returns: int, timeout: float) -> None:
        assert (num_returns, timeout) == (len(calls), 0.5)
        self.waits += 1

    def _get(self, call: str, timeout: float) -> ProcessSample:
        assert timeout == 0  # all were waited for together
        answer = self.answers[call]
        if answer is None:
            raise GetTimeoutError(call)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _record(name: str, state: str = "ALIVE", restarts: int = 0) -> ActorRecord:
    deployment, _, role = name.partition("/")
    return ActorRecord(deployment, role, "X", state, *_ROW, restarts)


def test_all_are_asked_side_by_side_and_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ProcessSample(5.0, 7, 1024, 0.5, {"hits": 3}, {"ndp/0": {"rows_sent": 4}})
    records = [
        _record("abcdef/lead", restarts=2), _record("abcdef/ndp/0"), _record("abcdef/ndp/1", "RESTARTING", 1),
        _record("abcdef/shard/1"), _record("abcdef/matcher"), _record("abcdef.1/lead"),
        _record("abcdef/store/0", "DEAD"), _record("abcdef/store/0"),  # made again
        _record("abcdef/store/1", "DEAD"), _record("abcdef/edge/0", "DEAD"), _record("abcde0/lead"),
    ]  # fmt: skip
    answers = {
        "abcdef/lead": answer, "abcdef.1/lead": answer, "abcdef/ndp/0": None, "abcdef/shard/1": ActorDiedError(),
        "abcdef/store/0": ProcessSample(5.0, 8, 1, 0.1), "abcde0/lead": answer,
    }  # fmt: skip
    fake = FakeRay(monkeypatch, records, answers)
    found = {sample.worker: sample for sample in samples("abcdef", 0.5)}
    assert fake.waits == 1
    assert fake.groups == {"abcdef/lead": attach.CONTROL, "abcdef.1/lead": attach.CONTROL}
    assert {name: sample.problem is None for name, sample in found.items()} == {
        "lead": True, "ndp/0": False, "ndp/1": False, "shard/1": False, "matcher": False, "lead.1": True,
        "store/0": True, "store/1": False,
    }  # fmt: skip
    assert found["lead"] == Sample(
        "abcdef", "lead", "lead", "host", "node", 2, 7, 5.0, 1024, 0.5, {"hits": 3}, {"ndp/0": {"rows_sent": 4}}
    )
    assert found["lead.1"].peers == {"ndp/0.1": {"rows_sent": 4}}  # of its own replica group
    assert (found["ndp/1"].problem, found["ndp/1"].restarts, found["ndp/1"].kind) == ("it is restarting", 1, "ndp")
    assert found["ndp/0"].problem == "it does not answer"
    assert found["store/1"].problem == "it is dead"


def _sample(at_s: float, pid: int = 7, problem: str | None = None, **counters: float) -> Sample:
    peers = {"ndp/0": {"rows_sent": 10 * at_s}}
    return Sample("d", "lead", "lead", *_ROW[:2], 0, pid, at_s, 1, at_s / 4, counters, peers, problem)


@pytest.mark.parametrize(
    ("before", "hits"),
    [
        (_sample(2.0, hits=4.0), 3.0),
        (_sample(2.0, hits=40.0), 5.0),  # somebody has set it to 0
        (_sample(2.0), 5.0),
        (_sample(2.0, pid=8, hits=4.0), None),  # another process
        (_sample(2.0, problem="it does not answer"), None),
        (_sample(4.0, hits=4.0), None),
    ],
)
def test_what_it_counts_a_second(before: Sample, hits: float | None) -> None:
    rates = _sample(4.0, hits=10.0).since(before)
    if hits is None:
        assert rates is None
    else:
        assert rates is not None
        assert (rates.over_s, rates.cpu, rates.counters) == (2.0, 0.25, {"hits": hits})
        assert rates.peers == {"ndp/0": {"rows_sent": 10.0}}


def test_a_sample_is_of_this_process() -> None:
    first = take_sample({"pairs": 1})
    second = take_sample()
    assert (first.pid, first.counters, first.peers) == (second.pid, {"pairs": 1}, {})
    assert first.rss_bytes > 2**20
    assert 0 < first.cpu_s <= second.cpu_s
