"""Checkpoints of a model's own cache: which there are, by tokens, salt and bytes."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from tiermoe.actors.engine.serving.states import Checkpoints

_TOKEN_BYTES = 2 * 4 * 4  # keys and values of four float32


def _cache(tokens: list[int], padding: int = 0) -> Any:
    """One layer whose keys are the tokens, behind so many of padding."""
    cache = DynamicCache()
    keys = torch.tensor([0] * padding + tokens, dtype=torch.float32)[None, None, :, None].repeat(1, 1, 1, 4)
    cache.update(keys, -keys, 0)
    return cache


def _keys(cache: Any) -> list[int]:
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert torch.equal(keys, -values)
    return keys[0, 0, :, 0].int().tolist()


def test_the_longest_beginning_of_one_salt_is_found() -> None:
    kept, tokens = Checkpoints(1 << 20, 4), list(range(1, 13))
    for length, padding in ((4, 0), (9, 3)):
        kept.keep(_cache(tokens[:length], padding), 0, tokens[:length], "a")
    assert kept.nbytes == 9 * _TOKEN_BYTES  # the first four are there once
    found = kept.find(tokens, "a", 11)
    assert found is not None
    assert (found.length, _keys(found.cache(torch.device("cpu")))) == (9, tokens[:9])
    assert kept.find(tokens, "a", 8).length == 4  # type: ignore[union-attr]
    assert kept.find(tokens, "b", 11) is None
    assert kept.find([2, *tokens], "a", 11) is None


def test_the_least_recently_used_goes_and_what_is_too_large_is_not_kept() -> None:
    kept = Checkpoints(10 * _TOKEN_BYTES, 4)
    for first in (1, 2, 3):
        tokens = [first] * 4
        kept.keep(_cache(tokens), 0, tokens, "")
        assert kept.find([1] * 9, "", 9) is not None
    assert kept.find([2] * 9, "", 9) is None
    kept.keep(_cache([4] * 11), 0, [4] * 11, "")
    assert (len(kept), kept.nbytes) == (2, 8 * _TOKEN_BYTES)


def test_prompts_part_at_a_page() -> None:
    kept = Checkpoints(1 << 20, 4)
    assert kept.border([1, 2, 3, 4, 5, 6, 7, 8, 9], "") == 0
    assert kept.border([1, 2, 3, 4, 5, 6, 7, 8], "") == 4  # one token at least is to run
    assert kept.border([1, 2, 3, 4, 5, 6, 7, 8, 20, 21], "") == 8
    assert kept.border([1, 2, 3, 4, 5], "other") == 0


@given(seed=st.integers(0, 1 << 16), limit=st.integers(0, 60))
def test_what_is_found_is_what_was_kept(seed: int, limit: int) -> None:
    source, kept = random.Random(seed), Checkpoints(limit * _TOKEN_BYTES, 4)
    for _ in range(30):
        tokens = [source.randrange(2) for _ in range(source.randrange(1, 12))]
        found = kept.find(tokens, "", len(tokens) - 1)
        if found is not None:
            assert _keys(found.cache(torch.device("cpu"))) == tokens[: found.length]
        kept.keep(_cache(tokens), 0, tokens, "")
        assert kept.nbytes == sum(one.nbytes for one in kept._kept.values()) <= kept.limit_bytes
        assert all(one in kept._kept.values() for each in kept._kept.values() for one in each.line)
