"""What an interrupted profile has summed so far, so that the next run goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..prepare.write import disk_errors, write_file
from .collect import State

_NAME = "sums.safetensors"


class Partial:
    """The sums of an unfinished profile in a work folder.

    Args:
        folder: made if it is not there.
        key: of everything that the sums depend on; sums of another key are thrown away.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path, self._key = folder / _NAME, key
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: State, done: int) -> None:
        """Keep the sums of the first `done` windows, in place of what was kept.

        Raises:
            StoreError: the disk is full.
        """
        write_file(self._path, save(state, {"key": self._key, "done": str(done)}))

    def load(self, like: State) -> tuple[State, int] | None:
        """The kept sums and their windows; None where there are none of this key, or not as `like`."""
        try:
            data = self._path.read_bytes()
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])["__metadata__"]
            state, done = load(data), int(header["done"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None
        same = header.get("key") == self._key and set(state) == set(like)
        if not same or any(
            state[name].dtype != held.dtype or state[name].shape != held.shape or not np.isfinite(state[name]).all()
            for name, held in like.items()
        ):
            return None
        return state, done
