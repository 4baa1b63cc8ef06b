"""What computing takes with everything resident, and which link makes loading so many times as long."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from rich.progress import Progress

from .....actors.engine.model.profile import layer_passes
from .....actors.policies.cost import Link, load_s
from .....actors.settings import LinkSettings
from .....errors import ConfigError
from ....config import RunConfig
from ..serving import serve, start_worker

REGIME = (2.0, 3.0)  # loading over computing where the paper measures (figure 2d: 34.55% to 49.45% of it can be hidden)
CALIBRATED = 3  # prompts on which computing is measured, and times


@dataclass(frozen=True)
class Calibration:
    """One decode step with all experts resident, one request at a time.

    tpot_s: seconds for each generated token. moe_s: of a layer's experts, host work included, in one step.
    expert_bytes: of one expert in its slot. latency_us: of each copy on the emulated links.
    """

    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    tpot_s: float
    moe_s: float
    latency_us: float

    @property
    def compute_s(self) -> float:
        """Seconds of a layer, its share of the rest of the step included."""
        return self.tpot_s / self.layers

    def load_s(self, gbps: float) -> float:
        """Seconds in which a link of so many gigabytes (1e9) per second brings the K experts of a token in a layer."""
        return self.top_k * load_s(self.expert_bytes, Link(gbps, self.latency_us))

    def ratio(self, gbps: float) -> float:
        """Loading over computing: a token's experts in a layer against all of the layer's decode time."""
        return self.load_s(gbps) / self.compute_s

    def in_regime(self, gbps: float) -> bool:
        """Whether loading is two to three times computing."""
        return REGIME[0] <= self.ratio(gbps) <= REGIME[1]

    def link(self, ratio: float) -> float:
        """Gigabytes per second at which loading is `ratio` times computing, to two digits.

        Raises:
            ConfigError: no link is as fast.
        """
        transfer_s = ratio * self.compute_s / self.top_k - self.latency_us * 1e-6
        if transfer_s <= 0:
            what = f"a copy's latency of {self.latency_us:g} us alone takes more than {ratio:g} times computing"
            raise ConfigError(what, "give a greater --ratios, or a smaller link.latency_us")
        return float(f"{self.expert_bytes / transfer_s / 1e9:.2g}")


def calibrate(
    base: RunConfig, prompts: Sequence[tuple[int, ...]], max_tokens: int, repeats: int,
    progress: Progress | None = None,
) -> Calibration:  # fmt: skip
    """Measure it on these prompts, one after the other; medians."""
    task = None if progress is None else progress.add_task("computing without waits", total=repeats * len(prompts))
    config = base.model_copy(update={"policy": "all-resident", "budget": "1.0", "link": LinkSettings()})
    with closing(start_worker(config)) as worker:
        serve(worker.submit, prompts[:1], max_tokens)
        taken = []
        for prompt in repeats * list(prompts):
            taken.append(serve(worker.submit, [prompt], max_tokens)[0]["tpot_s"])
            if progress is not None and task is not None:
                progress.advance(task)
        with layer_passes(worker.engine) as passes:
            serve(worker.submit, prompts[:1], max_tokens)
        engine = worker.engine
        return Calibration(
            len(engine.layers), engine.experts, engine.top_k, engine.slot_bytes, median(taken),
            median(p.total_s for p in passes if p.tokens == 1), base.link.latency_us,
        )  # fmt: skip
