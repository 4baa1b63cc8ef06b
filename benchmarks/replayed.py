"""Simulated sections on recorded traces: a trace holds the model's own routing, and clocks are virtual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from tiermoe.actors.budget import Budget
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.jobs.bench.experiment import LinkAt, Simulated, Variant
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.bench.serving import Calibration, Recorded, shape_of
from tiermoe.cluster.jobs.replay import require_replayable
from tiermoe.cluster.report.results import refused_row
from tiermoe.cluster.simulate.hit_rates import result, serve
from tiermoe.cluster.simulate.machine import Machine, load_machine, without_ndp
from tiermoe.errors import TierMoeError

from .papers import engine_of_split, transfers


@dataclass(frozen=True)
class Replayed(Simulated):
    """Variants on the recorded trace of each context.

    links: all of the grid's, or the first. ratios: of loading over computing, in place of the grid's links. twins: each
    variant also with `evict_writeback` inverted.
    """

    links: Literal["all", "first"] = "all"
    ratios: tuple[float, ...] | None = None
    twins: bool = False

    def refuse(self, study: Study) -> None:
        """Raise CheckpointError for too little text, ConfigError for a variant that no recorded trace can replay."""
        for context in study.contexts:
            study.traced(context)
        for variant in self.variants:
            preset = variant.policy()
            require_replayable(preset)
            if preset.placement.kind != "cache":
                raise without_ndp(preset.name, "recorded")

    def presets(self, tau: int | None) -> list[tuple[Variant, PolicySettings]]:
        """The variants and, with `twins`, those that write back what the others do not."""
        found = []
        for variant in self.variants:
            preset = variant.policy(tau)
            found.append((variant, preset))
            if self.twins:
                found.append((variant, preset.model_copy(update={"evict_writeback": not preset.evict_writeback})))
        return found

    def rows(self, study: Study, links: Sequence[LinkAt]) -> list[dict[str, Any]]:
        """Rows of all variants at each context, link and budget, as plain values.

        All contexts run on the machine that recorded the first context's trace; the section's `ratios` are of it.

        Raises:
            ConfigError: no link is as fast as a ratio. What a variant is refused for is its row (`refused_row`).
        """
        experiment, rows, latency_us = study.experiment, list[dict[str, Any]](), study.base.link.latency_us
        presets = self.presets(experiment.workload.tau)
        machine = load_machine(study.recorded(study.contexts[0]).header, None, None, None)
        budgets, chosen = self.budgets or experiment.grid.budgets, links[:1] if self.links == "first" else links
        for context in study.contexts:
            recorded = study.recorded(context)
            if self.ratios is not None:
                computing = Calibration.of_machine(shape_of(recorded.header), machine, latency_us)
                chosen = [(computing.link(ratio, digits=3), ratio) for ratio in self.ratios]
            stepped = study.stepped(f"replaying {self.name}", len(chosen) * len(budgets) * len(presets))
            for (gbps, ratio), budget, (variant, preset) in product(chosen, budgets, presets):
                throttled = machine.model_copy(update={"link_gbps": gbps, "link_latency_us": latency_us})
                row = {"section": self.name, "context": context, "policy": variant.name, "preset": variant.preset,
                       "budget": budget, "link_gbps": gbps}  # fmt: skip
                try:
                    (figures,) = replay(preset, budget, throttled, recorded, len(recorded.measure))
                except TierMoeError as error:
                    rows.append(refused_row(error, **row))
                else:
                    rows.append(row | {
                        "ratio": ratio, "lossless": preset.lossless, "executor": "simulated",
                        "writes_back": preset.evict_writeback, **figures,
                    })  # fmt: skip
                stepped()
        return rows


def replay(
    preset: PolicySettings, budget: str, machine: Machine, recorded: Recorded, each: int
) -> list[dict[str, float]]:
    """Serve the requests to learn from, then the measured ones; figures of every `each` measured requests."""
    engine = engine_of_split(preset, Budget.parse(budget), machine, recorded)
    serve(engine, recorded.learn)
    found = []
    for start in range(0, len(recorded.measure), each):
        engine.reset_stats()
        served = serve(engine, recorded.measure[start : start + each])
        counted = transfers(result(engine, served), served.generated)
        found.append({"tpot_ms": 1e3 * served.tpot_s, "ttft_ms": 1e3 * served.ttft_s, **asdict(counted)})
    return found
