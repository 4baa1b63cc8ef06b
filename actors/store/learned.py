"""How often each expert was used, kept over restarts: one small file for each model and host.

    hot-HOST.safetensors    uses [L, E], float32: in how many of `forwards` forwards each expert was needed

It lies in the store's folder; where that is another node's, or may not be written, in the user's cache. Nothing depends
on it: a file that is damaged, of another model or of another shape is said and passed over. It is replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import StoreError, reason
from ...proto.private import own_folder, user_cache
from .artifacts import Artifact
from .format import Manifest, model_fingerprint

_FILE = Artifact("uses of experts", "remove it: uses are learned anew")
_CACHE = "hot"  # in the user's cache


@dataclass(frozen=True)
class Uses:
    """In how many of `forwards` forwards each expert was needed, [L, E]."""

    counts: NDArray[np.float32]
    forwards: float

    def hottest(self) -> list[int]:
        """The experts that were used, as layer x E + expert, the most used first; ties to the lower number."""
        counts = self.counts.reshape(-1)
        order = np.argsort(-counts, kind="stable")
        return order[: int(np.count_nonzero(counts))].tolist()


def learned_files(store: Path | None, manifest: Manifest) -> Iterator[Path]:
    """Where this host's file of a model may be, the first choice first. store: its folder; None: it is not here."""
    name = f"hot-{re.sub(r'[^A-Za-z0-9._-]', '_', platform.node()) or 'host'}.safetensors"
    if store is not None:
        yield store / name
    yield user_cache() / _CACHE / model_fingerprint(manifest)[:16] / name


def find_learned(store: Path | None, manifest: Manifest) -> Path | None:
    """This host's newest file of a model; None: there is none."""
    there = [path for path in learned_files(store, manifest) if path.is_file()]
    return max(there, key=lambda path: path.stat().st_mtime, default=None)


def read_learned(path: Path, manifest: Manifest) -> Uses:
    """Raises StoreError: the file is unreadable, damaged, of another model, or holds what no counts are."""
    tag, arrays = _FILE.read(path)
    if tag.get("fingerprint") != model_fingerprint(manifest):
        raise _FILE.refused(f"'{path}' is of another model")
    counts, forwards = arrays.get("uses"), tag.get("forwards")
    shape = (len(manifest.layers), manifest.experts.num_experts)
    if not isinstance(forwards, int | float) or counts is None or counts.dtype != np.float32 or counts.shape != shape:
        raise _FILE.refused(f"'{path}' holds no uses of {shape[0]} layers x {shape[1]} experts")
    if not 0 < forwards < float("inf") or not bool(((counts >= 0) & (counts <= forwards)).all()):
        raise _FILE.refused(f"'{path}' has numbers that cannot be counts of forwards")
    return Uses(counts, float(forwards))


def write_learned(store: Path | None, manifest: Manifest, uses: Uses) -> Path:
    """Replace this host's file of a model; the path. Raises StoreError: it can be written nowhere."""
    tag: dict[str, object] = {"fingerprint": model_fingerprint(manifest), "forwards": uses.forwards}
    data, why = _FILE.encode({"uses": uses.counts}, tag), ""
    for path in learned_files(store, manifest):
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            if store is None or path.parent != store:
                own_folder(own_folder(user_cache() / _CACHE) / path.parent.name)
            part.write_bytes(data)
            os.replace(part, path)
            return path
        except OSError as error:
            why = reason(error)
            with contextlib.suppress(OSError):
                part.unlink()
    raise StoreError(f"uses of experts cannot be kept: {why}", "make the store's folder or the user's cache writable")
