"""Buddy substitution: C++, torch and Triton against the sequential algorithm, to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import OPTIONS, Arguments, assert_same, case, on_tensors, taus

from tiermoe.actors.policies.buddymoe import substitution
from tiermoe.actors.policies.buddymoe.substitution import SubstitutionOptions, reach, replaceable
from tiermoe.kernels import substitute as kernels
from tiermoe.kernels.substitute import substitute_tensors

SHAPES = [(1, 1, 4), (1, 4, 8), (3, 2, 5), (8, 8, 64), (33, 6, 60), (128, 8, 256)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpp_and_torch_give_what_the_algorithm_gives(shape: tuple[int, int, int], name: str) -> None:
    rng = np.random.default_rng(sum(shape))
    for steps in (0, 4):
        arguments = case(rng, *shape, ranks=min(16, shape[2]), steps=steps)
        for tau in taus(name, arguments):
            expected = substitution.substitute(*arguments, OPTIONS[name], tau)
            assert_same(kernels.substitute_arrays(*arguments, OPTIONS[name], tau), expected)
            assert_same(substitute_tensors(*on_tensors(arguments), OPTIONS[name], tau), expected)
            assert_same(kernels.substitute(*on_tensors(arguments), OPTIONS[name], tau), expected)


@pytest.mark.parametrize("name", ["rho 3", "buddy renormalised", "tempered"])
def test_cpp_and_torch_at_the_largest_shape(name: str) -> None:
    arguments = case(np.random.default_rng(1), 512, 8, 256, ranks=16)
    for tau in taus(name, arguments):
        expected = substitution.substitute(*arguments, OPTIONS[name], tau)
        assert expected.substituted > 100
        assert_same(kernels.substitute_arrays(*arguments, OPTIONS[name], tau), expected)
        assert_same(substitute_tensors(*on_tensors(arguments), OPTIONS[name], tau), expected)


@pytest.mark.parametrize("beta", [None, 0.0, 0.25, 0.5, 1.0])
def test_distribution_gate_in_cpp(beta: float | None) -> None:
    rng = np.random.default_rng(3)
    for experts in (4, 9, 64):
        for shards in (None, rng.integers(0, 3, experts)):
            ids = rng.integers(0, experts, (5, 4))
            resident = rng.random(experts) < 0.6
            expected = replaceable(ids, resident, beta, shards)
            np.testing.assert_array_equal(kernels.replaceable_arrays(ids, resident, beta, shards), expected)


def test_cpp_refuses_what_it_cannot_read() -> None:
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
            kernels.substitute_arrays(*wrong, plain)
    with pytest.raises(ValueError, match="need the router's probabilities"):
        kernels.substitute_arrays(ids, weights, None, allowed, near, buddies, SubstitutionOptions(eta=0.1))
    with pytest.raises((ValueError, BufferError)):
        kernels.substitute_arrays(ids.T.copy().T, weights, None, allowed, near, buddies, plain)
    with pytest.raises(ValueError, match="there is no expert"):
        kernels.replaceable_arrays(ids - 5, allowed, None)


def several_shards(seed: int, shards: int, kappa: float) -> Arguments:
    """As the rule asks: each shard's gate at beta 0.55, buddies on all shards, those of other ones at their hop."""
    rng = np.random.default_rng(seed)
    ids, weights, probabilities, _, _, buddies = case(rng, 8, 6, 48, ranks=16, steps=4)
    resident, shard_of = rng.random(48) < 0.5, np.arange(48) % shards
    replace = replaceable(ids, resident, 0.55, shard_of)
    np.testing.assert_array_equal(kernels.replaceable_arrays(ids, resident, 0.55, shard_of), replace)
    return ids, weights, probabilities, replace, reach(resident, kappa, shard_of > 0), buddies


HOPS = [(shards, kappa) for shards in (2, 3) for kappa in (0.0, 0.1, 0.5, 1.0)]


@pytest.mark.parametrize(("shards", "kappa"), HOPS)
@pytest.mark.parametrize("name", ["rho 3", "score", "buddy renormalised"])
def test_hops_in_cpp_and_torch(shards: int, kappa: float, name: str) -> None:
    options, moved = OPTIONS[name], 0
    for seed in range(6):
        arguments = several_shards(seed, shards, kappa)
        expected = substitution.substitute(*arguments, options)
        assert_same(kernels.substitute_arrays(*arguments, options), expected)
        assert_same(substitute_tensors(*on_tensors(arguments), options), expected)
        buddies = expected.ids[expected.ids != arguments[0]]
        moved += int(np.count_nonzero(buddies % shards)) if not expected.dropped else 0
    assert options.fallback == "drop" or (moved > 0) == (kappa < 1)


@pytest.fixture(scope="module")
def triton_kernel():
    """Interpreted where there is no GPU, see conftest.py; on a GPU tests/cuda has these."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/cuda/test_substitute.py runs the compiled kernel")
    from tiermoe.kernels.triton.substitute import substitute_triton

    return substitute_triton


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 2, 5), (8, 8, 64)], ids=str)
def test_triton_gives_what_the_algorithm_gives(triton_kernel, shape: tuple[int, int, int], name: str) -> None:
    arguments = case(np.random.default_rng(sum(shape)), *shape, ranks=min(16, shape[2]), steps=4)
    for tau in taus(name, arguments):
        expected = substitution.substitute(*arguments, OPTIONS[name], tau)
        assert_same(triton_kernel(*on_tensors(arguments), OPTIONS[name], tau), expected)


@pytest.mark.parametrize(("shards", "kappa"), HOPS)
def test_hops_in_triton(triton_kernel, shards: int, kappa: float) -> None:
    for seed, name in enumerate(("rho 3", "score", "buddy renormalised")):
        arguments = several_shards(seed, shards, kappa)
        expected = substitution.substitute(*arguments, OPTIONS[name])
        assert_same(triton_kernel(*on_tensors(arguments), OPTIONS[name]), expected)


@pytest.mark.slow
def test_triton_at_the_largest_shape(triton_kernel) -> None:
    arguments = case(np.random.default_rng(1), 512, 8, 256, ranks=16)
    expected = substitution.substitute(*arguments, OPTIONS["rho 3"])
    assert_same(triton_kernel(*on_tensors(arguments), OPTIONS["rho 3"]), expected)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tiermoe.kernels.triton.substitute import _kernel

types = dict(
    ids_in="*i64", weights_in="*fp32", probabilities="*fp32", replace="*u8", reach="*fp32", buddies="*i32",
    similarity="*fp32", table="*fp64", ids_out="*i64", weights_out="*fp32", counts="*i32",
    rho="i32", E="i32", R="i32", search="i32",
)
flags = ("ENTROPY", "MARGIN", "TEMPER", "COMPATIBILITY", "REUSE", "DROP", "BY_BUDDY", "RENORMALISE")
fixed = dict(K=4, SLOTS=4, RANKS=16) | dict.fromkeys(flags, True)
source = ASTSource(
    fn=_kernel, signature=types | dict.fromkeys(fixed, "constexpr"),
    constexprs={(_kernel.arg_names.index(name),): value for name, value in fixed.items()},
)
options = {"num_warps": 1, "enable_fp_fusion": False}
print(triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"])
"""


def test_triton_compiles_to_exact_arithmetic(tmp_path: Path) -> None:
    """For a GPU, which it takes none to compile for: no fused products, and division as IEEE 754 has it."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    operations = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert "div.rn.f64" in operations
    assert not [name for name in operations if name.startswith("fma.") or "approx" in name]
