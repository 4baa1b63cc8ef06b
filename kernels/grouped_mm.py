"""Experts by `torch.nn.functional.grouped_mm`: one matrix product over a range of slots for each projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from .expert_ffn import ExpertKernel, Gate, Group, Operands

MAX_SLOTS = 1023  # of one product, by its own limit
_BYTES = 16  # the products' rows begin at multiples of it


class Tables(Protocol):
    """What brings a few numbers to the device; see `triton.tables.TableRing`."""

    def put(self, table: NDArray[np.int32]) -> torch.Tensor: ...


class GroupedMmKernel:
    """Whole experts, all of a call in two grouped products; those without rows are groups of none.

    Segments of split experts go to the reference. Which blocks the products use may hang on the rows of the whole
    call: whoever needs results that do not must compare first.

    Args:
        operands: the slot pool, no biases.
        gate: as for `TorchKernel`.
        reference: runs segments, calls in another dtype than the slots', and sums.
        tables: brings the offsets to the device.

    Raises:
        ValueError: grouped_mm does not support the operands (see `supports`).
    """

    def __init__(self, operands: Operands, gate: Gate, reference: ExpertKernel, tables: Tables) -> None:
        if not self.supports(operands):
            raise ValueError("grouped_mm does not support these operands")
        slots, self._neurons, rows, width = operands.gate_up.shape
        self._gate_up = operands.gate_up.view(slots, self._neurons * rows, width).transpose(1, 2)  # [S, H, G*I]
        self._down = operands.down  # [S, I, H]
        self._gate, self._reference, self._tables = gate, reference, tables

    @staticmethod
    def supports(operands: Operands) -> bool:
        """Whether torch has a product for these operands that does not wait for the device: Hopper on, bfloat16."""
        gate_up = operands.gate_up
        _, neurons, _, width = gate_up.shape
        aligned = all(n * gate_up.element_size() % _BYTES == 0 for n in (neurons, width))
        plain = hasattr(functional, "grouped_mm") and operands.plain and aligned
        if gate_up.device.type == "cpu":
            return plain
        return plain and gate_up.dtype == torch.bfloat16 and torch.cuda.get_device_capability(gate_up.device)[0] >= 9

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """See `ExpertKernel.run`."""
        same = hidden.dtype == y.dtype == self._gate_up.dtype
        whole = [g for g in groups if g[3] == self._neurons and g[2] % self._neurons == 0 and not g[4] and same]
        if len(whole) < len(groups):
            self._reference.run(hidden, pairs, [g for g in groups if g not in whole], top_k, y)
        for part in self._parts([g for g in whole if g[1] > g[0]]):
            self._run(hidden, pairs, part, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `ExpertKernel.combine`."""
        return self._reference.combine(y, weights)

    def _parts(self, groups: list[Group]) -> Iterator[list[Group]]:
        """The groups by slot, in as many parts as ranges of `MAX_SLOTS` slots take."""
        groups = sorted(groups, key=lambda group: group[2])
        while groups:
            end = groups[0][2] + MAX_SLOTS * self._neurons
            part = [g for g in groups if g[2] < end]
            yield part
            groups = groups[len(part) :]

    def _run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        first, last = groups[0][2] // self._neurons, groups[-1][2] // self._neurons
        rows_of = np.zeros(last + 1 - first, np.int32)
        for start, stop, neuron, _, _ in groups:
            rows_of[neuron // self._neurons - first] += stop - start
        ends = self._tables.put(np.cumsum(rows_of, dtype=np.int32))
        rows = torch.cat([pairs[start:stop] for start, stop, *_ in groups])
        up = functional.grouped_mm(hidden[rows // top_k], self._gate_up[first : last + 1], offs=ends)  # [n, G*I]
        y[rows] = functional.grouped_mm(self._gate(up), self._down[first : last + 1], offs=ends)
