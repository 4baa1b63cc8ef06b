"""Random cases of buddy substitution, for tests of its kernels."""

from __future__ import annotations

import numpy as np
import torch

from tiermoe.actors.policies.buddymoe.substitution import (
    Buddies,
    Substituted,
    SubstitutionOptions,
    reach,
    replaceable,
    token_entropy,
)
from tiermoe.kernels.substitute import BuddyTensors, ReplacedArrays, ReplacedTensors

Arguments = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, Buddies]


def buddies_of(rng: np.random.Generator, experts: int, ranks: int, steps: int = 0) -> Buddies:
    """Random lists of random lengths; with `steps`, similarities are multiples of 1/steps, so that many are equal."""
    ids = np.tile(np.arange(experts, dtype=np.int32)[:, None], (1, ranks))
    similarity = np.zeros((experts, ranks), np.float32)
    for expert in range(experts):
        others = np.delete(np.arange(experts), expert)
        length = int(rng.integers(0, min(ranks, len(others)) + 1))
        ids[expert, :length] = rng.permutation(others)[:length]
        values = np.sort(rng.random(length))[::-1]
        if steps:
            values = np.ceil(values * steps) / steps
        similarity[expert, :length] = values
    return Buddies(ids, similarity)


def case(rng: np.random.Generator, tokens: int, top_k: int, experts: int, ranks: int, steps: int = 0) -> Arguments:
    """Routing of random logits (some weights 0), half of the experts resident, half of those on another GPU."""
    logits = rng.standard_normal((tokens, experts), dtype=np.float32) * np.float32(2)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k].astype(np.int64)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    weights[rng.random((tokens, top_k)) < 0.02] = 0
    resident = rng.random(experts) < 0.5
    allowed = replaceable(ids, resident, None)
    near = reach(resident, 0.25, rng.integers(0, 2, experts))
    return ids, weights, probabilities.astype(np.float32), allowed, near, buddies_of(rng, experts, ranks, steps)


OPTIONS = {
    "plain": SubstitutionOptions(),
    "rho 3": SubstitutionOptions(rho=3),
    "rho 0": SubstitutionOptions(rho=0),
    "search 2": SubstitutionOptions(search=2),
    "score": SubstitutionOptions(eta=0.7, reuse=0.5, rho=4),
    "reuse": SubstitutionOptions(reuse=0.9),
    "drop": SubstitutionOptions(fallback="drop", search=1),
    "drop renormalised": SubstitutionOptions(fallback="drop", search=1, renormalise=True),
    "buddy": SubstitutionOptions(weights="buddy"),
    "buddy renormalised": SubstitutionOptions(weights="buddy", renormalise=True, fallback="drop", eta=0.1, search=3),
    "gates": SubstitutionOptions(gamma=0.3, rho=2),
    "tempered": SubstitutionOptions(gamma=0.4, temperature=1.2, weights="buddy", renormalise=True),
    "cold": SubstitutionOptions(temperature=0.8, fallback="drop"),
}


def assert_same(found: ReplacedArrays | ReplacedTensors, expected: Substituted) -> None:
    np.testing.assert_array_equal(np.asarray(found.ids), expected.ids)
    np.testing.assert_array_equal(np.asarray(found.weights).view(np.int32), expected.weights.view(np.int32))
    assert (found.substituted, found.dropped) == (expected.substituted, expected.dropped)


def on_tensors(arguments: Arguments) -> tuple:
    *arrays, buddies = arguments
    return (*(torch.from_numpy(a) for a in arrays), BuddyTensors.of(buddies))


def taus(name: str, arguments: Arguments) -> list[float | None]:
    """No gate, and for some options a threshold at the very entropy of one of the tokens."""
    options = OPTIONS[name]
    entropies = np.sort(token_entropy(arguments[1], options.temperature))
    return [None, float(entropies[len(entropies) // 3])] if options.gamma or options.temperature != 1 else [None]
