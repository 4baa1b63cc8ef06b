"""The emulated part of `tiermoe bench activeevict`: what it runs, its measures, bars, page; and the rows it adds to."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tiermoe.actors.engine.stats import EngineStats, LayerStats, SourceStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.cluster.config import RunConfig
from tiermoe.cluster.jobs.bench import command
from tiermoe.cluster.jobs.bench.activeevict import emulated, job
from tiermoe.cluster.jobs.bench.activeevict.agreement import agreement, over_replay
from tiermoe.cluster.jobs.bench.activeevict.bars import bars_of
from tiermoe.cluster.jobs.bench.activeevict.earlier import simulated_before
from tiermoe.cluster.jobs.bench.activeevict.measures import measured, median_ratio, transfers
from tiermoe.cluster.jobs.bench.activeevict.page import page
from tiermoe.cluster.jobs.bench.activeevict.work import PRESETS, Workload
from tiermoe.cluster.jobs.bench.compare.measures import counters
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, Spread
from tiermoe.cluster.jobs.bench.prompt_split import Split
from tiermoe.cluster.jobs.bench.serving import run_config
from tiermoe.cluster.simulate.executor import Machine
from tiermoe.errors import CheckpointError, ConfigError, RuntimeFailure

_DOCS = Path(__file__).parents[2] / "docs" / "results"
_MACHINE = Machine(name="x", forward_s=8e-3, dense_s=1e-3, dense_row_s=0, expert_s=5e-4, expert_row_s=0)
_SETTINGS = {
    "repeats": 2, "prompts_each": 1, "learn": 1, "max_tokens": 8, "link_gbps": 2.0, "ratio": 1.0, "load_average": 0.5,
    "slot_bytes": 200_000, "executor": "emulated", "step_ms": 11.0, "replayed_step_ms": 10.0,
}  # fmt: skip


def row(policy: str, blocking_ms: tuple[float, float], replayed_ms: float, back: bool = False, **more: Any) -> Any:
    """Two repetitions; the medians are the means."""
    constant = {
        "total_ms": 10.0, "loaded_mb": 2.0, "written_back_mb": 2.0 * back, "redundant": 0.1, "precision": 1.0,
        "recall": 1.0, "hit_rate": 0.5, "dropped": 0.0, "tpot_ms": 9.0, "ttft_ms": 20.0, "late_ms": 1.0,
        "same_tokens": 1.0,
    }  # fmt: skip
    values = {name: [value, value] for name, value in constant.items()} | {"blocking_ms": list(blocking_ms)}
    values |= {name: list(found) for name, found in more.items()}
    replayed = {"blocking_ms": [replayed_ms, replayed_ms], "total_ms": [10.0, 10.0]}
    return {
        "context": "short", "section": "emulated", "policy": policy, "preset": policy,
        "lossless": policy != "activeevict", "writes_back": back, "budget": 0.25, "ratio": 1.0, "link_gbps": 2.0,
        **{name: sum(found) / 2 for name, found in values.items()}, "values": values, "replayed": replayed,
    }  # fmt: skip


def rows() -> list[Any]:
    return [
        row("on-demand", (6.0, 8.0), 5.0), row("moe-offloading", (9.0, 11.0), 8.0, back=True),
        row("moe-offloading", (3.0, 5.0), 2.0), row("activeevict-lossless", (5.0, 7.0), 4.0),
        row("activeevict", (4.0, 6.0), 4.5, precision=(1.0, 0.9)),
    ]  # fmt: skip


def record(bars: list[Bar], found: list[Any]) -> dict[str, Any]:
    """The result that docs/results keeps, with these emulated rows and no others."""
    kept = json.loads((_DOCS / "activeevict.json").read_text())
    kept["rows"] = [r for r in kept["rows"] if r["section"] != "emulated"] + found
    kept["settings"].pop("emulated", None)
    if found:
        kept["settings"]["emulated"] = _SETTINGS
    return kept | {"bars": [asdict(bar) | {"ok": bar.ok} for bar in bars]}


def test_bars_of_emulated_rows_stand_beside_the_simulated() -> None:
    simulated = [{k: v for k, v in row.items() if k != "values"} | {"section": "table"} for row in rows()]
    found = bars_of([*simulated, *rows()])
    assert [bar.name for bar in found[:3]] == [bar.name.replace(", emulated", "") for bar in found[3:]]
    swapped, plain, exact = found[3:]
    assert swapped.name == "short, emulated: blocking I/O, as the baselines are, which write back"
    assert (swapped.value, swapped.ok) == (pytest.approx((5 / 9 + 7 / 11) / 2), True)  # of each repetition
    assert (plain.value, plain.ok) == (pytest.approx((5 / 3 + 7 / 5) / 2), False)
    assert (exact.value, exact.ok) == (0.9, False)  # one repetition is enough
    assert found[0].value == pytest.approx(6 / 10)
    assert len(bars_of(simulated)) == 3


def test_a_baseline_that_never_blocks_in_a_repetition_is_not_left_out() -> None:
    """Guards against a ratio of the other repetitions only, which such a baseline is best in."""
    assert median_ratio([5, 6, 5], [0, 5, 4]) == 1.25
    assert median_ratio([5, 6], [0, 5]) is None
    assert median_ratio([0, 6], [0, 5]) == 1.2  # neither blocks: nothing to compare
    assert median_ratio([0], [0]) is None
    plain = row("moe-offloading", (0.0, 5.0), 2.0)
    assert math.isnan(bars_of([row("activeevict-lossless", (5.0, 5.0), 4.0), plain])[1].value)


def test_the_page_has_a_section_on_it() -> None:
    text = page(record(bars_of(rows()), rows()))
    assert "## Emulated: the engine itself on a throttled link" in text
    assert "| 0.25 | on-demand | no | 7 (6 to 8) | 10 | 2 | 0 | 10.0% |" in text
    assert "| 9 (9 to 9) | 100% | 1.40 |" in text
    assert "activeevict (lossy)" in text
    assert "| short, emulated: fetch precision and recall | 0.9 | >= 1 | missed |" in text
    assert text.index("## Emulated") < text.index("## Capacity")


def test_a_result_without_it_is_shown_as_before() -> None:
    text = page(record([], []))
    assert "mulated" not in text.partition("## Table 3")[2]
    assert "## Capacity" in text


def test_sentences_say_how_far_engine_and_replay_agree() -> None:
    first, moved, computing, after_gate, prefetching = agreement(rows(), _SETTINGS)
    assert "blocks 1.40 times" in first
    assert "from 1.11 (activeevict, short, budget 0.25) to 2.00 (moe-offloading, short, budget 0.25)" in first
    assert "Of 10 pairs of rows with one context and budget 9 have" in first  # not activeevict before its lossless self
    assert "What is moved is the same: total I/O, by the link's own clock, is 1.00" in moved
    # the engine blocks 2, 2 and 0.5 ms more; copies end 1 ms late; 10 copies of 0.2 MB a token
    assert "block 1.5 ms more a token" in after_gate
    assert "copies take 0 ms more" in after_gate
    assert "end 1 ms later" in after_gate
    assert "The rest, 0.5 ms more (50 us a copy)" in after_gate
    assert "computes 11 ms in this run, and 10 in a replay" in computing
    assert "block 2 ms more a token" in prefetching
    assert "us a copy" not in prefetching


def test_what_is_moved_differs_beyond_a_twentieth() -> None:
    fewer = [*rows(), row("on-demand", (6.0, 8.0), 5.0, total_ms=(9.0, 9.0))]
    _, moved, *_ = agreement(fewer, _SETTINGS)
    assert "What is moved differs: total I/O, by the link's own clock, is 0.90 (on-demand" in moved
    faster = [row("on-demand", (4.0, 4.0), 5.0)]
    assert "The rest, 2 ms less (200 us a copy), is in no copy: computing hides more" in list(
        agreement(faster, _SETTINGS)
    )[-1]


def test_what_a_replay_never_waits_for_has_no_ratio() -> None:
    never = row("on-demand", (1.0, 1.0), 0.0)
    assert over_replay(never, "blocking_ms") is None
    assert "nothing to compare" in next(agreement([never], _SETTINGS))


def test_measures_of_a_repetition_are_those_of_its_counters() -> None:
    def stats(scale: int) -> EngineStats:
        layer = LayerStats(
            hits=6, misses=4, late_prefetches=1, bytes_loaded_demand=300 * scale, bytes_loaded_prefetch=700 * scale,
            bytes_wasted=200, blocked_io_s=0.02 * scale, link_s=0.1, total_io_s=0.16,
        )  # fmt: skip
        sources = {"next-gate": SourceStats(queued=8, hits=4, late=1, wasted=2, cancelled=1)}
        return EngineStats(layers=[layer], prefetch_sources=sources)

    each = [stats(scale) for scale in (1, 3)]
    spread = {
        name: asdict(Spread.of([counters(found)[name] for found in each]))
        for name in counters(each[0])
        if any(counters(found)[name] for found in each)
    } | {name: asdict(Spread.of([0.01, 0.02])) for name in ("tpot_s", "ttft_s")}
    found = measured({"spread": spread, "lossless": True}, 10)
    for name, value in asdict(transfers(each[1].as_dict(), 10)).items():
        assert found["values"][name][1] == pytest.approx(value), name
    assert found["blocking_ms"] == pytest.approx(4.0)
    assert found["late_ms"] == pytest.approx(6.0)
    assert found["tpot_ms"] == pytest.approx(15.0)
    assert found["same_tokens"] == 1.0


class Worker:
    """Gives the prompt's first token again and again; with another first one where `shifted` is its policy."""

    def __init__(self, config: RunConfig, log: list[tuple[str, str]], shifted: str | None) -> None:
        self.policy, self._log, self._shift = Path(config.policy).stem, log, config.policy == shifted
        assert (config.link.gbps, config.link.latency_us) == (1.5, 10.0)

    def submit(self, request: GenerationRequest) -> list[TokenEvent]:
        self._log.append((self.policy, str(request.prompt_ids[0])))
        tokens = (request.prompt_ids[0] + self._shift,) * request.sampling.max_tokens
        return [TokenEvent(request.request_id, tokens, "length", ttft_s=0.1, tpot_s=0.01)]

    def stats(self) -> EngineStats:
        return EngineStats(layers=[LayerStats(misses=1, blocked_io_s=0.04)], executor="emulated")

    def reset_stats(self) -> None: ...

    def close(self) -> None: ...


def _emulate(
    monkeypatch: pytest.MonkeyPatch, folder: Path, shifted: str | None = None,
    contexts: tuple[str, ...] = ("short",),
) -> tuple[list[Any], dict[str, Any], list[tuple[str, str]]]:  # fmt: skip
    header = SimpleNamespace(slot_bytes=100, layers=2, top_k=2)
    monkeypatch.setattr(emulated, "prepared_store", lambda config, settings: folder)
    monkeypatch.setattr(emulated, "record_split", lambda *a: folder)
    monkeypatch.setattr(emulated, "read_split", lambda *a: SimpleNamespace(header=header))
    machines = iter((_MACHINE, _MACHINE.model_copy(update={"dense_s": 1.0})))  # the second is not to be used
    monkeypatch.setattr(emulated, "load_machine", lambda *a: next(machines))
    monkeypatch.setattr(emulated, "replay", lambda *a: [{"blocking_ms": 5.0, "total_ms": 1.0}] * 2)
    log: list[tuple[str, str]] = []
    work = Workload((("short", 1),), 1, 1, 4, (0.25, 1.0), repeats=2)
    split = Split(((1,),), ((3,), (4,)))
    link = emulated.Throttled(1.5, 1.0, _MACHINE)
    ran, settings, kept = emulated.emulate(
        run_config(None), dict.fromkeys(contexts, split), work, link, folder, None, None,
        lambda config: Worker(config, log, shifted),
    )  # fmt: skip
    assert len(kept) == len(contexts)
    return ran, settings, log


def test_presets_take_turns_on_prompts_that_none_has_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, settings, log = _emulate(monkeypatch, tmp_path)
    assert [(r["policy"], r["writes_back"]) for r in found[:7]] == [
        ("on-demand", False), ("moe-offloading", True), ("moe-apex", True), ("activeevict-lossless", False),
        ("activeevict", False), ("moe-offloading", False), ("moe-apex", False),
    ]  # fmt: skip
    assert [r["budget"] for r in found] == [0.25] * 7 + [1.0] * 7
    assert [prompt for _, prompt in log] == 2 * (["1"] * 7 + ["3"] * 7 + ["4"] * 7)
    assert [policy for policy, _ in log[7:12]] == list(PRESETS)
    assert found[0]["blocking_ms"] == pytest.approx(10.0)  # 40 ms over four tokens
    assert found[0]["replayed"]["blocking_ms"] == [5.0, 5.0]
    assert (settings["executor"], settings["step_ms"]) == ("emulated", pytest.approx(12.0))


def test_computing_is_told_of_the_context_that_the_replays_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a step of the last context beside one of the first."""
    found, settings, _ = _emulate(monkeypatch, tmp_path, contexts=("short", "long"))
    assert {r["context"] for r in found} == {"short", "long"}
    assert settings["step_ms"] == settings["replayed_step_ms"] == pytest.approx(12.0)


def test_other_tokens_of_a_lossless_preset_fail_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="activeevict-lossless is lossless and gives other tokens"):
        _emulate(monkeypatch, tmp_path, "activeevict-lossless")
    found, _, _ = _emulate(monkeypatch, tmp_path, "activeevict")
    assert [r["same_tokens"] for r in found if r["policy"] == "activeevict"] == [0.0, 0.0]


def test_a_machine_whose_link_is_its_own_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(job, "has_gpu", lambda: True)
    monkeypatch.setattr(job, "simulate", lambda *a: pytest.fail("replayed"))
    work = Workload((("short", 16),))
    with pytest.raises(ConfigError, match="CPU stand-in only"):
        job.bench_activeevict(None, work, None, None, None)
    monkeypatch.setattr(job, "has_gpu", lambda: False)
    with pytest.raises(CheckpointError, match="500"):
        job.bench_activeevict(None, replace(work, prompts_each=100), None, None, None)


def _earlier(folder: Path, **changes: Any) -> Path:
    kept, path = record([], rows()), folder / "activeevict.json"
    kept["hardware"] = {"model": "this one"}
    path.write_text(json.dumps(kept | changes))
    return path


def test_the_simulated_rows_of_an_earlier_run_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tiermoe.cluster.jobs.bench.activeevict.earlier.cpu", lambda: {"model": "this one"})
    found, settings = simulated_before(_earlier(tmp_path), run_config(None), Workload())
    assert {r["section"] for r in found} == {"table", "capacity", "alpha"}
    assert "emulated" not in settings
    assert settings["simulated_before"]["versions"]
    newer = _earlier(tmp_path, versions={"tiermoe": "9"})  # of its emulated part
    assert simulated_before(newer, run_config(None), Workload())[1] == settings
    first = json.loads(newer.read_text())
    del first["settings"]["simulated_before"]
    newer.write_text(json.dumps(first))
    _, settings = simulated_before(newer, run_config(None), Workload())
    assert settings["simulated_before"] == {"versions": {"tiermoe": "9"}}
    with pytest.raises(ConfigError, match="another contexts, max_tokens"):
        simulated_before(tmp_path / "activeevict.json", run_config(None), Workload((("short", 9),), max_tokens=9))
    with pytest.raises(ConfigError, match="another measure, ratios"):  # or what is given would be ignored
        simulated_before(tmp_path / "activeevict.json", run_config(None), Workload(measure=9, ratios=(2.5, 1.0)))
    with pytest.raises(ConfigError, match="another hardware"):
        simulated_before(_earlier(tmp_path, hardware={"model": "that"}), run_config(None), Workload())


def test_the_command_takes_the_simulated_rows_from_its_own_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []

    def bench(model: Any, work: Workload, folder: Path, earlier: Path, *rest: Any) -> tuple[Report, list[Any]]:
        given.extend([work.parts, work.repeats, folder, earlier])
        return Report("activeevict", "simulated, emulated"), []

    monkeypatch.setattr("tiermoe.cluster.jobs.bench.activeevict.job.bench_activeevict", bench)
    out = tmp_path / "out.json"
    options = ["activeevict", "--parts", "emulated", "--repeats", "3", "--out", str(out)]
    assert CliRunner().invoke(command.bench_app, options).exit_code == 0
    assert given == [("emulated",), 3, tmp_path, out]
    assert json.loads(out.read_text())["executor"] == "simulated, emulated"


@pytest.mark.parametrize("changes", [{"rows": rows()}, {"name": "moepic"}, {"settings": {}}, {"rows": 3},
                                     {"rows": [{"section": "table", "ratio": 7.0}]}])  # fmt: skip
def test_what_is_no_result_of_a_replay_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no result"):
        simulated_before(_earlier(tmp_path, **changes), run_config(None), Workload())
    with pytest.raises(ConfigError, match="holds no result"):
        simulated_before(tmp_path / "none.json", run_config(None), Workload())
    with pytest.raises(ConfigError, match="from an earlier run"):
        simulated_before(None, run_config(None), Workload())
