"""Expert maps on disk: one safetensors file, for a warm start, for other replicas and for a restart.

Tensors `embeddings` [n, D] and `maps` [L, n, J], both float32, as `ExpertMapStore.arrays` gives them. The header says
which model they are of; a file of another one, of another version or with numbers that are not finite is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import StoreError
from .policies.prefetch.map_store import checked_arrays
from .store_format import Manifest

FORMAT, VERSION = "tiermoe-expert-maps", "1"
_REMEDY = "give a file that `tiermoe` wrote for this model, or none: the matcher then learns while it serves"


@dataclass(frozen=True)
class MapShape:
    """The model that maps are of.

    Attributes:
        model: its name, as in the expert store's manifest.
        layers, experts: L MoE layers of J experts.
        hidden: H, width of its embeddings.
    """

    model: str
    layers: int
    experts: int
    hidden: int


def map_shape(manifest: Manifest) -> MapShape:
    """Of a store's model."""
    return MapShape(manifest.model, len(manifest.layers), manifest.experts.num_experts, manifest.experts.hidden)


def save_maps(path: Path, arrays: Mapping[str, NDArray[np.float32]], shape: MapShape) -> None:
    """Write the file whole or not at all: under another name first.

    Raises:
        StoreError: it cannot be written.
    """
    header = {"format": FORMAT, "version": VERSION} | {name: str(value) for name, value in asdict(shape).items()}
    header["width"] = str(arrays["embeddings"].shape[1])
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(arrays), part, metadata=header)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = f"expert maps cannot be written to '{path}': {error}"
        raise StoreError(why, "free space or give another path") from error


def load_maps(path: Path, shape: MapShape, width: int) -> dict[str, NDArray[Any]]:
    """The arrays of a file, checked.

    Args:
        shape: of the model that they must be of. width: D, of the embeddings that the store keeps.

    Raises:
        StoreError: there is no file, it is none of this kind, of another model or width, or damaged.
    """
    expected = {"format": FORMAT, "version": VERSION} | {name: str(value) for name, value in asdict(shape).items()}
    expected["width"] = str(width)
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            for name, value in expected.items():
                if header.get(name) != value:
                    raise StoreError(f"'{path}' has {name} {header.get(name)}, not {value}", _REMEDY)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        checked_arrays(arrays, shape.layers, shape.experts, width)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"expert maps cannot be read from '{path}': {error}", _REMEDY) from error
    except ValueError as error:
        raise StoreError(f"the expert maps in '{path}' are damaged: {error}", _REMEDY) from error
    return arrays
