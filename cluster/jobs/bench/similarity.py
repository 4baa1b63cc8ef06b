"""How well a prefill foretells which experts its decoding will use: figure 4 of the context-aware NDP paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ....errors import ConfigError


@dataclass(frozen=True)
class Similarity:
    """Cosine similarity of prefill and decode activations.

    Args:
        per_layer: [L], mean over the sequences.
        overall: mean of the layers (the paper: 0.89 for Mixtral-8x7B on TruthfulQA).
        sequences: D.
    """

    per_layer: tuple[float, ...]
    overall: float
    sequences: int


def activation_similarity(prefill_counts: ArrayLike, decode_counts: ArrayLike) -> Similarity:
    """Compare the expert activation distributions of both phases, for each sequence and layer.

    The cosine of two count vectors is that of their distributions, so nothing is normalized. Uniform routing
    gives 1 as well: on its own the number says that both phases agree, and not that routing is skewed.

    Args:
        prefill_counts: [D, L, E], how often sequence d selected expert e in layer l during prefill.
        decode_counts: [D, L, E], the same during decoding.

    Raises:
        ValueError: the shapes differ, or a count is negative or not finite.
        ConfigError: a sequence has no activations in one of the phases.
    """
    prefill, decode = np.asarray(prefill_counts, np.float64), np.asarray(decode_counts, np.float64)
    if prefill.ndim != 3 or prefill.shape != decode.shape or 0 in prefill.shape:
        raise ValueError(f"counts must both be [D, L, E], not {list(prefill.shape)} and {list(decode.shape)}")
    for name, counts in (("prefill", prefill), ("decode", decode)):
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError(f"{name} counts must be finite and not negative")
        empty = np.argwhere(counts.sum(axis=2) == 0)
        if len(empty):
            sequence, layer = empty[0].tolist()
            raise ConfigError(
                f"sequence {sequence} activated no expert of layer {layer} during {name}",
                "give each sequence a prompt and at least two generated tokens",
            )
    dot = (prefill * decode).sum(axis=2)  # [D, L]
    cosine = dot / (np.linalg.norm(prefill, axis=2) * np.linalg.norm(decode, axis=2))
    per_layer = cosine.mean(axis=0)
    return Similarity(tuple(per_layer.tolist()), float(per_layer.mean()), len(prefill))


def plot_similarity(path: Path, per_layer: Sequence[float], *, model: str, sequences: int) -> None:
    """Write the similarity of each layer and their mean as a PNG. The same numbers give the same pixels.

    Args:
        path: of the file; its folder exists.
        per_layer: [L], from `activation_similarity`.
        model: name for the title.
        sequences: D, for the title.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError(f"cannot plot '{path}': {error}", "install it with `pip install 'tiermoe[plots]'`") from error
    mean = float(np.mean(per_layer))
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar(range(len(per_layer)), per_layer, color="#4878a8")
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.2f}")
    axes.set_xlabel("MoE layer")
    axes.set_ylabel("cosine similarity")
    axes.set_ylim(0.0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"Expert activations, prefill against decode: {model}, {sequences} sequences", fontsize=10)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error}", "give a path that can be written") from error
