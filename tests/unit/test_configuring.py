"""The configurator beside an engine: what is recorded, when it decides, and that the simulated executor has it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import traces
from cache_rigs import tops_and_bottoms

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.hooks import Passed
from tiermoe.actors.engine.split import Configuring, Recorder, Step
from tiermoe.actors.engine.stats import ConfiguratorStats
from tiermoe.actors.policies.moepic.split import SplitOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.jobs.replay import Replay, with_prefetch
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine, context_of, first_split
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.trace import Trace

WAIT_S = 60


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def passed(layer: int, began_s: float, ended_s: float, waited_s: float = 0.0) -> Passed:
    """One row, of experts `layer` and 2."""
    counts = np.zeros((1, 3), np.int64)
    counts[0, [layer, 2]] = 1
    return Passed(layer, 1, counts, None, [began_s], [ended_s], [waited_s])


def fake_cache(layers: int) -> Any:
    return SimpleNamespace(core=SimpleNamespace(decode_only=False))


class Recording(Recorder):
    """With the steps that have ended."""

    def __init__(self, cache: Any, clock: Clock) -> None:
        self.steps: list[Step] = []
        super().__init__(cache, 2, self.steps.append, clock)


def forward(recorder: Recording, cache: Any, clock: Clock, decode: bool, waits_s: float = 0.0) -> Step:
    """Two layers, each entered 1 s after what was before, 3 s long."""
    cache.core.decode_only = decode
    recorder.steps.clear()
    for layer in range(2):
        assert recorder.steps == []
        began_s = clock.now_s + 1
        clock.now_s = began_s + 3 + waits_s
        recorder.passed(passed(layer, began_s, clock.now_s, waits_s))
    [step] = recorder.steps
    return step


class TestRecorder:
    def test_times_are_those_between_and_within_layers(self) -> None:
        cache, clock = fake_cache(2), Clock()
        recorder = Recording(cache, clock)
        first = forward(recorder, cache, clock, decode=True, waits_s=7)
        assert (first.attention_s, first.moe_s, first.head_s) == (1, 6, None)  # waits for copies are no computing
        assert (first.tables(2, 3)[0].tolist(), first.decode) == ([[1, 0, 1], [0, 1, 1]], True)
        clock.now_s += 4
        # the head, and the first layer's attention; none after a prompt
        assert [forward(recorder, cache, clock, decode=decode).head_s for decode in (False, True)] == [5, None]

    def test_predictions_belong_to_the_layer_that_they_foresee(self) -> None:
        cache, clock = fake_cache(2), Clock()
        recorder, wrapped, later = Recording(cache, clock), np.ones((1, 3)), np.array([[0, 1, 2], [3, 0, 1]])
        recorder.predicted(0, wrapped)
        recorder.passed(passed(0, 0.0, 1.0))
        recorder.predicted(1, later)
        recorder.passed(passed(1, 1.0, 2.0))
        [step] = recorder.steps
        assert step.tables(2, 3)[1].tolist() == [[1, 1, 1], [3, 1, 2]]  # the highest of any row
        assert np.isnan(forward(recorder, cache, clock, decode=True).tables(2, 3)[1]).all()
        recorder.passed(passed(0, 0.0, 1.0))
        recorder.steps.clear()
        forward(recorder, cache, clock, decode=True)  # of the forward that broke off there is no step


@dataclass
class FakeConfigurator:
    """Takes steps, and finds something whenever it is asked."""

    tau: int
    layers: int = 2
    stats: ConfiguratorStats = field(default_factory=ConfiguratorStats)
    added: list[int] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    asked: int = 0

    @property
    def due(self) -> bool:
        return sum(self.added) >= self.tau

    def add(self, steps: list[Step]) -> None:
        self.added += [step.tokens for step in steps]

    def configure(self) -> str:
        self.asked += 1
        return f"cut {self.asked}"

    def apply(self, found: str) -> None:
        self.applied.append(found)


class TestConfiguring:
    def test_decides_apart_and_applies_between_forwards(self) -> None:
        cache, clock = fake_cache(2), Clock()
        fake = FakeConfigurator(tau=3)
        configuring = Configuring(cast(Any, fake), cache, tau=3)
        try:
            recorder = cast(Any, configuring)
            for _ in range(2):
                forward_hooks(recorder, cache, clock)
            configuring.begin_forward()
            assert fake.applied == []
            assert configuring.ask().wait(WAIT_S)  # whatever tau says; takes what was recorded
            assert fake.added == [1, 1]
            assert fake.applied == []
            configuring.begin_forward()
            configuring.begin_forward()
            assert fake.applied == ["cut 1"]
            for _ in range(3):
                forward_hooks(recorder, cache, clock)  # tau tokens
            assert configuring.ask().wait(WAIT_S)
            assert fake.added == [1] * 5
            assert fake.asked == 2  # what was found waits to be applied: the ask found nothing newer
            configuring.begin_forward()
            assert fake.applied == ["cut 1", "cut 2"]
            assert fake.stats.record_s > 0
            assert fake.stats.configure_s > 0
        finally:
            configuring.close()
            configuring.close()

    def test_an_error_is_reported_and_stops_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeConfigurator(tau=9)
        monkeypatch.setattr(FakeConfigurator, "configure", lambda self: 1 / 0)
        configuring = Configuring(cast(Any, fake), fake_cache(2), tau=9)
        try:
            assert configuring.ask().wait(WAIT_S)
            assert configuring.ask().wait(WAIT_S)
            assert fake.stats.problem == "ZeroDivisionError: division by zero"
            configuring.begin_forward()
            assert fake.applied == []
        finally:
            configuring.close()


def forward_hooks(configuring: Configuring, cache: Any, clock: Clock) -> None:
    cache.core.decode_only = True
    for layer in range(2):
        configuring.passed(passed(layer, clock.now_s, clock.now_s))


POLICY = PolicySettings(
    name="test", lossless=True, eviction="lcp", prefetch={"kind": "next-gate", "min_useful": 0.0},
    split=SplitOptions(kind="adaptive", tau=8, zeta=0.05),
)  # fmt: skip
SHAPE = traces.header(layers=4, experts=8, slot_bytes=48 * 16)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    traces.write(tmp_path / "t", SHAPE, [[1, 2, 3], [7], [9, 9]], decodes=20)
    return Trace(tmp_path / "t")


def machine(gbps: float) -> Machine:
    return Machine(name="tiny", **traces.COSTS.model_dump(), link_gbps=gbps)


class TestSimulated:
    def test_the_cut_adapts(self, trace: Trace) -> None:
        """A slow link: the configurator finds a better cut, and whatever it does slots and budget hold."""
        cut = first_split(trace.header, POLICY, Budget(share=0.5))
        assert cut.neurons == 16
        eviction = tops_and_bottoms(4, 8, "lcp")
        policies = Policies(eviction, split=cut, settings=POLICY)
        engine = SimulatedEngine(trace.header, machine(1e-3), Budget(share=0.5), policies, check=True)
        served = serve(engine, trace.requests())
        found = engine.stats.configurator
        assert found is not None
        assert found.problem is None
        assert served.forwards == 63
        assert found.configurations >= 2
        assert found.reconfigurations >= 1
        assert engine.cache.split != cut
        assert engine.cache.split is not None
        assert engine.cache.split.total_neurons <= 16 * 16
        assert found.moe_s == pytest.approx(2 * 2.1e-4, rel=0.3)
        assert found.load_s == pytest.approx(768e-6, rel=0.01)
        assert found.head_s > found.attention_s > 0

    @pytest.mark.parametrize("prefetch", ["none", "next-gate"])
    def test_replay_of_a_preset_with_split_experts(self, trace: Trace, prefetch: str) -> None:
        policy = with_prefetch(POLICY, prefetch)
        runs = [Replay(trace, policy, context_of(trace.header), machine(1e-3), Budget(share=0.5))() for _ in range(2)]
        for run in runs:
            for own in ("record_s", "configure_s"):
                run["configurator"].pop(own)
        assert runs[0] == runs[1]
        assert runs[0]["top_hits"] > 0
        assert runs[0]["configurator"]["configurations"] > 0
