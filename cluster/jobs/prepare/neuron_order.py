"""Puts the neurons of each expert first that contribute most on calibration text.

    measure every neuron -> write the layers under other names -> replace `manifest.json` -> remove the old layers

Neuron j of an expert adds act_j * down_j to the expert's output, a vector of length |act_j| * ||down_j||. Its mass is
the sum of that length over the tokens that the router sent to the expert, without routing weights.

The output is a sum over neurons, so another order changes it by rounding only. Unfinished files are in `OUT.order` with
a journal (`writer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from ....actors.engine.cache.slots import LayerWeights
from ....actors.engine.cache.sources import host_weights
from ....actors.engine.model.model import MoeBlock
from ....actors.store.files import ExpertStore, LayerArrays
from ....actors.store.format import (
    MANIFEST_NAME,
    ExpertShape,
    LayerFile,
    Manifest,
    NeuronOrder,
    layer_name,
    read_manifest,
)
from ....actors.store.replicas import REPLICAS_NAME, store_digest
from ....errors import ConfigError, StoreError, UnsupportedModelError
from ...report.tables import progress_on
from .calibration import Windows, read_windows
from .capture import Watcher, batches, load_model, run_batch, watching
from .make_store import ORDER_WORK
from .writer import Journal, beside, locked, publish, require_space, sweep, write_file, write_tensors

_ALGORITHM = "1"  # changed when the same text gives another order: an unfinished run then starts over
_MASS = "neuron-mass.f64"
_LAYER_FILE = re.compile(r"layer-\d{3,}(-o[0-9a-f]{8})?\.safetensors")


def order_neurons(store: Path, model_dir: Path, text: Path, console: Console | None = None) -> Path:
    """Order the neurons of each expert by their mean |activation| * ||down row|| on a text, greatest first.

    Ties, and experts that no token reached, keep their order. A store ordered by this text is unchanged. An
    interrupted run resumes.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: see `read_texts`.

    Raises:
        ConfigError: the text is missing or too short; the store is ordered by another text, or has replicas, which
            are fitted to its order.
        UnsupportedModelError: an activation depends on a neuron's position.
        StoreError: the store is damaged, or the disk is full.
    """
    console = Console(stderr=True) if console is None else console
    read_manifest(store)  # refused before the text is read
    windows = read_windows(text, model_dir, console)
    calibration = windows.record()
    wanted = NeuronOrder(by="activation-norm", sha256=calibration.sha256, tokens=calibration.tokens)
    with locked(store, console):
        manifest = read_manifest(store)
        if manifest.neuron_order == wanted:
            sweep(store, beside(store, ORDER_WORK), manifest.files(), _LAYER_FILE)
        else:
            _refuse(store, manifest)
            _order(store, wanted, windows, console)
    return store


def _order(store: Path, wanted: NeuronOrder, windows: Windows, console: Console) -> None:
    """Measure, write, publish; under the store's lock."""
    opened, folder = ExpertStore(store, verify="stamp"), beside(store, ORDER_WORK)
    manifest = opened.manifest
    digests = {MANIFEST_NAME: store_digest(store), "calibration": wanted.sha256}
    journal = Journal(folder, digests, _ALGORITHM)
    # the measurement of an interrupted run counts, so all layers have one order
    journal.once(_MASS, lambda: write_file(folder / _MASS, _measured(opened, store, windows, console)))
    shape = (len(manifest.layers), manifest.experts.num_experts, manifest.experts.intermediate)
    mass = np.frombuffer((folder / _MASS).read_bytes(), dtype="<f8").reshape(shape)
    needed = sum(layer.nbytes for layer in manifest.layers)
    remedy = "free some space and run the same command again"
    require_space(folder, needed, "ordering neurons", folder.parent, remedy)
    orders, tensors, records = neuron_orders(mass), manifest.expert_tensors(), []
    with progress_on(console) as progress:
        for layer, order in zip(progress.track(opened.layers, description="ordering neurons"), orders, strict=True):
            name = f"{layer_name(layer.index).removesuffix('.safetensors')}-o{wanted.sha256[:8]}.safetensors"
            data = reordered(layer, tuple(tensors), order)
            record = journal.once(name, lambda name=name, data=data: write_tensors(folder / name, tensors, data))  # type: ignore[misc]
            records.append(LayerFile(index=layer.index, module=layer.module, **record.model_dump()))
    made = Manifest(**{**dict(manifest), "layers": tuple(records), "neuron_order": wanted})
    publish(store, folder, records, made, made.files(), _LAYER_FILE)
    after = first_half(np.take_along_axis(mass, orders, axis=-1))
    console.print(
        f"the first half of the neurons holds {after:.1%} of |activation| x ||down row|| on this text, "
        f"before {first_half(mass):.1%}"
    )


def _measured(opened: ExpertStore, store: Path, windows: Windows, console: Console) -> bytes:
    """`neuron_mass` of the text. Raises StoreError: it is not finite."""
    model, blocks = load_model(store, opened.manifest, None)
    refuse_mixing(blocks, opened.manifest.experts)
    with progress_on(console) as progress:
        task = progress.add_task("running the calibration text", total=windows.tokens)
        layers = host_weights(opened.layers)
        found = neuron_mass(model, blocks, layers, windows, lambda n: progress.advance(task, n))
    if not np.isfinite(found).all():
        what = f"the activations of {opened.manifest.architecture} on the text are not finite"
        raise StoreError(what, "give other calibration text")
    return found.astype("<f8").tobytes()


def _refuse(store: Path, manifest: Manifest) -> None:
    """Refuse a store that a new order would break."""
    if manifest.neuron_order is not None:
        raise ConfigError(
            f"the neurons of {store} are ordered by another text already",
            "keep them so, or make the store again: `tiermoe prepare MODEL OUT --force --neuron-order TEXT`",
        )
    own = any(record.file == REPLICAS_NAME for record in manifest.files())  # the checkpoint's file of that name
    if (store / REPLICAS_NAME).exists() and not own:
        raise ConfigError(
            f"{store} has quantized replicas, which are fitted to the order that its neurons have",
            "make both again: `tiermoe prepare MODEL OUT --force --neuron-order TEXT --bits WIDTHS`",
        )


def neuron_orders(mass: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the neurons by mass [..., I], greatest first; ties in their order."""
    return np.argsort(-mass, axis=-1, kind="stable")


def first_half(mass: NDArray[np.float64]) -> float:
    """The share of all mass [..., I] in the first I // 2 neurons; 0 without any mass."""
    total = float(mass.sum())
    return float(mass[..., : mass.shape[-1] // 2].sum()) / total if total else 0.0


def reordered(layer: LayerArrays, names: tuple[str, ...], orders: NDArray[np.int64]) -> Iterator[bytes]:
    """The data of a layer file in another neuron order, an expert at a time.

    Args:
        names: of the file's tensors, in file order. orders: [E, I] of `neuron_orders`.
    """
    for name in names:
        experts: NDArray[np.generic] = getattr(layer, name)
        for expert, order in zip(experts, orders, strict=True):
            yield (expert if name == "down_bias" else expert[order]).tobytes()


def neuron_mass(
    model: Any,
    blocks: Sequence[MoeBlock],
    experts: Sequence[LayerWeights],
    windows: Windows,
    advance: Callable[[int], None],
) -> NDArray[np.float64]:
    """Sum of |activation| * ||down row|| of each neuron: float64 [L, E, I]; zeros for experts without tokens.

    Args:
        model: in float32, its experts on meta. experts: of each layer, in the store's type.
        advance: called with the tokens of each forward.
    """
    meters = [_Meter(block, weights) for block, weights in zip(blocks, experts, strict=True)]
    with watching(model, blocks, meters):
        for _, ids in batches(windows):
            run_batch(model, ids)
            advance(ids.size)
    return np.stack([meter.mass() for meter in meters])


class _Meter(Watcher):

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        super().__init__(block, weights)
        self._sums = torch.zeros(self.down.shape[:2], dtype=torch.float64)  # of |activation| [E, I]

    def activations(self, expert: int, pre: torch.Tensor) -> torch.Tensor:
        found = super().activations(expert, pre)
        self._sums[expert] += found.abs().sum(dim=0, dtype=torch.float64)
        return found

    def mass(self) -> NDArray[np.float64]:
        """float64 [E, I]."""
        norms = torch.stack([down.float().norm(dim=1) for down in self.down])
        return (self._sums * norms).numpy()


def refuse_mixing(blocks: Sequence[MoeBlock], shape: ExpertShape) -> None:
    """Try a reversed neuron order on random pre-activations.

    Raises:
        UnsupportedModelError: an activation depends on a neuron's position, or on other neurons.
    """
    size, gates = shape.intermediate, shape.gates
    pre = torch.randn(4, size, gates, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer, block in enumerate(blocks):
            straight, flipped = block.gate(pre.flatten(1)), block.gate(pre.flip(1).flatten(1))
            if not torch.allclose(straight.flip(1), flipped, rtol=1e-4, atol=1e-5):
                raise UnsupportedModelError(
                    f"the experts of MoE layer {layer} depend on a neuron's position", "leave out --neuron-order"
                )
