"""Buddy substitution: C++ against the sequential algorithm (`buddymoe_reference`), to the last bit."""

from __future__ import annotations

import buddymoe_reference as reference
import numpy as np
import pytest
from kernel_cases import OPTIONS, Arguments, assert_same, case, taus

from tiermoe.actors.policies.buddymoe.substitution import SubstitutionOptions, reach
from tiermoe.kernels.substitute import replaceable, substitute

SHAPES = [(1, 1, 4), (1, 4, 8), (3, 2, 5), (8, 8, 64), (33, 6, 60), (128, 8, 256)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_gives_what_the_algorithm_gives(shape: tuple[int, int, int], name: str) -> None:
    rng = np.random.default_rng(sum(shape))
    for steps in (0, 4):
        arguments = case(rng, *shape, ranks=min(16, shape[2]), steps=steps)
        for tau in taus(name, arguments):
            expected = reference.substitute(*arguments, OPTIONS[name], tau)
            assert_same(substitute(*arguments, OPTIONS[name], tau), expected)


@pytest.mark.parametrize("name", ["rho 3", "buddy renormalised", "tempered"])
def test_the_largest_shape(name: str) -> None:
    arguments = case(np.random.default_rng(1), 512, 8, 256, ranks=16)
    for tau in taus(name, arguments):
        expected = reference.substitute(*arguments, OPTIONS[name], tau)
        assert expected.substituted > 100
        assert_same(substitute(*arguments, OPTIONS[name], tau), expected)


@pytest.mark.parametrize("beta", [None, 0.0, 0.25, 0.5, 1.0])
def test_distribution_gate(beta: float | None) -> None:
    rng = np.random.default_rng(3)
    for experts in (4, 9, 64):
        for shards in (None, rng.integers(0, 3, experts)):
            ids = rng.integers(0, experts, (5, 4))
            resident = rng.random(experts) < 0.6
            expected = reference.replaceable(ids, resident, beta, shards)
            np.testing.assert_array_equal(replaceable(ids, resident, beta, shards), expected)


def test_it_refuses_what_it_cannot_read() -> None:
    ids, weights, _, allowed, near, buddies = case(np.random.default_rng(0), 2, 2, 5, ranks=4)
    plain = SubstitutionOptions()
    for wrong in (
        (ids + 5, weights, None, allowed, near, buddies),
        (ids.astype(np.int32), weights, None, allowed, near, buddies),
        (ids, weights.astype(np.float64), None, allowed, near, buddies),
        (ids, weights, None, allowed[:-1], near, buddies),
        (ids, weights, None, allowed, near.view(np.int32), buddies),
        (ids, weights, np.ones((1, 5), np.float32), allowed, near, buddies),
    ):
        with pytest.raises(ValueError, match=r"there is no expert|must be numpy|has \d+ items"):
            substitute(*wrong, plain)
    with pytest.raises(ValueError, match="need the router's probabilities"):
        substitute(ids, weights, None, allowed, near, buddies, SubstitutionOptions(eta=0.1))
    with pytest.raises((ValueError, BufferError)):
        substitute(ids.T.copy().T, weights, None, allowed, near, buddies, plain)
    with pytest.raises(ValueError, match="there is no expert"):
        replaceable(ids - 5, allowed, None)


def several_shards(seed: int, shards: int, kappa: float) -> Arguments:
    """As the rule asks: each shard's gate at beta 0.55, buddies on all shards, those of other ones at their hop."""
    rng = np.random.default_rng(seed)
    ids, weights, probabilities, _, _, buddies = case(rng, 8, 6, 48, ranks=16, steps=4)
    resident, shard_of = rng.random(48) < 0.5, np.arange(48) % shards
    replace = reference.replaceable(ids, resident, 0.55, shard_of)
    np.testing.assert_array_equal(replaceable(ids, resident, 0.55, shard_of), replace)
    return ids, weights, probabilities, replace, reach(resident, kappa, shard_of > 0), buddies


HOPS = [(shards, kappa) for shards in (2, 3) for kappa in (0.0, 0.1, 0.5, 1.0)]


@pytest.mark.parametrize(("shards", "kappa"), HOPS)
@pytest.mark.parametrize("name", ["rho 3", "score", "buddy renormalised"])
def test_hops(shards: int, kappa: float, name: str) -> None:
    options, moved = OPTIONS[name], 0
    for seed in range(6):
        arguments = several_shards(seed, shards, kappa)
        expected = reference.substitute(*arguments, options)
        assert_same(substitute(*arguments, options), expected)
        buddies = expected.ids[expected.ids != arguments[0]]
        moved += int(np.count_nonzero(buddies % shards)) if not expected.dropped else 0
    assert options.fallback == "drop" or (moved > 0) == (kappa < 1)
