"""`tiermoe bench fmoe`: the split, what expert maps do on a trace, and sentences that follow the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench import page_parts
from tiermoe.cluster.jobs.bench.figures import paired, per_token
from tiermoe.cluster.jobs.bench.fmoe import job, maps, page
from tiermoe.cluster.jobs.bench.fmoe.findings import (
    ablation,
    against_baselines,
    best_policies,
    hit_rate_order,
    of_correlation,
    of_matcher,
    of_resting,
    waited_hits,
)
from tiermoe.cluster.jobs.bench.fmoe.job import FmoeReport, Workload
from tiermoe.cluster.jobs.bench.metrics import Spread
from tiermoe.cluster.jobs.bench.prompt_split import split_prompts
from tiermoe.cluster.jobs.bench.recorded import Recorded, read_split
from tiermoe.cluster.jobs.evaluate.text import load_heldout
from tiermoe.errors import CheckpointError, ConfigError


def _row(policy: str, tpot_ms: list[float], setting: str = "7:3", **figures: float) -> dict[str, Any]:
    measures = {"hit_rate": 0.5, "blocked_io_s": 0.1, "bytes_loaded": 1e6, "bytes_loaded_prefetch": 1e6, "misses": 10.0}
    measures |= {"bytes_wasted": 0.0, "late_prefetches": 0.0} | figures
    spread = {name: vars(Spread.of([value] * len(tpot_ms))) for name, value in measures.items()}
    spread["tpot_s"] = vars(Spread.of([ms / 1e3 for ms in tpot_ms]))
    return {
        "setting": setting, "policy": policy, "budget": "0.25", "link_gbps": 2.0, "hit_rate": measures["hit_rate"],
        "ttft_ms": 1.0, "tpot_ms": float(np.median(tpot_ms)), "blocked_io_s": measures["blocked_io_s"],
        "mb_loaded": measures["bytes_loaded"] / 1e6, "mb_wasted": measures["bytes_wasted"] / 1e6, "spread": spread,
        "layers": [], "quality": None,
    }  # fmt: skip


def test_no_document_is_on_both_sides_of_the_split() -> None:
    split, heldout = split_prompts(default_model_dir(), 32), load_heldout(default_model_dir())
    document = {p.ids[:32]: i for i, passages in enumerate(heldout.documents) for p in passages}
    lead = len(heldout.leading)
    sides = [{document.get(prompt[lead:]) for prompt in side} for side in (split.learn, split.measure)]
    if lead == 0:
        assert not sides[0] & sides[1]
        assert None not in sides[0] | sides[1]
    assert len(split.learn) + len(split.measure) == len(heldout.passages)
    assert {len(prompt) for prompt in (*split.learn, *split.measure)} == {32}
    first = split.first(50)
    assert (len(first.learn), len(first.measure)) == (35, 15)
    with pytest.raises(CheckpointError, match=r"gives .* prompts, not 700 and 300"):
        split.first(1000)


def test_ratios_are_paired_within_repetitions() -> None:
    slow, fast = _row("a", [10.0, 40.0, 90.0]), _row("b", [5.0, 10.0, 30.0])
    assert paired(slow, fast, "tpot_s") == pytest.approx(3.0)


def test_figures_for_each_token() -> None:
    row = _row("a", [5.0], blocked_io_s=0.02, bytes_wasted=25e4, late_prefetches=4.0)
    found = per_token(row, 10)
    assert (found.loaded_mb, found.wasted, found.late) == pytest.approx((0.1, 0.25, 0.4))
    assert (found.blocked_ms, found.rest_ms) == pytest.approx((2.0, 3.0))


def test_a_lower_tpot_is_said_to_be_lower_and_a_higher_one_is_explained_from_the_counters() -> None:
    better = [_row("fmoe", [4.0]), _row("promoe", [8.0])]
    (sentence,) = against_baselines(better, "7:3", 10)
    assert "lower in 1 of 1 cells, and 50% lower on average (the paper: 55% lower)." in sentence
    copies = [
        _row("fmoe", [8.0], blocked_io_s=0.06, hit_rate=0.4, bytes_wasted=5e5),
        _row("promoe", [4.0], blocked_io_s=0.02, hit_rate=0.6),
    ]
    (sentence,) = against_baselines(copies, "7:3", 10)
    assert "lower in 0 of 1 cells" in sentence
    assert "and 100% higher on average" in sentence
    assert "In them all (0.25 at 2 GB/s), per generated token" in sentence
    assert "in copies: its hit rate is lower (40.0% against 60.0%)" in sentence
    assert "left unused (50.0% against 0.0%)" in sentence
    host = [_row("fmoe", [8.0], blocked_io_s=0.01), _row("promoe", [4.0], blocked_io_s=0.02)]
    (sentence,) = against_baselines(host, "7:3", 10)
    assert "mostly not in copies" in sentence


def test_order_of_hit_rates_ablation_and_best() -> None:
    rows = [
        _row("fmoe", [4.0], hit_rate=0.5), _row("fmoe-ts", [5.0], hit_rate=0.6), _row("fmoe-t", [6.0], hit_rate=0.4),
        _row("mixtral-offloading", [8.0], hit_rate=0.7, blocked_io_s=0.3), _row("promoe", [7.0], hit_rate=0.3),
    ]  # fmt: skip
    order = hit_rate_order(rows, "7:3")
    assert "fmoe above mixtral-offloading in 0 of 1; mixtral-offloading above promoe in 1 of 1" in order
    semantic, delta = ablation(rows, 10)
    assert "Semantic search (S) raises the hit rate by 20.0 points on average (higher in 1 of 1 cells)" in semantic
    assert "lowers the hit rate by 10.0 points" in delta
    assert best_policies(rows, "7:3") == "Lowest TPOT: fmoe at 0.25 and 2 GB/s (4.0 ms)."
    waited = waited_hits(rows, "7:3", 10)
    assert waited is not None
    assert "70.0% against 50.0%" in waited
    assert "In 1 of these cells it waits longer for copies than fmoe, 30.0 ms" in waited
    assert waited_hits(rows[:3], "7:3", 10) is None


def test_of_the_matcher() -> None:
    figures = {
        "matcher.lag_us_p50": 2000.0, "matcher.commands": 30.0, "matcher.late": 10.0,
        "prefetch_sources.expert-map.queued": 75.0, "prefetch_sources.next-gate.queued": 25.0,
    }  # fmt: skip
    said = of_matcher([_row("fmoe", [8.0], **figures)], "7:3", 8)
    assert said is not None
    assert "2.0 ms after" in said
    assert "2.0 times what a layer takes (1.00 ms); 25.0% of them came too late, and 25.0%" in said
    assert of_matcher([_row("fmoe", [8.0])], "7:3", 8) is None


def test_a_prefetch_that_rests_is_named() -> None:
    rows = [_row("next-gate", [8.0, 8.0], prefetch_resting=1.0), _row("fmoe", [8.0])]
    assert of_resting(rows, "7:3") == (
        "Prefetch had turned itself off at the end of repetitions of next-gate at 0.25 and 2 GB/s (2 of 2)."
    )
    assert of_resting(rows[1:], "7:3") is None


def test_a_correlation_without_variance_has_no_figure() -> None:
    row = {"search": "semantic", "layer": None, "learns": True, "r": None}
    assert "cannot be given" in next(of_correlation([row | {"mean_score": 1.0, "mean_hit": 0.5, "pairs": 3}]))


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    traces.write(tmp_path / "t", traces.header(layers=5), [(1, 2), (3,), (4, 5), (1, 2)], decodes=4)
    return read_split(tmp_path / "t", 3)


def test_maps_of_what_is_measured_itself_foretell_it_all(recorded: Recorded) -> None:
    known = Recorded(recorded.header, recorded.measure, recorded.measure)
    table = {(c.search, c.layer): c for c in maps.correlations(known, 1, 50, learns=False)}
    for layer in range(1, 3):  # of two layers on, the trajectory tells iterations of random routing apart
        assert table["trajectory", layer].mean_hit == 1.0
        assert table["trajectory", layer].mean_score == pytest.approx(1.0, abs=1e-3)
    assert table["trajectory", layer].r is None  # nothing varies
    assert table["trajectory", None].pairs == 4 * 3
    new = {(c.search, c.layer): c for c in maps.correlations(recorded, 1, 50)}
    assert new["trajectory", 2].mean_hit < 1.0
    rows = maps.recalls(known, (1, 2), lambda: None)
    best = {(r.source, r.distance): r.overall for r in rows}
    assert best["next-gate", 1] == best["next-gate", 2] == 1.0
    assert best["expert-map, 1000 maps", 1] > best["popularity", 1]


def test_hit_rates_by_distance_and_capacity(recorded: Recorded) -> None:
    steps: list[int] = []
    rows = maps.hit_rates(recorded, (1, 2, 9), (2, 8), 0.5, 1.0, lambda: steps.append(1))
    assert [(r["varied"], r["distance"], r["capacity"]) for r in rows] == [
        ("distance", 1, 8), ("distance", 2, 8), ("capacity", 3, 2), ("capacity", 3, 8),
    ]  # fmt: skip
    assert len(steps) == 4
    assert [r["maps"] for r in rows] == [8, 8, 2, 8]
    assert all(0 < r["hit_rate"] < 1 for r in rows)


def test_balance_of_even_and_of_constant_routing(recorded: Recorded) -> None:
    found = maps.balance(recorded)
    assert 0 < found["persistence"] < 1
    assert found["top_share"] >= 2 / 6
    assert 0 < found["entropy"] <= 1


def test_the_page_has_every_table_and_its_data_beside_it(recorded: Recorded, tmp_path: Path) -> None:
    work = Workload(capacities=(2, 8))
    figures = page_parts.rounded(job._simulated(recorded, work, None))
    rows = [_row(policy, [5.0 + i, 6.0 + i]) for i, policy in enumerate(job.OFFLINE)]
    rows += [_row(policy, [5.0 + i, 6.0 + i], "online") for i, policy in enumerate(job.ONLINE)]
    settings = {
        "prompts_of_a_repetition": 2, "max_tokens": 4, "split": [7, 3], "trace_prompts": [3, 1], "latency_us": 10.0,
        "model": "m", "threads": 1, "prompt_tokens_each": 8, "repeats": 2, "trace_tokens": 5,
        "load_average": 0.5,
    }  # fmt: skip
    report = FmoeReport("fmoe", "emulated", rows, settings=settings, expert_maps=figures)
    page.write_page(report, tmp_path)
    text = (tmp_path / "fmoe.md").read_text()
    for part in ("## 7:3 split", "## Online", "## Ablation", "## On a recorded trace", "## Similarity", "*simulated*"):
        assert part in text
    assert all(f"| 0.25 | 2 | {policy} |" in text for policy in job.OFFLINE)
    assert "nan" not in text.lower().replace("finance", "")
    data = json.loads((tmp_path / "fmoe.json").read_text())
    assert data["rows"][0]["values"]["tpot_s"] == [0.005, 0.006]
    assert all((tmp_path / f"fmoe-{name}.png").stat().st_size > 1000 for name in ("tpot", "hits", "maps"))


def test_too_few_measured_prompts_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "record_split", lambda *a: pytest.fail("recorded"))
    with pytest.raises(ConfigError, match="3 measured prompts do not go into 5 parts"):
        job.bench_fmoe(None, 5, Workload(prompts=10), None, None)
    with pytest.raises(ConfigError, match="--max-tokens is 0"):
        Workload(max_tokens=0)
