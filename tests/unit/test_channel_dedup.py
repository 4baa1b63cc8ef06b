"""The server's memory of requests: executed once, forgotten when settled, bounded."""

from __future__ import annotations

import threading

import numpy as np

from tiermoe.proto.codec import Encoded, encode
from tiermoe.proto.messages import ExpertResult
from tiermoe.proto.requests import ReplyCache, State


def _reply(seconds: float = 0.0) -> Encoded:
    return encode(ExpertResult(np.zeros((1, 4), np.float32), seconds, 0.0, 0.0))  # 16 bytes


def test_a_request_is_new_once() -> None:
    cache = ReplyCache(10, 1000)
    assert cache.begin(1, 1) is State.NEW
    assert cache.begin(1, 1) is State.KNOWN
    assert cache.reply_of(1, 0.0) is None  # it runs
    reply = _reply()
    cache.finish(1, reply)
    assert cache.begin(1, 1) is State.KNOWN
    assert cache.reply_of(1, 0.0) is reply


def test_who_asks_while_it_runs_waits_for_it() -> None:
    cache = ReplyCache(10, 1000)
    cache.begin(1, 1)
    got: list[Encoded | None] = []
    waiter = threading.Thread(target=lambda: got.append(cache.reply_of(1, 5.0)))
    waiter.start()
    reply = _reply()
    cache.finish(1, reply)
    waiter.join(5.0)
    assert got == [reply]


def test_settled_requests_are_forgotten_and_refused() -> None:
    cache = ReplyCache(10, 1000)
    for number in (1, 2, 3):
        cache.begin(number, 1)
        cache.finish(number, _reply())
    assert cache.begin(4, 3) is State.NEW
    assert len(cache) == 2  # 3 and 4
    assert [cache.begin(n, 3) for n in (1, 2, 3)] == [State.STALE, State.STALE, State.KNOWN]
    assert [cache.knows(n) for n in (2, 3, 5)] == [True, True, False]


def test_the_oldest_answers_go_first_and_never_run_again() -> None:
    for cache in (ReplyCache(2, 1000), ReplyCache(100, 40)):
        for number in (1, 2, 3):
            assert cache.begin(number, 1) is State.NEW
            cache.finish(number, _reply())
        assert len(cache) == 2
        assert cache.begin(1, 1) is State.STALE
        assert cache.begin(3, 1) is State.KNOWN
