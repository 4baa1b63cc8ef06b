"""`tiermoe run` on the default model, as a user runs it: real Ray, real store, real worker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiermoe.cluster.config import default_model_dir

_TIERMOE = str(Path(sys.executable).with_name("tiermoe"))
_TIMEOUT_S = 200
_CONTRACT = {
    "model": str, "policy": str, "lossless": bool, "executor": str, "prompt_tokens": int, "generated_tokens": int,
    "token_ids": list, "text": str, "ttft_s": float, "tpot_s": float, "expert_budget_bytes": int,
    "expert_bytes_peak": int, "hits": int, "misses": int, "hit_rate": float, "bytes_loaded": int, "bytes_wasted": int,
    "blocked_io_s": float, "total_io_s": float, "ndp_tokens": int, "substitutions": int, "dropped": int, "plan": dict,
    "layers": list, "versions": dict,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


def _run(*options: str) -> dict[str, Any]:
    command = [_TIERMOE, "run", "def read_config(path):", "--device", "cpu", "--max-tokens", "24", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)  # fails unless stdout is one JSON object and nothing else


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="module")
def result(trace_file: Path) -> dict[str, Any]:
    return _run("--trace", str(trace_file))


def test_the_json_contract(result: dict[str, Any]) -> None:
    wrong = {name: result.get(name) for name, kind in _CONTRACT.items() if not isinstance(result.get(name), kind)}
    assert not wrong
    assert (result["policy"], result["lossless"], result["executor"]) == ("next-gate", True, "emulated")
    assert result["generated_tokens"] == len(result["token_ids"]) == 24
    assert {"python", "tiermoe", "torch", "transformers", "ray"} <= set(result["versions"])


def test_the_budget_holds_and_the_numbers_add_up(result: dict[str, Any]) -> None:
    plan = result["plan"]
    assert 0 < result["expert_bytes_peak"] <= result["expert_budget_bytes"]
    assert result["expert_budget_bytes"] == pytest.approx(plan["expert_bytes_total"] / 4, abs=plan["slot_bytes"])
    assert result["hit_rate"] == pytest.approx(result["hits"] / (result["hits"] + result["misses"]))
    assert sum(layer["misses"] for layer in result["layers"]) == result["misses"] > 0
    assert len(result["layers"]) == plan["moe_layers"]
    assert result["bytes_loaded"] % plan["slot_bytes"] == 0
    assert [actor["name"] for actor in result["topology"]["actors"]] == ["lead", "store-0"]
    assert result["prediction"]["label"] == "predicted"
    assert (result["ndp_tokens"], result["substitutions"], result["dropped"]) == (0, 0, 0)


def test_the_timeline_opens(result: dict[str, Any], trace_file: Path) -> None:
    events = json.loads(trace_file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert spans
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)


def test_every_expert_resident_gives_the_same_tokens(result: dict[str, Any]) -> None:
    resident = _run("--policy", "all-resident", "--budget", "1.0")
    assert resident["token_ids"] == result["token_ids"]
    assert resident["text"] == result["text"]
    assert resident["misses"] == 0


@contextmanager
def _streaming() -> Iterator[subprocess.Popen[str]]:
    """A long run that has begun to print its text."""
    command = [_TIERMOE, "run", "import os", "--device", "cpu", "--max-tokens", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = ""
        while not seen.endswith("import os") and (letter := process.stdout.read(1)):
            seen += letter
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_text_streams_ends_in_order(number: signal.Signals, code: int) -> None:
    with _streaming() as process:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        ended = process.wait(timeout=60)
        assert ended == code, process.stderr.read()
        assert not psutil.wait_procs(family, timeout=10)[1]
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_death_of_the_worker_is_one_line_and_exit_code_1() -> None:
    with _streaming() as process:
        worker = next(p for p in psutil.Process(process.pid).children(recursive=True) if _title(p) == "ray::GpuWorker")
        worker.kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err.splitlines()[-1].startswith("error: the worker failed during a request: its process ended")
        assert "Traceback" not in err
        assert "raylet" not in out  # Ray's own notice stays out of the text


def _title(process: psutil.Process) -> str:
    """Ray names its workers `ray::CLASS`, and `ray::CLASS.METHOD` while a method runs."""
    return ".".join(process.cmdline()[:1]).partition(".")[0]
