"""Heat maps of a profile: BuddyMoE's figures 4 (similarity), 6 (activations) and 7 (co-activation), of every layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ....actors.policies.expert_profile import ExpertProfile
from ....errors import ConfigError
from ...report.files import plot_counts, plot_matrix
from .report import alikeness, size_distributions, taken


def write_figures(folder: Path, profile: ExpertProfile) -> list[Path]:
    """Three PNGs a layer (two where the profile has no outputs) and `profile-report.json`, into a folder.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be made: {error.strerror}", "name a folder that you may write") from error
    itself = np.eye(profile.experts, dtype=bool)
    cosine = None if profile.outputs is None else profile.outputs.cosine()
    written = []
    for layer in range(profile.layers):
        paths = [folder / f"{name}-{layer:03d}.png" for name in ("activations", "coactivation", "similarity")]
        plot_counts(paths[0], profile.activations[layer], f"Layer {layer}: tokens of each expert", "tokens")
        pairs = np.where(itself, np.nan, profile.binary[layer])
        most = float(np.nanmax(pairs)) if profile.experts > 1 else 1.0
        plot_matrix(paths[1], pairs, f"Layer {layer}: picked together", "tokens", (0.0, max(most, 1.0)))
        written += paths[:2]
        if cosine is not None:
            alike = np.where(itself, np.nan, cosine[layer])
            top = float(np.nanmax(alike)) if profile.experts > 1 else 1.0
            title = f"Layer {layer}: outputs of j on the inputs of i"
            plot_matrix(paths[2], alike, title, "cosine", (min(0.0, float(np.nanmin(alike))), max(top, 1e-3)))
            written.append(paths[2])
    report = {"sizes": size_distributions(profile), "alikeness": alikeness(profile), "taken": taken(profile)}
    path = folder / "profile-report.json"
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error}", "give a path that can be written") from error
    return [*written, path]
