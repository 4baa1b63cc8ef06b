"""Experiments: the file and what is refused, order of runs, warm-up, resuming, bars; with fake workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer import Exit
from typer.testing import CliRunner

from tiermoe.actors.engine.stats import EngineStats, LayerResidency, LayerStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.benchmarks.papers import experiment_names, module_of
from tiermoe.benchmarks.replayed import Replayed
from tiermoe.cluster.config import RunConfig, chosen_policy, load_policy
from tiermoe.cluster.jobs.bench import bench_commands, run
from tiermoe.cluster.jobs.bench.cells import Journal, Policy, journal_file
from tiermoe.cluster.jobs.bench.compare import experiment as compare
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, RatioBar, Served, Variant, Workload, variants
from tiermoe.cluster.jobs.bench.finish import finish
from tiermoe.cluster.jobs.bench.metrics import Report
from tiermoe.cluster.jobs.bench.run import run_experiment
from tiermoe.cluster.jobs.bench.serving import Split
from tiermoe.errors import BudgetError, CheckpointError, ConfigError, PolicyError, RequestError, RuntimeFailure

_PROMPTS = ((1, 2), (3, 4), (5, 6), (7, 8))


class FakeWorker:
    """Gives prompt[0], prompt[0] + 1, ... and counts one miss for each token."""

    def __init__(self, config: RunConfig, log: list[str], shift: Callable[[str], int]) -> None:
        self.name = f"{Path(config.policy).stem}@{config.budget}/{config.link.gbps}"
        self.log, self._shift, self._policy = log, shift, Path(config.policy).stem
        self.sampled = set[tuple[float, int | None]]()
        policy = load_policy("next-gate") if config.policy == "default" else chosen_policy(config.policy)
        self.settings = SimpleNamespace(policy=policy)
        self._stats = EngineStats(layers=[LayerStats()], executor="emulated")

    def submit(self, request: GenerationRequest) -> list[TokenEvent]:
        self.log.append(f"{self.name} {list(request.prompt_ids)}")
        self.sampled.add((request.sampling.temperature, request.sampling.seed))
        count, first = request.sampling.max_tokens, request.prompt_ids[0] + self._shift(self._policy)
        self._stats.layers[0].misses += count
        tokens = tuple(range(first, first + count))
        return [TokenEvent(request.request_id, tokens, "length", ttft_s=0.1, tpot_s=0.01)]

    def stats(self) -> EngineStats:
        return self._stats

    def residency(self) -> list[LayerResidency]:
        return [LayerResidency((0, 2), (0, 5))]

    def reset_stats(self) -> None:
        self._stats.layers[0] = LayerStats()

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


class Starter:
    """Starts fake workers; raises at the start of one by name, if asked to."""

    def __init__(self, shift: Callable[[str], int] = lambda policy: 0, executor: str = "emulated") -> None:
        self.log: list[str] = []
        self.fail: str | None = None
        self.sampled = set[tuple[float, int | None]]()
        self._shift, self._executor = shift, executor

    def __call__(self, config: RunConfig) -> FakeWorker:
        worker = FakeWorker(config, self.log, self._shift)
        worker.sampled = self.sampled
        worker._stats = replace(worker._stats, executor=self._executor)
        if worker.name == self.fail:
            raise KeyboardInterrupt
        self.log.append(f"{worker.name} started")
        return worker


_PROMPTS_FILE = Path("prompts.txt")


def _experiment(
    chosen: tuple[str | Variant, ...] = ("on-demand", "next-gate"), budgets: tuple[str, ...] = ("0.25",),
    links: tuple[float | None, ...] = (2.0,), score: Any = "none", bars: tuple[RatioBar, ...] = (), **workload: Any,
) -> Experiment:  # fmt: skip
    work: dict[str, Any] = {"repeats": 2, "max_tokens": 3, "fresh": False, "prompts_file": _PROMPTS_FILE}
    return Experiment(
        name="x", title="X", workload=Workload(**work | workload), grid=Grid(budgets, links), bars=bars,
        sections=(Served("s", variants(*chosen), score=score),),
    )  # fmt: skip


@pytest.fixture
def passages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*prompts: tuple[int, ...], warm: tuple[tuple[int, ...], ...] = ()) -> None:
        monkeypatch.setattr(run, "_passages", lambda *a: {"": Split(warm, prompts)})

    use(*_PROMPTS)
    return use


def _scored(worker: Any, progress: Any) -> dict[str, Any]:
    worker.log.append(f"{worker.name} scored")
    return {"perplexity_ratio": 1.01, "top1_agreement": 0.9, "kl_nats": 0.02}


def _run(experiment: Experiment, start: Starter, out: Path | None = None) -> tuple[Report, Journal]:
    return run_experiment(experiment, out=out, start=start, score=_scored)


# -- order of runs -----------------------------------------------------------------------------------------------------


def test_policies_take_turns_and_warm_up_is_not_counted(passages: Callable[..., None]) -> None:
    passages((1, 2), warm=((9,),))
    start = Starter()
    report, _ = _run(_experiment(), start)
    a, b = "on-demand@0.25/2.0", "next-gate@0.25/2.0"
    assert start.log == [
        f"{a} started", f"{b} started", f"{a} [9]", f"{b} [9]",
        f"{a} [1, 2]", f"{b} [1, 2]", f"{a} [1, 2]", f"{b} [1, 2]", f"{b} closed", f"{a} closed",
    ]  # fmt: skip
    row = report.rows[0]
    assert (row["policy"], row["hit_rate"]) == ("on-demand", 0.0)
    assert (row["ttft_ms"], row["tpot_ms"]) == pytest.approx((100.0, 10.0))
    assert row["spread"]["misses"]["values"] == [3.0, 3.0]  # of two repetitions, without the warm-up
    assert row["layers"] == [{"misses": 6.0}]
    assert "hits" not in row["spread"]  # zero everywhere


@pytest.mark.usefixtures("passages")
def test_lossless_policies_with_other_tokens_fail_the_run() -> None:
    start = Starter(lambda policy: int(policy == "next-gate"))
    with pytest.raises(RuntimeFailure, match=r"next-gate is lossless and gives other tokens .* prompt 1"):
        _run(_experiment(), start)
    assert start.log[-2:] == ["next-gate@0.25/2.0 closed", "on-demand@0.25/2.0 closed"]


@pytest.mark.usefixtures("passages")
def test_links_are_not_emulated_on_real_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="emulated on the CPU stand-in only"):
        _run(_experiment(), Starter(executor="real"))
    report, _ = _run(_experiment(links=(None,)), Starter(executor="real"))
    assert report.executor == "real"
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    with pytest.raises(ConfigError, match="emulated on the CPU stand-in only"):  # before anything starts
        _run(_experiment(), Starter())


@pytest.mark.usefixtures("passages")
@pytest.mark.parametrize("round_number", [0, 1, 2])
def test_a_variant_that_fails_leaves_the_others_their_figures(tmp_path: Path, round_number: int) -> None:
    """One failure threw away all that had been measured. round_number: 0 while it starts, 1 and 2 while it serves."""
    out, experiment = tmp_path / "out.json", _experiment(budgets=("0.25", "0.5"))

    class Failing(Starter):
        def __call__(self, config: RunConfig) -> FakeWorker:
            worker, served = super().__call__(config), 0
            if worker.name != "next-gate@0.25/2.0":
                return worker

            def submit(request: GenerationRequest) -> list[TokenEvent]:
                nonlocal served
                served += 1
                if served > 4 * (round_number - 1):
                    raise PolicyError("policy p failed", "mend it")
                return FakeWorker.submit(worker, request)

            if round_number == 0:
                raise PolicyError("policy p failed", "mend it")
            worker.submit = submit  # type: ignore[method-assign]
            return worker

    start = Failing()
    report, _ = _run(experiment, start, out)
    assert [(row["policy"], row["budget"]) for row in report.rows] == [
        ("on-demand", "0.25"), ("on-demand", "0.5"), ("next-gate", "0.5")
    ]  # fmt: skip
    assert report.rows[0]["spread"]["misses"]["values"] == [12.0, 12.0]
    last = report.as_dict()["rows"][-1]
    assert (last["policy"], last["budget"], last["refused"]) == ("next-gate", "0.25", "policy p failed; mend it")
    with pytest.raises(Exit) as ended:
        finish(lambda progress: report, as_json=True, check=False)
    assert ended.value.exit_code == 2
    again = Starter()
    _run(experiment, again, out)  # the cell of the mended policy is measured again
    assert {line.partition(" ")[0] for line in again.log} == {"on-demand@0.25/2.0", "next-gate@0.25/2.0"}


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("passages")
def test_an_interrupted_experiment_resumes(tmp_path: Path) -> None:
    out, experiment, start = tmp_path / "out.json", _experiment(budgets=("0.25", "0.5")), Starter()
    start.fail = "next-gate@0.5/2.0"
    with pytest.raises(KeyboardInterrupt):
        _run(experiment, start, out)
    assert start.log[-1] == "on-demand@0.5/2.0 closed"
    with pytest.raises(RuntimeFailure, match="other tokens"):  # the recorded tokens bind the rest
        _run(experiment, Starter(lambda policy: 1), out)
    again = Starter()
    report, journal = _run(experiment, again, out)
    assert not any("@0.25/" in line for line in again.log)
    whole, _ = _run(experiment, Starter())
    found, expected = (json.loads(json.dumps(r.as_dict())) for r in (report, whole))
    for record in (found, expected):
        del record["settings"]["load_average"]
    assert found == expected
    journal.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("passages")
def test_other_settings_are_refused(tmp_path: Path) -> None:
    out, lfu = tmp_path / "out.json", Variant("next-gate", changes={"eviction": "lfu"})
    _run(_experiment(), Starter(), out)
    changed: tuple[tuple[dict[str, Any], str], ...] = (
        ({"max_tokens": 4}, "max_tokens"), ({"repeats": 3}, "repeats"), ({"fresh": True}, "fresh"),
        ({"chosen": ("next-gate", "on-demand")}, "policies"), ({"chosen": ("on-demand", lfu)}, "policies"),
    )  # fmt: skip
    for changes, named in changed:
        with pytest.raises(ConfigError, match=f"other .*({named})"):
            _run(_experiment(**changes), Starter(), out)


def test_other_prompts_and_files_that_are_no_journal_are_refused(tmp_path: Path, passages: Callable[..., None]) -> None:
    out = tmp_path / "out.json"
    _run(_experiment(), Starter(), out)
    passages(*_PROMPTS[::-1])
    with pytest.raises(ConfigError, match="other prompts"):
        _run(_experiment(), Starter(), out)
    journal_file(out).write_text("[]")
    with pytest.raises(ConfigError, match="holds no part of an experiment"):
        Journal(out, {})


# -- bars --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("passages")
def test_a_ratio_bar_is_over_the_best_baseline_of_each_of_its_cells() -> None:
    bar = RatioBar(section="s", of="next-gate", over=("on-demand",), measure="misses", budgets=("0.5",), limit=0.9)
    experiment = _experiment(budgets=("0.25", "0.5"), bars=(bar,))
    report, _ = _run(experiment, Starter())
    (found,) = report.bars
    assert (found.name, found.value) == ("misses of next-gate over on-demand, budget 0.5, 2 GB/s", 1.0)
    assert not report.ok


# -- options -----------------------------------------------------------------------------------------------------------


def _of(name: str, **options: Any) -> Experiment:
    found: Experiment = (compare if name == "compare" else module_of(name).experiment)(**options)
    return found


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_of_a_clone_is_sound(name: str) -> None:
    experiment = _of(name)
    assert experiment.name == name
    names = [section.name for section in experiment.sections]
    assert len(set(names)) == len(names)
    for section in experiment.sections:
        assert len({variant.name for variant in section.variants}) == len(section.variants)
        assert all(variant.policy(experiment.workload.tau) for variant in section.variants)
    compared = {comparison.section for comparison in getattr(module_of(name), "COMPARISONS", ())}
    assert compared | {bar.section for bar in experiment.bars} <= set(names)


WRONG: list[tuple[str, Mapping[str, Any], str]] = [
    ("moepic", {"warm": 2}, "51 tokens before its last prompt, the configurator runs after 240"),
    ("moepic", {"ratios": ""}, "--ratios names nothing"),
    ("moepic", {"ratios": "fast"}, "--ratios is fast"),
    ("moepic", {"budgets": "2"}, "budget '2' is a share outside"),
    ("moepic", {"budgets": "0.5,0.5"}, "--budgets names one twice"),
    ("buddymoe", {"ratio": 0.0}, "--ratio must be above 0"),
    ("buddymoe", {"link": -1.0}, "--link must be above 0"),
    ("buddymoe", {"rates": "2"}, "budget '2' is a share outside"),
    ("buddymoe", {"rates": "0.5,0.5"}, "--rates names one twice"),
    ("activeevict", {"budgets": ""}, "--budgets names nothing"),
    ("activeevict", {"ratios": "0"}, "--ratios must be above 0"),
    ("activeevict", {"ratios": "nan"}, "--ratios"),
    ("activeevict", {"ratios": "1,inf"}, "--ratios"),
    ("activeevict", {"ratios": "1,1"}, "--ratios names one twice"),
    ("activeevict", {"parts": "real"}, "--parts has 'real'"),
    ("prefetch", {"link_gbps": ""}, "--link-gbps names nothing"),
    ("compare", {"policies": "", "prompts": _PROMPTS_FILE}, "--policies names nothing"),
    ("compare", {"policies": "on-demand,on-demand", "prompts": _PROMPTS_FILE}, "--policies names one twice"),
    ("compare", {"policies": "no-such", "prompts": _PROMPTS_FILE}, "no policy 'no-such'"),
    ("compare", {"policies": "on-demand", "prompts": _PROMPTS_FILE, "links": "0"}, "--links must be above 0"),
]


@pytest.mark.parametrize(("name", "given", "what"), WRONG)
def test_what_is_of_no_use_is_refused(name: str, given: Mapping[str, Any], what: str) -> None:
    with pytest.raises((ConfigError, BudgetError), match=what):
        _of(name, **given)


@pytest.mark.usefixtures("passages")
def test_what_does_not_fit_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Starter()
    with pytest.raises(BudgetError, match="keeps every expert"):
        _run(_experiment(("on-demand", "all-resident"), budgets=("0.5",)), start)
    with pytest.raises(ConfigError, match="4 prompts cannot be new in each of 5 repetitions"):
        _run(_experiment(fresh=True, repeats=5), start)
    assert start.log == []
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="3 prompts cannot be new in each of 5 repetitions"):
        run_experiment(_of("fmoe", prompts=10), start=start)
    with pytest.raises(CheckpointError, match="500"):
        run_experiment(_of("activeevict", prompts_each=100), start=start)
    ndp = replace(_experiment(prompts_file=None), sections=(Replayed("s", variants("context-ndp-full")),))
    with pytest.raises(ConfigError, match="computes on an NDP worker"):
        run_experiment(ndp, start=start)


def test_a_variant_is_a_preset_with_other_values(tmp_path: Path) -> None:
    variant = Variant("min 0.5", "next-gate", {"prefetch": {"min_useful": 0.5}})
    preset, found = load_policy("next-gate"), variant.policy()
    assert (found.name, found.prefetch.min_useful) == ("min 0.5", 0.5)
    assert found.prefetch.kind == preset.prefetch.kind == "next-gate"
    assert preset.prefetch.min_useful != 0.5
    with pytest.raises(ConfigError, match="min_useful"):
        Variant("wrong", "next-gate", {"prefetch": {"min_useful": 2}}).policy()
    path = Policy("min 0.5", found, "next-gate", None).source(tmp_path)
    assert load_policy(path) == found


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--links fast", ConfigError), ("--max-tokens 100000", RequestError), ("--out {prompts}", ConfigError),
        ("--prompt-tokens 0", 2), ("--repeats 0", 2), ("--batch 0", 2), ("--max-tokens 0", 2), ("--policy lru", 2),
    ],
)  # fmt: skip
def test_malformed_options_end_the_command(words: str, code: Any, tmp_path: Path) -> None:
    """A folder that cannot be made is refused, too. Typer's own refusals exit with 2, as those of tiermoe do."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("a b c\n" * 2)
    common = ["compare", "--policies", "on-demand", "--prompts", str(prompts)]
    done = CliRunner().invoke(bench_commands.bench_app, [*common, *words.format(prompts=prompts).split()])
    if isinstance(code, int):
        assert done.exit_code == code
    else:
        assert isinstance(done.exception, code)
