"""Quantizes experts to their calibration inputs with GPTQ, and measures their losses.

Gate and up share the Hessian of the expert's input rows, all rows alike: the loss table is about the expert's output,
not about the router's weights. Down is then fitted to the activations of the *quantized* gate and up, with weights that
compensate their error: with A those activations and A* the full-precision ones, GPTQ gets, in place of the down
projection D,

    D* = D + (A^T A + damping)^-1 A^T (A* - A) D        the least squares fit of A D* to A* D

On held-out text this is better at every width than the Hessian of A* alone (docs/replicas-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional

from ....actors.engine.cache.sources import host_weights
from ....actors.store.files import ExpertStore
from ....actors.store.replicas import Calibration, ReplicaTables
from ....kernels.pack import pack_expert
from ....kernels.quantize import QuantizedBatch, damped, damping_for, gptq, round_to_nearest
from ....limits import usable_cores
from ...report.tables import LineProgress
from ...topology.inputs import facts_of_store
from .calibration import Windows
from .capture import LayerInputs, capture, inputs_name, load_model, open_inputs
from .replica_job import QuantizedLayer, ReplicaJob
from .writer import Journal

MIN_ROWS = 32  # an expert with fewer calibration rows is rounded to nearest (docs/replicas-notes.md has the figures)
LEAST_CAP = 4096  # at least so many rows of an expert are used; more with larger matrices
_ROWS_AT_ONCE = 4096  # whose pre-activations are in memory together
_BATCH_BYTES = 256 << 20  # of the Hessians of the experts that are quantized together
_COLUMNS_AT_ONCE = 256  # of a Hessian
_LOSS_ROWS = 256  # of an expert, on which losses are measured
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

    def packed(self) -> list[dict[str, NDArray[Any]]]:
        """Each expert in the kernels' layout."""
        gate_up, down = self.experts.gate_up, self.experts.down
        size = down.codes.shape[2]
        gate, up = slice(0, size), slice(size, 2 * size)
        return [
            pack_expert(gate_up.matrix(i, gate), gate_up.matrix(i, up), down.matrix(i)) for i in range(len(self.losses))
        ]


@dataclass(frozen=True)
class _Chunk:
    """Experts in full precision with calibration rows [n, H] and activations [n, I] of each.

    tested: some of the rows, on which losses are measured, and outputs [n, H] of those. hessians: [B, H, H]. few: [B],
    has less than `MIN_ROWS` rows.
    """

    full: Matrices
    rows: list[torch.Tensor]
    activations: list[torch.Tensor]
    tested: list[torch.Tensor]
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
        tested=[_tested(x) for x in rows],
        outputs=[_tested(a) @ d.T for a, d in zip(activations, full.down, strict=True)],
        hessians=torch.stack([_gram(x) for x in rows]),
        few=torch.from_numpy(counts < MIN_ROWS),
    )


def quantize_chunk(chunk: _Chunk, bits: int, group: int, activation: str) -> WidthResult:
    """All experts of a chunk at one width, with their losses. Raises ValueError: a weight or input is not finite."""
    full = chunk.full
    nearest = QuantizedExperts(round_to_nearest(full.gate_up, bits, group), round_to_nearest(full.down, bits, group))
    rtn_losses = output_losses(nearest.dequantized(), chunk.tested, chunk.outputs, activation)
    few = chunk.few.numpy()
    if few.all():
        return WidthResult(bits, nearest, rtn_losses, rtn_losses, few)
    counts = torch.tensor([len(x) for x in chunk.rows])
    hidden, size = full.down.shape[1:]
    gate_up = gptq(full.gate_up, chunk.hessians, bits, group, damping=damping_for(counts, hidden))
    seen = [_activate(x, w, activation) for x, w in zip(chunk.rows, gate_up.dequantized(), strict=True)]
    hessians = torch.stack([_gram(a) for a in seen])
    damping = damping_for(counts, size)
    down = gptq(_corrected(chunk, seen, hessians, damping), hessians, bits, group, damping=damping)
    fitted = QuantizedExperts(gate_up.replaced(chunk.few, nearest.gate_up), down.replaced(chunk.few, nearest.down))
    losses = output_losses(fitted.dequantized(), chunk.tested, chunk.outputs, activation)
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


def _activate(rows: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x gate^T) * (x up^T): rows [n, H], gate_up [2I, H] -> [n, I]."""
    act = ACTIVATIONS[activation]
    pairs = ((part @ gate_up.T).chunk(2, dim=1) for part in rows.split(_ROWS_AT_ONCE))
    return torch.cat([act(gate) * up for gate, up in pairs])


def _tested(rows: torch.Tensor) -> torch.Tensor:
    """Of more than `_LOSS_ROWS` rows about so many, evenly spaced."""
    return rows[:: max(1, len(rows) // _LOSS_ROWS)]


def _gram(x: torch.Tensor) -> torch.Tensor:
    """x^T x, one triangle of it computed: [n, I] -> [I, I]."""
    size = x.shape[1]
    found = torch.empty(size, size)
    for start in range(0, size, _COLUMNS_AT_ONCE):
        part = slice(start, start + _COLUMNS_AT_ONCE)
        torch.mm(x[:, part].T, x[:, start:], out=found[part, start:])
        found[start + _COLUMNS_AT_ONCE :, part] = found[part, start + _COLUMNS_AT_ONCE :].T
    return found


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
) -> Iterator[WidthResult]:
    """Every chunk of a layer's experts, in order, at every width."""
    for experts in chunks(gate_up.shape[0], gate_up.shape[3], gate_up.shape[1]):
        chunk = load_chunk(gate_up, down, inputs, experts, activation)
        for bits in widths:
            yield quantize_chunk(chunk, bits, group, activation)


@dataclass(frozen=True)
class Calibrated(ReplicaJob):
    """Replicas by GPTQ. windows: the calibration text; work is counted in 1e9 multiplications."""

    windows: Windows

    method = "gptq"

    @property
    def calibration(self) -> Calibration:
        return self.windows.record()

    def _progress(self, console: Console) -> Progress:
        if not console.is_terminal:
            return LineProgress(console)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
        return Progress(*columns, TimeRemainingColumn(), console=console)

    def _work(self, opened: ExpertStore) -> tuple[str, float]:
        capturing, quantizing = self._costs()
        total = len(opened.layers) * (capturing + opened.manifest.experts.num_experts * quantizing)
        return f"calibrating and quantizing to {', '.join(map(str, self.widths))} bits", round(total, 3)

    def _costs(self) -> tuple[float, float]:
        """1e9 multiplications of a layer's calibration text, and of an expert at all widths; estimates."""
        facts = facts_of_store(self.store, self.store)
        tokens, h, i = self.windows.tokens, facts.hidden, facts.intermediate
        rows = min(tokens * facts.top_k / facts.experts, max(LEAST_CAP, 2 * max(h, i)))
        dense = facts.dense_elements / facts.layers
        sweeps = 5 * (2 * i * h * h + h * i * i)  # the sweep, and the last fit of scales
        return (
            tokens * (facts.top_k * 3 * h * i + dense) / 1e9,
            len(self.widths) * (sweeps + rows * (12 * h * i + h * h + i * i)) / 1e9,
        )

    def _remaining_bytes(self, opened: ExpertStore) -> int:
        shape = opened.manifest.experts
        return len(opened.layers) * 4 * self.windows.tokens * (shape.hidden + 32)

    def _prepare(self, opened: ExpertStore, journal: Journal, advance: Callable[[float], None]) -> None:
        """The inputs of every layer's experts, unless an earlier run finished them all."""
        torch.set_num_threads(usable_cores())
        if all(journal.finished(inputs_name(layer)) for layer in range(len(opened.layers))):
            return
        model, blocks = load_model(self.store, opened.manifest)
        each = self._costs()[0] * len(opened.layers) / self.windows.tokens
        for record in capture(
            model, blocks, opened.layers, self.windows, journal.folder, lambda tokens: advance(each * tokens)
        ):
            journal.add(record)

    def _quantize(
        self, opened: ExpertStore, layer: int, widths: Sequence[int], folder: Path, advance: Callable[[float], None]
    ) -> dict[int, QuantizedLayer]:
        arrays = opened.layers[layer]
        gate_up, down = host_weights([arrays])[0].tensors[:2]
        made: dict[int, QuantizedLayer] = {bits: QuantizedLayer() for bits in widths}
        activation, inputs = self.activations[layer], open_inputs(folder, layer)
        results = widths_of(gate_up, down, inputs, activation, tuple(widths), self.options.group)
        each = self._costs()[1] / len(self.widths)
        for result in results:
            experts = result.packed()  # now: unpacked codes take a byte each
            made[result.bits].arrays.append({name: np.stack([e[name] for e in experts]) for name in experts[0]})
            columns = (result.losses, result.rtn_losses, result.fallback.astype(np.float32))
            made[result.bits].figures.append(np.stack(columns))
            advance(each * len(experts))
        return made

    def _popularity(self, opened: ExpertStore, folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        experts = opened.manifest.experts.num_experts
        inputs = [open_inputs(folder, layer) for layer in range(len(opened.layers))]
        counts = [np.bincount(each.ids.reshape(-1), minlength=experts) for each in inputs]
        scores = [np.bincount(x.ids.reshape(-1), weights=x.weights.reshape(-1), minlength=experts) for x in inputs]
        return np.stack(counts), np.stack(scores)

    def _report(self, tables: ReplicaTables, console: Console) -> None:
        """Print the experts that are rounded to nearest at a new width."""
        columns = [tables.widths.index(bits) for bits in self.widths]
        layers, experts = np.nonzero(tables.fallback[..., columns].any(axis=2))
        if not len(layers):
            return
        shown = ", ".join(f"{layer}/{expert}" for layer, expert in list(zip(layers, experts, strict=True))[:8])
        more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
        console.print(
            f"{len(layers)} of {tables.counts.size} experts got fewer than {MIN_ROWS} calibration rows and are rounded "
            f"to nearest (layer/expert): {shown}{more}"
        )
