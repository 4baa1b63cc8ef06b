"""One run that adds replicas to a store: which files, in which order, and how they get into the store.

    prepare -> for each layer: a file of packed experts and one of losses for each width -> tables -> publish

`DataFree` fits each group to its weights; `Calibrated` (`quantize.py`) runs a text through the model first and
quantizes each expert to its inputs. Unfinished files are in the work folder with a journal, so a run that is killed
resumes after the last finished layer. `replicas.py` decides what is made, and holds the store's lock.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from ....actors.store.files import ExpertStore, LayerArrays
from ....actors.store.format import MANIFEST_NAME, FileRecord
from ....actors.store.published import FormArrays
from ....actors.store.replicas import (
    REPLICA_VERSION,
    REPLICAS_NAME,
    Calibration,
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
from ....kernels.fit import expected_losses, fit_layer
from ....kernels.pack import PackedShape
from ....kernels.packed_ffn import Threads
from ....limits import usable_cores
from ...checkpoints.experts import in_order
from ...report.tables import byte_progress
from .make_store import REPLICA_WORK
from .replica_options import ReplicaOptions
from .writer import Journal, beside, disk_errors, publish, require_space, write_file, write_tensors

_ALGORITHM = "2"  # changed when the same inputs give other replicas: an unfinished run then starts over
_REPLICA_FILE = re.compile(r"(replicas-b\d+-g\d+-\d+|losses-b\d+-g\d+)\.safetensors")
_TYPES = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "U8": np.uint8}
_PART_BYTES = 128 << 20  # of float32 weights that are fitted in one step, for the time left to be known soon


@dataclass
class QuantizedLayer:
    """Experts of one layer at one width, part by part.

    Attributes:
        arrays: packed experts [n, ...] by name.
        figures: float32 [3, n]: losses, losses of round-to-nearest, and 1 where the expert is rounded to nearest.
    """

    arrays: list[Mapping[str, NDArray[Any]]] = field(default_factory=list)
    figures: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(frozen=True)
class ReplicaJob(ABC):
    """One run.

    Attributes:
        activations: of each MoE layer's experts.
        widths: to make now, ascending.
        present: replicas that stay.
    """

    store: Path
    options: ReplicaOptions
    activations: Sequence[str]
    widths: tuple[int, ...]
    present: ReplicaManifest | None

    method: ClassVar[Literal["data-free", "gptq"]]

    @property
    @abstractmethod
    def calibration(self) -> Calibration | None:
        """The text that replicas are fitted to."""

    @abstractmethod
    def _progress(self, console: Console) -> Progress: ...

    @abstractmethod
    def _work(self, opened: ExpertStore) -> tuple[str, float]:
        """What the progress display says, and all units of work."""

    def _prepare(  # noqa: B027  # most share nothing
        self, opened: ExpertStore, journal: Journal, advance: Callable[[float], None]
    ) -> None:
        """What the layers share, before the first."""

    @abstractmethod
    def _quantize(
        self, opened: ExpertStore, layer: int, widths: Sequence[int], folder: Path, advance: Callable[[float], None]
    ) -> dict[int, QuantizedLayer]:
        """One layer at some widths. Raises ValueError: a weight or an input is not finite."""

    @abstractmethod
    def _popularity(self, opened: ExpertStore, folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Rows routed to each expert [L, E], and the sums of their weights [L, E]."""

    def _remaining_bytes(self, opened: ExpertStore) -> int:
        """Bytes in the work folder besides the replicas."""
        return 0

    def make(self, console: Console) -> None:
        """Quantize and publish. Raises StoreError: as `add_replicas`."""
        opened, folder = ExpertStore(self.store, verify="stamp"), beside(self.store, REPLICA_WORK)
        layers = range(len(opened.mapped))
        options = [self.method, self.options.group]
        inputs = {
            MANIFEST_NAME: store_digest(self.store),
            "options": hashlib.sha256(json.dumps(options).encode()).hexdigest(),
        }
        if self.calibration is not None:
            inputs["calibration"] = self.calibration.sha256
        journal = Journal(folder, inputs, _ALGORITHM)
        self._require_space(opened, folder)
        with self._progress(console) as bar:
            title, total = self._work(opened)
            task = bar.add_task(title, total=total)

            def advance(units: float) -> None:
                bar.advance(task, units)

            self._prepare(opened, journal, advance)
            for layer in layers:
                self._layer(opened, layer, journal, advance)
            bar.update(task, completed=total)
        files = []
        for bits in self.widths:
            for layer in layers:
                record = journal.finished(self._name(bits, layer))
                assert record is not None  # recorded by `_layer`
                files.append(ReplicaFile(bits=cast(Width, bits), layer=layer, **record.model_dump()))
        tables = self._tables(opened, folder)
        self._report(tables, console)
        self._publish(folder, files, tables)

    def _report(self, tables: ReplicaTables, console: Console) -> None:  # noqa: B027
        """Lines at the end."""

    def _name(self, bits: int, layer: int) -> str:
        return replica_name(bits, self.options.group, layer)

    def _shape(self, opened: ExpertStore, bits: int) -> PackedShape:
        experts = opened.manifest.experts
        return PackedShape(experts.hidden, experts.intermediate, bits, self.options.group)

    def _require_space(self, opened: ExpertStore, folder: Path) -> None:
        experts = opened.manifest.experts.num_experts
        packed = sum(self._shape(opened, bits).nbytes() for bits in self.widths) * experts * len(opened.mapped)
        needed = packed + self._remaining_bytes(opened)
        remedy = "free some space, or make fewer widths"
        require_space(folder, needed, "making replicas", folder.parent, remedy)

    def _layer(self, opened: ExpertStore, layer: int, journal: Journal, advance: Callable[[float], None]) -> None:
        """The missing widths of one layer: for each a file of packed experts and one of losses."""
        left = tuple(
            bits
            for bits in self.widths
            if not (journal.finished(self._name(bits, layer)) and journal.finished(_figures_name(bits, layer)))
        )
        if not left:
            return
        folder = journal.folder
        try:
            made = self._quantize(opened, layer, left, folder, advance)
        except ValueError as error:
            what = f"layer {layer} cannot be quantized ({error})"
            raise StoreError(what, "use a policy that needs no replicas") from error
        for bits in left:
            tensors, parts = self._shape(opened, bits).tensors(), made[bits].arrays
            experts = opened.manifest.experts.num_experts
            header = {name: (code, (experts, *dims)) for name, (code, dims) in tensors.items()}
            data = (part[name].reshape(-1).view(np.uint8).data for name in header for part in parts)
            written = write_tensors(folder / self._name(bits, layer), header, data)
            losses = _write_figures(folder / _figures_name(bits, layer), made[bits].figures)
            journal.add(written)
            journal.add(losses)

    def _tables(self, opened: ExpertStore, folder: Path) -> ReplicaTables:
        """Tables of the new widths and of those that stay."""
        layers, experts = len(opened.mapped), opened.manifest.experts.num_experts
        counts, scores = self._popularity(opened, folder)

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
            method=self.method,
            act_order=False,
            calibration=self.calibration,
            files=tuple(sorted((*staying, *files), key=lambda file: (file.bits, file.layer))),
            losses=losses,
        )
        if self.present is None:  # new files may have the names of old ones, so no manifest may name those
            with disk_errors(self.store):
                (self.store / REPLICAS_NAME).unlink(missing_ok=True)
        publish(self.store, folder, (*files, losses), manifest, manifest.records(), _REPLICA_FILE)


@dataclass(frozen=True)
class DataFree(ReplicaJob):
    """Replicas that need no text: scales of least squared error, all widths in one pass over the weights.

    Losses are those expected for inputs of unit variance. Experts in a published form are dequantized first.
    """

    method = "data-free"

    @property
    def calibration(self) -> None:
        return None

    def _progress(self, console: Console) -> Progress:
        return byte_progress(console)

    def _work(self, opened: ExpertStore) -> tuple[str, float]:
        layers = range(len(opened.mapped))
        return f"quantizing to {_words(self.widths)} bits", sum(map(opened.manifest.layer_nbytes, layers))

    def _quantize(
        self, opened: ExpertStore, layer: int, widths: Sequence[int], folder: Path, advance: Callable[[float], None]
    ) -> dict[int, QuantizedLayer]:
        threads, experts = Threads(usable_cores()), opened.manifest.experts
        made: dict[int, QuantizedLayer] = {bits: QuantizedLayer() for bits in widths}
        each_nbytes = opened.manifest.layer_nbytes(layer) / experts.num_experts
        count = max(1, _PART_BYTES // (4 * experts.elements()))
        for start in range(0, experts.num_experts, count):
            part = range(start, min(start + count, experts.num_experts))
            gate_up, down, dtype = _neurons(opened.mapped[layer], part)
            fitted, powers = fit_layer(gate_up, down, dtype, widths, self.options.group, threads)
            for each in fitted:
                losses = expected_losses(each.errors, powers, experts.hidden, self.activations[layer])
                made[each.bits].arrays.append(each.arrays)
                made[each.bits].figures.append(np.stack([losses, losses, np.ones_like(losses)]))
            advance(each_nbytes * len(part))
        return made

    def _popularity(self, opened: ExpertStore, folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        shape = len(opened.mapped), opened.manifest.experts.num_experts
        return np.zeros(shape, np.int64), np.zeros(shape, np.float64)


def _neurons(arrays: LayerArrays | FormArrays, part: range) -> tuple[NDArray[Any], NDArray[Any], str]:
    """Some experts of a layer as `fit_layer` takes them: gate_up [n, I, 2, H], down [n, I, H], and their type."""
    if isinstance(arrays, LayerArrays):
        some = slice(part.start, part.stop)
        return np.ascontiguousarray(arrays.gate_up[some]), np.ascontiguousarray(arrays.down[some]), arrays.dtype
    gate_up, down = zip(*in_order(arrays.neurons, part), strict=True)
    return np.stack(gate_up), np.stack(down), "float32"


def _words(widths: Sequence[int]) -> str:
    return ", ".join(map(str, widths))


def _figures_name(bits: int, layer: int) -> str:
    return f"figures-b{bits}-{layer:03d}.f32"


def _write_figures(path: Path, parts: Sequence[NDArray[np.float32]]) -> FileRecord:
    """Losses, losses of round-to-nearest and fallbacks of a layer: float32 [3, E], from its parts."""
    return write_file(path, np.concatenate(parts, axis=1).astype(np.float32).tobytes())


def _write_tables(path: Path, tables: ReplicaTables) -> FileRecord:
    header = table_tensors(*tables.losses.shape)
    data = (getattr(tables, name).astype(_TYPES[code]).tobytes() for name, (code, _) in header.items())
    return write_tensors(path, header, data)
