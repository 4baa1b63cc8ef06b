"""Residency on the device: where a layer's experts are is read by a kernel, and a miss needs no host.

    resolve   ids [T, K] -> the address of each pair's expert: its slot, or on a miss its place in host memory;
              touches the slots' stamps and appends the layer's routing to a ring in mapped memory
    experts   gate_up, down: as `expert_ffn`, of weights at these addresses; a miss is read over the link, once

The host follows the ring behind, plans, and publishes what has arrived (`engine.cuda.resident`). All launches depend on
the number of rows alone, so a step can be one CUDA graph. A pair is a tile of its own: experts that several tokens
share are read from the L2 cache then. Its rows and sums are those of `expert_ffn`, to the bit.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device import on_device
from ..packed_ffn import ACTIVATIONS
from .expert_ffn import PAD, Shape, down_tile, shapes_for, up_tile
from .launch import Launch

RING_HEAD = 4  # numbers of an entry before the ids: step, layer, pairs, misses
ABSENT = -1  # in the table of slots


@triton.jit
def _advance(step):
    tl.store(step, tl.load(step) + 1)


_LOOSE = ["layer", "layers", "experts", "pairs", "entries", "gate_up", "down", "up_bytes", "bytes"]


@triton.jit(do_not_specialize=_LOOSE)
def _resolve(
    ids, weights, slot_of, stamps, step, homes, addresses, ring, ring_weights, layer, layers, experts, pairs, entries,
    gate_up, down, up_bytes, bytes, PAIRS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, PAIRS)
    used = p < pairs
    expert = tl.load(ids + p, mask=used, other=0).to(tl.int64)
    key = expert + layer * experts
    slot = tl.load(slot_of + key, mask=used, other=-1).to(tl.int64)
    hit = used & (slot >= 0)
    missed = used & (slot < 0)
    now = tl.load(step)
    tl.store(stamps + slot, tl.zeros((PAIRS,), dtype=tl.int64) + now, mask=hit)
    at_up = tl.where(hit, gate_up + slot * up_bytes, tl.load(homes + 2 * key, mask=missed, other=0))
    at_down = tl.where(hit, down + slot * bytes, tl.load(homes + 2 * key + 1, mask=missed, other=0))
    tl.store(addresses + 2 * p, at_up, mask=used)
    tl.store(addresses + 2 * p + 1, at_down, mask=used)
    place = (now * layers + layer) % entries
    entry = ring + place * (HEAD + WIDTH)
    tl.store(entry, now)
    tl.store(entry + 1, layer.to(tl.int64))
    tl.store(entry + 2, pairs.to(tl.int64))
    tl.store(entry + 3, tl.sum(missed.to(tl.int64), axis=0))
    tl.store(entry + HEAD + p, expert, mask=used)
    tl.store(ring_weights + place * WIDTH + p, tl.load(weights + p, mask=used, other=0.0).to(tl.float32), mask=used)


@triton.jit(do_not_specialize=["top_k"])
def _gate_up_at(
    hidden, addresses, activations, top_k, neurons, H, STRIDE,
    ACTIVATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    m = tl.arange(0, M)
    weights = tl.load(addresses + 2 * pair).to(tl.pointer_type(hidden.dtype.element_ty))
    weights = tl.multiple_of(weights, 16)
    up_tile(
        hidden + (pair // top_k + 0 * m) * H, weights, activations + (pair + 0 * m).to(tl.int64) * STRIDE, m < 1,
        tl.program_id(1) * N, neurons, H, ACTIVATION, M, N, K, EVEN, WIDEN,
    )  # fmt: skip


@triton.jit
def _down_at(
    activations, addresses, y, neurons, H, STRIDE,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    m = tl.arange(0, M)
    used = m < 1
    h = tl.program_id(1) * N + tl.arange(0, N)
    weights = tl.load(addresses + 2 * pair + 1).to(tl.pointer_type(y.dtype.element_ty))
    weights = tl.multiple_of(weights, 16)
    rows = activations + (pair + 0 * m).to(tl.int64) * STRIDE
    total = down_tile(rows, weights, used, h, neurons, H, M, N, K, EVEN, WIDEN)
    at = y + (pair + 0 * m).to(tl.int64)[:, None] * H + h[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=used[:, None] & (h < H)[None, :])


@triton.jit(do_not_specialize=["count"])
def _publish(slot_of, changes, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        used = i < count
        key = tl.load(changes + 2 * i, mask=used, other=0)
        tl.store(slot_of + key, tl.load(changes + 2 * i + 1, mask=used, other=0), mask=used)


@dataclass(frozen=True)
class Tables:
    """The tables of one cache on the device, and the ring.

    slot_of: int32 [L * E], `ABSENT` or the expert's slot. stamps: int64 [S], the last step that used each slot. step:
    int64 [1]. homes: int64 [L * E, 2], addresses of gate_up and down in host memory that kernels can read. ring: int64
    [entries, RING_HEAD + W], ring_weights: float32 [entries, W], in pinned memory; W: most pairs of a layer.
    """

    slot_of: torch.Tensor
    stamps: torch.Tensor
    step: torch.Tensor
    homes: torch.Tensor
    ring: torch.Tensor
    ring_weights: torch.Tensor


class ResidentKernels:
    """The launches of a step with residency on the device.

    Args:
        gate_up, down: the slot pool [S, I, 2, H], [S, I, H]; host memory has the same dtype and layout.
        activation: a key of `packed_ffn.ACTIVATIONS`.
        layers, experts: L and E of `tables`.

    Raises:
        ValueError: unknown activation, or the pool is not contiguous.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: str, layers: int, experts: int, tables: Tables
    ) -> None:
        if activation not in ACTIVATIONS or not (gate_up.is_contiguous() and down.is_contiguous()):
            raise ValueError(f"residency on the device needs contiguous slots and a known activation, not {activation}")
        self._gate_up, self._down, self._tables = gate_up, down, tables
        self._layers, self._experts = layers, experts
        _, self._neurons, _, self._width = gate_up.shape
        self._stride = triton.cdiv(self._neurons, PAD) * PAD
        self._device, self._dtype = gate_up.device, gate_up.dtype
        shape: Shape = shapes_for(self._dtype)["decode"][0]
        widen = self._device.type == "cpu" and self._dtype == torch.bfloat16
        up, low, width = shape.gate_up, shape.down, self._width
        self._grids = self._stride // up.N, triton.cdiv(width, low.N)
        self._up = Launch(
            _gate_up_at, ACTIVATION=ACTIVATIONS[activation], M=shape.M, N=up.N, K=up.K, EVEN=width % up.K == 0,
            WIDEN=widen, num_warps=up.warps, num_stages=up.stages, enable_fp_fusion=True,
        )  # fmt: skip
        self._low = Launch(
            _down_at, M=shape.M, N=low.N, K=low.K, EVEN=width % low.N == 0, WIDEN=widen, num_warps=low.warps,
            num_stages=low.stages, enable_fp_fusion=True,
        )  # fmt: skip
        most = tables.ring_weights.shape[1]
        pairs = triton.next_power_of_2(most)
        self._resolve = Launch(_resolve, PAIRS=pairs, WIDTH=most, HEAD=RING_HEAD, num_warps=1)
        self._advance, self._publish = Launch(_advance, num_warps=1), Launch(_publish, BLOCK=128, num_warps=1)

    def begin(self) -> None:
        """A forward begins: count its step."""
        with on_device(self._device):
            self._advance((1, 1, 1), self._tables.step)

    def run(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y [T * K, H] of a layer's pairs, in routing order: hidden [T, H], ids int64 [T, K], weights [T, K].

        Raises:
            ValueError: more pairs than the ring's entries hold, or another dtype than the slots'.
        """
        tables, (tokens, top_k) = self._tables, ids.shape
        pairs = tokens * top_k
        if pairs > tables.ring_weights.shape[1] or hidden.dtype != self._dtype or ids.dtype != torch.int64:
            raise ValueError(f"{pairs} pairs of {hidden.dtype} for {tables.ring_weights.shape[1]} of {self._dtype}")
        hidden, ids, weights, device = hidden.contiguous(), ids.contiguous(), weights.contiguous(), self._device
        addresses = torch.empty((pairs, 2), dtype=torch.int64, device=device)
        activations = torch.empty((pairs, self._stride), dtype=self._dtype, device=device)
        y = torch.empty((pairs, self._width), dtype=self._dtype, device=device)
        gate_up, down = self._gate_up, self._down
        with on_device(device):
            self._resolve(
                (1, 1, 1), ids, weights, tables.slot_of, tables.stamps, tables.step, tables.homes, addresses,
                tables.ring, tables.ring_weights, layer, self._layers, self._experts, pairs, len(tables.ring),
                gate_up.data_ptr(), down.data_ptr(), gate_up[0].nbytes, down[0].nbytes,
            )  # fmt: skip
            self._up(
                (pairs, self._grids[0], 1), hidden, addresses, activations, top_k, self._neurons, self._width,
                self._stride,
            )  # fmt: skip
            self._low(
                (pairs, self._grids[1], 1), activations, addresses, y, self._neurons, self._width, self._stride
            )
        return y

    def publish(self, changes: torch.Tensor) -> None:
        """slot_of[key] = slot for (key, slot) in `changes` int32 [n, 2], for later work on the current stream."""
        with on_device(self._device):
            self._publish((1, 1, 1), self._tables.slot_of, changes, len(changes))
