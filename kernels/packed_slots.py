"""Packed experts on slots of a pool: the interface, the plain torch kernel, and the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from .pack import INPUTS, OUTPUTS, PackedShape, PackError, code_vectors
from .packed_ffn import ACTIVATIONS, HostLayer, PackedLayer, Threads

PackedGroup = tuple[int, int, int]  # pairs `start` to `stop` of the sorted pair list go through the expert in a slot
_DTYPES = {"U8": torch.uint8, "F16": torch.float16}


class PackedKernel(Protocol):
    """Runs packed experts on slots; `name` is its name in plans."""

    name: str

    def run(
        self, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup], top_k: int, y: torch.Tensor
    ) -> None:
        """y[pair] = FFN(hidden[pair // top_k]) of the group's expert, for the pairs of each group; other rows stay.

        Args:
            hidden: [T, H].
            pairs: numbers t * top_k + k, sorted by expert [T * top_k], int64.
            groups: (start, stop, slot): ranges of `pairs` and their slots.
            y: [T * top_k, H], contiguous, of the type of `hidden`.

        Raises:
            ValueError: shapes, types or memory layouts differ, or a group or slot is out of range.
        """
        ...


def packed_shapes(shape: PackedShape) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each tensor of one packed expert, in the order of `PackedShape.tensors()`."""
    return [(_DTYPES[code], dims) for code, dims in shape.tensors().values()]


def check_slots(slots: Sequence[torch.Tensor], shape: PackedShape) -> None:
    """Raise PackError unless these are the contiguous tensors of packed experts of `shape`, on one device."""
    expected = packed_shapes(shape)
    if len(slots) != len(expected):
        raise PackError(f"packed experts have {len(expected)} tensors, not {len(slots)}")
    for tensor, (dtype, dims) in zip(slots, expected, strict=True):
        fits = tensor.dtype == dtype and tuple(tensor.shape) == (len(slots[0]), *dims)
        if not fits or not tensor.is_contiguous() or tensor.device != slots[0].device:
            raise PackError(f"a tensor of packed slots must be contiguous {dtype} {dims}, not {tensor.dtype} "
                            f"{tuple(tensor.shape)} on {tensor.device}")  # fmt: skip


def try_out(
    kernel: Any, hidden_size: int, dtype: torch.dtype, device: torch.device, expert: tuple[int, ...] = (0,)
) -> None:  # fmt: skip
    """Run a kernel at few rows and at many, and wait: compiles it, or raises what prevents it here.

    Args:
        kernel: its `run` takes groups. expert: what a group says behind its rows: the first slot.
    """
    for rows in (1, 17):
        hidden, pairs = torch.zeros((rows, hidden_size), dtype=dtype, device=device), torch.arange(rows, device=device)
        y = torch.empty_like(hidden)
        kernel.run(hidden, pairs, [(0, rows, *expert)], 1, y)
        y[0, 0].item()


def check_call(
    shape: PackedShape, slots: int, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup],
    top_k: int, y: torch.Tensor,
) -> None:  # fmt: skip
    """Raise ValueError unless `PackedKernel.run` takes these arguments."""
    count = pairs.numel()
    if hidden.shape != (count // top_k, shape.hidden):
        raise ValueError(f"hidden is {tuple(hidden.shape)} for {count} pairs, top-{top_k} and width {shape.hidden}")
    if pairs.dtype != torch.int64 or pairs.dim() != 1:
        raise ValueError(f"pairs must be int64 [N], not {pairs.dtype} {tuple(pairs.shape)}")
    if y.shape != (count, shape.hidden) or y.dtype != hidden.dtype or not y.is_contiguous():
        raise ValueError(f"y must be contiguous {hidden.dtype} [{count}, {shape.hidden}], not {y.dtype} "
                         f"{tuple(y.shape)}")  # fmt: skip
    for start, stop, slot in groups:
        if not (0 <= start <= stop <= count and 0 <= slot < slots):
            raise ValueError(f"group {(start, stop, slot)}: there are {count} pairs and {slots} slots")


class TorchPackedKernel:
    """Reference for any device: dequantizes an expert, then plain GEMMs. Args: as `TritonPackedKernel`."""

    name = "torch"

    def __init__(self, slots: Sequence[torch.Tensor], shape: PackedShape, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"there is no activation {activation}: choose one of {', '.join(ACTIVATIONS)}")
        check_slots(slots, shape)
        self._slots, self._shape, self._activation = tuple(slots), shape, activation

    def run(
        self, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup], top_k: int, y: torch.Tensor
    ) -> None:
        check_call(self._shape, len(self._slots[0]), hidden, pairs, groups, top_k, y)
        for start, stop, slot in groups:
            gate, up, down = (m.to(hidden.dtype) for m in self.weights(slot))
            rows = pairs[start:stop]
            x = hidden[rows // top_k]
            y[rows] = (_activated(x @ gate.t(), self._activation) * (x @ up.t())) @ down.t()

    def weights(self, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up [I, H], down [H, I] of the expert in a slot, dequantized, float32."""
        shape = self._shape
        gate_up, gate_up_scales, down, down_scales = (tensor[slot] for tensor in self._slots)
        blocks = gate_up.permute(0, 3, 1, 2, 4)  # [B, half, tile, gate or up, 64 b]
        affine = gate_up_scales.permute(0, 3, 1, 2, 4, 5)  # [B, half, group, gate or up, scale or offset, 16]
        gate, up = (
            _dequantized(blocks[:, :, :, m].flatten(0, 1), affine[:, :, :, m].flatten(0, 1), shape) for m in range(2)
        )
        codes = down.permute(1, 0, 2, 3).flatten(1, 2)  # [output tile, input tile, 64 b]
        back = _dequantized(codes, down_scales.permute(1, 0, 2, 3), shape)
        h, i = shape.hidden, shape.intermediate
        return gate[:i, :h], up[:i, :h], back[:h, :i]


class CpuPackedKernel:
    """The C++ kernel of the NDP worker on slot memory of the CPU; it rounds activations to eight bits.

    Args: as `TritonPackedKernel`, and the number of threads.
    """

    name = "cpu"

    def __init__(self, slots: Sequence[torch.Tensor], shape: PackedShape, activation: str, threads: int = 1) -> None:
        check_slots(slots, shape)
        self._shape, self._count = shape, len(slots[0])
        arrays = {name: tensor.numpy() for name, tensor in zip(shape.tensors(), slots, strict=True)}
        self._layer = PackedLayer(arrays, shape, activation, Threads(threads))  # reads the very memory

    def run(
        self, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup], top_k: int, y: torch.Tensor
    ) -> None:
        check_call(self._shape, self._count, hidden, pairs, groups, top_k, y)
        run_pairs(self._layer, hidden, pairs, groups, top_k, y)


def run_pairs(
    layer: HostLayer, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup], top_k: int,
    y: torch.Tensor,
) -> None:  # fmt: skip
    """`PackedKernel.run` by experts whose numbers are their slots; the arguments are checked."""
    chosen = torch.cat([pairs[start:stop] for start, stop, _ in groups])
    x = hidden[chosen // top_k].float().contiguous().numpy()  # [n, H]: each pair is a row of its own
    found, out, first = [], np.empty_like(x), 0
    for start, stop, slot in groups:
        found.append((slot, first, first + stop - start))
        first += stop - start
    layer.run(found, np.arange(first, dtype=np.int32), np.ones(first, np.float32), x, out)
    y[chosen] = torch.from_numpy(out).to(y.dtype)


def _dequantized(codes: torch.Tensor, affine: torch.Tensor, shape: PackedShape) -> torch.Tensor:
    """codes [R, tiles, 64 b] and affine [R, groups, 2, 16] -> [16 R, 32 tiles], padding included."""
    rows, units, _ = codes.shape
    v = torch.stack(code_vectors(codes, shape.bits), dim=2)
    whole = v.reshape(rows, units, INPUTS // 4, OUTPUTS, 4).permute(0, 3, 1, 2, 4)
    matrix = whole.reshape(rows * OUTPUTS, units * INPUTS).float()
    spread = affine.float().permute(2, 0, 3, 1).reshape(2, rows * OUTPUTS, -1)  # [2, outputs, groups]
    scales, offsets = (part.repeat_interleave(shape.group, dim=1)[:, : matrix.shape[1]] for part in spread)
    return scales * matrix + offsets


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    functional = torch.nn.functional
    if activation == "silu":
        return functional.silu(gate)
    if activation == "relu":
        return functional.relu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
