"""Benchmarks and experiments end to end on the default model, with hardly any tokens; their figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tiermoe.actors.policies.buddymoe.buddies import BuddyOptions
from tiermoe.actors.store.artifacts import read_profile
from tiermoe.actors.store.format import read_manifest
from tiermoe.benchmarks import overhead
from tiermoe.benchmarks.experiments import moepic, ndp
from tiermoe.benchmarks.gpu import run_parts
from tiermoe.benchmarks.gpu.decode import cells_of, table
from tiermoe.benchmarks.gpu.models import TOY
from tiermoe.benchmarks.gpu.run_parts import PARTS, Part
from tiermoe.benchmarks.gpu.run_parts import main as gpu_main
from tiermoe.benchmarks.papers import module_of
from tiermoe.benchmarks.replayed import Replayed
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench import bench_commands, run, serving
from tiermoe.cluster.jobs.bench.cells import Journal, journal_file
from tiermoe.cluster.jobs.bench.experiment import (
    Experiment,
    Grid,
    RatioBar,
    Section,
    TraceSizes,
    Variant,
    Workload,
)
from tiermoe.cluster.jobs.bench.metrics import Report
from tiermoe.cluster.jobs.bench.page import write_folder
from tiermoe.cluster.jobs.bench.run import run_experiment
from tiermoe.cluster.jobs.bench.serving import own_store
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.local_worker import run_config
from tiermoe.cluster.jobs.prepare.calibration import read_texts
from tiermoe.cluster.jobs.profile import ProfileOptions
from tiermoe.cluster.jobs.profile.collect_profile import profile_text

pytestmark = pytest.mark.slow


def bench(*words: object) -> subprocess.CompletedProcess[str]:
    """`tiermoe bench WORDS`."""
    program = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()", "bench", *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the default model with a profile of a little text."""
    folder = tmp_path_factory.mktemp("profile")
    text = folder / "text.txt"
    text.write_text("\n".join(read_texts(default_model_dir() / "calibration"))[:2500])
    store = own_store(run_config(None), folder)
    assert all(file.stat().st_nlink == 1 for file in store.iterdir())  # links would disturb who serves the files
    profile_text(store, default_model_dir(), text, ProfileOptions(output_tokens=256), progress=False)
    return store


# -- experiments -------------------------------------------------------------------------------------------------------


def tiny(
    name: str, only: dict[str, tuple[str | Variant, ...]], workload: Workload, grid: Grid, **changes: Any
) -> Experiment:  # fmt: skip
    """A shipped experiment of another workload and grid; `only`: by section, the variants that are left, by name.

    Budgets and ratios of a section are the first ones of its own.
    """
    whole: Experiment = module_of(name).experiment()
    sections: list[Section] = []
    for section in whole.sections:
        known = {variant.name: variant for variant in section.variants}
        names = only.get(section.name, tuple(known))
        found = replace(section, variants=tuple(known[one] for one in names), budgets=(section.budgets or (None,))[:1])
        if isinstance(found, Replayed) and found.ratios is not None:
            found = replace(found, ratios=grid.ratios)
        sections.append(found if section.budgets else replace(found, budgets=None))
    return replace(whole, sections=tuple(sections), workload=workload, grid=grid, **changes)


def ran(experiment: Experiment, folder: Path) -> tuple[Report, Journal]:
    """Run into a folder, and write its page."""
    report, journal = run_experiment(experiment, out=folder / f"{experiment.name}.json")
    write_folder(experiment, report.as_dict(), folder)
    return report, journal


def test_two_policies_side_by_side(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("The quick brown fox\ndef main(arguments):\n")
    grid = ("--policies", "on-demand,next-gate", "--budgets", "0.25", "--links", "2")
    size = ("--prompts", prompts, "--repeat", "1", "--max-tokens", "4")
    done = bench("compare", *grid, *size, "--json", out)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["name"], report["executor"]) == ("compare", "emulated")
    on_demand, next_gate = report["rows"]
    assert (on_demand["policy"], next_gate["policy"]) == ("on-demand", "next-gate")
    asked = [sum(row["spread"][name]["median"] for name in ("hits", "misses")) for row in report["rows"]]
    assert asked[0] == asked[1] > 0  # the same tokens, so the same experts
    assert next_gate["spread"]["prefetched_hits"]["median"] > 0
    assert "prefetched_hits" in on_demand["spread"]
    assert len(on_demand["layers"]) == 16
    assert not journal_file(out).exists()


def test_moepic_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moepic, "_RHOS", (0.25,))
    monkeypatch.setattr(moepic, "_OMEGAS", (128,))
    bar = RatioBar(section="budgets", of="moepic", over=("mixtral-offloading",), regime=True, limit=1e-3)
    experiment = tiny(
        "moepic",
        {"budgets": ("mixtral-offloading", "moepic"), "ablation": ("moepic",), "sensitivity": ("moepic", "theta 0.4"),
         "links": ("mixtral-offloading", "moepic")},
        Workload(prompt_tokens=16, max_tokens=5, warm=3, repeats=1, tau=40,
                 trace=TraceSizes(learn=2, measure=2, tokens=4), quality=EvaluationOptions(documents=2)),
        Grid(ratios=(2.5,), calibrate="resident"), bars=(bar,),
    )  # fmt: skip
    report, journal = ran(experiment, tmp_path)
    monkeypatch.setattr(run, "calibrate", lambda *a: pytest.fail("calibrated again"))
    monkeypatch.setattr(run, "record_split", lambda *a: pytest.fail("recorded again"))
    monkeypatch.setattr(run, "measure_cell", lambda *a: pytest.fail("served again"))
    assert ran(experiment, tmp_path)[0].rows == report.rows
    journal.discard()
    assert {path.name for path in tmp_path.iterdir()} == {"moepic.json", "moepic.md", *experiment.figures}
    assert [(row["section"], row["policy"]) for row in report.rows] == [
        ("links", "mixtral-offloading"), ("links", "moepic"), ("budgets", "mixtral-offloading"), ("budgets", "moepic"),
        ("ablation", "moepic"), ("sensitivity", "moepic"), ("sensitivity", "theta 0.4"),
    ]  # fmt: skip
    assert len({row["link_gbps"] for row in report.rows[2:]}) == 1
    assert 2 <= report.settings["links"][0]["ratio"] <= 3
    assert [bar.ok for bar in report.bars] == [False]
    assert sorted({row["size"] for row in report.figures["hits"]["rates"]}) == [5, 11, 16, 21, 27]


def test_activeevict_replayed_and_served(tmp_path: Path) -> None:
    experiment = tiny(
        "activeevict", {"alpha": ("lru",)},
        Workload(contexts={"short": 12, "long": 16}, warm=1, max_tokens=6, repeats=2,
                 trace=TraceSizes(learn=1, measure=1, tokens=6, distances=2)),
        Grid(("0.25",), ratios=(2.0,), latency_us=10.0, calibrate="trace"),
    )  # fmt: skip
    both, journal = ran(experiment, tmp_path)
    assert both.executor == "simulated, emulated"
    replayed = [row for row in both.rows if row["section"] != "emulated"]
    presets = {"on-demand", "moe-offloading", "moe-apex", "activeevict-lossless", "activeevict"}
    assert len(replayed) == 2 * (2 * len(presets) + 5 + 1)
    assert {row["policy"] for row in replayed if row["section"] == "table"} == presets
    for row in replayed:
        assert (row["written_back_mb"] > 0) == row["writes_back"]
        assert row["lossless"] == (row["policy"] not in ("activeevict", "moe-apex"))
        assert row["precision"] == row["recall"] == 1.0 or row["policy"].startswith("moe-")
    names = [bar.name for bar in both.bars if "emulated" not in bar.name]
    assert len(names) == 2 * 3
    emulated = [bar.name for bar in both.bars if "emulated" in bar.name]
    assert emulated == [name.replace(":", ", emulated:") for name in names]
    journal.discard()
    assert {path.name for path in tmp_path.iterdir()} == {"activeevict.md", "activeevict.json", "activeevict.png"}
    served = [row for row in both.rows if row["section"] == "emulated"]
    assert [row["preset"] for row in served[:7]] == [
        "on-demand", "moe-offloading", "hobbit", "activeevict-lossless", "activeevict", "moe-offloading", "hobbit",
    ]  # fmt: skip
    for row in served:
        assert row["link_gbps"] == replayed[0]["link_gbps"]
        assert (row["written_back_mb"] > 0) == row["writes_back"]
        assert row["precision"] == row["recall"] == 1.0 or row["policy"].startswith("moe-")
        assert row["same_tokens"] == 1.0 or not row["lossless"]
        assert len(row["spread"]["blocking_ms"]["values"]) == len(row["replayed"]["blocking_ms"]) == 2
    on_demand = served[0]  # its bytes depend on the routing alone
    values = {name: on_demand["spread"][name]["values"] for name in ("loaded_mb", "total_ms")}
    assert values["loaded_mb"] == pytest.approx(on_demand["replayed"]["loaded_mb"], rel=1e-4)
    assert values["total_ms"] == pytest.approx(on_demand["replayed"]["total_ms"], rel=1e-3)


@pytest.mark.timeout(900)  # it makes replicas where there are none yet
def test_ndp_and_decode_demands_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("context, full precision", *(f"{placement}, {kind} 3 bits" for placement in ("context", "static")
                                          for kind in ("prefix-split", "uniform")))  # fmt: skip
    monkeypatch.setattr(ndp, "_PAIRS", (names[1:3], names[3:]))
    quality = EvaluationOptions(documents=2, windows=1)
    experiment = tiny("ndp", {"quality": names}, Workload(quality=quality), Grid(("0.5",), (None,)))
    report, _ = ran(experiment, tmp_path)
    monkeypatch.setattr(serving, "start_worker", lambda *a: pytest.fail("started again"))
    assert [row["case"] for row in report.rows] == list(names)
    for row in report.rows:
        assert 0 < row["ndp_share"] < 1, row["case"]
        assert row["perplexity"] > 1.0
    (demanded,) = [bar for bar in report.bars if bar.name.startswith("bytes demanded by decode")]
    assert demanded.value == 0
    assert len(report.bars) == 2 * 2 + 1
    assert 0 < report.figures["similarity"]["own"] <= 1
    page = (tmp_path / "ndp.md").read_text()
    assert all(name in page for name in names)


# -- micro-benchmarks, and `bench gpu` ---------------------------------------------------------------------------------


def test_overhead_of_transformers_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "BATCHES", (1, 2))
    monkeypatch.setattr(overhead, "MAX_TOKENS", 8)
    words = ["overhead", "--against", "transformers", "--repeats", "1", "--json"]
    done = CliRunner().invoke(bench_commands.bench_app, words)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["name"], report["executor"], len(report["bars"])) == ("overhead", "emulated", 2)
    assert {row["case"] for row in report["rows"]} == {overhead.OURS, *overhead.REFERENCES}
    assert {row["measure"] for row in report["rows"]} >= {"tpot_s", "ttft_s"}
    assert all(row["median"] >= 0 for row in report["rows"])


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only")
def test_the_channel_s_benchmark_prints_one_json_object() -> None:
    done = bench("channel", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["name"], report["executor"], len(report["bars"])) == ("channel", "real", 4)
    ways = {f"{way} {size}" for way in ("shm", "bare ring", "grpc", "bare grpc", "ray") for size in ("8 KiB", "1 MiB")}
    assert {row["case"] for row in report["rows"]} == ways
    assert {row["measure"] for row in report["rows"]} == {"p50_us", "p99_us"}
    assert all(row["median"] > 0 for row in report["rows"])


def test_a_request_through_ray_is_measured(tmp_path: Path) -> None:
    done = bench("host", "--preset", "next-gate", "--batch", 1, "--repeats", 1, "--check", "--out", tmp_path)
    report = json.loads((tmp_path / "host.json").read_text())
    assert done.returncode == (0 if all(bar["ok"] for bar in report["bars"]) else 1)
    service = {(row["per"], row["part"]): row["all-resident"] for row in report["rows"] if row["all-resident"] != ""}
    assert set(service) == {
        ("request", "actor call"), ("request", "Ray, call to first piece"), ("token, client", "Ray, piece of a stream"),
        ("token, client", "detokenize, run"), ("token, client", "detokenize, API"),
    }  # fmt: skip
    assert service["request", "actor call"] > 0
    assert 0 < service["token, client", "detokenize, run"] < service["token, client", "detokenize, API"]


@pytest.mark.timeout(1800)
def test_every_part_of_bench_gpu_runs_at_toy_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU stand-in, by the same code that a GPU runs; all but the first part in this process, to import once."""
    child = run_parts._child

    def here(part: Part, plan: run_parts.Plan, limit_s: float, earlier: Any = None) -> dict[str, Any]:
        if part is PARTS[0]:
            return child(part, plan, limit_s, earlier)
        record, begin_s = tmp_path / f"{part.name}.json", time.monotonic()
        run_parts.run_part(part.name, plan.device, plan.sizes, begin_s + limit_s, record)
        return json.loads(record.read_text()) | {"outcome": "done", "seconds": time.monotonic() - begin_s}

    monkeypatch.setattr(run_parts, "_child", here)
    assert gpu_main(["--device", "cpu", "--sizes", "toy", "--out", str(tmp_path), "--seconds", "1700"]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {name: found["outcome"] for name, found in document["parts"].items()} == {p.name: "done" for p in PARTS}
    for part, models in (("qwen", ["qwen"]), ("qwen3", ["qwen3"]), ("published", ["gpt-oss", "qwen3-fp8"])):
        found = document["parts"][part]
        ran = [(row["shape"], row["preset"], row["budget"]) for row in found["rows"] if row["kind"] == "served"]
        cells = {model: cells_of(model)[: None if model == "qwen" else 2] for model in models}
        assert ran == [(TOY[model].name, str(cell), cell.budget) for model, of in cells.items() for cell in of]
        assert found["notes"] == [] or part == "qwen"
    forms = [row for row in document["parts"]["forms"]["rows"] if row["kind"] == "form"]
    assert len(forms) == 2 * len(table()["forms"])
    assert all(row["error"] < 1e-3 for row in forms)
    assert [row["status"] for row in document["parts"]["ray"]["rows"]] == [0]
    assert {row["kind"] for row in document["parts"]["references"]["rows"]} >= {"reference"}
    assert {row["kind"] for row in document["parts"]["host"]["rows"]} >= {"host"}
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| device_name | cpu (stands in for a GPU) |\n| sizes | toy |" in page
    assert page.count("Outcome: done.") == len(PARTS)
    assert "Not run yet." not in page


# -- profiles of experts -----------------------------------------------------------------------------------------------


def test_the_profile_of_the_default_model(profiled: Path) -> None:
    profile = read_profile(profiled, read_manifest(profiled))
    assert (profile.layers, profile.experts) == (16, 32)
    assert np.ptp(profile.activations.sum(1)) == 0  # every token picks four experts in every layer
    assert profile.binary.sum((1, 2)).tolist() == (profile.activations.sum(1) * 3).tolist()
    sizes = [profile.buddies(BuddyOptions(alpha=alpha)).sizes for alpha in (0.3, 0.6, 0.95)]
    assert (sizes[0] <= sizes[1]).all()
    assert (sizes[1] <= sizes[2]).all()
    assert sizes[2].max() == 16
    taus = profile.taus(15)
    assert len(taus) == 16
    assert all(0 < tau < 1 for tau in taus)
