"""The learned hot set: a server counts how often each expert is used, and begins with the most used ones next time.

    begin    earlier runs' uses -> the placer; the most used experts -> free slots, behind demand
    look     every `SAVE_S` seconds, and at the end: the core's uses since the last look are added, and the file written

The share of forwards that use an expert is a mean over about the last `MOST` forwards and those of this run: uses of
earlier runs count as at most so many. Prompts count, too: a forward of many rows uses most experts once, which tells
little, and changes no order.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .store.format import Manifest
from .store.learned import Uses, find_learned, read_learned, write_learned

if TYPE_CHECKING:  # torch
    from .engine.engine import ExpertEngine

SAVE_S, MOST = 300.0, 4096
_log = logging.getLogger(__name__)


class LearnedUses:
    """Uses of the experts of one engine, kept for the next start.

    Args:
        store: the store's folder on this node; None: the store is another node's.

    Attributes:
        notes: for the plan: what the start was made of, and why a file was passed over. Those of `begin`.
    """

    def __init__(self, engine: ExpertEngine, manifest: Manifest, store: Path | None) -> None:
        self._engine, self._manifest, self._store = engine, manifest, store
        self._earlier: Uses | None = None
        self._seen: NDArray[np.int64] = np.zeros(len(engine.cache.uses), np.int64)
        self._seen_forwards = 0
        self._mine, self._forwards = np.zeros(len(self._seen), np.int64), 0  # of this run, up to the last look
        self.notes: list[str] = []
        self._end, self._saving = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Read what earlier runs left and fill free slots by it; the counters were just reset. Before requests."""
        path = find_learned(self._store, self._manifest)
        if path is not None:
            try:
                self._earlier = read_learned(path, self._manifest)
            except StoreError as error:
                self.notes.append(f"the learned hot set is not used: {error}")
        if self._earlier is not None and (filled := self._engine.begin_with(self._earlier)):
            self.notes.append(f"{filled} slots are filled with the experts that earlier runs used most ({path})")
        self._thread = threading.Thread(target=self._run, name="tiermoe-learned", daemon=True)
        self._thread.start()

    def look(self) -> Uses | None:
        """Uses so far, of earlier runs and of this one; None: nothing ran yet."""
        now, forwards = self._engine.cache.uses.copy(), self._engine.cache.core.counts(0).forwards
        if forwards < self._seen_forwards:  # the counters were reset meanwhile
            self._seen, self._seen_forwards = np.zeros_like(now), 0
        self._mine += np.maximum(now - self._seen, 0)
        self._forwards += forwards - self._seen_forwards
        self._seen, self._seen_forwards = now, forwards
        if not self._forwards:
            return self._earlier
        counts, total = self._mine.astype(np.float64), float(self._forwards)
        if self._earlier is not None:
            share = min(1.0, MOST / self._earlier.forwards)
            counts += share * self._earlier.counts.reshape(-1)
            total += share * self._earlier.forwards
        counts = np.minimum(counts, total)  # a pass may run while its layers are read
        return Uses(counts.astype(np.float32).reshape(len(self._manifest.layers), -1), float(np.float32(total)))

    def save(self) -> None:
        """Write the file, if anything ran since the start. Raises StoreError: it can be written nowhere."""
        with self._saving:
            uses = self.look()
            if uses is not None and self._forwards:
                write_learned(self._store, self._manifest, uses)

    def close(self) -> None:
        """Save once more, as far as that is possible. Safe to call twice."""
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            self._try_saving()

    def _run(self) -> None:
        while not self._end.wait(SAVE_S):
            self._try_saving()

    def _try_saving(self) -> None:
        try:
            self.save()
        except StoreError as error:
            _log.warning("%s", error)
