"""A profile of a store's experts with random counts, for tests that do not ask what buddies are worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tiermoe.actors.policies.buddymoe.buddies import BINS, TEMPERATURES, ExpertProfile, Outputs
from tiermoe.actors.store.artifacts import PROFILE_NAME, ProfileManifest, ProfileSource, encode_arrays
from tiermoe.actors.store.format import model_fingerprint, read_manifest


def add_random_profile(folder: Path, top_k: int, *, outputs: bool = False) -> None:
    """Put it into the store's folder; with random products of outputs where a ranking needs them."""
    manifest = read_manifest(folder)
    layers, experts = len(manifest.layers), manifest.experts.num_experts
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 100, (layers, experts, experts)).astype(np.float64)
    counts = (counts + counts.transpose(0, 2, 1)) * ~np.eye(experts, dtype=bool)
    entropies = np.ones((layers, len(TEMPERATURES), BINS))
    norms = rng.uniform(1.0, 2.0, counts.shape)
    products = Outputs(norms * rng.uniform(0.0, 1.0, counts.shape), norms) if outputs else None
    data, record = encode_arrays(ExpertProfile(counts.sum(axis=2), counts, counts, entropies, products))
    source = ProfileSource(
        kind="text" if outputs else "trace", sha256="0" * 64, tokens=100, output_tokens=100 if outputs else 0,
        warmup_steps=0, warmup_weight=0.0,
    )  # fmt: skip
    (folder / record.file).write_bytes(data)
    profile = ProfileManifest(
        profile_version=1, fingerprint=model_fingerprint(manifest), layers=layers, experts=experts, top_k=top_k,
        source=source, arrays=record,
    )  # fmt: skip
    (folder / PROFILE_NAME).write_bytes(profile.encode())
