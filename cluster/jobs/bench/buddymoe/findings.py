"""What is better than what, with paired intervals over documents; a difference whose interval holds 0 is a tie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...evaluate.quality import EvaluationOptions
from ..figures import Row, cells
from ..metrics import Bar
from .methods import DROP, ORIGINAL, OWN, PAPER, RANDOM
from .scoring import quality_of

SETTING = "rates"  # of all rows
QUALITY = {  # by key of `evaluate.quality.MEASURES`: name, and whether less is better
    "perplexity_ratio": ("perplexity over lossless", True), "top1_agreement": ("top-1 agreement", False),
    "kl_nats": ("KL", True), "choice_accuracy": ("choice accuracy", False),
}  # fmt: skip
BYTES = "loaded_per_token"
_LESS_IS_BETTER = {name: less for name, (_, less) in QUALITY.items()} | {BYTES: True}
Verdict = Literal["better", "tie", "worse"]


@dataclass(frozen=True)
class Comparison:
    """One method less another in one measure, at one cache rate.

    low, high: 95% interval of the paired difference over documents. wanted: what a bar asks for; None: there is none.
    """

    rate: str
    own: str
    other: str
    measure: str
    value: float
    low: float
    high: float
    wanted: Literal["better", "no worse"] | None

    @property
    def verdict(self) -> Verdict:
        """Of `own`."""
        if self.low <= 0 <= self.high:
            return "tie"
        return "better" if (self.high < 0) == _LESS_IS_BETTER[self.measure] else "worse"

    @property
    def bar(self) -> Bar:
        """Better: the end of the interval that is worse for `own` must be on its side of 0. No worse: the other end."""
        name = "bytes" if self.measure == BYTES else QUALITY[self.measure][0]
        worst, best = (self.high, self.low) if _LESS_IS_BETTER[self.measure] else (-self.low, -self.high)
        text = f"cache rate {self.rate}: {name}, {self.own} less {self.other}"
        if self.wanted == "better":
            return Bar(f"{text}, worse end of 95%", worst, "<", 0.0)
        return Bar(f"{text}, better end of 95%", best, "<=", 0.0)

    def as_dict(self) -> dict[str, Any]:
        ok = None if self.wanted is None else self.bar.ok
        return asdict(self) | {"verdict": self.verdict, "ok": ok}


def comparisons(rows: Sequence[Row], options: EvaluationOptions) -> list[Comparison]:
    """Those of the bars, then every other method against random replacement and drop."""
    found = []
    for (rate, _), of in cells(rows, SETTING).items():
        qualities = {name: quality_of(row, options) for name, row in of.items()}
        for own, other, measure, wanted in _pairs(list(of)):
            estimate = qualities[own].minus(qualities[other], measure)
            found.append(Comparison(rate, own, other, measure, estimate.value, estimate.low, estimate.high, wanted))
    return found


def _pairs(names: Sequence[str]) -> Iterator[tuple[str, str, str, Literal["better", "no worse"] | None]]:
    wanted: dict[tuple[str, str, str], Literal["better", "no worse"]] = {}
    for own in (PAPER, OWN):
        wanted |= {(own, RANDOM, measure): "better" for measure in QUALITY}
        wanted |= {(own, RANDOM, BYTES): "no worse", (own, ORIGINAL, BYTES): "better"}
    wanted |= {(OWN, DROP, measure): "better" for measure in QUALITY}
    for (own, other, measure), what in wanted.items():
        if own in names and other in names:
            yield own, other, measure, what
    for other in (RANDOM, f"{RANDOM}, rho 3", DROP):
        for own in names:
            for measure in (*QUALITY, BYTES):
                if other in names and own != other and (own, other, measure) not in wanted:
                    yield own, other, measure, None


def bars_of(found: Sequence[Comparison]) -> list[Bar]:
    return [comparison.bar for comparison in found if comparison.wanted is not None]
