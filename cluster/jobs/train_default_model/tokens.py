"""Tokenised corpus on disk, and the deterministic order in which training reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from .corpus import Document
from .sources import KINDS

MIXTURE = {"python": 0.40, "c": 0.24, "prose": 0.36}


def tokenise(documents: list[Document], tokenizer: Any, folder: Path) -> None:
    """Write ``{train,heldout}-{kind}.bin``: uint16 ids, ``<|endoftext|>`` before each document."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        for held_out, name in ((False, "train"), (True, "heldout")):
            chosen = [d.text for d in documents if d.kind == kind and d.held_out == held_out]
            with (folder / f"{name}-{kind}.bin").open("wb") as out:
                starts = range(0, len(chosen), 256)
                for start in track(starts, description=f"tokenise {name} {kind}"):
                    for encoding in tokenizer.encode_batch(chosen[start : start + 256]):
                        out.write(np.array([0, *encoding.ids], dtype=np.uint16).tobytes())


class BatchStream:
    """Rows of tokens, drawn without replacement within a kind and a row length.

    The state is the number of rows drawn so far for each (kind, length); with the seed it
    determines everything that follows, so a resumed run reads on where the first one stopped.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed = seed
        self._tokens = {kind: np.memmap(folder / f"train-{kind}.bin", dtype=np.uint16, mode="r") for kind in KINDS}
        self._orders: dict[tuple[str, int, int], NDArray[np.int64]] = {}
        self.drawn: dict[str, int] = {}

    def next_rows(self, rows: int, length: int) -> NDArray[np.int64]:
        """Array [rows, length + 1]: inputs and, shifted by one, targets."""
        rng = np.random.default_rng([self._seed, sum(self.drawn.values()), length])
        kinds = rng.choice(len(KINDS), size=rows, p=[MIXTURE[kind] for kind in KINDS])
        return np.stack([self._row(KINDS[kind], length) for kind in kinds])

    def _row(self, kind: str, length: int) -> NDArray[np.int64]:
        key = f"{kind}:{length}"
        index = self.drawn.get(key, 0)
        self.drawn[key] = index + 1
        tokens = self._tokens[kind]
        blocks = (len(tokens) - 1) // length
        start = int(self._order(kind, length, index // blocks, blocks)[index % blocks]) * length
        return tokens[start : start + length + 1].astype(np.int64)

    def _order(self, kind: str, length: int, epoch: int, blocks: int) -> NDArray[np.int64]:
        key = (kind, length, epoch)
        if key not in self._orders:
            rng = np.random.default_rng([self._seed, KINDS.index(kind), length, epoch])
            self._orders[key] = rng.permutation(blocks)
        return self._orders[key]
