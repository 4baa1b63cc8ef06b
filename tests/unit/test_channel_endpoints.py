"""The endpoint directory: the newest registration of a name holds."""

from __future__ import annotations

import threading

from tiermoe.cluster.endpoints import EndpointDirectory


def test_register_and_look_up() -> None:
    directory = EndpointDirectory()
    assert directory.lookup("ndp/0") is None
    generation = directory.register("ndp/0", "127.0.0.1:4000", 17)
    found = {"name": "ndp/0", "address": "127.0.0.1:4000", "generation": generation, "pid": 17}
    assert directory.lookup("ndp/0") == found
    directory.register("store/0", "127.0.0.1:4001", 18)
    assert directory.entries("ndp/") == [found]
    assert [e["name"] for e in directory.entries()] == ["ndp/0", "store/0"]


def test_a_worker_that_ended_does_not_remove_its_successor() -> None:
    directory = EndpointDirectory()
    old = directory.register("ndp/0", "127.0.0.1:4000", 17)
    new = directory.register("ndp/0", "127.0.0.1:5000", 18)
    assert new > old
    assert not directory.remove("ndp/0", old)
    assert directory.remove("ndp/0", new)
    assert not directory.remove("ndp/0", new)
    assert directory.lookup("ndp/0") is None


def test_generations_are_unique_among_threads() -> None:
    directory = EndpointDirectory()
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: seen.extend(directory.register(f"w/{n}", "a:1", n) for _ in range(200)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
    assert len(set(seen)) == len(seen) == 800
