"""Quantizes the experts of a store to their calibration inputs, and measures their losses.

Gate and up share the Hessian of the expert's input rows, all rows alike: the loss table is about the expert's output,
not about the router's weights. Down is then fitted to the activations of the *quantized* gate and up, with weights that
compensate their error: with A those activations and A* the full-precision ones, GPTQ gets, in place of the down
projection D,

    D* = D + (A^T A + damping)^-1 A^T (A* - A) D        the least squares fit of A D* to A* D

On held-out text this is better at every width than the Hessian of A* alone (docs/store-format.md).

`ReplicaJob` is one run over all layers, under the store's lock; `replicas.py` decides what it makes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional

from ....actors.engine.cache.sources import host_weights
from ....actors.store.files import ExpertStore
from ....actors.store.format import MANIFEST_NAME, FileRecord
from ....actors.store.replicas import (
    REPLICA_VERSION,
    REPLICAS_NAME,
    Group,
    ReplicaFile,
    ReplicaManifest,
    ReplicaTables,
    Width,
    describe_replicas,
    losses_name,
    read_tables,
    replica_name,
    store_digest,
    table_tensors,
)
from ....errors import StoreError
from ....kernels.pack import PackedShape, pack_expert, unpack_expert
from ....kernels.quantize import QuantizedBatch, damped, damping_for, gptq, round_to_nearest
from .calibration import Windows
from .capture import LayerInputs, capture, inputs_name, load_model, open_inputs
from .job import REPLICA_WORK
from .replicas import ReplicaOptions
from .writer import Journal, beside, disk_errors, publish, require_space, write_file, write_tensors

MIN_ROWS = 32  # an expert with fewer calibration rows is rounded to nearest (docs/store-format.md has the figures)
LEAST_CAP = 4096  # at least so many rows of an expert are used; more with larger matrices
_ROWS_AT_ONCE = 4096  # whose pre-activations are in memory together
_BATCH_BYTES = 256 << 20  # of the Hessians of the experts that are quantized together
_CORRECTION_DAMPING = 0.3  # of the mean diagonal, for D*

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True)
class Matrices:
    """B experts as float32 matrices, outputs before inputs: gate_up [B, 2I, H], gate before up; down [B, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def of(gate_up: torch.Tensor, down: torch.Tensor) -> Matrices:
        """From the store's neuron-major arrays [B, I, 2, H] and [B, I, H] of any type."""
        return Matrices(
            gate_up.float().transpose(1, 2).flatten(1, 2).contiguous(), down.float().transpose(1, 2).contiguous()
        )


@dataclass(frozen=True)
class QuantizedExperts:
    """B experts of one layer at one width. gate_up: outputs 0..I-1 are gate, I..2I-1 up; inputs H. down: I to H."""

    gate_up: QuantizedBatch
    down: QuantizedBatch

    def dequantized(self) -> Matrices:
        return Matrices(self.gate_up.dequantized(), self.down.dequantized())


@dataclass(frozen=True)
class WidthResult:
    """B experts at one width.

    losses, rtn_losses: float32 [B], as in `ReplicaTables`. fallback: bool [B], rounded to nearest: too few rows.
    """

    bits: int
    experts: QuantizedExperts
    losses: np.ndarray
    rtn_losses: np.ndarray
    fallback: np.ndarray


@dataclass(frozen=True)
class _Chunk:
    """Experts in full precision with calibration rows [n, H], activations [n, I] and outputs [n, H] of each.

    hessians: [B, H, H]. few: [B], has less than `MIN_ROWS` rows.
    """

    full: Matrices
    rows: list[torch.Tensor]
    activations: list[torch.Tensor]
    outputs: list[torch.Tensor]
    hessians: torch.Tensor
    few: torch.Tensor


def chunks(experts: int, hidden: int, intermediate: int) -> list[range]:
    """Expert ids in runs whose Hessians fit into `_BATCH_BYTES`."""
    size = max(1, _BATCH_BYTES // (4 * max(hidden, intermediate) ** 2))
    return [range(start, min(start + size, experts)) for start in range(0, experts, size)]


def expert_rows(inputs: LayerInputs, expert: int, cap: int) -> torch.Tensor:
    """float32 [n, H]: rows routed to the expert, at most `cap`, evenly spaced; without any, rows of the layer."""
    rows = np.flatnonzero((inputs.ids == expert).any(axis=1))
    if not len(rows):
        rows = np.arange(len(inputs.ids))
    if len(rows) > cap:
        rows = rows[np.linspace(0, len(rows) - 1, cap).astype(np.int64)]
    return torch.from_numpy(inputs.hidden[rows])


def load_chunk(
    gate_up: torch.Tensor, down: torch.Tensor, inputs: LayerInputs, experts: range, activation: str
) -> _Chunk:
    """Experts of a layer in float32 with what all widths share; gate_up [E, I, 2, H] and down [E, I, H] as stored."""
    part = slice(experts.start, experts.stop)
    full = Matrices.of(gate_up[part], down[part])
    sizes = full.down.shape[1:]  # H, I
    cap = max(LEAST_CAP, 2 * max(sizes))
    counts = np.bincount(inputs.ids.reshape(-1), minlength=len(gate_up))[part]
    rows = [expert_rows(inputs, expert, cap) for expert in experts]
    activations = [_activate(x, w, activation) for x, w in zip(rows, full.gate_up, strict=True)]
    return _Chunk(
        full=full,
        rows=rows,
        activations=activations,
        outputs=[a @ d.T for a, d in zip(activations, full.down, strict=True)],
        hessians=torch.stack([x.T @ x for x in rows]),
        few=torch.from_numpy(counts < MIN_ROWS),
    )


def quantize_chunk(chunk: _Chunk, bits: int, group: int, act_order: bool, activation: str) -> WidthResult:
    """All experts of a chunk at one width, with their losses. Raises ValueError: a weight or input is not finite."""
    full = chunk.full
    nearest = QuantizedExperts(round_to_nearest(full.gate_up, bits, group), round_to_nearest(full.down, bits, group))
    rtn_losses = output_losses(nearest.dequantized(), chunk.rows, chunk.outputs, activation)
    few = chunk.few.numpy()
    if few.all():
        return WidthResult(bits, nearest, rtn_losses, rtn_losses, few)
    counts = torch.tensor([len(x) for x in chunk.rows])
    hidden, size = full.down.shape[1:]
    gate_up = gptq(
        full.gate_up, chunk.hessians, bits, group, act_order=act_order, damping=damping_for(counts, hidden)
    )
    seen = [_activate(x, w, activation) for x, w in zip(chunk.rows, gate_up.dequantized(), strict=True)]
    hessians = torch.stack([a.T @ a for a in seen])
    damping = damping_for(counts, size)
    down = gptq(_corrected(chunk, seen, hessians, damping), hessians, bits, group, act_order=act_order, damping=damping)
    fitted = QuantizedExperts(gate_up.replaced(chunk.few, nearest.gate_up), down.replaced(chunk.few, nearest.down))
    losses = output_losses(fitted.dequantized(), chunk.rows, chunk.outputs, activation)
    return WidthResult(bits, fitted, losses, rtn_losses, few)


def expert_outputs(experts: Matrices, rows: list[torch.Tensor], activation: str) -> list[torch.Tensor]:
    """The output of each expert for its rows [n, H] -> [n, H]."""
    return [
        _activate(x, gate_up, activation) @ down.T
        for x, gate_up, down in zip(rows, experts.gate_up, experts.down, strict=True)
    ]


def output_losses(
    experts: Matrices, rows: list[torch.Tensor], outputs: list[torch.Tensor], activation: str
) -> np.ndarray:
    """float32 [B]: mean squared difference of the experts' outputs [n, H] on their rows [n, H] from `outputs`."""
    made = expert_outputs(experts, rows, activation)
    return np.array([float((y - out).square().mean()) for y, out in zip(outputs, made, strict=True)], dtype=np.float32)


def unpacked(arrays: Mapping[str, NDArray[Any]], shape: PackedShape) -> Matrices:
    """A layer's packed experts [E, ...] as matrices. Raises PackError: the arrays are not those of `shape`."""
    experts = len(arrays["down"])
    parts = [unpack_expert({name: array[e] for name, array in arrays.items()}, shape) for e in range(experts)]
    gate_up = [np.concatenate([gate.dequantized(), up.dequantized()]) for gate, up, _ in parts]
    down = [matrix.dequantized() for _, _, matrix in parts]
    return Matrices(torch.from_numpy(np.stack(gate_up)), torch.from_numpy(np.stack(down)))


def _activate(rows: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x gate^T) * (x up^T): rows [n, H], gate_up [2I, H] -> [n, I]."""
    act = ACTIVATIONS[activation]
    pairs = ((part @ gate_up.T).chunk(2, dim=1) for part in rows.split(_ROWS_AT_ONCE))
    return torch.cat([act(gate) * up for gate, up in pairs])


def _corrected(
    chunk: _Chunk, seen: list[torch.Tensor], hessians: torch.Tensor, damping: torch.Tensor
) -> torch.Tensor:
    """D* [B, H, I]; see the module's docstring."""
    missing = torch.stack([a.T @ (full - a) for a, full in zip(seen, chunk.activations, strict=True)])  # [B, I, I]
    share = damping.clamp(min=_CORRECTION_DAMPING)
    return chunk.full.down + chunk.full.down @ torch.linalg.solve(damped(hessians, share), missing).transpose(1, 2)


def widths_of(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inputs: LayerInputs,
    activation: str,
    widths: tuple[int, ...],
    group: int,
    act_order: bool,
) -> Iterator[WidthResult]:
    """Every chunk of a layer's experts, in order, at every width."""
    for experts in chunks(gate_up.shape[0], gate_up.shape[3], gate_up.shape[1]):
        chunk = load_chunk(gate_up, down, inputs, experts, activation)
        for bits in widths:
            yield quantize_chunk(chunk, bits, group, act_order, activation)


_ALGORITHM = "1"  # changed when the same inputs give other replicas: an unfinished run then starts over
_ACTIVATIONS = "activations.json"
_REPLICA_FILE = re.compile(r"(replicas-b\d+-g\d+-\d+|losses-b\d+-g\d+)\.safetensors")
_TYPES = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "U8": np.uint8}


@dataclass(frozen=True)
class ReplicaJob:
    """One run. windows: the calibration text. widths: to make now, ascending. present: replicas that stay."""

    store: Path
    options: ReplicaOptions
    windows: Windows
    widths: tuple[int, ...]
    present: ReplicaManifest | None

    def make(self, console: Console) -> None:
        """Capture, quantize, publish. Raises UnsupportedModelError: unusual gating; StoreError: as `add_replicas`."""
        opened, folder = ExpertStore(self.store, verify="stamp"), beside(self.store, REPLICA_WORK)
        options = hashlib.sha256(json.dumps([self.options.group, self.options.act_order]).encode()).hexdigest()
        calibration = self.windows.record().sha256
        inputs = {MANIFEST_NAME: store_digest(self.store), "calibration": calibration, "options": options}
        journal = Journal(folder, inputs, _ALGORITHM)
        layers = range(len(opened.layers))
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            self._capture(opened, journal, bar)
            title = f"quantizing to {', '.join(map(str, self.widths))} bits"
            task = bar.add_task(title, total=len(layers) * len(self.widths))
            for layer in layers:
                self._layer(opened, layer, journal)
                bar.advance(task, len(self.widths))
        files = []
        for bits in self.widths:
            for layer in layers:
                record = journal.finished(self._name(bits, layer))
                assert record is not None  # recorded by `_layer`
                files.append(ReplicaFile(bits=cast(Width, bits), layer=layer, **record.model_dump()))
        tables = self._tables(opened, folder)
        _report_fallbacks(tables, self.widths, console)
        self._publish(folder, files, tables)

    def _name(self, bits: int, layer: int) -> str:
        return replica_name(bits, self.options.group, layer)

    def _shape(self, opened: ExpertStore, bits: int) -> PackedShape:
        experts = opened.manifest.experts
        return PackedShape(experts.hidden, experts.intermediate, bits, self.options.group)

    def _capture(self, opened: ExpertStore, journal: Journal, bar: Progress) -> None:
        """The inputs of every layer's experts, unless an earlier run finished them all."""
        names = [*(inputs_name(layer) for layer in range(len(opened.layers))), _ACTIVATIONS]
        if all(journal.finished(name) for name in names):
            return
        task, folder = bar.add_task("running the calibration text", total=self.windows.tokens), journal.folder
        model, blocks = load_model(self.store, opened.manifest)
        shape = opened.manifest.experts
        packed = sum(self._shape(opened, bits).nbytes() for bits in self.widths) * shape.num_experts
        needed = len(opened.layers) * (packed + 4 * self.windows.tokens * (shape.hidden + 32))
        remedy = "free some space, or give a shorter calibration text"
        what = f"making replicas needs {needed / 1e9:.1f} GB"
        require_space(folder, needed, what, folder.parent, remedy, resumed=False)
        for record in capture(model, blocks, opened.layers, self.windows, folder, lambda n: bar.advance(task, n)):
            journal.add(record)
        journal.add(write_file(folder / _ACTIVATIONS, json.dumps([b.activation for b in blocks]).encode()))

    def _layer(self, opened: ExpertStore, layer: int, journal: Journal) -> None:
        """The missing widths of one layer: for each a file of packed experts and one of losses."""
        left = tuple(
            bits
            for bits in self.widths
            if not (journal.finished(self._name(bits, layer)) and journal.finished(_figures_name(bits, layer)))
        )
        if not left:
            return
        folder, group, act_order = journal.folder, self.options.group, self.options.act_order
        gate_up, down = host_weights([opened.layers[layer]])[0].tensors[:2]
        activation = json.loads((folder / _ACTIVATIONS).read_text())[layer]
        packed: dict[int, list[dict[str, NDArray[Any]]]] = {bits: [] for bits in left}
        figures: dict[int, list[NDArray[np.float32]]] = {bits: [] for bits in left}
        try:
            for result in widths_of(gate_up, down, open_inputs(folder, layer), activation, left, group, act_order):
                packed[result.bits] += _packed(result)  # now: unpacked codes take a byte each
                columns = (result.losses, result.rtn_losses, result.fallback.astype(np.float32))
                figures[result.bits].append(np.stack(columns))
        except ValueError as error:
            raise StoreError(
                f"layer {layer} cannot be quantized ({error})", "give another calibration text, or do without replicas"
            ) from error
        for bits in left:
            tensors, experts = self._shape(opened, bits).tensors(), packed[bits]
            header = {name: (code, (len(experts), *dims)) for name, (code, dims) in tensors.items()}
            data = (expert[name].tobytes() for name in header for expert in experts)
            written = write_tensors(folder / self._name(bits, layer), header, data)
            losses = _write_figures(folder / _figures_name(bits, layer), figures[bits])
            journal.add(written)
            journal.add(losses)

    def _tables(self, opened: ExpertStore, folder: Path) -> ReplicaTables:
        """Tables of the new widths and of those that stay."""
        layers, experts = len(opened.layers), opened.manifest.experts.num_experts
        counts = np.zeros((layers, experts), dtype=np.int64)
        scores = np.zeros((layers, experts), dtype=np.float64)
        for layer in range(layers):
            inputs = open_inputs(folder, layer)
            ids = inputs.ids.reshape(-1)
            counts[layer] = np.bincount(ids, minlength=experts)
            scores[layer] = np.bincount(ids, weights=inputs.weights.reshape(-1), minlength=experts)

        def figures(bits: int, layer: int) -> np.ndarray:
            return np.fromfile(folder / _figures_name(bits, layer), dtype=np.float32).reshape(3, experts)

        # [L, 3, E] of each width
        by_width = {bits: np.stack([figures(bits, layer) for layer in range(layers)]) for bits in self.widths}
        if self.present is not None and (view := describe_replicas(self.store, verify="stamp")) is not None:
            old = read_tables(view)
            for column, bits in enumerate(old.widths):
                staying = (old.losses, old.rtn_losses, old.fallback)
                by_width[bits] = np.stack([table[..., column].astype(np.float32) for table in staying], axis=1)
        widths = tuple(sorted(by_width))
        stacked = np.stack([by_width[bits] for bits in widths])  # [B, L, 3, E]
        losses, rtn_losses, fallback = stacked.transpose(2, 1, 3, 0)
        return ReplicaTables(widths, losses, rtn_losses, fallback.astype(np.bool_), counts, scores)

    def _publish(self, folder: Path, files: Sequence[ReplicaFile], tables: ReplicaTables) -> None:
        """Move the files into the store, `replicas.json` last, and remove what no manifest names any more."""
        losses = _write_tables(folder / losses_name(tables.widths, self.options.group), tables)
        staying = self.present.files if self.present is not None else ()
        manifest = ReplicaManifest(
            replica_version=REPLICA_VERSION,
            store_sha256=store_digest(self.store),
            group=cast(Group, self.options.group),
            widths=cast(tuple[Width, ...], tables.widths),
            act_order=self.options.act_order,
            calibration=self.windows.record(),
            files=tuple(sorted((*staying, *files), key=lambda file: (file.bits, file.layer))),
            losses=losses,
        )
        if self.present is None:  # new files may have the names of old ones, so no manifest may name those
            with disk_errors(self.store):
                (self.store / REPLICAS_NAME).unlink(missing_ok=True)
        publish(self.store, folder, (*files, losses), manifest, manifest.records(), _REPLICA_FILE)


def _figures_name(bits: int, layer: int) -> str:
    return f"figures-b{bits}-{layer:03d}.f32"


def _packed(result: WidthResult) -> list[dict[str, NDArray[Any]]]:
    """Each expert in the kernels' layout."""
    gate_up, down = result.experts.gate_up, result.experts.down
    size = down.codes.shape[2]
    gate, up = slice(0, size), slice(size, 2 * size)
    return [
        pack_expert(gate_up.matrix(i, gate), gate_up.matrix(i, up), down.matrix(i)) for i in range(len(result.losses))
    ]


def _write_figures(path: Path, parts: Sequence[NDArray[np.float32]]) -> FileRecord:
    """Losses, losses of round-to-nearest and fallbacks of a layer: float32 [3, E], from its chunks."""
    return write_file(path, np.concatenate(parts, axis=1).astype(np.float32).tobytes())


def _write_tables(path: Path, tables: ReplicaTables) -> FileRecord:
    header = table_tensors(*tables.losses.shape)
    data = (getattr(tables, name).astype(_TYPES[code]).tobytes() for name, (code, _) in header.items())
    return write_tensors(path, header, data)


def _report_fallbacks(tables: ReplicaTables, made: Sequence[int], console: Console) -> None:
    """Print the experts that are rounded to nearest at a new width."""
    columns = [tables.widths.index(bits) for bits in made]
    layers, experts = np.nonzero(tables.fallback[..., columns].any(axis=2))
    if not len(layers):
        return
    shown = ", ".join(f"{layer}/{expert}" for layer, expert in list(zip(layers, experts, strict=True))[:8])
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    console.print(
        f"{len(layers)} of {tables.counts.size} experts got fewer than {MIN_ROWS} calibration rows and are rounded to "
        f"nearest (layer/expert): {shown}{more}"
    )
