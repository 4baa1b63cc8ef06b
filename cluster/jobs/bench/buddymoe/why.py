"""Why a bar is missed or tied, from counters and the profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from ..figures import Row, cells
from .findings import BYTES, QUALITY, SETTING
from .methods import ORIGINAL, RANDOM

Found = Mapping[str, Any]  # of `Comparison.as_dict`


def explained(rows: Sequence[Row], found: Sequence[Found], profile: Mapping[str, Any]) -> Iterator[str]:
    """One paragraph for each cache rate and pair of methods with a bar that does not hold; then what is behind all."""
    by_cell = {rate: of for (rate, _), of in cells(rows, SETTING).items()}
    lost = [comparison for comparison in found if comparison["ok"] is False]
    for rate, own, other in dict.fromkeys((c["rate"], c["own"], c["other"]) for c in lost):
        mine = [c for c in lost if (c["rate"], c["own"], c["other"]) == (rate, own, other)]
        of = by_cell[rate]
        a, b = of[own]["quality"], of[other]["quality"]
        text = f"**Cache rate {rate}, {own} against {other}.** "
        tied = [_name(c["measure"]) for c in mine if c["verdict"] == "tie"]
        worse = [_name(c["measure"]) for c in mine if c["verdict"] == "worse"]
        text += " ".join(f"{what}: {', '.join(names)}." for what, names in (("Tied", tied), ("Worse", worse)) if names)
        text += (
            f" {own} replaces {share(a, 'substitutions'):.1%} of the routers' picks and leaves out "
            f"{share(a, 'dropped'):.1%}, {other} {share(b, 'substitutions'):.1%} and {share(b, 'dropped'):.1%}."
        )
        if any(c["measure"] != BYTES for c in mine):
            text += _quality(rate, own, other, found)
        if any(c["measure"] == BYTES for c in mine):
            text += _bytes(own, other, a, b, of.get(f"{RANDOM}, rho 3"))
        yield text
    if lost:
        yield _redundancy(profile)


def share(quality: Mapping[str, Any], counter: str) -> float:
    """Of the routers' picks."""
    return float(quality[counter] / quality["picks"]) if quality["picks"] else 0.0


def _name(measure: str) -> str:
    return "bytes" if measure == BYTES else QUALITY[measure][0]


def _quality(rate: str, own: str, other: str, found: Sequence[Found]) -> str:
    kl = next(c for c in found
              if (c["rate"], c["own"], c["other"], c["measure"]) == (rate, own, other, "kl_nats"))  # fmt: skip
    wide = (kl["high"] - kl["low"]) / 2
    text = f" KL differs by {kl['value']:+.4f} nats, give or take {wide:.4f}."
    if kl["verdict"] == "tie":
        return text + " More documents would narrow that (`--documents`)."
    return text


def _bytes(own: str, other: str, a: Mapping[str, Any], b: Mapping[str, Any], limited: Row | None) -> str:
    demand, prefetch = ([q[key] / 1e6 for q in (a, b)] for key in ("bytes_loaded_demand", "bytes_loaded_prefetch"))
    text = (
        f" On demand it loads {demand[0]:.0f} MB and by prefetch {prefetch[0]:.0f} MB ({other}: {demand[1]:.0f} and "
        f"{prefetch[1]:.0f}): {prefetch[0] / max(sum((demand[0], prefetch[0])), 1e-9):.0%} of its bytes are guesses, "
        "of which no substitute saves any."
    )
    if other == RANDOM and limited is not None:
        q = limited["quality"]
        text += (
            f" {RANDOM} has no limit of replacements and any resident expert will do; held to rho 3 it loads "
            f"{q['bytes_loaded_demand'] / 1e6:.0f} MB on demand. What else {own} loads has no buddy on the device."
        )
    elif other == ORIGINAL:
        text += f" {ORIGINAL} replaces nothing, and its loads on demand are all that can be saved."
    return text


def _redundancy(profile: Mapping[str, Any]) -> str:
    text = (
        "**The experts themselves.** A token that picks an expert has picked its best buddy already in "
        + " and ".join(f"{value:.0%} of the cases by {by}" for by, value in profile["taken"].items())
        + f", where it stands in for nothing; 95% of the co-activations of an expert take {profile['peers']:.0f} of "
        f"{profile['experts'] - 1} peers, so that a short list says little."
    )
    if profile["best_cosine"]:
        text += (
            f" An expert's outputs have a cosine of {mean(profile['best_cosine']):.2f} with those of its most alike "
            f"other expert (by layer {min(profile['best_cosine']):.2f} to {max(profile['best_cosine']):.2f}); for "
            f"{profile['better_than_none']:.0%} of the experts there is another whose output is nearer than no "
            "output at the same weight: for the others leaving it out, as drop does, is the smaller error."
        )
    return text
