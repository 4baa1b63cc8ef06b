"""Limits and counters of several replicas of the server are those of all of them. The other replica is a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_api import FakeBackend, byte_tokenizer
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from tiermoe.cluster.api import shared
from tiermoe.cluster.api.admission import Admission
from tiermoe.cluster.api.keys import Key
from tiermoe.cluster.api.refusals import ApiError
from tiermoe.cluster.api.service import Service
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.shared import Admitted, Ledger, share_counters
from tiermoe.errors import RuntimeFailure

_FULL = """
import resource, signal, sys
from pathlib import Path
from tiermoe.cluster.api.metrics import Metrics
from tiermoe.cluster.api.shared import Admitted, Ledger, share_counters

folder = Path(sys.argv[1])
share_counters(folder)
metrics, ledger = Metrics(None, sharded=False, shared=folder), Ledger(folder)
places = [file.stat().st_blocks for file in sorted(folder.iterdir())]
sizes = [file.stat().st_size for file in sorted(folder.iterdir())]
for i in range(100):
    metrics.ended.labels(finished_reason=f"r{i}").inc()
    ledger.write(Admitted(i, {f"{k}" * 60: (k, i) for k in range(9)}))
assert places == [file.stat().st_blocks for file in sorted(folder.iterdir())], "room was taken later"
assert all(512 * place >= size for place, size in zip(places, sizes))
assert len(places) == 3, places
"""

_OTHER = """
import sys
from pathlib import Path
from tiermoe.cluster.api.metrics import Metrics
from tiermoe.cluster.api.shared import Admitted, Ledger, share_counters

folder = Path(sys.argv[1])
share_counters(folder)
metrics = Metrics(None, sharded=False, shared=folder)
metrics.generated.inc(30)
metrics.first.observe(0.5)
metrics.ended.labels(finished_reason="stop").inc(3)
Ledger(folder).write(Admitted(2, {"a": (3, 40), "b": (1, 0)}))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another replica, with three choices of key a and one of key b, two of them with the runtime."""
    command = [sys.executable, "-c", _OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def _refusal(admission: Admission, key: Key, tokens: list[int]) -> str:
    with pytest.raises(ApiError) as refused:
        admission.admit(key, tokens)
    assert refused.value.status == 429
    return str(refused.value.message)


def test_limits_are_of_all_replicas_until_one_dies(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    ledger = Ledger(tmp_path)
    admission = Admission(4, 2, ledger)
    assert ledger.others() == [Admitted(2, {"a": (3, 40), "b": (1, 0)})]
    assert admission.waiting_anywhere == 2
    assert "3 of 3 requests" in _refusal(admission, Key("a", requests=3), [5])
    assert "40 of 50 prompt tokens" in _refusal(admission, Key("a", tokens=50), [11])
    assert "2 requests wait" in _refusal(admission, Key("c"), [1, 1, 1])
    admission.admit(Key("c"), [1, 1])
    assert admission.waiting_anywhere == 4
    other.kill()
    other.wait()
    admission.admit(Key("a", requests=3), [5])
    assert len(list(tmp_path.glob("*.admitted"))) == 1


def test_replicas_see_each_other_whatever_the_clock_says(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was set by two seconds made each take the other for dead: limits doubled."""
    started_s = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started_s(process) + 2.0)
    assert Ledger(tmp_path).others() == [Admitted(2, {"a": (3, 40), "b": (1, 0)})]


def test_what_is_shared_takes_no_more_room_once_it_serves(tmp_path: Path) -> None:
    """On a disk that filled up, requests failed at their counts, and a page of counters without room ended the process
    (SIGBUS)."""
    subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], check=True)


def test_a_replica_that_cannot_tell_its_counts_refuses_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, key = Ledger(tmp_path), Key("a")
    admission = Admission(4, 2, ledger)
    admission.admit(key, [1])

    def full(file: int, text: bytes, place: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.os, "pwrite", full)
    with pytest.raises(ApiError, match="disk") as refused:
        admission.admit(key, [1, 1])
    assert refused.value.status == 503
    admission.leave(key)
    assert admission.waiting == 0


def test_a_disk_without_room_for_the_counts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, place: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.os, "posix_fallocate", full)
    for make in (Ledger, share_counters):
        with pytest.raises(RuntimeFailure, match=r"No space left.*make room"):
            make(tmp_path)


def test_a_ledger_grows_and_half_of_a_text_is_not_read(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    big, ledger = Admitted(1, {f"{i:064}": (i, i) for i in range(2000)}), Ledger(tmp_path)
    ledger.write(big)
    assert shared._read(tmp_path / ledger._name) == big
    (name,) = [file for file in tmp_path.glob("*.admitted") if file.name != ledger._name]
    before = ledger.others()
    assert before == [Admitted(2, {"a": (3, 40), "b": (1, 0)})]
    with name.open("r+b") as file:
        file.seek(12)
        file.write(b"?")
    assert shared._read(name) is None
    assert ledger.others() == before


def test_a_replica_has_its_part_of_the_slots_and_what_the_others_do_not_need(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    async def run() -> None:
        admission, key = Admission(6, 10, Ledger(tmp_path)), Key("c")
        admission.admit(key, [1] * 6)
        over = asyncio.Event()

        async def choice() -> None:
            async with admission.slot(key, 1):
                await over.wait()
            admission.leave(key)

        tasks = [asyncio.create_task(choice()) for _ in range(6)]
        while admission.inside < 3:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert admission.inside == 3  # the other has four choices, and its part is three
        other.kill()
        other.wait()
        admission._serve()  # as when the next choice ends
        while admission.inside < 6:
            await asyncio.sleep(0)
        over.set()
        await asyncio.gather(*tasks)
        assert admission.inside == admission.waiting == 0

    asyncio.run(run())


def test_counters_are_sums_over_all_replicas_also_dead_ones(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)  # put back afterwards
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    share_counters(tmp_path)
    backend, limits = FakeBackend(), LimitSettings()
    metrics = Service(backend, byte_tokenizer(), None, "fake", limits, shared=tmp_path).metrics
    metrics.generated.inc(12)
    metrics.first.observe(0.01)
    metrics.ended.labels(finished_reason="length").inc()
    other.kill()
    other.wait()
    families = {family.name: family for family in text_string_to_metric_families(metrics.page().decode())}
    found = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert found["tiermoe_generation_tokens_total",] == 42
    assert found["tiermoe_time_to_first_token_seconds_count",] == 2
    assert found["tiermoe_request_success_total", "stop"] == 3
    assert found["tiermoe_request_success_total", "length"] == 1
    assert families["tiermoe_generation_tokens"].documentation == "Tokens generated."
    assert found["vllm:generation_tokens_total", "0", "fake"] == 42
