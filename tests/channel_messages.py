"""Messages for the tests of the channel."""

from __future__ import annotations

import numpy as np

from tiermoe.proto.messages import ExpertBatch


def batch(rows: int = 2, width: int = 8, layer: int = 3) -> ExpertBatch:
    """Two experts, each for the first row; the hidden state counts up."""
    return ExpertBatch(
        layer,
        np.array([1, 5], np.int32),
        np.array([3, 0], np.uint8),
        np.array([0, 1, 2], np.int32),
        np.array([0, 0], np.int32),
        np.array([0.25, 0.75], np.float32),
        np.arange(rows * width, dtype=np.float32).reshape(rows, width),
    )
