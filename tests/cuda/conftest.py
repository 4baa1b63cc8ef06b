"""What needs a GPU: skipped where there is none. Nothing here needs Ray."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The GPU that the test runs on."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
