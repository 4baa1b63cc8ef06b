"""`tiermoe bench compare`: order of runs, warm-up, resuming, and what makes it fail, with workers that are not real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tiermoe.actors.engine.stats import EngineStats, LayerStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.cluster.config import RunConfig
from tiermoe.cluster.jobs.bench import command
from tiermoe.cluster.jobs.bench.compare.kept import Kept
from tiermoe.cluster.jobs.bench.compare.measures import added, counters
from tiermoe.cluster.jobs.bench.compare.partial import partial_file
from tiermoe.cluster.jobs.bench.compare.report import compare
from tiermoe.cluster.jobs.bench.compare.sweep import Group, Sweep
from tiermoe.cluster.jobs.bench.serving import run_config
from tiermoe.errors import BudgetError, ConfigError, RequestError, RuntimeFailure

_PROMPTS = ((1, 2), (3, 4), (5, 6), (7, 8))


class FakeWorker:
    """Gives prompt[0], prompt[0] + 1, ... and counts one miss for each token."""

    def __init__(self, config: RunConfig, log: list[str], shift: Callable[[str], int]) -> None:
        self.name, self.log, self._shift = f"{config.policy}@{config.budget}/{config.link.gbps}", log, shift
        self._policy, self._stats = config.policy, EngineStats(layers=[LayerStats()], executor="emulated")

    def submit(self, request: GenerationRequest) -> list[TokenEvent]:
        self.log.append(f"{self.name} {list(request.prompt_ids)}")
        count, first = request.sampling.max_tokens, request.prompt_ids[0] + self._shift(self._policy)
        self._stats.layers[0].misses += count
        tokens = tuple(range(first, first + count))
        return [TokenEvent(request.request_id, tokens, "length", ttft_s=0.1, tpot_s=0.01)]

    def stats(self) -> EngineStats:
        return self._stats

    def reset_stats(self) -> None:
        self._stats.layers[0] = LayerStats()

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


class Starter:
    """Starts fake workers; raises at the start of one by name, if asked to."""

    def __init__(self, shift: Callable[[str], int] = lambda policy: 0) -> None:
        self.log: list[str] = []
        self.fail: str | None = None
        self._shift = shift

    def __call__(self, config: RunConfig) -> FakeWorker:
        worker = FakeWorker(config, self.log, self._shift)
        if worker.name == self.fail:
            raise KeyboardInterrupt
        self.log.append(f"{worker.name} started")
        return worker


def _sweep(**changes: Any) -> Sweep:
    given: dict[str, Any] = {
        "policies": ("on-demand", "next-gate"), "budgets": ("0.25",), "links": (2.0,), "prompts": _PROMPTS,
        "repeats": 2, "max_tokens": 3,
    }  # fmt: skip
    return Sweep(run_config(None), **(given | changes))


def _scored(worker: Any, progress: Any) -> dict[str, Any]:
    worker.log.append(f"{worker.name} scored")
    return {"perplexity_ratio": 1.01, "top1_agreement": 0.9, "kl_nats": 0.02}


def test_policies_take_turns_and_warm_up_is_not_counted() -> None:
    start = Starter()
    report, _ = compare(_sweep(prompts=_PROMPTS[:1], warm=((9,),)), start=start)
    a, b = "on-demand@0.25/2.0", "next-gate@0.25/2.0"
    assert start.log == [
        f"{a} started", f"{b} started", f"{a} [9]", f"{b} [9]",
        f"{a} [1, 2]", f"{b} [1, 2]", f"{a} [1, 2]", f"{b} [1, 2]", f"{b} closed", f"{a} closed",
    ]  # fmt: skip
    row = report.rows[0]
    assert (row["policy"], row["hit_rate"], row["ttft_ms"]) == ("on-demand", 0.0, pytest.approx(100.0))
    assert row["tpot_ms"] == pytest.approx(10.0)
    assert row["spread"]["misses"]["values"] == (3.0, 3.0)  # of two repetitions; the warm-up's are not there
    assert row["layers"] == [{"misses": 6.0}]
    assert "hits" not in row["spread"]  # zero everywhere


def test_one_group_is_closed_before_the_next_starts() -> None:
    start = Starter()
    report, _ = compare(_sweep(budgets=("0.25", "0.5"), links=(2.0, None), policies=("on-demand",)), start=start)
    ends = [line for line in start.log if line.endswith(("started", "closed"))]
    names = ["on-demand@0.25/2.0", "on-demand@0.25/None", "on-demand@0.5/2.0", "on-demand@0.5/None"]
    assert ends == [f"{name} {what}" for name in names for what in ("started", "closed")]
    assert [(row["budget"], row["link_gbps"]) for row in report.rows] == [
        ("0.25", 2.0), ("0.25", None), ("0.5", 2.0), ("0.5", None),
    ]  # fmt: skip


def test_fresh_prompts_are_each_met_once_after_a_few_tokens_to_warm_up() -> None:
    sweep = _sweep(fresh=True, prompts=(*_PROMPTS, (9,)), policies=("on-demand",))
    assert [list(sweep.round(n)) for n in range(2)] == [[0, 1], [2, 3]]
    assert sweep.warm_up == ((1, 2),)
    start = Starter()
    compare(sweep, start=start)
    name = "on-demand@0.25/2.0"
    assert start.log[2:-1] == [f"{name} {list(p)}" for p in _PROMPTS]


def test_lossless_policies_with_other_tokens_fail_the_run() -> None:
    start = Starter(lambda policy: int(policy == "next-gate"))
    with pytest.raises(RuntimeFailure, match=r"next-gate is lossless and gives other tokens .* prompt 1"):
        compare(_sweep(), start=start)
    assert start.log[-2:] == ["next-gate@0.25/2.0 closed", "on-demand@0.25/2.0 closed"]


def test_a_lossy_policy_is_scored_and_its_tokens_are_compared() -> None:
    start = Starter(lambda policy: int(policy == "context-ndp-3bit"))
    report, _ = compare(_sweep(policies=("context-ndp-3bit", "on-demand")), start=start, score=_scored)
    lossy, lossless = report.rows
    assert (lossy["perplexity_ratio"], lossy["same_tokens"], lossless["perplexity_ratio"]) == (1.01, 0.0, None)
    assert [line for line in start.log if line.endswith("scored")] == ["context-ndp-3bit@0.25/2.0 scored"]
    assert "kl_nats" in report.shown


def test_an_interrupted_sweep_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    out, sweep, start = tmp_path / "out.json", _sweep(budgets=("0.25", "0.5")), Starter()
    start.fail = "next-gate@0.5/2.0"
    with pytest.raises(KeyboardInterrupt):
        compare(sweep, out, start=start)
    assert start.log[-1] == "on-demand@0.5/2.0 closed"
    again = Starter()
    report, kept = compare(sweep, out, start=again)
    assert not any("@0.25/" in line for line in again.log)
    whole, _ = compare(sweep, start=Starter())
    assert json.loads(json.dumps(report.as_dict())) == json.loads(json.dumps(whole.as_dict()))
    kept.discard()
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_an_interrupted_sweep_still_bind_the_rest(tmp_path: Path) -> None:
    out, start = tmp_path / "out.json", Starter()
    sweep, start.fail = _sweep(budgets=("0.25", "0.5")), "on-demand@0.5/2.0"
    with pytest.raises(KeyboardInterrupt):
        compare(sweep, out, start=start)
    with pytest.raises(RuntimeFailure, match="other tokens"):
        compare(sweep, out, start=Starter(lambda policy: 1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 4}, "max_tokens"),
        ({"prompts": _PROMPTS[::-1]}, "prompts"),
        ({"policies": ("next-gate", "on-demand")}, "policies, presets|policies"),
        ({"repeats": 3}, "repeats"),
        ({"fresh": True}, "fresh"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    out = tmp_path / "out.json"
    compare(_sweep(), out, start=Starter())
    with pytest.raises(ConfigError, match=f"other .*({named})"):
        Kept(out, _sweep(**changes).fingerprint())


def test_a_file_that_is_no_comparison_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    partial_file(out).write_text("[]")
    with pytest.raises(ConfigError, match="holds no part of a comparison"):
        Kept(out, {})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"policies": ()}, "--policies names nothing"),
        ({"budgets": ("0.25", "0.25")}, "names one twice"),
        ({"links": (0.0,)}, "above 0"),
        ({"repeats": 0}, "--repeat is 0"),
        ({"batch": 0}, "--batch is 0"),
        ({"policies": ("no-such",)}, "no policy 'no-such'"),
        ({"fresh": True, "repeats": 5}, "4 prompts cannot be new"),
    ],
)
def test_what_is_of_no_use_is_refused_before_a_worker_starts(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        _sweep(**changes)


def test_a_budget_that_does_not_fit_a_policy_is_refused() -> None:
    with pytest.raises(BudgetError, match="keeps every expert"):
        _sweep(policies=("on-demand", "all-resident"), budgets=("0.5",))


def test_links_are_not_emulated_on_real_hardware() -> None:
    class Real(Starter):
        def __call__(self, config: RunConfig) -> FakeWorker:
            worker = super().__call__(config)
            worker._stats = replace(worker._stats, executor="real")
            return worker

    with pytest.raises(ConfigError, match="emulated on the CPU stand-in only"):
        compare(_sweep(), start=Real())
    report, _ = compare(_sweep(links=(None,)), start=Real())
    assert report.executor == "real"


def test_counters_are_flat_and_layers_add_up() -> None:
    stats = EngineStats(layers=[LayerStats(hits=3, misses=1)], prefetch_resting=True)
    stats.count_worker("ndp/0", 2, 5)
    found = counters(stats)
    assert (found["hits"], found["hit_rate"], found["prefetch_resting"]) == (3.0, 0.75, 1.0)
    assert found["ndp_workers.ndp/0.pairs"] == 5.0
    assert "executor" not in found
    assert added([{"a": 1.0}], [{"a": 2.0, "b": 1.0}]) == [{"a": 3.0, "b": 1.0}]


def test_groups_are_named() -> None:
    assert Group("0.25", 2.0).name == "budget 0.25, 2 GB/s"
    assert Group("1GiB", None).name == "budget 1GiB, no emulated link"


def test_malformed_options_end_the_command(tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a b c\n" * 2)
    common = ["compare", "--policies", "on-demand", "--prompts", str(prompts)]
    for options, error in (
        (["--links", "fast"], ConfigError),
        (["--prompt-tokens", "0"], ConfigError),
        (["--max-tokens", "100000"], RequestError),
    ):
        assert isinstance(CliRunner().invoke(command.bench_app, [*common, *options]).exception, error)
