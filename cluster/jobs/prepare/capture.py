"""Runs calibration text through a store's model in full precision, with a `Watcher` as each layer's experts.

A watcher computes the experts in float32, one at a time from the store's mapped files, and sums or writes what its job
needs. Dense weights are in memory in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.cache.sources import host_weights
from ....actors.engine.model.model import MoeBlock, build_model, find_blocks
from ....actors.store.files import LayerArrays, hash_files
from ....actors.store.format import FileRecord, Manifest, TensorSpec, build_header, read_header
from ....errors import StoreError, UnsupportedModelError
from ....kernels.device import bound_torch_threads
from .calibration import Windows
from .writer import disk_errors

IMPLEMENTATION = "tiermoe-watched"  # name under which transformers knows experts that watchers compute
ROWS_PER_FORWARD = 2048


class Watcher:
    """The experts of one MoE layer, in the store's type.

    A subclass overrides `see`, which gets the layer's input.
    """

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        self.block = block
        self.gate_up, self.down, *self._biases = weights.tensors  # [E, I, G, H], [E, I, H]

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        self.see(hidden, ids, weights)
        top_k, flat, start = ids.shape[1], ids.reshape(-1), 0
        pairs = flat.argsort(stable=True)
        y = torch.empty(len(flat), hidden.shape[1])  # [T * K, H]
        for expert, count in enumerate(flat.bincount(minlength=len(self.down)).tolist()):
            if count:
                rows = pairs[start : start + count]
                y[rows] = self.expert(expert, hidden[rows // top_k].float())
            start += count
        picked = self.post(y).view(*ids.shape, -1)  # [T, K, H]
        return (picked * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)

    def see(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """The layer's input, before any expert runs."""

    def expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert's outputs for its rows: [n, H] -> [n, H]."""
        pre = x @ self.gate_up[expert].float().flatten(0, 1).t()  # [n, I * G]
        if self._biases:
            pre = pre + self._biases[0][expert].float().flatten()
        out = self.block.gate(pre) @ self.down[expert].float()
        return out + self._biases[1][expert].float() if self._biases else out

    def post(self, y: torch.Tensor) -> torch.Tensor:
        """The module's own step after each expert: [n, H] -> [n, H]."""
        out: torch.Tensor = y if self.block.post is None else self.block.post(y)
        return out


def _watched_forward(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface."""
    out: torch.Tensor = module.tiermoe_watcher.forward(hidden, ids, weights)
    return out


@contextmanager
def watching(model: Any, blocks: Sequence[MoeBlock], watchers: Sequence[Watcher]) -> Iterator[None]:
    """The model's MoE layers run through watchers while the context lasts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _watched_forward)
    before = model.config._experts_implementation
    for block, watcher in zip(blocks, watchers, strict=True):
        block.experts.tiermoe_watcher = watcher
    model.set_experts_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
        for block in blocks:
            del block.experts.tiermoe_watcher


def batches(windows: Windows, first: int = 0) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(number of the first, ids [n, W]) of windows from `first` on, about `ROWS_PER_FORWARD` tokens at a time."""
    step = max(1, ROWS_PER_FORWARD // windows.ids.shape[1])
    for start in range(first, len(windows.ids), step):
        yield start, windows.ids[start : start + step]


@torch.no_grad()
def run_batch(model: Any, ids: NDArray[np.int64]) -> None:
    """One forward without the language model's head; ids [n, W]."""
    model.base_model(input_ids=torch.from_numpy(ids), use_cache=False)


def load_model(store: Path, manifest: Manifest, what: str | None = "replicas") -> tuple[Any, list[MoeBlock]]:
    """The store's model with its dense weights in float32, and its MoE layers.

    Args:
        what: made of plain act(gate) * up experts, for messages; None: any experts.

    Raises:
        UnsupportedModelError, StoreError: as `checked_blocks` and `build_model`.
    """
    bound_torch_threads()
    model = build_model(store, manifest, torch.float32, torch.device("cpu"), "auto")
    return model, find_blocks(model, manifest) if what is None else checked_blocks(model, manifest, what)


def checked_blocks(model: Any, manifest: Manifest, what: str = "replicas") -> list[MoeBlock]:
    """The model's MoE layers. Raises UnsupportedModelError: experts are not plain act(gate) * up without biases."""
    blocks = find_blocks(model, manifest)
    if any(block.activation is None or block.post is not None for block in blocks):
        raise UnsupportedModelError(
            f"the experts of {manifest.architecture} have their own gating", f"use it without {what}"
        )
    return blocks


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one MoE layer, mapped: hidden float32 [T, H], ids int32 [T, K], routing weights float32 [T, K]."""

    hidden: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def inputs_name(layer: int) -> str:
    """File name of one layer's inputs in the work folder."""
    return f"inputs-{layer:03d}.safetensors"


def capture(
    model: Any,
    blocks: Sequence[MoeBlock],
    arrays: Sequence[LayerArrays],
    windows: Windows,
    folder: Path,
    advance: Callable[[int], None],
) -> list[FileRecord]:
    """Run all windows and write the `LayerInputs` of every layer into `folder`; `advance` gets each forward's tokens.

    Raises:
        StoreError: the disk is full.
    """
    hidden = model.config.get_text_config().hidden_size
    recorders = [
        _Recorder(block, weights, folder / inputs_name(i), windows.tokens, hidden)
        for i, (block, weights) in enumerate(zip(blocks, host_weights(arrays), strict=True))
    ]
    with watching(model, blocks, recorders), disk_errors(folder):
        for _, ids in batches(windows):
            run_batch(model, ids)
            advance(ids.size)
        for recorder in recorders:
            recorder.close()
    paths = [recorder.path for recorder in recorders]
    with disk_errors(folder):
        sizes = [path.stat().st_size for path in paths]
        digests = hash_files(paths)
    return [FileRecord(file=p.name, nbytes=n, sha256=d) for p, n, d in zip(paths, sizes, digests, strict=True)]


def open_inputs(folder: Path, layer: int) -> LayerInputs:
    """Map one layer's file of `capture`."""
    path = folder / inputs_name(layer)
    _, specs = read_header(path, lambda what: StoreError(what, "run the same command again"))
    return LayerInputs(**_mapped(path, specs, "r"))


def _mapped(path: Path, specs: Sequence[TensorSpec], mode: Literal["r", "r+"]) -> dict[str, np.ndarray]:
    types = {"F32": np.float32, "I32": np.int32}
    return {s.name: np.memmap(path, types[s.dtype], mode, offset=s.offset, shape=s.shape) for s in specs}


class _Recorder(Watcher):
    """Writes the layer's inputs in order; the first rows give K, and so the file's size."""

    def __init__(self, block: MoeBlock, weights: LayerWeights, path: Path, tokens: int, hidden: int) -> None:
        super().__init__(block, weights)
        self.path, self._tokens, self._hidden = path, tokens, hidden
        self._arrays: dict[str, np.ndarray] = {}
        self._done = 0

    def see(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if not self._arrays:
            t, top_k = self._tokens, ids.shape[1]
            head, specs = build_header(
                {"hidden": ("F32", (t, self._hidden)), "weights": ("F32", (t, top_k)), "ids": ("I32", (t, top_k))}
            )
            with open(self.path, "wb") as file:
                file.write(head)
                file.truncate(specs[-1].offset + specs[-1].nbytes)
            self._arrays = _mapped(self.path, specs, "r+")
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
