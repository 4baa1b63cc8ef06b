"""The endpoint directory, asked through Ray: here through a handle that looks like Ray's; no Ray is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

from tiermoe.cluster.endpoints import EndpointDirectory, Endpoints
from tiermoe.errors import RuntimeFailure


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any) -> Callable[[], Any]:
        return lambda: self._method(*args)


class _Handle:
    """Ray's handle of a directory: `handle.method.remote(...)` gives what `ray.get` resolves."""

    def __init__(self, directory: EndpointDirectory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._directory, name))


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    handles = {"endpoints": _Handle(EndpointDirectory())}

    def get_actor(name: str) -> _Handle:
        if name not in handles:
            raise ValueError(f"no actor {name}")
        return handles[name]

    def get(reference: Callable[[], Any], *, timeout: float) -> Any:
        assert timeout > 0  # a directory that hangs must not hang its callers
        return reference()

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", get)
    return Endpoints("endpoints", "127.0.0.1")


def test_the_newest_registration_of_a_name_holds(endpoints: Endpoints) -> None:
    assert endpoints.host() == "127.0.0.1"
    assert endpoints.lookup("ndp/0") is None
    endpoints.register("store/0", "127.0.0.1:4001")
    endpoints.register("ndp/0", "127.0.0.1:4000")
    assert endpoints.lookup("ndp/0") == "127.0.0.1:4000"
    endpoints.register("ndp/0", "127.0.0.1:5000")
    assert list(endpoints.entries().items()) == [("ndp/0", "127.0.0.1:5000"), ("store/0", "127.0.0.1:4001")]


def test_a_directory_that_is_not_there(endpoints: Endpoints) -> None:
    with pytest.raises(RuntimeFailure, match="does not answer: ValueError"):
        Endpoints("another").lookup("ndp/0")


def test_a_directory_that_does_not_answer(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(reference: object, *, timeout: float) -> object:
        raise ray.exceptions.GetTimeoutError("late")

    monkeypatch.setattr(ray, "get", late)
    with pytest.raises(RuntimeFailure, match="GetTimeoutError"):
        endpoints.entries()
