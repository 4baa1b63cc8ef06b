"""Runs calibration text through the full-precision model and keeps what the router sends to the experts.

Dense layers are in memory in float32; experts are read from the store's mapped files, one at a time in float32, so
there is no second copy. Inputs, ids and weights of every MoE layer go to one file each in the work folder.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.cache.sources import host_weights
from ....actors.engine.model.model import MoeBlock, attach, build_model, detach, find_blocks
from ....actors.store.files import LayerArrays, hash_files
from ....actors.store.format import FileRecord, Manifest, build_header, read_header
from ....errors import StoreError, UnsupportedModelError
from ....kernels.expert_ffn import Operands, TorchKernel
from .calibration import Windows
from .writer import disk_errors

_ROWS_PER_FORWARD = 2048


@dataclass(frozen=True)
class LayerInputs:
    """What one MoE layer got: T tokens, K experts each. Mapped arrays.

    Attributes:
        hidden: float32 [T, H].
        ids: int32 [T, K].
        weights: float32 [T, K], the routing weights.
    """

    hidden: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def inputs_name(layer: int) -> str:
    """Name of the file of one layer's inputs in the work folder."""
    return f"inputs-{layer:03d}.safetensors"


def checked_blocks(model: Any, manifest: Manifest, what: str = "replicas") -> list[MoeBlock]:
    """The model's MoE layers.

    Raises:
        UnsupportedModelError: its experts are not plain act(gate) * up without biases: there are no kernels on
            replicas of others.
    """
    blocks = find_blocks(model, manifest)
    if any(block.activation is None or block.post is not None for block in blocks):
        raise UnsupportedModelError(
            f"the experts of {manifest.architecture} gate in a way of their own", f"use it without {what}"
        )
    return blocks


def load_model(store: Path, manifest: Manifest, what: str = "replicas") -> tuple[Any, list[MoeBlock]]:
    """The store's model with its dense part in float32, and its MoE layers. what: is to be made, for messages.

    Raises:
        UnsupportedModelError, StoreError: as `checked_blocks` and `build_model`.
    """
    model = build_model(store, manifest, torch.float32, torch.device("cpu"), "auto")
    return model, checked_blocks(model, manifest, what)


def capture(
    model: Any,
    blocks: Sequence[MoeBlock],
    arrays: Sequence[LayerArrays],
    windows: Windows,
    folder: Path,
    advance: Callable[[int], None],
) -> list[FileRecord]:
    """Run all windows and write the inputs of every layer.

    Args:
        folder: where the files of `open_inputs` go.
        advance: called with the tokens just run.

    Raises:
        StoreError: the disk is full.
    """
    hidden = model.config.get_text_config().hidden_size
    files = [_InputsFile(folder / inputs_name(i), windows.tokens, hidden) for i in range(len(blocks))]
    recorders = [
        _Recorder(block, weights, file)
        for block, weights, file in zip(blocks, host_weights(arrays), files, strict=True)
    ]
    handles = [attach(block.experts, recorder) for block, recorder in zip(blocks, recorders, strict=True)]
    step = max(1, _ROWS_PER_FORWARD // windows.ids.shape[1])
    try:
        with torch.no_grad(), disk_errors(folder):
            for start in range(0, len(windows.ids), step):
                ids = torch.from_numpy(windows.ids[start : start + step])
                model.base_model(input_ids=ids, use_cache=False)
                advance(ids.numel())
            for file in files:
                file.close()
    finally:
        for handle in handles:
            detach(handle)
    paths = [file.path for file in files]
    with disk_errors(folder):
        sizes = [path.stat().st_size for path in paths]
        digests = hash_files(paths)
    return [FileRecord(file=p.name, nbytes=n, sha256=d) for p, n, d in zip(paths, sizes, digests, strict=True)]


def open_inputs(folder: Path, layer: int) -> LayerInputs:
    """Map what `capture` wrote for one layer."""
    path = folder / inputs_name(layer)
    _, specs = read_header(path, lambda what: StoreError(what, "run the same command again"))
    types = {"F32": np.float32, "I32": np.int32}
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return LayerInputs(
        **{
            spec.name: np.frombuffer(
                mapped, types[spec.dtype], count=math.prod(spec.shape), offset=spec.offset
            ).reshape(spec.shape)
            for spec in specs
        }
    )


class _InputsFile:
    """One layer's inputs, appended in order; the number of experts a token uses is known with the first rows."""

    def __init__(self, path: Path, tokens: int, hidden: int) -> None:
        self.path, self._tokens, self._hidden = path, tokens, hidden
        self._arrays: dict[str, np.ndarray] = {}
        self._done = 0

    def append(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if not self._arrays:
            self._create(ids.shape[1])
        rows = slice(self._done, self._done + len(hidden))
        for name, tensor in (("hidden", hidden), ("ids", ids), ("weights", weights)):
            self._arrays[name][rows] = tensor.numpy()
        self._done += len(hidden)

    def close(self) -> None:
        for array in self._arrays.values():
            array.flush()  # type: ignore[attr-defined]  # of np.memmap
        self._arrays = {}
        if self._done != self._tokens:
            raise StoreError(f"{self.path} got {self._done} of {self._tokens} rows", "report this as a bug")

    def _create(self, top_k: int) -> None:
        t = self._tokens
        head, specs = build_header(
            {"hidden": ("F32", (t, self._hidden)), "weights": ("F32", (t, top_k)), "ids": ("I32", (t, top_k))}
        )
        with open(self.path, "wb") as file:
            file.write(head)
            file.truncate(specs[-1].offset + specs[-1].nbytes)
        types = {"F32": np.float32, "I32": np.int32}
        for spec in specs:
            self._arrays[spec.name] = np.memmap(
                self.path, types[spec.dtype], mode="r+", offset=spec.offset, shape=spec.shape
            )


class _Recorder:
    """In place of an MoE layer's experts: notes the inputs, answers in full precision."""

    def __init__(self, block: MoeBlock, weights: LayerWeights, file: _InputsFile) -> None:
        self._gate, self._file = block.gate, file
        self._gate_up, self._down = weights.tensors[0], weights.tensors[1]

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self._file.append(hidden, ids, weights)
        top_k = ids.shape[1]
        pairs = ids.reshape(-1).argsort(stable=True)
        counts = ids.reshape(-1).bincount(minlength=len(self._gate_up)).tolist()
        y = torch.empty(len(pairs), hidden.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                one = slice(expert, expert + 1)
                operands = Operands(self._gate_up[one].float(), self._down[one].float(), None, None)
                kernel = TorchKernel(operands, self._gate)
                kernel.run(hidden, pairs, [(start, start + count, 0, self._gate_up.shape[1], False)], top_k, y)
            start += count
        return (y.view(*ids.shape, -1) * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)
