"""The substitution kernel on a GPU gives what the sequential algorithm gives, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import OPTIONS, assert_same, case, on_tensors, taus

from tiermoe.actors.policies.buddymoe import substitution
from tiermoe.kernels.substitute import BuddyTensors, ReplacedTensors, substitute, substitute_tensors

pytest.importorskip("triton")

SHAPES = [(1, 1, 4), (128, 4, 60)]  # a kernel is compiled for each option and top-k, for some seconds at top-8


def moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, BuddyTensors):
        return BuddyTensors(*(part.to(device) for part in argument))
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


def on_host(found: ReplacedTensors) -> ReplacedTensors:
    return found._replace(ids=found.ids.cpu(), weights=found.weights.cpu())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_gives_what_the_algorithm_gives(gpu: torch.device, name: str) -> None:
    """`substitute` takes the Triton kernel for tensors of a GPU; torch's way is the same there too."""
    for shape in SHAPES:
        for steps in (0, 4):
            arguments = case(np.random.default_rng(sum(shape)), *shape, ranks=min(16, shape[2]), steps=steps)
            given = [moved(a, gpu) for a in on_tensors(arguments)]
            for tau in taus(name, arguments):
                expected = substitution.substitute(*arguments, OPTIONS[name], tau)
                assert_same(on_host(substitute(*given, OPTIONS[name], tau)), expected)
                assert_same(on_host(substitute_tensors(*given, OPTIONS[name], tau)), expected)


def test_nothing_waits_for_the_gpu(gpu: torch.device, forbid_waits: Any) -> None:
    arguments = case(np.random.default_rng(3), 128, 4, 60, ranks=16)
    given = [moved(a, gpu) for a in on_tensors(arguments)]
    substitute(*given, OPTIONS["score"])  # compiled, and its constants copied
    torch.cuda.synchronize(gpu)
    with forbid_waits():
        found = substitute(*given, OPTIONS["score"])
    assert_same(on_host(found), substitution.substitute(*arguments, OPTIONS["score"]))


@pytest.mark.parametrize("name", ["score", "tempered"])
def test_the_largest_shape(gpu: torch.device, name: str) -> None:
    arguments = case(np.random.default_rng(1), 512, 8, 256, ranks=16)
    given = [moved(a, gpu) for a in on_tensors(arguments)]
    for tau in taus(name, arguments):
        expected = substitution.substitute(*arguments, OPTIONS[name], tau)
        assert expected.substituted > 100
        assert_same(on_host(substitute(*given, OPTIONS[name], tau)), expected)
