"""A small store of MoE layers with biases, written by hand: no torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.store.format import (
    DTYPE_CODES,
    MANIFEST_NAME,
    DenseFile,
    DType,
    ExpertShape,
    FileRecord,
    LayerFile,
    Manifest,
    build_header,
    layer_name,
)

EXPERTS, HIDDEN, INTERMEDIATE = 3, 8, 5
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, gates=2, has_bias=True)
LAYERS = 2


def record(path: Path, data: bytes) -> dict[str, Any]:
    path.write_bytes(data)
    return {"file": path.name, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def layer_values(index: int, dtype: DType = "float32", shape: ExpertShape = SHAPE) -> dict[str, NDArray[Any]]:
    """Random arrays of a layer; bfloat16 as the upper halves of float32's bits."""
    rng = np.random.default_rng(index)
    values = {name: rng.standard_normal(dims).astype(np.float32) for name, dims in shape.stacked().items()}
    if dtype == "float32":
        return values
    if dtype == "float16":
        return {name: array.astype(np.float16) for name, array in values.items()}
    return {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in values.items()}


def write_store(
    folder: Path, layers: int = LAYERS, dtype: DType = "float32", shape: ExpertShape = SHAPE, model: str = "tiny"
) -> Path:
    folder.mkdir()
    files = []
    for index in range(layers):
        values = layer_values(index, dtype, shape)
        head, _ = build_header({name: (DTYPE_CODES[dtype], array.shape) for name, array in values.items()})
        data = head + b"".join(array.tobytes() for array in values.values())
        files.append(LayerFile(index=index, module=f"m.{index}", **record(folder / layer_name(index), data)))
    head, _ = build_header({"norm": ("F32", (8,))})
    manifest = Manifest(
        format_version=1,
        model=model,
        architecture="Tiny",
        dtype=dtype,
        transformers_version="5",
        experts=shape,
        layers=tuple(files),
        dense=DenseFile(tied=(), **record(folder / "dense.safetensors", head + bytes(32))),
        extras=(FileRecord(**record(folder / "config.json", b"{}")),),
        source=(),
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    return folder
