"""The runner of `bench gpu`: limits, what remains of a part that fails, the page in every state, what it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiermoe.actors.engine.cache.form_slots import FormPool
from tiermoe.benchmarks.cases import GpuEstimates
from tiermoe.benchmarks.gpu import build, checks, decode, estimates, forms, page, run_parts, through_ray
from tiermoe.benchmarks.gpu.estimates import Token
from tiermoe.benchmarks.gpu.models import REAL
from tiermoe.benchmarks.gpu.run_parts import Context, Part, Record
from tiermoe.benchmarks.gpu.timeline import LayerTimes, Timeline
from tiermoe.benchmarks.gpu.transfers import Peaks
from tiermoe.cluster.jobs.bench.metrics import fill_tables
from tiermoe.kernels.forms import BLOCKS, ExpertForm

pytest.importorskip("triton")
from tiermoe.kernels.triton.forms import TritonFormKernel

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
    checks.run(Context(torch.device("cpu"), "toy", time.monotonic() + left_s, tmp_path), record)
    assert {check["name"]: check["ok"] for check in record.checks} == {
        "test_it.py: failures and errors": True, "test_it.py: ran to its end": False
    }  # fmt: skip
    assert why in record.notes[0]
    found = record.as_dict() | {"outcome": "done"}
    assert run_parts.failures({"parts": {"tests": found}}, (Part("tests", 1),)) == ["test_it.py: ran to its end"]


# -- what the first parts decide ---------------------------------------------------------------------------------------


def test_the_first_parts_take_twelve_minutes_and_every_cell_can_be_loaded() -> None:
    """What is learned soonest comes first; a preset or form that does not exist would cost time of a GPU."""
    assert [part.name for part in run_parts.PARTS[: len(run_parts.FIRST)]] == [
        "mapped", "machine", "qwen", "qwen3", "forms", "published", "recovery", "prompt", "ray"
    ]  # fmt: skip
    assert run_parts.BUILD_S + sum(part.seconds for part in run_parts.FIRST) <= 720
    for model in decode.table()["served"]:
        assert model in REAL
        assert all(decode.load_policy(cell.preset).name == cell.preset for cell in decode.cells_of(model))
    assert {"all-resident", "on-demand", "next-gate", "auto"} <= {cell.preset for cell in decode.cells_of("qwen")[:4]}
    assert set(decode.table()["published"]) <= set(REAL)
    assert set(BLOCKS) <= {form["kind"] for form in decode.table()["forms"].values()}
    assert all(shape.expert_form is not None for shape in forms.shapes(toy=False).values())


class _Clock:
    """A device's time, which graphs and what is between them let pass."""

    now_ms = 0.0

    def event(self) -> _Event:
        return _Event(self)


class _Event:
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at_ms = self.clock.now_ms

    def elapsed_time(self, end: _Event) -> float:
        return end.at_ms - self.at_ms


class _Graph:
    def __init__(self, clock: _Clock, ms: float) -> None:
        self.clock, self.ms = clock, ms

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...
    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.clock.now_ms += self.ms


def test_events_around_graphs_give_the_time_of_each_layer() -> None:
    """Two layers and a head; a step that began before the timing, and one that did not end, are left out."""
    clock, taken = _Clock(), iter((0.1, 0.2, 0.5))
    timeline = Timeline(clock.event, lambda: _Graph(clock, next(taken)))
    graphs = [timeline.graph() for _ in range(3)]

    def step(experts_ms: float) -> None:
        for graph in graphs:
            graph.replay()
            clock.now_ms += experts_ms

    step(9.0)
    assert timeline.by_layer(2) is None
    timeline.on = True
    for experts_ms in (0.04, 0.05, 0.07):
        step(experts_ms)
    graphs[0].replay()
    found = timeline.by_layer(2)
    assert found is not None
    assert (found.dense_us, found.head_us) == (pytest.approx([100, 200]), pytest.approx(500))
    assert found.experts_us == pytest.approx([50, 50])


@pytest.mark.parametrize(("auto_ms", "ok"), [(7.3, True), (7.5, False)])
def test_auto_is_judged_beside_the_fastest_preset_of_its_budget(auto_ms: float, ok: bool) -> None:
    record = Record("qwen", None)
    for preset, budget, ms in (
        ("auto", 0.5, auto_ms),
        ("on-demand", 0.5, 7.0),
        ("next-gate", 0.5, 8.0),
        ("auto", 0.25, 9.0),
    ):
        record.row("served", shape="a", preset=preset, budget=budget, tpot_ms={"median": ms})
    decode.judge_auto(record, "a")
    assert [(check["name"], check["ok"]) for check in record.checks] == [
        ("a: auto at 0.5 over the fastest preset there", ok)
    ]  # fmt: skip


@pytest.mark.parametrize(("experts_us", "ok"), [(60.0, True), (90.0, False)])
def test_layers_of_published_experts_are_judged_by_their_bytes_and_the_host(experts_us: float, ok: bool) -> None:
    """gpt-oss-120b's four experts are 53 MB: 13 us at 4 TB/s. All 36 layers are told of six."""
    record = Record("published", None)
    context = Context(torch.device("cpu"), "real", 0.0, _ROOT)
    bench: Any = SimpleNamespace(
        shape=REAL["gpt-oss"], record=record, context=context, host=SimpleNamespace(layers=[0] * 6)
    )
    times = LayerTimes([100.0] * 6, [experts_us] * 6, 500.0)
    decode.timeline_row(bench, decode.Cell("all-resident", 1.0), times, 50.0, 1.5, Peaks(50.0, 50.0, 4000.0))
    (row,) = record.rows_of("timeline")
    assert row["floor_experts_us"] == pytest.approx(13.2, abs=0.1)
    assert row["whole_ms"] == pytest.approx(1.5 + 30 * (100 + experts_us) * 1e-3)
    assert [check["ok"] for check in record.checks] == [ok]


def test_a_later_call_measures_only_what_an_earlier_one_had_no_time_for(tmp_path: Path) -> None:
    record = Record("forms", tmp_path / "r.json")
    record.row("peaks", hbm_gbps=1.0)
    record.row("form", form="q8_0", row_class="decode")
    record.check("fast", 1.0, "<=", 2.0)
    record.check("slow", 3.0, "<=", 2.0)
    again = Record("forms", None)
    again.resume(json.loads((tmp_path / "r.json").read_text()))
    assert again.rows == [{"kind": "form", "form": "q8_0", "row_class": "decode"}]
    assert [check["name"] for check in again.checks] == ["fast"]
    assert again.measured("form", form="q8_0", row_class="decode")
    assert not again.measured("form", form="q8_0", row_class="prefill")
    assert not again.measured("served", form="q8_0")


def test_forms_on_a_gpu_run_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, and within the bound of what torch computes."""

    def triton(pool: FormPool, form: ExpertForm, activation: str) -> TritonFormKernel:
        return TritonFormKernel(pool.parts(form), form, activation, forms.GATES[activation], pool.dtype)

    shape = forms.shapes(toy=True)["gpt-oss mxfp4"]
    monkeypatch.setattr(forms, "kernel_of", triton)
    monkeypatch.setattr(forms, "seconds_of", lambda device, call, repeats: (call(1), (1e-5, 1e-5))[1])
    record = Record("forms", None)
    context = Context(torch.device("cpu"), "toy", time.monotonic() + 60, _ROOT)
    forms.measure(context, record, "gpt-oss mxfp4", shape, "decode", 100.0)
    (row,) = record.rows_of("form")
    assert row["error"] < 1e-5
    assert (row["rows"], row["experts"]) == (1, 2)
    assert record.checks[0]["ok"]


def test_without_ray_the_part_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_ray, "FOR_RAY", {"no_such_module": "no-such"})
    record = Record("ray", None)
    through_ray.run(Context(torch.device("cpu"), "toy", time.monotonic() + 60, _ROOT), record)
    assert (record.notes, record.checks) == (["`tiermoe run` did not run: no-such not installed"], [])


# -- estimates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layers", "resident", "measured_ms"),
    [
        ("Qwen1.5-MoE-A2.7B, bfloat16", 24, 1.0, 6.42), ("Qwen1.5-MoE-A2.7B, bfloat16", 24, 0.5, 7.03),
        ("Qwen3-30B-A3B, bfloat16", 16, 1.0, 4.13), ("Qwen3-30B-A3B, bfloat16", 16, 0.5, 4.81),
    ],
)  # fmt: skip
def test_estimates_are_near_what_was_measured(model: str, layers: int, resident: float, measured_ms: float) -> None:
    token = Token.of(estimates.models()[model], estimates.machines()["H200, PCIe 5"])
    found = token.ms(estimates.inputs()["host_us"]["measured"], resident, layers)
    assert found == pytest.approx(measured_ms, rel=0.2)
    assert token.ms(0.0, 1.0) > token.floor_ms


def test_the_pages_of_estimates_are_what_the_command_writes(tmp_path: Path) -> None:
    pages = ("docs/gpu.md", "docs/results/gpu-estimates.md")
    (tmp_path / "docs/results").mkdir(parents=True)
    for page_ in pages:
        (tmp_path / page_).write_text((_ROOT / page_).read_text(encoding="utf-8"), encoding="utf-8")
    report = estimates.estimates(GpuEstimates(), None)
    estimates.write_page(tmp_path / pages[1], report)
    for page_ in pages:
        assert (tmp_path / page_).read_text(encoding="utf-8") == (_ROOT / page_).read_text(encoding="utf-8"), page_
    assert report.executor == "estimated"
