"""What a profile says, in figures: how long buddy lists are, and how alike the best buddies' outputs are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
from rich.table import Table

from ....actors.policies.buddies import BuddyOptions, Ranking
from ....actors.policies.expert_profile import ExpertProfile

ALPHAS = (0.75, 0.95, 0.99)  # those of the paper's tables


def size_distributions(profile: ExpertProfile, most: int = BuddyOptions.max_buddies) -> list[dict[str, Any]]:
    """|B(i; alpha)| over the experts of each layer, for each ranking that the profile allows and each of `ALPHAS`.

    Args:
        most: K_max. `uncapped_mean` and `capped` (experts whose list it cuts) say what it does.
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
                    "median": float(np.median(of)), "most": int(of.max()), "empty": int((of == 0).sum()),
                    "uncapped_mean": float(free[layer].mean()), "capped": int((free[layer] > most).sum()),
                }
                for layer, of in enumerate(sizes)
            ]  # fmt: skip
    return rows


def alikeness(profile: ExpertProfile) -> list[dict[str, Any]]:
    """Of each layer: each expert's most alike other one, by cosine of outputs on its own inputs; empty without outputs.

    `best_cosine` is the mean over experts, `best_cosine_most` the greatest; `better_than_none` is the share of experts
    that have another whose output, at the same weight, leaves a smaller error than nothing does.
    """
    if profile.outputs is None or profile.experts < 2:
        return []
    itself = np.eye(profile.experts, dtype=bool)
    best = np.where(itself, -1.0, profile.outputs.cosine()).max(axis=2)
    error = np.where(itself, np.inf, profile.outputs.error()).min(axis=2)
    return [
        {
            "layer": layer, "best_cosine": float(best[layer].mean()), "best_cosine_most": float(best[layer].max()),
            "least_error": float(error[layer].mean()), "better_than_none": float((error[layer] < 1).mean()),
        }
        for layer in range(profile.layers)
    ]  # fmt: skip


def taken(profile: ExpertProfile) -> list[dict[str, Any]]:
    """By ranking: how often a token that picks an expert has picked that expert's best buddy too, mean over experts.

    Such a buddy is of no use to it: it runs already. Co-activation ranks by just that.
    """
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


def size_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each ranking and alpha, over all layers."""
    table = Table("by", "alpha", "least", "mean", "most", "mean by layer", "without K_max", "cut", title="buddies")
    for by, alpha in dict.fromkeys((row["by"], row["alpha"]) for row in rows):
        of = [row for row in rows if (row["by"], row["alpha"]) == (by, alpha)]
        means = [row["mean"] for row in of]
        table.add_row(
            by, f"{alpha:g}", str(min(row["least"] for row in of)), f"{np.mean(means):.1f}",
            str(max(row["most"] for row in of)), f"{min(means):.1f} to {max(means):.1f}",
            f"{np.mean([row['uncapped_mean'] for row in of]):.1f}",
            f"{sum(row['capped'] for row in of)} experts",
        )  # fmt: skip
    return table
