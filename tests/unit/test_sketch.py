"""Embeddings of a bounded width keep their cosines."""

from __future__ import annotations

import numpy as np
import pytest

from tiermoe.actors.policies.fmoe.maps import Sketch, unit_rows


def test_narrow_embeddings_are_kept() -> None:
    x = np.random.default_rng(0).standard_normal((4, 16), np.float32)
    np.testing.assert_allclose(Sketch(16, 512)(x), x / np.linalg.norm(x, axis=1, keepdims=True), rtol=1e-6)


def test_zero_stays_zero() -> None:
    assert not Sketch(300, 64)(np.zeros((2, 300), np.float32)).any()


def test_wide_embeddings_keep_their_cosines() -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((200, 2000)).astype(np.float32)
    y = x + random.standard_normal((200, 2000)).astype(np.float32)
    sketch = Sketch(2000, 512)
    before = np.einsum("sh,sh->s", unit_rows(x), unit_rows(y))
    after = np.einsum("sd,sd->s", sketch(x), sketch(y))
    assert np.sqrt(np.mean((before - after) ** 2)) < np.sqrt(2 / 512)
    assert abs(np.mean(before - after)) < 0.01


def test_the_signs_are_those_of_splitmix64() -> None:
    """Its first outputs from seed 0 end in ...DAF, ...5F4, ...54F, ...1EC, ...49B: odd is plus."""
    x = np.eye(5, dtype=np.float32)
    assert Sketch(5, 1)(x).ravel().tolist() == [1, -1, 1, -1, 1]


def test_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="not"):
        Sketch(16)(np.zeros((1, 17), np.float32))
