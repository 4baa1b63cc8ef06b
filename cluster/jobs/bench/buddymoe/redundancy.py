"""What the profile says of the model's experts: whether there is anything that a buddy could stand in for."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from .....actors.store.artifacts import read_profile
from .....actors.store.format import read_manifest
from ...profile.command import alikeness, size_distributions, taken


def redundancy(store: Path) -> dict[str, Any]:
    """Of a store's profile, as plain values.

    best_cosine: of each layer, of an expert's outputs with those of its most alike other expert, mean over experts;
    empty without output similarity. better_than_none: share of the experts that have another whose output is nearer
    than no output. taken: by ranking, how often a token has its expert's best buddy already. peers: experts that hold
    95% of the co-activations of one, mean.

    Raises:
        StoreError: there is no profile, or it is damaged.
    """
    profile = read_profile(store, read_manifest(store))
    alike = alikeness(profile)
    sizes = [row["uncapped_mean"] for row in size_distributions(profile)
             if (row["by"], row["alpha"]) == ("coactivation", 0.95)]  # fmt: skip
    return {
        "best_cosine": [row["best_cosine"] for row in alike],
        "better_than_none": mean(row["better_than_none"] for row in alike) if alike else None,
        "taken": {row["by"]: row["taken"] for row in taken(profile)},
        "peers": mean(sizes),
        "experts": profile.experts,
    }
