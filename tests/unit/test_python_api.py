"""`tiermoe.LLM`, `tiermoe.plan` and `tiermoe.replay`: the commands' own results; `import tiermoe` loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import traces
from commands import Command

import tiermoe
from tiermoe.cluster.config import DEFAULT_LINK
from tiermoe.cluster.jobs.prepare import ensure_prepared
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.errors import BudgetError, CheckpointError, ConfigError, RequestError, RuntimeFailure


def _trace(tmp_path: Path) -> Path:
    traces.write(tmp_path / "trace", traces.header(), [[1, 2, 3], [4, 5]], 6)
    return tmp_path / "trace"


def test_the_package_is_imported_in_no_time() -> None:
    code = (
        "import sys, time; begin_s = time.process_time(); import tiermoe; took_s = time.process_time() - begin_s; "
        "assert took_s < 0.3, took_s; "
        "assert not {'torch', 'ray', 'pydantic', 'numpy'} & set(sys.modules), sorted(sys.modules); "
        "assert {'LLM', 'plan', 'replay', '__version__'} == set(dir(tiermoe))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        _ = tiermoe.llm  # type: ignore[attr-defined]


def test_a_plan_is_the_command_s(checkpoint: Path, command: Command) -> None:
    found = tiermoe.plan(str(checkpoint), policy="on-demand", budget=0.5, cluster={"shards": 2})
    args = ("--model", str(checkpoint), "--policy", "on-demand", "--budget", "0.5", "--shards", "2")
    theirs = command.json("plan", *args)
    for record in (found, theirs):
        record.pop("nodes_from")  # names what is free now
        for load in record["topology"]["loads"]:
            load.pop("host_total")
            load["resources"].pop("memory", None)
    assert json.loads(json.dumps(found)) == theirs


def test_a_replay_is_the_command_s(tmp_path: Path, command: Command) -> None:
    trace = _trace(tmp_path)
    ours = tiermoe.replay(trace, "next-gate", budget="50%")
    args = (str(trace), "--policy", "next-gate", "--budget", "50%")
    assert json.loads(json.dumps(ours)) == command.json("replay", *args)
    assert ours["machine"]["link_gbps"] == DEFAULT_LINK.gbps
    assert ours["blocked_io_s"] > 0
    table = command.json("replay", str(trace), "--policies", "on-demand, next-gate", "--budget", "50%")["rows"]
    assert [row["policy"] for row in table] == ["on-demand", "next-gate"]
    assert table[1] == json.loads(json.dumps(ours))


def test_a_refused_policy_is_a_row_beside_the_finished_ones(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refusal threw away what had been replayed. What can be known before is said before anything runs."""
    trace = _trace(tmp_path)
    (tmp_path / "failing_policy.py").write_text(
        "from tiermoe.actors.policies.eviction import Lru\nfrom tiermoe.actors.policies.registry import PolicyOptions\n"
        "class Failing(Lru):\n    Options = PolicyOptions\n    def used(self, keys): raise KeyError('boom')\n"
    )
    (tmp_path / "own.yaml").write_text("{name: own, lossless: true, eviction: 'failing_policy:Failing'}")
    monkeypatch.syspath_prepend(tmp_path)
    names = f"on-demand,{tmp_path / 'own.yaml'},context-ndp-full,next-gate"
    code, out, err = command("replay", trace, "--policies", names, "--json")
    assert code == 2
    rows = json.loads(out)["rows"]
    assert [row.get("refused", "")[:40] for row in rows] == [
        "", "policy failing_policy:Failing failed in ", "policy 'context-ndp-full' computes on an", ""
    ]  # fmt: skip
    assert rows[3]["tpot_s"] > 0
    assert err.index("refused: context-ndp-full") < err.index("replaying requests")
    code, out, _ = command("replay", trace, "--policies", names)
    assert code == 2
    assert out.count("KeyError: 'boom'; mend it") == 1
    assert "next-gate" in out
    del sys.modules["failing_policy"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"policy": "on-demnd"}, ConfigError),
        ({"budget": 2.0}, BudgetError),
        ({"threats": 2}, ConfigError),
        ({"link": {"gbps": -1}}, ConfigError),
    ],
)
def test_options_are_refused_at_once(checkpoint: Path, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tiermoe.LLM(str(checkpoint), **options)
    with pytest.raises(error):
        tiermoe.plan(str(checkpoint), **options)


def test_requests_are_refused_before_a_process_starts(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        tiermoe.LLM(str(tmp_path / "none"))
    llm = tiermoe.LLM(str(checkpoint))
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate("")
    with pytest.raises(RequestError, match="exceed the model's"):
        llm.generate(["a", "b"], max_tokens=100_000)
    with pytest.raises(RequestError, match="--temperature"):
        llm.stream("a", temperature=-1.0)
    with pytest.raises(RuntimeFailure, match="not running"):
        llm.stats()
    llm.close()


def test_one_of_several_replicas_is_started(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All were started and one was used."""
    llm = tiermoe.LLM(str(checkpoint), progress=True, cluster={"replicas": 2})
    assert llm.config.cluster.replicas == 1
    assert "one of 2 replica groups is started: `tiermoe serve` and `up` use them all" in capsys.readouterr().err


def test_a_started_process_imports_nothing_from_the_user_s_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ensure_prepared(checkpoint, tmp_path / "store", progress=False)
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("numpy", "pydantic", "trace", "profile"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the folder of the user')")
    monkeypatch.chdir(folder)
    role = Role("store/0", "store 0", "actors.store.server:StoreWorker", {"index": 0}, "path")
    with WorkerProcess(role, store) as process:
        assert process.pid
