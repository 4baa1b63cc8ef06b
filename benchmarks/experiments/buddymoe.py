"""BuddyMoE: Tables 2 to 4: what takes the place of a missing expert, quality and speed of the same runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import typer

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, Served, Variant, Workload, variants
from tiermoe.cluster.jobs.bench.metrics import Bar, Row, cells_of
from tiermoe.cluster.jobs.bench.page import Figure, Panel, fixed, over, table
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions, Quality

_PAPER, _OWN = "cft 0.95, 16 buddies, rho 3, by coactivation", "buddymoe-own-weight"
_QUALITIES, _BYTES = ("perplexity_ratio", "top1_agreement", "kl_nats", "choice_accuracy"), ("loaded_per_token",)
_AGAINST = ("random", "random, rho 3", "drop")
_SECTIONS = (
    Served("rates",
           variants("original", Variant("random", "random-replacement"),
                    Variant("random, rho 3", "random-replacement", {"on_miss": {"rho": 3}}), "drop",
                    Variant("cft 0.75, 4 buddies, by coactivation", "buddymoe-cft75",
                            {"on_miss": {"by": "coactivation"}}),
                    Variant("cft 0.95, 16 buddies, rho 3, by coactivation", "buddymoe",
                            {"on_miss": {"by": "coactivation"}}),
                    Variant("cft 0.95, 16 buddies, rho 4, by coactivation", "buddymoe-rho4",
                            {"on_miss": {"by": "coactivation"}}),
                    Variant("cft 0.99, 2 buddies, by coactivation", "buddymoe",
                            {"on_miss": {"by": "coactivation", "alpha": 0.99, "max_buddies": 2, "rho": None}},
                            most_top_k=4),
                    Variant("cft 0.95, 16 buddies, by coactivation", "buddymoe",
                            {"on_miss": {"by": "coactivation", "rho": None}}, least_top_k=5),
                    Variant("cft 0.75, 4 buddies, by output", "buddymoe-cft75", {"on_miss": {"by": "output"}}),
                    Variant("cft 0.95, 16 buddies, rho 3, by output", "buddymoe", {"on_miss": {"by": "output"}}),
                    Variant("cft 0.95, 16 buddies, rho 4, by output", "buddymoe-rho4", {"on_miss": {"by": "output"}}),
                    Variant("cft 0.99, 2 buddies, by output", "buddymoe",
                            {"on_miss": {"by": "output", "alpha": 0.99, "max_buddies": 2, "rho": None}},
                            most_top_k=4),
                    Variant("cft 0.95, 16 buddies, by output", "buddymoe", {"on_miss": {"by": "output", "rho": None}},
                            least_top_k=5), "buddymoe-own-weight"), score="all", stepped=True),
)  # fmt: skip


def _cell_0(row: Row) -> str:
    return f"{'ok' if row['ok'] else 'missed'}"


def _speed(row: Row) -> str:
    """Tokens per second: median and range."""
    times_s = row["values"]["tpot_s"]
    return f"{1 / median(times_s):.1f} ({1 / max(times_s):.1f} to {1 / min(times_s):.1f})"


_TABLES = {
    "comparisons": table(
        [
            ("cache rate", "{rate}"), ("method", "{own}"), ("against", "{other}"), ("measure", "{name}"),
            ("asked", "{wanted}"), ("difference", "{value:+.4f} ({low:+.4f} to {high:+.4f})"), ("is", "{verdict}"),
            ("", _cell_0),
        ],
        source="comparisons", wanted=("better", "no worse"),
        measure=("perplexity_ratio", "top1_agreement", "kl_nats", "choice_accuracy"),
    ),
    "bytes": table(
        [
            ("cache rate", "{rate}"), ("method", "{own}"), ("against", "{other}"), ("asked", "{wanted}"),
            (
                "MB a token",
                lambda row: f"{row['value'] / 1e6:+.2f} ({row['low'] / 1e6:+.2f} to {row['high'] / 1e6:+.2f})",
            ),
            ("is", "{verdict}"), ("", _cell_0),
        ],
        source="comparisons", wanted=("better", "no worse"), measure="loaded_per_token",
    ),
    "quality": table(
        [
            ("method", "{policy}"),
            ("tokens/s", _speed),
            ("over original", over("original", inverse=True)), ("perplexity", "{quality[perplexity]:.3f}"),
            ("top-1 agreement", "{quality[top1_agreement]:.1%}"), ("KL (nats)", "{quality[kl_nats]:.4f}"),
            ("choices", "{quality[choice_accuracy]:.1%}"), ("replaced", "{quality[replaced]:.1%}"),
            ("left out", "{quality[left_out]:.1%}"),
            ("MB a token", lambda row: f"{row['quality']['loaded_per_token'] / 1e6:.2f}"),
        ],
        each=("budget",), heading="### Cache rate {budget}",
    ),
    # DeepSeek-V2-Lite (64 experts, top-6): mean accuracy of ARC-Easy and ARC-Challenge, tokens per second
    "paper": fixed(
        ("cache rate", "original", "random", "cft 0.95, 16 buddies, rho 3"),
        (("0.75", "0.735, 34.23", "0.55, 39.67", "0.695, 36.75"), ("0.5", "-, 28.56", "0.23, 33.14", "0.635, 30.21"),
         ("0.375", "-, 24.78", "0.16, -", "0.645, 27.33")),
    ),
}  # fmt: skip
_FIGURES = {
    "buddymoe.png": Figure((Panel(kind="point", each=("budget",), x="tpot_s", x_scale=1e3, y="quality.kl_nats",
                                  series="policy", from_zero=True, x_label="TPOT (ms)",
                                  y_label="mean KL from lossless (nats)",
                                  title="cache rate {budget}, {link_gbps:g} GB/s"),), size=(4.2, 4.6),
                           highlight=("buddymoe-own-weight",)),
}  # fmt: skip

Wanted = Literal["better", "no worse"]
_WANTED: tuple[tuple[str, str, Wanted, tuple[str, ...]], ...] = (  # the bars: own, other, what it must be, measures
    (_PAPER, "random", "better", _QUALITIES), (_PAPER, "random", "no worse", _BYTES),
    (_PAPER, "original", "better", _BYTES), (_OWN, "random", "better", _QUALITIES),
    (_OWN, "random", "no worse", _BYTES), (_OWN, "original", "better", _BYTES), (_OWN, "drop", "better", _QUALITIES),
)  # fmt: skip


QUALITY = {  # by key of `evaluate.quality.MEASURES`: name, and whether less is better
    "perplexity_ratio": ("perplexity over lossless", True), "top1_agreement": ("top-1 agreement", False),
    "kl_nats": ("KL", True), "choice_accuracy": ("choice accuracy", False), "loaded_per_token": ("bytes", True),
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One method less another in one measure, at one cache rate.

    low, high: 95% interval of the paired difference over documents. wanted: the bar's demand; None: no bar.
    """

    rate: str
    own: str
    other: str
    measure: str
    value: float
    low: float
    high: float
    wanted: Wanted | None

    @property
    def verdict(self) -> Literal["better", "tie", "worse"]:
        """Of `own`; a tie where the interval holds 0."""
        if self.low <= 0 <= self.high:
            return "tie"
        return "better" if (self.high < 0) == QUALITY[self.measure][1] else "worse"

    @property
    def bar(self) -> Bar:
        """Better: the worse end of the interval must be better than 0. No worse: the better end must not be worse."""
        worst, best = (self.high, self.low) if QUALITY[self.measure][1] else (-self.low, -self.high)
        text = f"cache rate {self.rate}: {QUALITY[self.measure][0]}, {self.own} less {self.other}"
        if self.wanted == "better":
            return Bar(f"{text}, worse end of 95%", worst, "<", 0.0)
        return Bar(f"{text}, better end of 95%", best, "<=", 0.0)

    def as_dict(self) -> dict[str, Any]:
        ok = None if self.wanted is None else self.bar.ok
        return asdict(self) | {"name": QUALITY[self.measure][0], "verdict": self.verdict, "ok": ok}


def differences(rows: Sequence[Row], options: EvaluationOptions) -> Iterator[Difference]:
    """The wanted comparisons, then those of every method with each of `_AGAINST`, with intervals over documents."""
    asked: dict[tuple[str, str, str], Wanted] = {
        (own, other, measure): wanted for own, other, wanted, measures in _WANTED for measure in measures
    }
    for (_, rate, _), of in cells_of(rows, "rates").items():
        qualities = {name: quality_of(row["quality"], name, row["lossless"], options) for name, row in of.items()}
        others = [(own, other, measure) for other in _AGAINST for own in of for measure in QUALITY if own != other]
        for own, other, measure in dict.fromkeys([*asked, *others]):
            if own in of and other in of:
                is_wanted = asked.get((own, other, measure))
                estimate = qualities[own].minus(qualities[other], measure)
                yield Difference(rate, own, other, measure, estimate.value, estimate.low, estimate.high, is_wanted)


def quality_of(found: Mapping[str, Any], policy: str, lossless: bool, options: EvaluationOptions) -> Quality:
    """The `Quality` of a `cells.score_worker` result, for paired differences."""
    sums = {name: np.asarray(values, np.float64) for name, values in found["sums"].items()}
    return Quality(policy, lossless, found["executor"], sums, options)


def _after(study: Study) -> dict[str, Any]:
    found = list(differences(study.rows, study.experiment.workload.quality))
    study.bars += [one.bar for one in found if one.wanted is not None]
    return {"comparisons": [one.as_dict() for one in found]}


def experiment(
    repeats: options.Repeats = 5,
    rates: Annotated[
        str, typer.Option(help="Cache rates: shares of the experts that fit, separated by commas.")
    ] = "0.75,0.5,0.375",
    ratio: Annotated[float, typer.Option(help="Of the emulated link: loading over computing.")] = 2.5,
    link: Annotated[
        float | None, typer.Option(help="Emulated link in 1e9 bytes per second, in place of it.")
    ] = None,
    prompts: options.Prompts = 1, warm: options.Warm = 2, prompt_tokens: options.PromptTokens = 32,
    max_tokens: options.DecodeTokens = 24,
    documents: options.Documents = 36,
    items: Annotated[int, options.count("Most multiple-choice items of each document.")] = 1,
    prefix: Annotated[int, options.count("Tokens that are prefilled in each window.")] = 32,
    continuation: Annotated[int, options.count("Tokens that are scored after them.")] = 40,
) -> Experiment:  # fmt: skip
    """BuddyMoE against random replacement and dropping: quality and speed at three cache rates."""
    return Experiment(
        name="buddymoe", title="BuddyMoE: another expert in place of a missing one", sections=_SECTIONS,
        workload=Workload(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, warm=warm, prompts=prompts, repeats=repeats,
            quality=EvaluationOptions(
                documents=documents, items=items, prefix=prefix, continuation=continuation, rows=1
            ),
        ),
        grid=Grid(
            options.budgets(rates, "rates"), ratios=options.numbers(str(ratio), "ratio"),
            link=None if link is None else options.numbers(str(link), "link")[0], calibrate="resident",
        ),
        regime=(2.0, 3.0), after=_after,
        shown=("policy", "budget", "link_gbps", "tpot_ms", "perplexity_ratio", "top1_agreement", "kl_nats",
               "mb_loaded", "hit_rate"),
        tables=_TABLES, figures=_FIGURES,
    )  # fmt: skip
