"""What a policy costs in quality: figures with 95% intervals, from sums over documents.

The intervals are percentiles of a bootstrap over documents, since tokens of one document are not independent. Every
figure is a ratio of two sums over documents, so all resamples are one matrix product. All figures and policies have the
same resamples: differences between policies are paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from ....errors import ConfigError


@dataclass(frozen=True)
class EvaluationOptions:
    """Sizes of an evaluation: the options of `tiermoe eval`, each with its help.

    rows: 1 is what a policy that depends on the cache's content needs; as many as fit is fastest.

    Raises:
        ConfigError: a value is out of range; the message names its option.
    """

    documents: Annotated[int | None, "Most documents to use; default: all."] = None
    windows: Annotated[int | None, "Most windows of each document; default: 1; with --text, 64 in all."] = None
    items: Annotated[int | None, "Most multiple-choice items of each document; default: 1."] = None
    prefix: Annotated[int, "Tokens that are prefilled in each window."] = 128
    continuation: Annotated[int, "Tokens that are scored after them."] = 128
    rows: Annotated[
        int | None, "Most scored tokens in one forward pass; 1: as one request is served; default: all."
    ] = None
    seed: Annotated[int, "Seed of the bootstrap."] = 0
    resamples: Annotated[int, "Resamples of the bootstrap."] = 2000

    def __post_init__(self) -> None:
        for option in ("documents", "windows", "items", "prefix", "continuation", "resamples", "rows"):
            if (value := getattr(self, option)) is not None and value < 1:
                raise ConfigError(f"--{option} is {value}", "give a number of at least 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}", "give a number from 0 to 2^63-1")


Array = npt.NDArray[np.float64]
Transform = Callable[[Array], Array]
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """A figure: sums over each document [D], and a function of their ratio."""

    numerator: Array
    denominator: Array
    transform: Transform

    def over(self, counts: Array) -> Array:
        """The figure of each resample in counts [R, D]; NaN for a denominator of zero."""
        numerator, denominator = counts @ self.numerator, counts @ self.denominator
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.transform(np.where(denominator > 0, numerator / denominator, np.nan))

    @property
    def value(self) -> float:
        return float(self.over(np.ones((1, len(self.numerator))))[0])


def resample_counts(documents: int, resamples: int, seed: int) -> Array:
    """How often each resample draws each document: [resamples, documents]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples).astype(np.float64)


def estimate(ratio: Ratio, counts: Array) -> Estimate:
    """The figure with the percentile interval over resamples [R, D]."""
    return _interval(ratio.value, ratio.over(counts))


def difference(ratio: Ratio, other: Ratio, counts: Array) -> Estimate:
    """`ratio` less `other` over the same documents, with the interval of the paired difference."""
    return _interval(ratio.value - other.value, ratio.over(counts) - other.over(counts))


def _interval(value: float, resampled: Array) -> Estimate:
    """The interval without NaN: resamples that drew no document of the figure."""
    resampled = resampled[~np.isnan(resampled)]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail)) if len(resampled) else (value, value)
    return Estimate(value, float(low), float(high))


def _same(x: Array) -> Array:
    return x


# sums over each document; `reference_...`: of the lossless run, `loaded`: bytes copied to the device during its windows
SUMS = (
    "tokens", "bytes", "nll", "extra_nll", "agree", "kl", "items", "correct", "same_choice",
    "reference_nll", "reference_correct", "loaded",
)  # fmt: skip

# name: (numerator, denominator, function of their ratio)
MEASURES: Mapping[str, tuple[str, str, Transform]] = {
    "perplexity": ("nll", "tokens", np.exp),
    "perplexity_ratio": ("extra_nll", "tokens", np.exp),  # over lossless, token by token: most of the text cancels
    "bits_per_byte": ("nll", "bytes", lambda x: x / math.log(2)),
    "top1_agreement": ("agree", "tokens", _same),
    "kl_nats": ("kl", "tokens", _same),
    "choice_accuracy": ("correct", "items", _same),
    "choice_agreement": ("same_choice", "items", _same),
    "reference_perplexity": ("reference_nll", "tokens", np.exp),
    "reference_choice_accuracy": ("reference_correct", "items", _same),
    "loaded_per_token": ("loaded", "tokens", _same),
}


@dataclass(frozen=True)
class Quality:
    """The result for one policy of the measured worker. sums: by name (`SUMS`), one value per document.

    `kl_nats` is KL(lossless || policy) in natural units, mean over scored tokens.
    """

    policy: str
    lossless: bool
    executor: str
    sums: Mapping[str, Array]
    options: EvaluationOptions

    def __getitem__(self, measure: str) -> Estimate:
        """A figure of `MEASURES` with its interval."""
        return estimate(self._ratio(measure), self._counts())

    def minus(self, other: Quality, measure: str) -> Estimate:
        """This less `other` with the paired interval. Raises ValueError: measured with different options."""
        if self.options != other.options or len(self.sums["tokens"]) != len(other.sums["tokens"]):
            raise ValueError(f"{self.policy} and {other.policy} were not measured on the same text")
        return difference(self._ratio(measure), other._ratio(measure), self._counts())

    @property
    def measures(self) -> list[str]:
        """The figures that there is something to count from; one's own text has no multiple choice."""
        return [name for name, (_, over, _) in MEASURES.items() if self.sums[over].sum() > 0]

    def as_dict(self) -> dict[str, Any]:
        """One flat record: each measure with its interval (`_low`, `_high`), and the numbers of scored items."""
        out: dict[str, Any] = {"policy": self.policy, "lossless": self.lossless, "executor": self.executor}
        for measure in self.measures:
            found = self[measure]
            out |= {measure: found.value, f"{measure}_low": found.low, f"{measure}_high": found.high}
        return out | {
            "documents": len(self.sums["tokens"]),
            "tokens": int(self.sums["tokens"].sum()),
            "items": int(self.sums["items"].sum()),
        }

    def _ratio(self, measure: str) -> Ratio:
        numerator, denominator, transform = MEASURES[measure]
        return Ratio(self.sums[numerator], self.sums[denominator], transform)

    def _counts(self) -> Array:
        return resample_counts(len(self.sums["tokens"]), self.options.resamples, self.options.seed)
