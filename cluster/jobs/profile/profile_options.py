"""The `--profile` options of `tiermoe prepare`, and what a profile says, as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console

from ....actors.policies.buddymoe.buddies import BuddyOptions, ExpertProfile, Ranking
from ....actors.store.artifacts import ProfileManifest, read_profile
from ....actors.store.format import read_manifest
from ....errors import ConfigError
from ...report.tables import Grid, grid, show
from ..prepare.calibration import read_texts
from . import OUTPUT_TOKENS, ProfileOptions

ALPHAS = (0.75, 0.95, 0.99)  # of the paper's tables


def size_distributions(profile: ExpertProfile, most: int = BuddyOptions.max_buddies) -> list[dict[str, Any]]:
    """|B(i; alpha)| over the experts of each layer, for each ranking of the profile and each of `ALPHAS`.

    most: K_max; `uncapped_mean` is the mean without it, `capped` counts the lists that it shortens.
    """
    rows = []
    for by in get_args(Ranking):
        if by != "coactivation" and profile.outputs is None:
            continue
        for alpha in ALPHAS:
            options = BuddyOptions(by=by, alpha=alpha, max_buddies=profile.experts)
            free = profile.buddies(options).sizes
            sizes = profile.buddies(replace(options, max_buddies=most)).sizes
            rows += [
                {
                    "by": by, "alpha": alpha, "layer": layer, "mean": float(of.mean()), "least": int(of.min()),
                    "most": int(of.max()), "uncapped_mean": float(free[layer].mean()),
                    "capped": int((free[layer] > most).sum()),
                }
                for layer, of in enumerate(sizes)
            ]  # fmt: skip
    return rows


def alikeness(profile: ExpertProfile) -> list[dict[str, Any]]:
    """Of each layer: the cosine of each expert's most alike other output on its own inputs; empty without outputs.

    `best_cosine` is the mean over experts; `better_than_none` is the share of experts whose best substitute at the same
    weight leaves a smaller error than no output.
    """
    if profile.outputs is None or profile.experts < 2:
        return []
    itself = np.eye(profile.experts, dtype=bool)
    best = np.where(itself, -1.0, profile.outputs.cosine()).max(axis=2)
    error = np.where(itself, np.inf, profile.outputs.error()).min(axis=2)
    return [
        {
            "layer": layer,
            "best_cosine": float(best[layer].mean()),
            "better_than_none": float((error[layer] < 1).mean()),
        }
        for layer in range(profile.layers)
    ]


def taken(profile: ExpertProfile) -> list[dict[str, Any]]:
    """By ranking: how often a token that picks an expert also picks its best buddy, which then cannot replace it."""
    rows = []
    for by in get_args(Ranking):
        if by != "coactivation" and profile.outputs is None:
            continue
        table = profile.buddies(BuddyOptions(by=by, max_buddies=1))
        together = np.take_along_axis(profile.binary, table.ids.astype(np.int64), axis=2)[:, :, 0]
        used = (profile.activations > 0) & (table.sizes > 0)
        shares = together[used] / profile.activations[used]
        rows.append({"by": by, "taken": float(shares.mean()) if used.any() else 0.0})
    return rows


def size_table(rows: list[dict[str, Any]]) -> Grid:
    """One line for each ranking and alpha, over all layers."""
    cells = []
    for by, alpha in dict.fromkeys((row["by"], row["alpha"]) for row in rows):
        of = [row for row in rows if (row["by"], row["alpha"]) == (by, alpha)]
        means = [row["mean"] for row in of]
        cells.append((
            by, f"{alpha:g}", str(min(row["least"] for row in of)), f"{np.mean(means):.1f}",
            str(max(row["most"] for row in of)), f"{min(means):.1f} to {max(means):.1f}",
            f"{np.mean([row['uncapped_mean'] for row in of]):.1f}",
            f"{sum(row['capped'] for row in of)} experts",
        ))  # fmt: skip
    columns = ("by", "alpha", "least", "mean", "most", "mean by layer", "without K_max", "cut")
    return grid("buddies of an expert", columns, cells)


@dataclass(frozen=True)
class ProfileRequest:
    """A profile that the command line asks for: of `text` or `trace`."""

    text: Path | None
    trace: Path | None
    options: ProfileOptions

    def run(self, store: Path, model_dir: Path) -> ProfileManifest:
        """Profile, and print the lengths of the buddy lists. Raises as `profile_text` and `profile_trace`."""
        from .collect_profile import profile_text, profile_trace

        if self.text is not None:
            made = profile_text(store, model_dir, self.text, self.options)
        else:
            assert self.trace is not None  # checked by `profile_request`
            made = profile_trace(store, self.trace, self.options)
        profile = read_profile(store, read_manifest(store))
        console = Console(stderr=True)
        show(console, size_table(size_distributions(profile)))
        shares = ", ".join(f"{row['taken']:.0%} by {row['by']}" for row in taken(profile))
        show(console, f"a token that picks an expert has picked its best buddy too: {shares}")
        if alike := alikeness(profile):
            best = sum(row["best_cosine"] for row in alike) / len(alike)
            better = sum(row["better_than_none"] for row in alike) / len(alike)
            show(
                console,
                f"best buddy's output: cosine {best:.2f} on average, nearer than no output for {better:.0%} of the "
                "experts",
            )
        return made


def profile_request(
    text: Path | None,
    trace: Path | None,
    outputs: int | None,
    warmup: int | None,
    warmup_weight: float | None,
) -> ProfileRequest | None:
    """The profile of the options, if any.

    Raises:
        ConfigError: both sources, options without a source or of the other one, a value out of range, or no text.
    """
    if text is not None and trace is not None:
        raise ConfigError("--profile and --profile-trace are both given", "leave one out: a store has one profile")
    if text is None and trace is None:
        given = {
            "--profile-outputs": outputs, "--profile-warmup": warmup, "--profile-warmup-weight": warmup_weight,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} is given without --profile", "add --profile TEXT, or leave it out")
        return None
    if trace is not None and outputs is not None:
        raise ConfigError("--profile-outputs is given with --profile-trace", "leave it out: a trace has no outputs")
    if warmup_weight is not None and warmup is None:
        raise ConfigError("--profile-warmup-weight is given without --profile-warmup", "add --profile-warmup TOKENS")
    options = ProfileOptions(
        OUTPUT_TOKENS if outputs is None else outputs, warmup or 0, 0.0 if warmup_weight is None else warmup_weight
    )
    if text is not None:
        read_texts(text)  # refused before anything is computed
    return ProfileRequest(text, trace, options)
