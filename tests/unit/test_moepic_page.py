"""`tiermoe bench moepic`: links, variants, memory for a TPOT, timelines, and sentences that follow the figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces

from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.bench import page_parts
from tiermoe.cluster.jobs.bench.compare.partial import partial_file
from tiermoe.cluster.jobs.bench.compare.sweep import Sweep
from tiermoe.cluster.jobs.bench.metrics import Spread
from tiermoe.cluster.jobs.bench.moepic import findings, footprint, page, simulated, why
from tiermoe.cluster.jobs.bench.moepic.calibration import Calibration
from tiermoe.cluster.jobs.bench.moepic.hits import hit_table
from tiermoe.cluster.jobs.bench.moepic.report import MoepicReport
from tiermoe.cluster.jobs.bench.moepic.sweeps import sweeps
from tiermoe.cluster.jobs.bench.moepic.timelines import Decode, common, decode_of, joined
from tiermoe.cluster.jobs.bench.moepic.variants import write_variant
from tiermoe.cluster.jobs.bench.moepic.work import ABLATION, POLICIES, Workload
from tiermoe.cluster.jobs.bench.prompt_split import Split
from tiermoe.cluster.jobs.bench.recorded import Recorded, read_split
from tiermoe.cluster.jobs.bench.serving import run_config
from tiermoe.cluster.jobs.bench.steps import Steps
from tiermoe.errors import ConfigError, RuntimeFailure

_CALIBRATION = Calibration(
    layers=8, experts=32, top_k=4, expert_bytes=400_000, tpot_s=8e-3, moe_s=5e-4, latency_us=10.0
)
_SLOW, _FAST = 0.65, 1.6


def _row(policy: str, tpot_ms: list[float], budget: str = "0.25", **figures: Any) -> dict[str, Any]:
    measures = {"hit_rate": 0.5, "blocked_io_s": 0.1, "bytes_loaded": 1e6, "bytes_wasted": 0.0, "ttft_s": 0.1}
    measures["expert_budget_bytes"] = 1e8 * float(budget)
    measures |= {key: value for key, value in figures.items() if key in ("hit_rate", "ttft_s", findings.CONFIGURED)}
    spread = {name: asdict(Spread.of([value] * len(tpot_ms))) for name, value in measures.items()}
    spread["tpot_s"] = asdict(Spread.of([ms / 1e3 for ms in tpot_ms]))
    return {
        "setting": figures.get("setting", "budgets"), "policy": policy, "budget": budget,
        "link_gbps": figures.get("gbps", _SLOW), "hit_rate": measures["hit_rate"],
        "ttft_ms": 1e3 * measures["ttft_s"], "tpot_ms": float(np.median(tpot_ms)),
        "blocked_io_s": 0.1, "mb_loaded": 1.0, "mb_wasted": 0.0, "spread": spread, "layers": [], "quality": None,
        "perplexity_ratio": figures.get("perplexity_ratio"), "top1_agreement": figures.get("top1_agreement"),
        "kl_nats": None, "same_tokens": None,
    }  # fmt: skip


def test_a_link_is_as_fast_as_a_ratio_asks_for() -> None:
    assert _CALIBRATION.compute_s == pytest.approx(1e-3)
    assert _CALIBRATION.load_s(1.0) == pytest.approx(4 * (4e-4 + 1e-5))
    slow, fast = _CALIBRATION.link(2.5), _CALIBRATION.link(1.0)
    assert (slow, fast) == (0.65, 1.7)
    assert _CALIBRATION.ratio(slow) == pytest.approx(2.5, rel=0.02)
    assert [_CALIBRATION.in_regime(gbps) for gbps in (slow, fast, 0.1)] == [True, False, False]
    with pytest.raises(ConfigError, match="latency of 10 us alone"):
        _CALIBRATION.link(0.01)


def test_a_warm_up_that_ends_before_the_first_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="51 tokens before its last prompt, the configurator runs after 240"):
        Workload(warm=2)
    with pytest.raises(ConfigError, match="--max-tokens is 2"):
        Workload(max_tokens=2)
    with pytest.raises(ConfigError, match="--ratios names nothing"):
        Workload(ratios=())
    with pytest.raises(ConfigError, match="budget '2' is a share outside"):
        Workload(budgets=("2",))
    with pytest.raises(ConfigError, match="--budgets names one twice"):
        Workload(budgets=("0.5", "0.5"))


def test_a_variant_is_a_preset_with_other_values(tmp_path: Path) -> None:
    path = write_variant(tmp_path, "min 0.5", "next-gate", {"prefetch": {"min_useful": 0.5}})
    preset, variant = load_policy("next-gate"), load_policy(path)
    assert (variant.name, variant.prefetch.min_useful) == ("min 0.5", 0.5)
    assert variant.prefetch.kind == preset.prefetch.kind == "next-gate"
    assert preset.prefetch.min_useful != 0.5
    with pytest.raises(ConfigError, match="min_useful"):
        write_variant(tmp_path, "wrong", "next-gate", {"prefetch": {"min_useful": 2}})


def _sweeps(tmp_path: Path) -> dict[str, Sweep]:
    split = Split(tuple((i,) for i in range(6)), tuple((i,) for i in range(10, 20)))
    work = Workload(thetas=(0.4, 1.0), zetas=(0.05,))
    return sweeps(run_config(None), split, 5, work, (_SLOW, _FAST), tmp_path / "policies")


def test_sweeps_configure_themselves_every_tau_tokens(tmp_path: Path) -> None:
    found = _sweeps(tmp_path)
    assert [(name, len(sweep.groups)) for name, sweep in found.items()] == [
        ("budgets", 8), ("ablation", 2), ("sensitivity", 1),
    ]  # fmt: skip
    assert found["sensitivity"].policies == ("moepic", "theta 0.4", "theta 1", "zeta 0.05")
    for name in ("moepic", "adapmoe", "moepic-no-sp"):
        sweep = found["ablation" if name == "moepic-no-sp" else "budgets"]
        assert sweep.preset(name).split == load_policy(name).split.model_copy(update={"tau": 240})
    assert found["budgets"].preset("moe-infinity") == load_policy("moe-infinity")
    fixed, finest = (found["sensitivity"].preset(name).split for name in ("theta 0.4", "zeta 0.05"))
    assert (fixed.kind, fixed.theta, finest.kind, finest.zeta, finest.tau) == ("fixed", 0.4, "adaptive", 0.05, 240)


def test_memory_for_a_tpot_is_interpolated_and_never_falls_with_the_budget() -> None:
    points = [(10.0, 30.0), (20.0, 20.0), (40.0, 25.0), (80.0, 10.0)]
    assert footprint.least_budget(points, 25.0) == footprint.Least(15.0)
    assert footprint.least_budget(points, 15.0) == footprint.Least(60.0)  # from 20 ms at 40: more memory is not slower
    assert footprint.least_budget(points, 30.0) == footprint.Least(10.0, at_most=True)
    assert footprint.least_budget(points, 9.0) == footprint.Least(None)


def test_targets_lie_between_the_best_of_all_and_the_middle_at_the_smallest_budget() -> None:
    rows = [_row("a", [20.0], "0.125"), _row("a", [10.0], "0.5"), _row("b", [30.0], "0.125"), _row("b", [20.0], "0.5")]
    points = footprint.points_of(rows, "budgets", _SLOW)
    assert points["a"] == [(1.25e7, 20.0), (5e7, 10.0)]
    targets = footprint.targets_of(points)
    assert len(targets) == 5
    assert 10.0 < targets[0] < targets[-1] <= 30.1
    assert {row["policy"] for row in footprint.footprints(points, targets)} == {"a", "b"}


def _event(track: int, name: str, start_ms: float, end_ms: float) -> dict[str, Any]:
    return {"ph": "X", "tid": track, "name": name, "ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}


def test_a_decode_step_of_a_timeline_is_taken_apart() -> None:
    events = [
        {"ph": "M", "tid": 1, "name": "thread_name"},
        _event(1, "L0 experts", 0, 4), _event(1, "L1 experts", 5, 10),  # the prompt
        _event(1, "L0 experts", 12, 16), _event(1, "L1 experts", 17, 20),
        _event(1, "L0 experts", 22, 24), _event(1, "L1 experts", 25, 30),
        _event(2, "L0 wait", 13, 15), _event(2, "L1 wait", 26, 28), _event(2, "L1 wait", 8, 10),
        _event(3, "L0 E1", 9, 15), _event(4, "L1 E2", 14, 18), _event(4, "L1 E3", 27, 29),
    ]  # fmt: skip
    found = decode_of(events, 2)
    assert asdict(found) == pytest.approx({
        "steps": 2, "token_ms": 10.0, "wait_ms": 2.0, "link_ms": (8 + 2) / 2, "idle_wait_ms": 0.5,
        "experts_ms": (4 + 3 + 2 + 5 - 4) / 2,
    })  # fmt: skip
    assert (found.busy_ms, found.rest_ms, found.link_share) == pytest.approx((8.0, 3.0, 0.5))
    with pytest.raises(RuntimeFailure, match="no decode step"):
        decode_of(events[:3], 2)


def test_overlapping_spans() -> None:
    merged = joined([(5, 7), (0, 2), (1, 3), (8, 12)], 1, 10)
    assert merged == [(1, 3), (5, 7), (8, 10)]
    assert common(merged, [(2, 6), (9, 20)]) == [(2, 3), (5, 6), (9, 10)]


def _decode(token_ms: float, wait_ms: float, link_ms: float) -> Decode:
    return Decode(10, token_ms, wait_ms, link_ms, 0.0, (token_ms - wait_ms) / 2)


@pytest.mark.parametrize(
    ("own", "limit_ms", "cause", "says"),
    [
        (_decode(9.0, 1.0, 5.0), 7.0, "floor", "No cache can hold the bar here: adapmoe takes only 1.25 times"),
        (_decode(16.0, 2.0, 5.0), 10.0, "host", "Not copies but the host keeps it: without any wait"),
        (_decode(16.0, 7.0, 15.0), 10.0, "link", "The link is saturated"),
        (_decode(16.0, 7.0, 8.0), 10.0, "late", "not asked for in time, while the link has room"),
    ],
)
def test_what_a_missed_bar_is_put_down_to(own: Decode, limit_ms: float, cause: str, says: str) -> None:
    assert why.cause_of(own, 8.0, limit_ms) == cause
    other = _decode(limit_ms / findings.LIMIT, 1.0, 1.0)
    record = {"budget": "0.25", "link_gbps": 0.65, "best": "adapmoe", "own": asdict(own), "other": asdict(other)}
    text = why.explained(record, 8.0)
    assert says in text
    assert "**Budget 0.25, 0.65 GB/s.**" in text


def _simulated(*tpot: tuple[str, float, float]) -> list[dict[str, Any]]:
    return [
        {"policy": name, "budget": "0.25", "link_gbps": gbps, "ratio": 2 / gbps, "tpot_ms": value}
        for name, gbps, value in tpot
    ]


def test_where_the_bar_would_hold() -> None:
    rows = _simulated(("moepic", 1, 6), ("mixtral-offloading", 1, 10), ("moe-infinity", 1, 12), ("moepic", 2, 8),
                      ("mixtral-offloading", 2, 9))  # fmt: skip
    said = why.where_it_holds(rows, "0.25")
    assert said is not None
    assert said.endswith("the bar holds with link.gbps at 1 GB/s (loading 2.0 times computing: 0.60).")
    said = why.where_it_holds(rows[3:], "0.25")
    assert said is not None
    assert "holds on none of 2 GB/s; moepic is best at 2 GB/s" in said
    assert "0.89 of the best" in said
    assert why.where_it_holds(rows, "0.5") is None


def test_bars_are_of_the_best_baseline_in_the_regime() -> None:
    rows = [
        _row("moepic", [6.0, 8.0, 6.0]), _row("adapmoe", [10.0, 10.0, 10.0]), _row("moe-infinity", [12.0, 9.0, 12.0]),
        _row("moepic", [9.0], "0.5"), _row("adapmoe", [10.0], "0.5"), _row("on-demand", [9.5], "0.5"),
        _row("moepic", [9.0], "0.125"), _row("adapmoe", [10.0], "0.125"),
        _row("moepic", [9.0], gbps=_FAST), _row("adapmoe", [10.0], gbps=_FAST),
    ]  # fmt: skip
    held, lost = findings.bars_of(rows, _CALIBRATION)
    assert (held.name, held.value, held.ok) == ("tpot over adapmoe, budget 0.25, 0.65 GB/s", pytest.approx(0.6), True)
    assert (lost.value, lost.ok) == (pytest.approx(0.9), False)
    assert findings.missed(rows, _CALIBRATION) == [("0.5", _SLOW, "adapmoe")]
    assert "holds in 1 of 2 cells" in findings.of_bars([{"ok": True}, {"ok": False}])
    assert "No cell of this run" in findings.of_bars([])


def test_sentences_follow_the_figures() -> None:
    rows = [_row("moepic", [5.0]), _row("moe-infinity", [10.0]), _row("cache-only", [4.0])]
    infinity, cache = findings.against_baselines(rows)
    assert "lower in 1 of 1 cells, 50% lower on average (the paper: 38% to 66% lower)" in infinity
    assert "lower in 0 of 1 cells, 25% higher on average, between" in cache
    table = [_row(name, [5.0 + i], setting="ablation") for i, name in enumerate(ABLATION)]
    sp, lcp, cca = findings.of_ablation(findings.ablation_rows(table))
    assert "prefetcher (random guesses instead) TPOT is 1.20 times moepic's (the paper: 1.32)" in sp
    assert "1.40 times" in lcp
    assert "1.60 times" in cca
    tpot = {"moepic": 6.0, "theta 0.4": 5.0, "theta 1": 9.0, "zeta 0.01": 6.0, "zeta 0.05": 9.0}
    varied = [_row(name, [ms], setting="sensitivity") for name, ms in tpot.items()]
    theta, zeta = findings.of_sensitivity(varied)
    assert "theta 0.4 is the fastest (5.0 ms) and theta 1 the slowest" in theta
    assert "1.20 times the fastest's" in theta
    assert "by 50.0% at most: zeta 0.01 gives 6.0 ms" in zeta
    hits = {"lcp": [0.5, 0.7], "lru": [0.4, 0.7], "lfu": [0.45, 0.6], "belady": [0.6, 0.8]}
    said = findings.of_table1(hits)
    assert said is not None
    assert "LCP at least equals LRU, the better of LRU and LFU: +5.00 points" in said
    assert "has 10.0 points more" in said
    assert "does not reach LRU" in (findings.of_table1(hits | {"lcp": [0.4, 0.6]}) or "")
    assert findings.of_table1({"lcp": [0.5]}) is None
    lossy = [_row("adapmoe", [5.0], perplexity_ratio=1.02, top1_agreement=0.9)]
    assert "perplexity is 1.0200 to 1.0200 times" in next(findings.of_quality(lossy))
    assert "1 of 1 cells" in (findings.of_configurator([_row("moepic", [5.0], **{findings.CONFIGURED: 1.0})]) or "")
    assert findings.of_configurator(rows) is None


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    out, done = tmp_path / "parts.json", list[str]()

    def measure() -> dict[str, float]:
        done.append("once")
        return {"value": 1.5}

    assert Steps(out, {"a": 1}).get("calibration", measure) == {"value": 1.5}
    again = Steps(out, {"a": 1})
    assert again.get("calibration", measure) == {"value": 1.5}
    assert again.get("none", lambda: None) is None
    assert done == ["once"]
    with pytest.raises(ConfigError, match="with other a"):
        Steps(out, {"a": 2})
    again.discard()
    assert not partial_file(out).exists()


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    traces.write(tmp_path / "t", traces.header(layers=3), [(1, 2), (3,), (4, 5), (1, 2)], decodes=6)
    return read_split(tmp_path / "t", 2)


def test_hit_rates_by_size_policy_rho_and_omega(recorded: Recorded) -> None:
    work = Workload(rhos=(0.1, 0.9), omegas=(2, 64))
    found = hit_table(recorded, work, None)
    assert (found["experts"], found["sizes"], found["tokens"], found["lcp_size"]) == (6, [1, 2, 3, 4, 5], 16, 3)
    assert all(rates == sorted(rates) for rates in (found["rates"]["belady"],))
    for policy, rates in found["rates"].items():
        assert len(rates) == 5
        assert all(rate <= best for rate, best in zip(rates, found["rates"]["belady"], strict=True)), policy
    assert [(row["rho"], row["omega"]) for row in found["lcp"]] == [(0.1, 2), (0.1, 64), (0.9, 2), (0.9, 64)]


def test_links_are_simulated_with_the_policies_that_a_trace_can_replay(recorded: Recorded, tmp_path: Path) -> None:
    sweep = _sweeps(tmp_path)["budgets"]
    found = simulated.simulate(recorded, sweep, [("0.5", _SLOW, "adapmoe")], None)
    assert found["left_out"] == ["pre-gated", "adapmoe"]
    rows = found["rows"]
    assert {row["policy"] for row in rows} == {"mixtral-offloading", "moe-infinity", "moepic"}
    slower = [row["link_gbps"] for row in rows if row["policy"] == "moepic"]
    assert slower == sorted(slower, reverse=True)
    for policy in ("mixtral-offloading", "moepic"):
        taken = [row["tpot_ms"] for row in rows if row["policy"] == policy]
        assert taken[0] < taken[-1]


def _report(recorded: Recorded, moepic_ms: float) -> MoepicReport:
    rows = [
        _row(policy, [ms, ms + 5], budget, gbps=gbps)
        for budget in ("0.125", "0.25", "0.5") for gbps in (_SLOW, _FAST)
        for ms, policy in ((moepic_ms if name == "moepic" else 20.0 + i, name) for i, name in enumerate(POLICIES))
    ]  # fmt: skip
    rows += [_row(name, [moepic_ms + i], setting="ablation") for i, name in enumerate(ABLATION)]
    rows += [_row(name, [moepic_ms + i], setting="sensitivity")
             for i, name in enumerate(("moepic", "theta 0.4", "zeta 0.01", "zeta 0.05"))]  # fmt: skip
    for row in rows:
        if row["policy"] == "adapmoe":
            row |= {"perplexity_ratio": 1.01, "top1_agreement": 0.95, "kl_nats": 0.01, "same_tokens": 0.5}
    settings = {
        "prompts_of_a_repetition": 2, "max_tokens": 24, "prompt_tokens_each": 32, "warm_prompts": 5, "repeats": 2,
        "warm_tokens": 275, "tau": 256, "latency_us": 10.0, "model": "m", "threads": 1, "load_average": 0.5,
        "links_gbps": [_SLOW, _FAST], "links_given": False, "asked": [2.5, 1.0], "budgets": ["0.125", "0.25", "0.5"],
        "trace_prompts": [2, 2], "trace_tokens": 6,
    }  # fmt: skip
    missed = findings.missed(rows, _CALIBRATION)
    timelines = [
        {"budget": budget, "link_gbps": gbps, "best": best, "own": asdict(_decode(16.0, 7.0, 15.0)),
         "other": asdict(_decode(20.0, 9.0, 18.0))}
        for budget, gbps, best in missed
    ]  # fmt: skip
    simulated = _simulated(("moepic", 1, 6), ("mixtral-offloading", 1, 10))
    points = footprint.points_of(rows, "budgets", _SLOW)
    return MoepicReport(
        "moepic", "emulated", rows, findings.bars_of(rows, _CALIBRATION), settings, (), asdict(_CALIBRATION),
        hit_table(recorded, Workload(rhos=(0.25,), omegas=(128,)), None),
        footprint.footprints(points, footprint.targets_of(points)), timelines,
        {"rows": simulated, "left_out": ["pre-gated"]} if missed else None,
    )  # fmt: skip


def test_the_page_has_every_section_and_its_data_beside_it(recorded: Recorded, tmp_path: Path) -> None:
    report = _report(recorded, 10.0)
    assert report.ok
    page.write_page(report, tmp_path)
    text = (tmp_path / "moepic.md").read_text()
    for part in ("(Table 1)", "against the budget", "### The bar", "(Table 3)", "## Sensitivity", "(Figure 8)"):
        assert part in text
    assert all(f"| 0.25 | 0.65 | {policy} |" in text for policy in POLICIES)
    assert "It holds in 2 of 2 cells." in text
    assert "bench moepic --budgets 0.125,0.25,0.5 --ratios 2.5,1 --prompts 2 --warm 5" in text
    assert "Simulated TPOT" not in text
    assert "nan" not in text.lower()
    assert "| adapmoe | 0.25 | 0.65 | 1.0100 | 95.00% | 0.01000 | 50% |" in text
    data = json.loads((tmp_path / "moepic.json").read_text())
    assert data["rows"][0]["values"]["tpot_s"] == [0.02, 0.025]
    names = ("budgets", "memory", "sensitivity")
    assert all((tmp_path / f"moepic-{name}.png").stat().st_size > 1000 for name in names)


def test_the_page_explains_a_missed_bar(recorded: Recorded) -> None:
    report = _report(recorded, 19.0)
    assert not report.ok
    text = page.page(page_parts.rounded(report.as_dict()))
    assert "It holds in 0 of 2 cells." in text
    assert "| missed |" in text
    assert text.count("The link is saturated") == 2
    assert "the bar holds with link.gbps at 1 GB/s" in text
    assert "Not among them, because a trace has not what they go by: pre-gated." in text
