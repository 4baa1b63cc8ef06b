"""The lossless run, kept for many comparisons: its distribution at every scored token, and its choices."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....errors import RuntimeFailure


class Distributions:
    """Log-probabilities [windows, tokens, V] in fp16, in an unnamed file that ends with the process.

    In memory they would be 150000 entries x 2 bytes for every scored token of a large vocabulary.

    Raises:
        RuntimeFailure: the folder of temporary files has no room for them.
    """

    def __init__(self, windows: int, tokens: int, vocabulary: int) -> None:
        shape = (windows, tokens, vocabulary)
        nbytes = int(np.prod(shape, dtype=np.int64)) * 2
        with tempfile.TemporaryFile() as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # now, for a full disk would kill the process later
            except OSError as error:
                what = f"no room for {nbytes} bytes of log-probabilities in '{tempfile.gettempdir()}': {error.strerror}"
                raise RuntimeFailure(what, "score fewer windows, or set TMPDIR to a larger disk") from error
            self._values: Any = np.memmap(file, np.float16, "r+", shape=shape)  # it stays after the file is closed

    def put(self, window: int, log_probs: torch.Tensor) -> None:
        """log_probs [tokens, V]."""
        self._values[window] = log_probs.to(torch.float16).numpy()

    def get(self, window: int) -> torch.Tensor:
        """[tokens, V] in fp16."""
        return torch.from_numpy(np.asarray(self._values[window]))


@dataclass
class Reference:
    """What the lossless policy found.

    nll, top1: of each window, [tokens]. choices: of each item, the candidate that it picks.
    """

    distributions: Distributions
    nll: list[torch.Tensor] = field(default_factory=list)
    top1: list[torch.Tensor] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
