"""The endpoint directory, and what is said where it does not answer; tests/cluster asks it through Ray."""

from __future__ import annotations

import pytest
import ray

from tiermoe.cluster.endpoints import EndpointDirectory, Endpoints
from tiermoe.errors import RuntimeFailure, StoreError


def test_the_newest_registration_of_a_name_holds() -> None:
    directory = EndpointDirectory()
    assert directory.lookup("ndp/0") is None
    directory.register("store/0", "127.0.0.1:4001")
    directory.register("ndp/0", "127.0.0.1:4000")
    assert directory.lookup("ndp/0") == "127.0.0.1:4000"
    directory.register("ndp/0", "127.0.0.1:5000")
    assert list(directory.entries().items()) == [("ndp/0", "127.0.0.1:5000"), ("store/0", "127.0.0.1:4001")]


def test_a_process_whose_files_do_not_verify_is_named_until_it_registers() -> None:
    directory = EndpointDirectory()
    directory.register("store/0", "127.0.0.1:4001")
    directory.refuse("store/0", StoreError("layer-000.safetensors changed", "put it back"))
    with pytest.raises(StoreError, match="layer-000"):
        directory.lookup("store/0")
    directory.register("store/0", "127.0.0.1:4002")
    assert directory.lookup("store/0") == "127.0.0.1:4002"


@pytest.mark.parametrize("error", [ValueError("no actor endpoints"), ray.exceptions.GetTimeoutError("late")])
def test_a_directory_that_does_not_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise error

    monkeypatch.setattr(ray, "get_actor", absent)
    endpoints = Endpoints("endpoints", "127.0.0.1")
    assert endpoints.host() == "127.0.0.1"
    with pytest.raises(RuntimeFailure, match=f"does not answer: {type(error).__name__}"):
        endpoints.lookup("ndp/0")
