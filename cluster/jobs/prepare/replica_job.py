"""One run that makes replicas, under the store's lock; `replicas.py` decides what it has to make."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ....actors.engine.sources import host_weights
from ....actors.expert_store import ExpertStore
from ....actors.replica_format import (
    REPLICA_VERSION,
    REPLICAS_NAME,
    Group,
    ReplicaFile,
    ReplicaManifest,
    Width,
    encode_replicas,
    losses_name,
    replica_name,
    store_digest,
    table_tensors,
)
from ....actors.replica_store import ReplicaTables, describe_replicas, read_tables
from ....actors.store_format import FileRecord, SourceFile
from ....errors import StoreError
from ....kernels.pack import PackedShape, pack_expert
from .calibration import Windows
from .capture import capture, inputs_name, load_model, open_inputs
from .job import REPLICA_WORK, beside, discard
from .journal import Journal
from .quantize_layer import MIN_ROWS, WidthResult, widths_of
from .replica_options import ReplicaOptions
from .write import disk_errors, sync_folder, write_file, write_tensors

_ALGORITHM = "1"  # another number where the same inputs give other replicas: an unfinished run then starts over
_ACTIVATIONS = "activations.json"
_SPARE_BYTES = 256 << 20  # left free on the disk


@dataclass(frozen=True)
class ReplicaJob:
    """What to make.

    Attributes:
        windows: the calibration text.
        widths: those to make now, ascending.
        present: replicas that stay.
    """

    store: Path
    options: ReplicaOptions
    windows: Windows
    widths: tuple[int, ...]
    present: ReplicaManifest | None

    def make(self, console: Console) -> None:
        """Capture, quantize, publish.

        Raises:
            UnsupportedModelError: unusual gating. StoreError: the store is damaged, or the disk is full.
        """
        opened = ExpertStore(self.store, verify="stamp")
        folder = beside(self.store, REPLICA_WORK)
        journal = Journal(folder, self._inputs(), _ALGORITHM)
        layers = range(len(opened.layers))
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            self._capture(opened, folder, journal, bar)
            title = f"quantizing to {', '.join(map(str, self.widths))} bits"
            task = bar.add_task(title, total=len(layers) * len(self.widths))
            for layer in layers:
                self._layer(opened, layer, folder, journal)
                bar.advance(task, len(self.widths))
        files = [
            ReplicaFile(bits=cast(Width, bits), layer=layer, **_finished(journal, self._name(bits, layer)).model_dump())
            for bits in self.widths
            for layer in layers
        ]
        tables = self._tables(opened, folder)
        _report_fallbacks(tables, self.widths, console)
        self._publish(folder, files, tables)

    def _inputs(self) -> tuple[SourceFile, ...]:
        """What unfinished work depends on, in the form in which the journal compares it."""
        calibration = self.windows.record()
        options = hashlib.sha256(json.dumps([self.options.group, self.options.act_order]).encode()).hexdigest()
        return tuple(
            SourceFile(file=name, nbytes=nbytes, mtime_ns=None, sha256=digest)
            for name, nbytes, digest in (
                ("manifest.json", 0, store_digest(self.store)),
                ("calibration", calibration.tokens, calibration.sha256),
                ("options", 0, options),
            )
        )

    def _name(self, bits: int, layer: int) -> str:
        return replica_name(bits, self.options.group, layer)

    def _capture(self, opened: ExpertStore, folder: Path, journal: Journal, bar: Progress) -> None:
        """The inputs of every layer's experts, unless an earlier run left them all."""
        names = [*(inputs_name(layer) for layer in range(len(opened.layers))), _ACTIVATIONS]
        if all(journal.finished(name) for name in names):
            return
        task = bar.add_task("running the calibration text", total=self.windows.tokens)
        model, blocks = load_model(self.store, opened.manifest)
        self._check_space(opened, folder)
        records = capture(model, blocks, opened.layers, self.windows, folder, lambda n: bar.advance(task, n))
        records.append(write_file(folder / _ACTIVATIONS, json.dumps([b.activation for b in blocks]).encode()))
        for record in records:
            if journal.finished(record.file) is None:
                journal.add(record)

    def _check_space(self, opened: ExpertStore, folder: Path) -> None:
        """Refuse to start what cannot be finished.

        Raises:
            StoreError: the disk has too little space.
        """
        shape, layers = opened.manifest.experts, len(opened.layers)
        packed = sum(self._shape(opened, bits).nbytes() for bits in self.widths) * shape.num_experts
        needed = layers * (packed + 4 * self.windows.tokens * (shape.hidden + 32))
        with disk_errors(folder):
            free = shutil.disk_usage(folder).free
        if free < needed + _SPARE_BYTES:
            raise StoreError(
                f"making replicas needs {needed / 1e9:.1f} GB, {folder.parent} has {free / 1e9:.1f} GB free",
                "free some space, or give a shorter calibration text",
            )

    def _shape(self, opened: ExpertStore, bits: int) -> PackedShape:
        experts = opened.manifest.experts
        return PackedShape(experts.hidden, experts.intermediate, bits, self.options.group)

    def _layer(self, opened: ExpertStore, layer: int, folder: Path, journal: Journal) -> None:
        """The missing widths of one layer: for each a file of packed experts and one of figures."""
        left = tuple(
            bits
            for bits in self.widths
            if not (journal.finished(self._name(bits, layer)) and journal.finished(_figures_name(bits, layer)))
        )
        if not left:
            return
        gate_up, down = host_weights([opened.layers[layer]])[0].tensors[:2]
        activation = json.loads((folder / _ACTIVATIONS).read_text())[layer]
        inputs = open_inputs(folder, layer)
        packed: dict[int, list[dict[str, NDArray[Any]]]] = {bits: [] for bits in left}
        figures: dict[int, list[NDArray[np.float32]]] = {bits: [] for bits in left}
        group, act_order = self.options.group, self.options.act_order
        try:
            for result in widths_of(gate_up, down, inputs, activation, left, group, act_order):
                packed[result.bits] += _packed(result)  # at once: codes take a byte each
                columns = (result.losses, result.rtn_losses, result.fallback.astype(np.float32))
                figures[result.bits].append(np.stack(columns))
        except ValueError as error:
            raise StoreError(
                f"layer {layer} cannot be quantized ({error})", "give another calibration text, or do without replicas"
            ) from error
        for bits in left:
            records = (
                self._write_experts(opened, layer, bits, packed[bits], folder),
                _write_figures(folder / _figures_name(bits, layer), figures[bits]),
            )
            for record in records:
                if journal.finished(record.file) is None:
                    journal.add(record)

    def _write_experts(
        self, opened: ExpertStore, layer: int, bits: int, packed: Sequence[dict[str, NDArray[Any]]], folder: Path
    ) -> FileRecord:
        tensors = self._shape(opened, bits).tensors()
        header = {name: (code, (len(packed), *dims)) for name, (code, dims) in tensors.items()}
        data = (expert[name].tobytes() for name in header for expert in packed)
        return write_tensors(folder / self._name(bits, layer), header, data)

    def _tables(self, opened: ExpertStore, folder: Path) -> ReplicaTables:
        """Of the new widths and of those that stay."""
        layers, experts = len(opened.layers), opened.manifest.experts.num_experts
        counts = np.zeros((layers, experts), dtype=np.int64)
        scores = np.zeros((layers, experts), dtype=np.float64)
        for layer in range(layers):
            inputs = open_inputs(folder, layer)
            ids = inputs.ids.reshape(-1)
            counts[layer] = np.bincount(ids, minlength=experts)
            scores[layer] = np.bincount(ids, weights=inputs.weights.reshape(-1), minlength=experts)
        by_width = {
            bits: np.stack([_read_figures(folder / _figures_name(bits, layer), experts) for layer in range(layers)])
            for bits in self.widths
        }  # [L, 3, E]
        if self.present is not None and (view := describe_replicas(self.store, verify="stamp")) is not None:
            old = read_tables(view)
            for place, bits in enumerate(old.widths):
                kept = (old.losses, old.rtn_losses, old.fallback)
                by_width[bits] = np.stack([table[..., place].astype(np.float32) for table in kept], axis=1)
        widths = tuple(sorted(by_width))
        stacked = np.stack([by_width[bits] for bits in widths])  # [B, L, 3, E]
        losses, rtn_losses, fallback = stacked.transpose(2, 1, 3, 0)
        return ReplicaTables(widths, losses, rtn_losses, fallback.astype(np.bool_), counts, scores)

    def _publish(self, folder: Path, files: Sequence[ReplicaFile], tables: ReplicaTables) -> None:
        """Move the files into the store, `replicas.json` last, and drop what no manifest names any more."""
        losses = _write_tables(folder / losses_name(tables.widths, self.options.group), tables)
        kept = self.present.files if self.present is not None else ()
        manifest = ReplicaManifest(
            replica_version=REPLICA_VERSION,
            store_sha256=store_digest(self.store),
            group=cast(Group, self.options.group),
            widths=cast(tuple[Width, ...], tables.widths),
            act_order=self.options.act_order,
            calibration=self.windows.record(),
            files=tuple(sorted((*kept, *files), key=lambda file: (file.bits, file.layer))),
            losses=losses,
        )
        with disk_errors(self.store):
            if self.present is None:  # names of the old set may be those of the new one: have none in between
                (self.store / REPLICAS_NAME).unlink(missing_ok=True)
            for record in (*files, losses):
                (folder / record.file).replace(self.store / record.file)
            sync_folder(self.store)
        write_file(self.store / REPLICAS_NAME, encode_replicas(manifest))
        named = {record.file for record in manifest.records()}
        with disk_errors(self.store):
            for pattern in ("replicas-b*-g*-*.safetensors", "losses-b*-g*.safetensors"):
                for path in self.store.glob(pattern):
                    if path.name not in named:
                        path.unlink()
            discard(folder)


def _finished(journal: Journal, name: str) -> FileRecord:
    record = journal.finished(name)
    if record is None:
        raise StoreError(f"{name} is missing from the unfinished replicas", "run the same command again")
    return record


def _figures_name(bits: int, layer: int) -> str:
    return f"figures-b{bits}-{layer:03d}.f32"


def _packed(result: WidthResult) -> list[dict[str, NDArray[Any]]]:
    """The experts of a chunk in the kernels' layout."""
    gate_up, down = result.experts.gate_up, result.experts.down
    size = down.codes.shape[2]
    gate, up = slice(0, size), slice(size, 2 * size)
    return [
        pack_expert(gate_up.matrix(i, gate), gate_up.matrix(i, up), down.matrix(i)) for i in range(len(result.losses))
    ]


def _write_figures(path: Path, parts: Sequence[NDArray[np.float32]]) -> FileRecord:
    """Losses, losses of round-to-nearest and fallbacks of a layer at one width: float32 [3, E], from its chunks."""
    return write_file(path, np.concatenate(parts, axis=1).astype(np.float32).tobytes())


def _read_figures(path: Path, experts: int) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), dtype=np.float32).reshape(3, experts)


def _write_tables(path: Path, tables: ReplicaTables) -> FileRecord:
    layers, experts, widths = tables.losses.shape
    header = table_tensors(layers, experts, widths)
    types = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "U8": np.uint8}
    data = (getattr(tables, name).astype(types[code]).tobytes() for name, (code, _) in header.items())
    return write_tensors(path, header, data)


def _report_fallbacks(tables: ReplicaTables, made: Sequence[int], console: Console) -> None:
    """Say which experts of the new widths are rounded to nearest."""
    places = [tables.widths.index(bits) for bits in made]
    layers, experts = np.nonzero(tables.fallback[..., places].any(axis=2))
    if not len(layers):
        return
    shown = ", ".join(f"{layer}/{expert}" for layer, expert in list(zip(layers, experts, strict=True))[:8])
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    console.print(
        f"{len(layers)} of {tables.counts.size} experts got fewer than {MIN_ROWS} calibration rows and are rounded to "
        f"nearest (layer/expert): {shown}{more}"
    )
