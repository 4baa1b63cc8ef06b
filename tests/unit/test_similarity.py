"""Prefill against decode activations: the number, and a plot that is a picture."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest

from tiermoe.cluster.jobs.bench.similarity import activation_similarity, plot_similarity
from tiermoe.errors import ConfigError


def test_the_same_distribution_is_1_whatever_its_length() -> None:
    result = activation_similarity([[[6, 2, 0, 2]]], [[[60, 20, 0, 20]]])
    assert result.per_layer == pytest.approx((1.0,))
    assert (result.overall, result.sequences) == (pytest.approx(1.0), 1)


def test_other_experts_are_0() -> None:
    assert activation_similarity([[[1, 1, 0, 0]]], [[[0, 0, 3, 0]]]).overall == 0.0


def test_mean_over_sequences_then_layers() -> None:
    prefill = [[[1, 0], [1, 1]], [[1, 0], [3, 4]]]
    decode = [[[1, 0], [1, 0]], [[0, 1], [4, 3]]]
    result = activation_similarity(prefill, decode)
    per_layer = ((1 + 0) / 2, (1 / math.sqrt(2) + 24 / 25) / 2)
    assert result.per_layer == pytest.approx(per_layer)
    assert result.overall == pytest.approx(sum(per_layer) / 2)
    assert result.sequences == 2


def test_a_sequence_without_decoding_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence 1 activated no expert of layer 0 during decode; give each"):
        activation_similarity([[[1, 0]], [[1, 0]]], [[[1, 0]], [[0, 0]]])


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [([[1, 2]], [[1, 2]]), ([[[1, 2]]], [[[1, 2, 3]]]), ([[[1, -2]]], [[[1, 2]]]), ([[[math.nan]]], [[[1]]]), ([], [])],
)
def test_malformed_counts(prefill: Any, decode: Any) -> None:
    with pytest.raises(ValueError, match="counts must"):
        activation_similarity(prefill, decode)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    for path in (one, other):
        plot_similarity(path, [0.9, 0.8, 0.95], model="tiny-moe", sequences=7)
    assert one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(ConfigError, match="cannot write"):
        plot_similarity(tmp_path / "none" / "x.png", [1.0], model="m", sequences=1)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named '{name}'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'tiermoe\[plots\]'"):
        plot_similarity(tmp_path / "x.png", [1.0], model="m", sequences=1)
