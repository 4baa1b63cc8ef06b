"""How much each neuron of each expert contributes on calibration text.

Neuron j of an expert adds act_j * down_j to the expert's output, so on a token the vector that it adds has length
|act_j| * ||down_j||. Its mass is the sum of that over the tokens that the router sent to the expert, not weighted by
the routing weights. Within an expert this ranks neurons as the mean over those tokens does.

Puts those neurons of each expert first that contribute most on calibration text, in a store that is there.

    measure every neuron -> write the layers anew under other names -> replace `manifest.json` -> drop the old ones

An expert's output is a sum over its neurons, so their order is free: outputs change by rounding only. What is
unfinished lies in `OUT.order` with a journal. The manifest names the layer files, and one renaming replaces it: until
then the store is the old one, from then on the new one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.cache.sources import host_weights
from ....actors.engine.model.model import MoeBlock, attach, build_model, detach, find_blocks
from ....actors.store.files import ExpertStore, LayerArrays
from ....actors.store.format import (
    MANIFEST_NAME,
    ExpertShape,
    FileRecord,
    LayerFile,
    Manifest,
    NeuronOrder,
    SourceFile,
    layer_name,
    read_manifest,
)
from ....actors.store.replicas import REPLICAS_NAME, store_digest
from ....errors import ConfigError, StoreError, UnsupportedModelError
from ...report.tables import progress_on
from .calibration import Windows, read_windows
from .job import ORDER_WORK, SPARE_BYTES, beside, discard, locked
from .writer import Journal, disk_errors, sync_folder, write_file, write_tensors

_ROWS_PER_FORWARD = 2048


def neuron_mass(
    model: Any,
    blocks: Sequence[MoeBlock],
    experts: Sequence[LayerWeights],
    windows: Windows,
    advance: Callable[[int], None],
) -> NDArray[np.float64]:
    """Sum of |activation| * ||down row|| of each neuron: float64 [L, E, I]; zeros for experts that got no token.

    Dense layers are in memory in float32; experts are read one at a time, so there is no second copy.

    Args:
        model: in float32, its experts on meta. experts: of each layer, in the store's type.
        advance: called with the tokens just run.
    """
    meters = [_Meter(block, weights) for block, weights in zip(blocks, experts, strict=True)]
    handles = [attach(block.experts, meter) for block, meter in zip(blocks, meters, strict=True)]
    step = max(1, _ROWS_PER_FORWARD // windows.ids.shape[1])
    try:
        with torch.no_grad():
            for start in range(0, len(windows.ids), step):
                ids = torch.from_numpy(windows.ids[start : start + step])
                model.base_model(input_ids=ids, use_cache=False)
                advance(ids.numel())
            return np.stack([meter.mass() for meter in meters])
    finally:
        for handle in handles:
            detach(handle)


def refuse_mixing(blocks: Sequence[MoeBlock], shape: ExpertShape) -> None:
    """Tried out on random pre-activations: may an expert's neurons change places?

    Raises:
        UnsupportedModelError: an activation depends on the place of a neuron, or on other neurons.
    """
    size, gates = shape.intermediate, shape.gates
    pre = torch.randn(4, size, gates, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer, block in enumerate(blocks):
            straight, flipped = block.gate(pre.flatten(1)), block.gate(pre.flip(1).flatten(1))
            if not torch.allclose(straight.flip(1), flipped, rtol=1e-4, atol=1e-5):
                raise UnsupportedModelError(
                    f"the experts of MoE layer {layer} treat a neuron by its place", "leave out --neuron-order"
                )


class _Meter:
    """In place of an MoE layer's experts: sums activations, answers in full precision."""

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        self._gate, self._post = block.gate, block.post
        self._gate_up, self._down, *self._biases = weights.tensors
        self._sums = torch.zeros(self._down.shape[:2], dtype=torch.float64)  # of |activation| [E, I]

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        top_k, flat = ids.shape[1], ids.reshape(-1)
        pairs = flat.argsort(stable=True)
        counts = flat.bincount(minlength=len(self._down)).tolist()
        y = torch.empty(len(flat), hidden.shape[1])  # [T * K, H]
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = pairs[start : start + count]
                y[rows] = self._expert(hidden[rows // top_k].float(), expert)
            start += count
        if self._post is not None:
            y = self._post(y)
        return (y.view(*ids.shape, -1) * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)

    def mass(self) -> NDArray[np.float64]:
        """float64 [E, I]."""
        norms = torch.stack([down.float().norm(dim=1) for down in self._down])
        return (self._sums * norms).numpy()

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        pre = x @ self._gate_up[expert].float().flatten(0, 1).t()  # [n, I * G]
        if self._biases:
            pre = pre + self._biases[0][expert].float().flatten()
        activations = self._gate(pre)  # [n, I]
        self._sums[expert] += activations.abs().sum(dim=0, dtype=torch.float64)
        out = activations @ self._down[expert].float()
        return out + self._biases[1][expert].float() if self._biases else out


_ALGORITHM = "1"  # another number where the same text gives another order: an unfinished run then starts over
_MASS = "neuron-mass.f64"
_LAYER_FILE = re.compile(r"layer-\d{3,}(-o[0-9a-f]{8})?\.safetensors")


def order_neurons(store: Path, model_dir: Path, text: Path, console: Console | None = None) -> Path:
    """Order the neurons of each expert by their mean |activation| * ||down row|| on a text, greatest first.

    Neurons that tie keep their order, and so do all of an expert that no token of the text reached. A store that is
    ordered by this very text stays as it is. An interrupted run resumes.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: see `read_texts`.

    Returns:
        The store folder.

    Raises:
        ConfigError: the text is none or too short; the store is ordered by another text, or has replicas, which are
            fitted to the order that it has.
        UnsupportedModelError: experts whose neurons may not change places.
        StoreError: the store is damaged, or the disk is full.
    """
    console = Console(stderr=True) if console is None else console
    read_manifest(store)  # is one: said before the text is read
    windows = read_windows(text, model_dir, console)
    calibration = windows.record()
    wanted = NeuronOrder(by="activation-norm", sha256=calibration.sha256, tokens=calibration.tokens)
    with locked(store, console):
        manifest = read_manifest(store)
        if manifest.neuron_order == wanted:
            _sweep(store, manifest)
        else:
            _refuse(store, manifest)
            _Job(store, wanted, windows, console).run()
    return store


def neuron_orders(mass: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which neuron comes at each place: [..., I] -> [..., I], greatest mass first, ties as they were."""
    return np.argsort(-mass, axis=-1, kind="stable")


def first_half(mass: NDArray[np.float64]) -> float:
    """The share of all mass [..., I] in the first I // 2 neurons; 0 where there is none."""
    total = float(mass.sum())
    return float(mass[..., : mass.shape[-1] // 2].sum()) / total if total else 0.0


def reordered(layer: LayerArrays, names: tuple[str, ...], orders: NDArray[np.int64]) -> Iterator[bytes]:
    """The data of a layer file with its neurons in another order, an expert at a time.

    Args:
        names: of the file's tensors, as they lie. orders: [E, I] of `neuron_orders`.
    """
    for name in names:
        experts: NDArray[np.generic] = getattr(layer, name)
        for expert, order in zip(experts, orders, strict=True):
            yield (expert if name == "down_bias" else expert[order]).tobytes()


@dataclass(frozen=True)
class _Job:
    """One run, under the store's lock."""

    store: Path
    order: NeuronOrder
    windows: Windows
    console: Console

    def run(self) -> None:
        opened = ExpertStore(self.store, verify="stamp")
        folder = beside(self.store, ORDER_WORK)
        journal = Journal(folder, self._inputs(), _ALGORITHM)
        mass = self._mass(opened, folder, journal)
        _check_space(opened.manifest, folder)
        orders = neuron_orders(mass)
        records = []
        with progress_on(self.console) as progress:
            task = progress.add_task("ordering neurons", total=len(orders))
            for layer, of_layer in zip(opened.layers, orders, strict=True):
                records.append(self._layer(opened.manifest, layer, of_layer, folder, journal))
                progress.advance(task)
        self._publish(opened.manifest, folder, records)
        after = first_half(np.take_along_axis(mass, orders, axis=-1))
        self.console.print(
            f"the first half of the neurons holds {after:.1%} of |activation| x ||down row|| on this text, "
            f"before {first_half(mass):.1%}"
        )

    def _inputs(self) -> tuple[SourceFile, ...]:
        """What unfinished work depends on, in the form in which the journal compares it."""
        pairs = ((MANIFEST_NAME, store_digest(self.store)), ("calibration", self.order.sha256))
        return tuple(SourceFile(file=name, nbytes=0, mtime_ns=None, sha256=digest) for name, digest in pairs)

    def _mass(self, opened: ExpertStore, folder: Path, journal: Journal) -> NDArray[np.float64]:
        """`neuron_mass` of the text, unless an earlier run left it: then all layers follow one measurement.

        Raises:
            StoreError: it is not finite.
        """
        manifest = opened.manifest
        shape = manifest.experts
        if journal.finished(_MASS) is None:
            import torch

            model = build_model(self.store, manifest, torch.float32, torch.device("cpu"), "auto")
            blocks = find_blocks(model, manifest)
            refuse_mixing(blocks, shape)
            with progress_on(self.console) as progress:
                task = progress.add_task("running the calibration text", total=self.windows.tokens)
                layers = host_weights(opened.layers)
                found = neuron_mass(model, blocks, layers, self.windows, lambda n: progress.advance(task, n))
            if not np.isfinite(found).all():
                what = f"the activations of {manifest.architecture} on the text are not finite"
                raise StoreError(what, "give other calibration text")
            journal.add(write_file(folder / _MASS, found.astype("<f8").tobytes()))
        flat = np.frombuffer((folder / _MASS).read_bytes(), dtype="<f8")
        return flat.reshape(len(manifest.layers), shape.num_experts, shape.intermediate)

    def _layer(
        self, manifest: Manifest, layer: LayerArrays, orders: NDArray[np.int64], folder: Path, journal: Journal
    ) -> LayerFile:
        name = f"{layer_name(layer.index).removesuffix('.safetensors')}-o{self.order.sha256[:8]}.safetensors"
        record: FileRecord | None = journal.finished(name)
        if record is None:
            tensors = manifest.expert_tensors()
            record = write_tensors(folder / name, tensors, reordered(layer, tuple(tensors), orders))
            journal.add(record)
        return LayerFile(index=layer.index, module=layer.module, **record.model_dump())

    def _publish(self, old: Manifest, folder: Path, layers: list[LayerFile]) -> None:
        """Move the files into the store beside the old ones, then replace the manifest."""
        manifest = Manifest(**{**dict(old), "layers": tuple(layers), "neuron_order": self.order})
        with disk_errors(self.store):
            for record in layers:
                (folder / record.file).replace(self.store / record.file)
            sync_folder(self.store)
        write_file(self.store / MANIFEST_NAME, manifest.encode())
        _sweep(self.store, manifest)


def _refuse(store: Path, manifest: Manifest) -> None:
    """What an order would break.

    Raises:
        ConfigError: see `order_neurons`.
    """
    if manifest.neuron_order is not None:
        raise ConfigError(
            f"the neurons of {store} are ordered by another text already",
            "keep them so, or make the store anew: `tiermoe prepare MODEL OUT --force --neuron-order TEXT`",
        )
    own = any(record.file == REPLICAS_NAME for record in manifest.files())  # the checkpoint's file of that name
    if (store / REPLICAS_NAME).exists() and not own:
        raise ConfigError(
            f"{store} has quantized replicas, which are fitted to the order that its neurons have",
            "make both anew: `tiermoe prepare MODEL OUT --force --neuron-order TEXT --bits WIDTHS`",
        )


def _check_space(manifest: Manifest, folder: Path) -> None:
    """Refuse to start what cannot be finished; what an earlier run left counts as done.

    Raises:
        StoreError: the disk has too little space.
    """
    needed = sum(layer.nbytes for layer in manifest.layers)
    with disk_errors(folder):
        done = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        free = shutil.disk_usage(folder).free
    if free + done < needed + SPARE_BYTES:
        raise StoreError(
            f"ordering neurons needs {needed / 1e9:.1f} GB for a while, {folder.parent} has {free / 1e9:.1f} GB free",
            "free some space and run the same command again",
        )


def _sweep(store: Path, manifest: Manifest) -> None:
    """Remove the layer files that no manifest names any more, and the work folder."""
    named = {record.file for record in manifest.files()}
    with disk_errors(store):
        for path in store.iterdir():
            if _LAYER_FILE.fullmatch(path.name) and path.name not in named:
                path.unlink()
        discard(beside(store, ORDER_WORK))
