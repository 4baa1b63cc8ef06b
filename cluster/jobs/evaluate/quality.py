"""What a policy costs in quality: figures with intervals, from sums over documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bootstrap import Array, Estimate, Ratio, Transform, difference, estimate, resample_counts
from .options import EvaluationOptions


def _same(x: Array) -> Array:
    return x


# The sums that are collected for each document; `reference_...` are of the lossless run, `loaded` the bytes that copies
# to the device brought during its windows.
SUMS = (
    "tokens", "bytes", "nll", "extra_nll", "agree", "kl", "items", "correct", "same_choice",
    "reference_nll", "reference_correct", "loaded",
)  # fmt: skip

# name: (numerator, denominator, made of their ratio)
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
    """The result for one policy.

    policy, lossless, executor: of the worker that was measured. sums: by name (`SUMS`), one value per document.
    Nats are natural units of information; `kl_nats` is KL(lossless || policy), mean over scored tokens.
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
        """This less `other`, which was measured on the same windows and items, with the paired interval.

        Raises:
            ValueError: they were measured with different options.
        """
        if self.options != other.options or len(self.sums["tokens"]) != len(other.sums["tokens"]):
            raise ValueError(f"{self.policy} and {other.policy} were not measured on the same text")
        return difference(self._ratio(measure), other._ratio(measure), self._counts())

    def as_dict(self) -> dict[str, Any]:
        """Flat and plain: each measure under its name, its interval as `_low` and `_high`; and what was scored."""
        out: dict[str, Any] = {"policy": self.policy, "lossless": self.lossless, "executor": self.executor}
        for measure in MEASURES:
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
