"""Modelled seconds of a batch of experts on a near-data device: one model for planner, worker and simulator.

The device of "Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems", section 5.1 and table 2: memory of a stated
bandwidth, systolic arrays beside it, and a link to the host. `expert_cost` and `BatchCosts` state our assumptions where
the paper is silent. Nothing here is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

FULL_BITS = 16
GROUP_BYTES = 4  # scale and offset of a group, float16 each


class CostError(ValueError):
    """An impossible device or piece of work; the message names the value and its range."""


@dataclass(frozen=True)
class Link:
    """One direction of a host link: `gbps` gigabytes (1e9) per second after `latency_us`."""

    gbps: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        _check_number("gbps", self.gbps, zero=False)
        _check_number("latency_us", self.latency_us, zero=True)


def load_s(nbytes: int, link: Link) -> float:
    """Seconds until `nbytes` have crossed the link."""
    return link.latency_us * 1e-6 + nbytes / (link.gbps * 1e9)


@dataclass(frozen=True)
class NdpDevice:
    """A near-data device, as in a file of configs/hardware.

    Args:
        name: in reports. memory_gbps: internal bandwidth, gigabytes (1e9) per second. capacity_bytes: of its memory.
        arrays: number of systolic arrays. array_rows: token rows that an array works on at once. clock_ghz: of the
            arrays.
        array_cols: weights that an array takes in per clock at 16 bits.
        narrowest_bits: at b bits a multiplier does 16 / max(b, narrowest_bits) multiplications per clock; 16: one.
        link_gbps, link_latency_us: of one direction of the link to the host, latency per message.

    Raises:
        CostError: a value is out of range.
    """

    name: str
    memory_gbps: float
    capacity_bytes: int
    arrays: int
    array_rows: int
    array_cols: int
    clock_ghz: float
    narrowest_bits: int
    link_gbps: float
    link_latency_us: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise CostError(f"name is {self.name!r}; give the device a name")
        for field in ("memory_gbps", "clock_ghz", "link_gbps"):
            _check_number(field, getattr(self, field), zero=False)
        _check_number("link_latency_us", self.link_latency_us, zero=True)
        for field in ("capacity_bytes", "arrays", "array_rows", "array_cols"):
            _check_count(field, getattr(self, field), 1, None)
        _check_count("narrowest_bits", self.narrowest_bits, 1, FULL_BITS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NdpDevice:
        """From the keys of a file, all required. Raises CostError: a key is missing or unknown, or a value is out of
        range.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, set(values) - set(known))):
            raise CostError(f"unknown key '{unknown[0]}'; known keys: {', '.join(known)}")
        if missing := [key for key in known if key not in values]:
            raise CostError(f"key '{missing[0]}' is missing; add it")
        return cls(**values)

    @property
    def link(self) -> Link:
        return Link(self.link_gbps, self.link_latency_us)

    def macs_per_s(self, bits: int) -> float:
        """Multiply-accumulates per second with every multiplier busy, on weights of `bits`."""
        split = FULL_BITS / min(FULL_BITS, max(bits, self.narrowest_bits))
        return self.arrays * self.array_rows * self.array_cols * split * self.clock_ghz * 1e9


@dataclass(frozen=True)
class Work:
    """The token rows of one expert, a gated FFN of three hidden x intermediate matrices.

    Args:
        hidden, intermediate: H and I. rows: token rows. bits: of a stored weight; 16: full precision.
        group: inputs that share a scale and an offset; None: one group per output. Unused at 16 bits.

    Raises:
        CostError: a value is out of range.
    """

    hidden: int
    intermediate: int
    rows: int
    bits: int = FULL_BITS
    group: int | None = None

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate", "rows"):
            _check_count(field, getattr(self, field), 1, None)
        _check_count("bits", self.bits, 1, FULL_BITS)
        if self.group is not None:
            _check_count("group", self.group, 1, None)

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.hidden, self.intermediate, self.bits, self.group)

    @property
    def macs(self) -> int:
        """3 H I per row: gate, up and down. The activation's H and I terms are below 0.1% of it."""
        return 3 * self.hidden * self.intermediate * self.rows


@dataclass(frozen=True)
class Cost:
    """Modelled seconds of an expert. `memory_s` and `compute_s` overlap, so they do not add up to `total_s`."""

    memory_s: float
    compute_s: float
    total_s: float


def packed_bytes(hidden: int, intermediate: int, bits: int, group: int | None) -> int:
    """Bytes of one expert's weights, scales and offsets, without tile padding of odd shapes.

    At 16 bits: 3 H I values of 2 bytes. Below: b bits a value, and a float16 scale and offset for each group of inputs:
    gate and up have I outputs of H inputs, down has H outputs of I inputs.
    """
    weights = math.ceil(3 * hidden * intermediate * bits / 8)
    if bits >= FULL_BITS:
        return weights
    groups = 2 * intermediate * math.ceil(hidden / (group or hidden))
    groups += hidden * math.ceil(intermediate / (group or intermediate))
    return weights + GROUP_BYTES * groups


def expert_cost(device: NdpDevice, work: Work) -> Cost:
    """One expert on the device: `total_s` is the longer of memory and compute.

    1. Every weight byte, scales included, is read once at full internal bandwidth: experts are long contiguous arrays.
    Activations stay in the arrays' buffers.
    2. An array of r x c multipliers is output-stationary: r token rows against c outputs, c weights per clock at 16
    bits. Its share of busy multipliers is rows / (r ceil(rows / r)): 1/4 for one row on a 4 x 4 array. (The paper does
    not name the dataflow. With this one, table 2's 64 arrays take in 64 x 4 x 2 bytes per ns = 512 GB/s, exactly its
    bandwidth, so up to four rows cost what one costs. Weight-stationary arrays are equal for one row.)
    3. For more than r rows the weights pass again, from the arrays' buffers and not from memory.
    4. Filling and draining an array takes r + c clocks per H or I clocks of a dot product: 0.2% for 4 x 4 arrays and H
    = 4096, left out.
    5. Narrow weights multiply faster, by `narrowest_bits`. (Section 2.3: lower precision "can increase effective
    in-device bandwidth and parallelism". Section 5.2's 5x at 3 bits and 8x at 2 bits need both: with multipliers that
    do not split, line 2 would leave one row at fp16's time.)
    6. Memory and arrays work in parallel (double buffering), so the longer one counts.
    """
    memory_s = work.weight_bytes / (device.memory_gbps * 1e9)
    steps = math.ceil(work.rows / device.array_rows)
    compute_s = work.macs / work.rows * steps * device.array_rows / device.macs_per_s(work.bits)
    return Cost(memory_s, compute_s, max(memory_s, compute_s))


class BatchCosts:
    """Seconds of messages with the token rows of several experts of one model, and their replies.

    Experts run one after another, each on all arrays; the link carries all activations in before the first and all
    results out after the last, one latency each way. Decode steps ask for the same few experts' seconds over and over.

    Args:
        full_bits: of a weight in full precision, which a batch calls 0 bits. group: as of `Work`, below that.
    """

    def __init__(self, device: NdpDevice, hidden: int, intermediate: int, full_bits: int, group: int | None) -> None:
        self._device, self._link = device, device.link
        self._shape, self._full_bits, self._group = (hidden, intermediate), full_bits, group
        self._known: dict[tuple[int, int], float] = {}  # of an expert, by (bits, rows)

    def expert_s(self, bits: int, rows: int) -> float:
        """Of one expert, without the link."""
        if (bits, rows) not in self._known:
            work = Work(*self._shape, rows, bits or self._full_bits, self._group if bits else None)
            self._known[bits, rows] = expert_cost(self._device, work).total_s
        return self._known[bits, rows]

    def total_s(self, experts: Iterable[tuple[int, int]], bytes_in: int, bytes_out: int) -> float:
        """Of a message with these experts; zero without any that has rows.

        Args:
            experts: bits and rows of each.
            bytes_in, bytes_out: of all token rows and of all results, as they cross the link.
        """
        each = [self.expert_s(bits, rows) for bits, rows in experts if rows]
        if not each:
            return 0.0
        return load_s(bytes_in, self._link) + load_s(bytes_out, self._link) + math.fsum(each)


@dataclass(frozen=True)
class SplitCosts:
    """Seconds of each needed expert of a layer on either side.

    Args:
        gpu_s: per expert, once its weights are there; measured on the executor.
        ndp_s: per expert, with its rows' share of the link.
        load_s: one absent expert's load to the GPU. ndp_once_s: once, if the device runs any expert.
    """

    gpu_s: tuple[float, ...]
    ndp_s: tuple[float, ...]
    load_s: float
    ndp_once_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.gpu_s) != len(self.ndp_s):
            raise CostError(f"{len(self.gpu_s)} costs on the GPU and {len(self.ndp_s)} on NDP; give one of each")
        if not all(0 <= t < math.inf for t in (*self.gpu_s, *self.ndp_s, self.load_s, self.ndp_once_s)):
            raise CostError("a cost is negative or not finite; give seconds")


def split_costs(
    device: NdpDevice, works: Sequence[Work], gpu_s: Sequence[float], one_load_s: float, row_bytes: int
) -> SplitCosts:
    """The device's side from the model, the GPU's side as given.

    Args:
        works: one for each needed expert. gpu_s: per expert, seconds on the GPU.
        one_load_s: seconds of one expert's load. row_bytes: of one token row's activations, each way.
    """
    row_s = 2 * row_bytes / (device.link_gbps * 1e9)
    ndp_s = [expert_cost(device, work).total_s + work.rows * row_s for work in works]
    return SplitCosts(tuple(gpu_s), tuple(ndp_s), one_load_s, 2e-6 * device.link_latency_us)


def _check_number(name: str, value: Any, *, zero: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise CostError(f"{name} is {value!r}; give a number {'of at least' if zero else 'above'} 0")


def _check_count(name: str, value: Any, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        to = f" to {most}" if most is not None else " or more"
        raise CostError(f"{name} is {value!r}; give a whole number, {least}{to}")
