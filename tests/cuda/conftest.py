"""What needs a GPU: skipped where there is none. Nothing here needs Ray."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> torch.device:
    """Where the tests run: the GPU, or with `--on-cpu` the stand-in, for the tests that can be tried on it."""
    if request.config.getoption("--on-cpu"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def gpu(target: torch.device) -> torch.device:
    """The GPU that the test runs on."""
    return target
