"""Unit tests start no Ray."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a unit test must not start Ray; tests/cluster is the place")

    monkeypatch.setattr(ray, "init", refuse)
