"""The runner of `bench gpu`: limits, what remains of a part that fails, the page in every state, what it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiermoe.actors.engine.host_view import Asked, operands_of
from tiermoe.benchmarks.gpu import build, checks, page, run_parts
from tiermoe.benchmarks.gpu.models import REAL
from tiermoe.benchmarks.gpu.routing import Replay, RoutingTrace
from tiermoe.benchmarks.gpu.run_parts import Part, Record
from tiermoe.cluster.jobs.bench.metrics import fill_tables
from tiermoe.errors import ConfigError

_ROOT = run_parts.ROOT
PART = Part("machine", 30)
TEXT = (_ROOT / page.PAGE).read_text(encoding="utf-8")
ROW = "import json; json.dump({'rows': [{'kind': 'x'}], 'checks': [], 'goals': [], 'notes': []}, open(RECORD, 'w'));"


def _rendered(text: str, document: dict[str, Any] | None) -> str:
    return fill_tables(text, lambda name: page.block(name, document))


@pytest.mark.parametrize(
    ("code", "limit_s", "outcome", "rows", "log"),
    [
        (ROW, 30.0, "done", [{"kind": "x"}], None),
        (f"{ROW} raise SystemError('it fell off')", 30.0, "ended with status 1", [{"kind": "x"}], "it fell off"),
        ("import time; time.sleep(600)", 0.5, "cut off after", [], ""),
    ],
)
def test_a_part_that_fails_costs_only_itself(
    code: str, limit_s: float, outcome: str, rows: list[Any], log: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child runs `code`, with RECORD in place of its record's path."""
    popen = run_parts.subprocess.Popen

    def instead(command: list[str], **kwargs: Any) -> Any:
        record = command[command.index("--record") + 1]
        return popen([sys.executable, "-c", code.replace("RECORD", repr(record))], **kwargs)

    monkeypatch.setattr(run_parts.subprocess, "Popen", instead)
    monkeypatch.setattr(run_parts, "_GRACE_S", 0.0)
    found = run_parts._child(PART, run_parts.Plan(Path("unused"), "cpu", "toy", (PART,), 60.0), limit_s)
    assert found["outcome"].startswith(outcome)
    assert found["rows"] == rows
    assert ("log" in found) == (log is not None)
    assert (log or "") in found.get("log", "")


def test_parts_without_time_are_named_and_other_parts_stay(tmp_path: Path) -> None:
    found = {"rows": [], "checks": [], "goals": [], "notes": ["a note"], "outcome": "done", "seconds": 1.0}
    name = run_parts._device_name("cpu")
    before = {"device": "cpu", "sizes": "real", "device_name": name, "parts": {"loads": found, "gone": found}}
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    document = run_parts.run_all(run_parts.Plan(tmp_path, "cpu", "real", (PART,), 0.0), lambda text: None)
    assert document["parts"]["machine"]["outcome"] == "not run: no time was left"
    assert document["parts"]["loads"] == found
    assert "gone" not in document["parts"]
    assert run_parts.failures(document, (PART,)) == ["machine: not run: no time was left"]
    assert "a note" in (tmp_path / "gpu.md").read_text()


def test_a_later_call_runs_what_the_earlier_one_had_no_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells stay; what is measured anew, such as the link's peak, does not."""
    cells = [{"kind": "peaks", "h2d_gbps": 1.0}, {"kind": "decode", "preset": "moepic", "budget": 0.5, "batch": 1}]
    found = {"rows": cells, "checks": [], "goals": [], "notes": [], "outcome": "done", "seconds": 1.0}
    parts = {"qwen": found | {"notes": [f"qwen: {run_parts.NO_TIME} for drop at 0.5"]}, "machine": found}
    before = {"device": "cpu", "sizes": "real", "device_name": run_parts._device_name("cpu"), "parts": parts}
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    begun: list[Any] = []

    def child(part: Part, plan: run_parts.Plan, limit_s: float, earlier: Any) -> dict[str, Any]:
        begun.append((part.name, earlier))
        return found

    monkeypatch.setattr(run_parts, "_child", child)
    wanted = (PART, Part("qwen", 30))
    run_parts.run_all(run_parts.Plan(tmp_path, "cpu", "real", wanted, 60.0, resume=True), lambda text: None)
    assert begun == [("qwen", parts["qwen"])]
    record = Record("qwen", None)
    record.resume(parts["qwen"])
    assert record.rows == cells[1:]
    assert record.notes == []


def test_time_that_earlier_parts_left_goes_to_the_later_ones() -> None:
    parts = [Part(name, seconds) for name, seconds in (("a", 10.0), ("b", 30.0), ("c", 20.0))]
    assert run_parts.limit_of(parts, 50.0) == 10.0  # less than all together: what each has, as long as there is some
    assert run_parts.limit_of(parts, 90.0) == 20.0
    assert run_parts.limit_of(parts[2:], 90.0) == 90.0
    assert run_parts.limit_of(parts[1:], 15.0) == 15.0


def test_failures_are_checks_and_not_goals_and_on_the_stand_in_not_speed(tmp_path: Path) -> None:
    record = Record("machine", tmp_path / "r.json")
    record.check("fast", 1.0, "<=", 2.0)
    record.check("slow", 3.0, "<=", 2.0)
    record.goal("wish", 0.0, ">=", 1.0)
    found = json.loads((tmp_path / "r.json").read_text()) | {"outcome": "done"}
    assert run_parts.failures({"parts": {"machine": found}}, (PART,)) == ["slow"]
    stand_in = Record("machine", None, judged=False)
    stand_in.check("speed", 3.0, "<=", 2.0)
    stand_in.check("identity", 3.0, "<=", 2.0, always=True)
    assert [check["name"] for check in stand_in.checks] == ["identity"]


def test_the_page_without_data_claims_nothing() -> None:
    assert "claims nothing about a GPU" in TEXT
    assert "benchmarks/gpu/run.sh" in TEXT
    blocks = re.findall(r"<!-- table: (.*) -->", TEXT)
    assert blocks[:3] == ["run", "parts", "limits"]
    assert set(blocks[3:]) == {part.name for part in run_parts.PARTS}
    bare = _rendered(TEXT, None)
    assert bare.count("\nNot run yet.\n") == len(blocks)
    assert bare == TEXT or (_ROOT / "docs/results/gpu.json").exists()


def test_unknown_parts_and_a_missing_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="no part 'qwne'"):
        run_parts.chosen_parts("qwne")
    assert [part.name for part in run_parts.chosen_parts("loads,machine")] == ["machine", "loads"]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            run_parts.device_of("cuda")


def test_missing_packages_and_the_extensions_to_build_are_known_without_the_package() -> None:
    assert build.missing({"numpy": "numpy", "no_such": "no-such", "no.such": "other"}) == ["no-such", "other"]
    assert build.missing(build.NEEDED) == []
    assert [ext.name for ext in build.extensions(_ROOT)] == [
        "tiermoe.kernels._cpu", "tiermoe.kernels._launch", "tiermoe.actors.core._core",
        "tiermoe.proto._ring",
    ]  # fmt: skip


def test_headers_that_a_source_includes_are_watched() -> None:
    """Guards against an extension that is not compiled again when one of its headers changes."""
    for extension in build.extensions(_ROOT):
        watched, left = set(extension.depends), [_ROOT / source for source in extension.sources]
        folders = [_ROOT / folder for folder in extension.include_dirs]
        seen: set[Path] = set()
        while left:
            file = left.pop()
            for name in re.findall(r'^#include "(.+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
                places = ((folder / name).resolve() for folder in (file.parent, *folders))
                found = next(path for path in places if path.is_file())
                if found.is_relative_to(_ROOT) and "site-packages" not in found.parts and found not in seen:
                    seen.add(found)
                    left.append(found)
        assert {str(path.relative_to(_ROOT)) for path in seen} <= watched, extension.name


def test_nanobind_missing_is_said_with_the_remedy() -> None:
    """By setup.py, for builds without isolation; nothing of setuptools' is needed to say it."""
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "--version"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stderr == "nanobind is not installed: python -m pip install 'nanobind==3.1.0'\n"


def test_no_part_imports_ray_or_typer() -> None:
    """A GPU machine has neither. Guards against modules of the package that import them for all of their users."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(('ray', 'typer', 'click', 'fastapi', 'matplotlib'));"
        "from tiermoe.benchmarks.gpu import run_parts; print(*(part.name for part in run_parts.PARTS if part.load()));"
        "from tiermoe.benchmarks.kernels import measured"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {part.name for part in run_parts.PARTS}


def test_real_shapes_are_the_published_ones() -> None:
    """Bytes of an expert, experts of a layer, experts per token, and MoE layers, as published."""
    sizes = {
        name: (shape.expert.nbytes(2), shape.experts, shape.top_k, shape.layers - shape.dense_layers)
        for name, shape in REAL.items()
    }
    assert sizes == {
        "mixtral": (336 << 20, 8, 2, 32), "qwen": (3 * 2048 * 1408 * 2, 60, 4, 24),
        "deepseek": (3 * 2048 * 1408 * 2, 64, 6, 26), "qwen3": (3 * 2048 * 768 * 2, 128, 8, 48),
    }  # fmt: skip


def test_a_replay_answers_for_the_present_and_for_later_layers() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 3, 8)).astype(np.float32)
    trace = RoutingTrace(np.argsort(-logits, axis=2)[:, :, :2], logits, (logits,))  # foreseen as it comes
    weights = [torch.randn(8, 4) for _ in range(3)]
    replay = Replay(trace, weights, torch.device("cpu"), torch.float32)
    modules = [torch.nn.Module() for _ in range(3)]
    for module in modules:
        module.forward = lambda hidden, ids, weights: (ids, weights)  # type: ignore[method-assign]
    replay.attach(modules)
    replay.begin(2, 1)
    hidden = torch.randn(1, 4)
    ids, chosen = modules[1](hidden, torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))
    assert ids.tolist() == [trace.ids[2, 1].tolist()]
    assert chosen.sum().item() == pytest.approx(1.0)
    probes = replay.probes()
    for layer, token in ((1, 2), (2, 2), (0, 3)):  # this layer; the next, foreseen; the next token's first
        asked = Asked(probes[layer], False)
        scores = probes[layer](hidden)
        assert set(scores.topk(2)[1][0].tolist()) == set(trace.ids[token, layer].tolist())
        operands = operands_of(asked, 1)  # of a kernel, which are the present token's alone
        assert operands is not None
        weight, bias, count, softmax = operands
        assert bias is not None
        torch.testing.assert_close(torch.addmm(bias[None], hidden, weight.t()), scores)
        assert (count, softmax, operands_of(asked, 2)) == (1, False, None)
    with pytest.raises(ValueError, match="has 6 tokens"):
        replay.begin(6, 1)
    replay.close()
    assert modules[0](hidden, "as", "given") == ("as", "given")


@pytest.mark.parametrize(
    ("test", "left_s", "why"),
    [
        ("import threading; threading.Event().wait(60)", 7.0, "was cut off: no time was left"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60.0, "ended with status -9"),
        ("import os; os._exit(0)", 60.0, "ended with status 0 and no report"),
    ],
)
def test_a_test_file_that_does_not_end_has_failed(
    test: str, left_s: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a file that was cut off, all of whose tests until then had passed: it counted as a pass."""
    (tmp_path / "test_it.py").write_text(f"def test_a() -> None: ...\n\ndef test_b() -> None:\n    {test}\n")
    monkeypatch.setattr(checks, "targets", lambda context: ["test_it.py"])
    record = Record("tests", None)
    checks.run(run_parts.Context(torch.device("cpu"), "toy", time.monotonic() + left_s, tmp_path), record)
    assert {check["name"]: check["ok"] for check in record.checks} == {
        "test_it.py: failures and errors": True, "test_it.py: ran to its end": False
    }  # fmt: skip
    assert why in record.notes[0]
    found = record.as_dict() | {"outcome": "done"}
    assert run_parts.failures({"parts": {"tests": found}}, (Part("tests", 1),)) == ["test_it.py: ran to its end"]


def test_an_error_of_a_case_costs_that_case_only() -> None:
    record = Record("qwen", None)
    with record.trying("a refusal", must_run=True):
        raise ConfigError("it is too large", "make it smaller")
    with record.trying("a reference"):
        raise ValueError("it does not run")
    assert record.checks == []
    with record.trying("a cell", must_run=True):
        raise ValueError("it does not run")
    assert [(check["name"], check["ok"]) for check in record.checks] == [("a cell: ran", False)]
    assert [note.split(":")[0] for note in record.notes] == ["a refusal", "a reference failed", "a cell failed"]
    with pytest.raises(RuntimeError, match="CUDA error"), record.trying("a fault"):  # the context is gone
        raise RuntimeError("CUDA error: an illegal access")
    context = run_parts.Context(torch.device("cpu"), "toy", time.monotonic() + 60.0, _ROOT)
    assert (record.has_time(context, 5.0, "short"), record.has_time(context, 600.0, "long")) == (True, False)
    assert record.notes[-1] == f"long: {run_parts.NO_TIME}"
