"""What needs a GPU: skipped where there is none. Nothing here needs Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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


@pytest.fixture
def forbid_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[list[str]]]:
    """A context in which an operation of torch that waits for the GPU raises.

    It gives the names of the waits that were asked for by name, which do not happen.
    """

    @contextmanager
    def forbid() -> Iterator[list[str]]:
        calls: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with monkeypatch.context() as patch:
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                patch.setattr(owner, "synchronize", lambda *_, name=owner.__name__: calls.append(name))
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield calls
            finally:
                torch.cuda.set_sync_debug_mode(before)

    return forbid
