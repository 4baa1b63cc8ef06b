"""Expert FFN on slots: the interface, the torch and C++ kernels, and the choice by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from . import _cpu
from .packed_ffn import ACTIVATIONS
from .substitute import BuddyLists, Options, numbers

CPU_MAX_ROWS = 8  # rows of one expert above which blocked GEMMs beat the C++ kernel
MAX_SLOTS = 1023  # groups that one grouped product takes
_ALIGNMENT_BYTES = 16  # of the rows of grouped products

# Classes of experts by their own row count, which alone selects a kernel: were it the rows of the whole call, a result
# would depend on the other experts in it.
RowClass = Literal["decode", "short", "prefill"]
ROW_CLASSES: tuple[RowClass, ...] = get_args(RowClass)
DECODE_ROWS = 16  # at most: one tensor-core tile, bound by the bytes of weights
SHORT_ROWS = 64

Gate = Callable[[torch.Tensor], torch.Tensor]
# (start, stop, first, neurons, add): pairs start to stop of the sorted pair list go through these neurons of the pool,
# counted over all slots; add: y holds the rows of the expert's other segment, to which these are added.
Group = tuple[int, int, int, int, bool]


@dataclass(frozen=True)
class Operands:
    """Slots as GEMM operands, neuron-major: S slots, I neurons, G rows per neuron (1 or 2), H hidden.

    gate_up [S, I, G, H], down [S, I, H], gate_up_bias [S, I, G] or None, down_bias [S, H] or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def plain(self) -> bool:
        """Whether the arrays are contiguous and without biases."""
        biased = self.gate_up_bias is not None or self.down_bias is not None
        return not biased and self.gate_up.is_contiguous() and self.down.is_contiguous()

    @property
    def plain_gated(self) -> bool:
        """Whether the arrays are `plain`, gated, of fitting shapes, one type and one device."""
        gate_up, down = self.gate_up, self.down
        slots, neurons, rows, width = gate_up.shape
        alike = gate_up.dtype == down.dtype and gate_up.device == down.device
        return self.plain and alike and rows == 2 and down.shape == (slots, neurons, width)


class ExpertKernel(Protocol):
    """Runs experts on slots."""

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """y[pair] = FFN(hidden[pair // top_k]) over the group's neurons, for the pairs of each group.

        Other rows of y stay. Of an expert's two segments one is written and the other added: in either order the same
        bits.

        Args:
            hidden: [T, H].
            pairs: numbers t * top_k + k, sorted by expert [T * top_k], int64.
            groups: ranges of `pairs` and their neurons.
            y: [T * top_k, H].
        """
        ...

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_k weights[t, k] * y[t * K + k] -> [T, H], in the dtype of y."""
        ...


def row_class(rows: int) -> RowClass:
    """The class of an expert with this many rows."""
    if rows <= DECODE_ROWS:
        return "decode"
    return "short" if rows <= SHORT_ROWS else "prefill"


class TorchKernel:
    """Reference: one GEMM per expert and projection.

    Args:
        operands: the slot pool; with biases, groups are whole slots.
        gate: maps interleaved pre-activations [n, I*G] (row j*G is neuron j's gate) to activations [n, I].
    """

    def __init__(self, operands: Operands, gate: Gate) -> None:
        slots, i, g, h = operands.gate_up.shape
        bias = operands.gate_up_bias
        self._neurons, self._rows = i, g
        self._gate_up_t = operands.gate_up.view(slots * i * g, h).t()  # [H, S*I*G]
        self._down = operands.down.view(slots * i, h)
        self._gate_up_bias = bias.view(slots * i * g) if bias is not None else None
        self._down_bias = operands.down_bias
        self._gate = gate

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        g = self._rows
        for start, stop, first, neurons, add in groups:
            rows = pairs[start:stop]
            up = hidden[rows // top_k] @ self._gate_up_t.narrow(1, first * g, neurons * g)  # [n, neurons*G]
            if self._gate_up_bias is not None:
                up += self._gate_up_bias.narrow(0, first * g, neurons * g)
            out = self._gate(up) @ self._down.narrow(0, first, neurons)  # [n, H]
            if self._down_bias is not None:
                out += self._down_bias[first // self._neurons]
            if add:
                y.index_add_(0, rows, out)
            else:
                y[rows] = out

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, top_k = weights.shape
        return (y.view(tokens, top_k, y.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)


class CpuKernel:
    """The C++ kernel (`kernels/cpu`) for decode shapes: one pass over an expert's bytes for its few rows.

    Args:
        operands: fp32 pool on the CPU, contiguous, G = 2, no biases.
        activation: a key of `packed_ffn.ACTIVATIONS`.
        large: runs the experts that have more than `CPU_MAX_ROWS` rows.

    Raises:
        ValueError: unsupported operands or activation (see `supports`).
    """

    def __init__(self, operands: Operands, activation: str, large: ExpertKernel) -> None:
        if not self.supports(operands, activation):
            raise ValueError(f"the CPU kernel does not support activation {activation} on these operands")
        self._gate_up, self._down, self._large = operands.gate_up, operands.down, large
        self._addresses = operands.gate_up.data_ptr(), operands.down.data_ptr()
        slots, neurons, _, self._width = operands.gate_up.shape
        self._neurons = slots * neurons
        self._activation = ACTIVATIONS[activation]

    @staticmethod
    def supports(operands: Operands, activation: str | None) -> bool:
        """Whether the kernel can run these operands."""
        gate_up = operands.gate_up
        here = gate_up.device.type == "cpu" and gate_up.dtype == torch.float32
        return activation in ACTIVATIONS and here and operands.plain_gated

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        few = pairs.numel() <= CPU_MAX_ROWS and hidden.dtype == torch.float32
        large = [] if few else [g for g in groups if g[1] - g[0] > CPU_MAX_ROWS or hidden.dtype != torch.float32]
        if large:
            self._large.run(hidden, pairs, large, top_k, y)
            if len(large) == len(groups):
                return
            groups = [g for g in groups if g[1] - g[0] <= CPU_MAX_ROWS]
        count, width = pairs.numel(), self._width
        if hidden.shape != (count // top_k, width):
            raise ValueError(f"hidden is {tuple(hidden.shape)} for {count} pairs, top-{top_k} and width {width}")
        if pairs.dtype != torch.int64 or not pairs.is_contiguous():
            raise ValueError(f"pairs must be contiguous int64, not {pairs.dtype} with strides {pairs.stride()}")
        if y.dtype != torch.float32 or not y.is_contiguous() or y.shape != (count, width):
            raise ValueError(f"y must be contiguous float32 [{count}, {width}], not {y.dtype} {tuple(y.shape)}")
        hidden = hidden.contiguous()
        gate_up, down = self._addresses
        _cpu.expert_ffn(
            hidden.data_ptr(), gate_up, down, pairs.data_ptr(), count, groups,
            top_k, self._neurons, width, self._activation, y.data_ptr(),
        )  # fmt: skip

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if weights.dtype != torch.float32 or y.dtype != torch.float32:
            return self._large.combine(y, weights)
        tokens, top_k = weights.shape
        if y.shape != (tokens * top_k, self._width):
            raise ValueError(f"y is {tuple(y.shape)} for {tokens} tokens, top-{top_k} and width {self._width}")
        y, weights = y.contiguous(), weights.contiguous()
        out = torch.empty((tokens, self._width), dtype=torch.float32)
        _cpu.combine(y.data_ptr(), weights.data_ptr(), tokens, top_k, self._width, out.data_ptr())
        return out

    def native(
        self, layer: int, states: NDArray[np.uint8], slots: NDArray[np.int32], record: NDArray[np.int64],
        counts: _cpu.Counts, loads: _cpu.Loads | None = None, orders: bool = False,
    ) -> NativeLayer:  # fmt: skip
        """One layer in native calls.

        Args:
            states, slots: of its experts [E], as in `policies.residency.Residency.arrays`.
            record: of its passes without misses, for an order of eviction in Python. counts: of the cache.
            loads: plans the others; None: only passes without misses run. orders: it has an order of eviction.
        """
        made = _cpu.layer(
            layer, len(slots), states.ctypes.data, slots.ctypes.data, *self._addresses, self._gate_up.shape[1],
            self._width, self._activation, CPU_MAX_ROWS, record.ctypes.data, len(record), counts, loads,
        )  # fmt: skip
        held = states, slots, record, counts, loads, self
        return NativeLayer(made, self._width, loads is not None, orders, held)

    def split_layer(
        self, split: _cpu.Split, layer: int, layers: int, experts: int, probe: tuple[int, int, int, int, int]
    ) -> _cpu.SplitLayer:
        """One layer of split experts in native calls. probe: address of a router's weight, 0: none; of its bias; whose
        layer it is; experts that each row names; whether their votes order them, else the highest probability.
        """
        return _cpu.split_layer(
            split, layer, experts, layers, *self._addresses, self._width, self._activation, CPU_MAX_ROWS, *probe
        )

    @property
    def width(self) -> int:
        """Of rows: H."""
        return self._width


class Needed(NamedTuple):
    """What a pass needs, once its routing is known.

    keys, counts: the experts, and the tokens that picked each. run: the same keys as they will run: `resident` ones,
    then `arriving` ones whose copies are under way, then the missing ones. victims: slots to be freed for those.
    """

    keys: list[int]
    counts: list[int]
    run: list[int]
    resident: int
    arriving: int
    victims: int


class RoutersAhead(NamedTuple):
    """The routers of the layers behind a layer, for prefetch by votes (`policies.prefetch.NextGatePrefetch`).

    weight [layers * E, H] and bias [layers * E], or None, in float32; top: experts of a row. source: the policy's name.
    max_rows: of which scores are computed so.
    """

    weight: torch.Tensor | None  # None: there are no layers behind
    bias: torch.Tensor | None
    layers: int
    top: int
    max_rows: int
    source: str


class ReleaseAhead(NamedTuple):
    """Slots that are freed for the next layer (`policies.activeevict.PreEviction`) by its router's scores.

    weight [E, H] and bias [E], or None, in float32. threshold, most: of the rule. max_rows: of an input.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    threshold: float
    most: int
    max_rows: int

    @property
    def source(self) -> None:
        """Nothing is prefetched."""
        return None


class Budget(NamedTuple):
    """Pairs are dropped whose experts do not fit: as `policies.activeevict.BudgetAwareTopK`."""

    narrowest: int
    renormalise: bool


class Replace(NamedTuple):
    """Missing experts are replaced by others, or left out: as `policies.buddymoe.MissRule` on one GPU.

    top_k: of the routings; others are for Python. tau, beta: None: no gate. weight [E, H] and bias [E], or None: the
    router whose probabilities the options ask for. draws [n] float32 and next [1] int64, the first that was not read:
    in their place. full [L] bool, emptied [1] int64: the rule's state. max_rows: of which probabilities are computed.
    """

    top_k: int
    buddies: BuddyLists
    options: Options
    tau: float | None
    beta: float | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    draws: NDArray[np.float32] | None
    next: NDArray[np.int64] | None
    full: NDArray[np.bool_]
    emptied: NDArray[np.int64]
    max_rows: int


def native_operands(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The same, contiguous; None: in other dtypes than the kernel's. Raises ValueError: of other shapes."""
    float32 = torch.float32
    if hidden.dtype is not float32 or weights.dtype is not float32 or ids.dtype is not torch.int64:
        return None
    shape = ids.shape
    if hidden.shape != (shape[0], width) or weights.shape != shape:
        raise ValueError(f"{tuple(hidden.shape)} rows, {tuple(shape)} ids and {tuple(weights.shape)} weights")
    return hidden.contiguous(), ids.contiguous(), weights.contiguous()


class NativeLayer:
    """Runs a layer in native calls (`kernels/cpu/layer_module.cpp`): `step`, or `run`, or `begin`, `load` and `finish`.

    The output is that of `CpuKernel.run` and `combine`, to the bit. What is found at `begin` is pinned until `finish`.

    Attributes:
        handle: for `dense.Program.run_layers`. width: of rows, H. joins: it may run so.
        plans: whether passes with misses run.
        orders: whether the order of eviction is in native code; without, `step` cannot run.
        waited_s: seconds that the last `finish` or `step` has waited for copies.
        source: the policy whose prefetches are part of `step`; None: there are none.
        kernel_s: seconds of the kernels, by the wall's clock and by the thread's CPU time, added up while `timed`.
    """

    decides = False
    joins = True

    def __init__(self, made: _cpu.Layer, width: int, plans: bool, orders: bool, held: object) -> None:
        self.handle, self.width, self._held = made, width, held
        self.plans, self.orders, self.waited_s = plans, orders, 0.0
        self.kernel_s = np.zeros(2)
        self.source: str | None = None
        self._release = 0, 0, 0.0, 0, 0  # of `ReleaseAhead`
        self._pass: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def timed(self, on: bool) -> None:
        """Whether the kernels' seconds are added up."""
        _cpu.layer_times(self.handle, self.kernel_s.ctypes.data if on else 0)

    def look_ahead(self, ahead: RoutersAhead | ReleaseAhead) -> None:
        """`step` prefetches what these routers pick, or frees slots."""
        weight, bias = (0 if t is None else t.data_ptr() for t in (ahead.weight, ahead.bias))
        if isinstance(ahead, RoutersAhead):
            _cpu.layer_ahead(self.handle, weight, bias, ahead.layers, ahead.top, ahead.max_rows)
        else:
            self._release = weight, bias, ahead.threshold, ahead.most, ahead.max_rows
            _cpu.layer_active(self.handle, *self._release, 0, False)
        self._held, self.source = (self._held, ahead), ahead.source

    def call(self, hooks: Callable[[int, int, int, int], object]) -> None:
        """`step` calls these once its copies are queued, with the addresses of hidden [tokens, H] and of the ids
        [tokens, top_k] that the model picked, tokens and top_k.
        """
        _cpu.layer_hooks(self.handle, hooks)
        self._held = self._held, hooks

    def reroute(self, rule: Budget | Replace) -> None:
        """`step` changes the routing so."""
        if isinstance(rule, Budget):
            _cpu.layer_active(self.handle, *self._release, *rule)
            return
        weight, bias = (0 if t is None else t.data_ptr() for t in (rule.weight, rule.bias))
        draws, after = rule.draws, rule.next
        read = (0, 0, 0) if draws is None or after is None else (draws.ctypes.data, len(draws), after.ctypes.data)
        _cpu.layer_replace(
            self.handle, weight, bias, *read, rule.full.ctypes.data, rule.emptied.ctypes.data,
            rule.buddies.ids.ctypes.data, rule.buddies.similarity.ctypes.data,
            numbers((0, rule.top_k), rule.buddies, rule.options, rule.tau),
            math.inf if rule.beta is None else rule.beta, rule.max_rows,
        )  # fmt: skip
        self._held = self._held, rule

    def step(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, decode_only: bool, source: int
    ) -> torch.Tensor | list[int] | None:
        """The whole pass: hidden [T, H], ids [T, K], weights [T, K] -> [T, H].

        None: as of `begin`. A list: the pass has failed, since copies of these keys were cancelled or, if empty, since
        the link is closed. decode_only: the forward has no rows of a prompt. source: number of the prefetch policy in
        the counters; 0: nothing is prefetched.
        """
        of = native_operands(hidden, ids, weights, self.width)
        if of is None:
            return None
        hidden, ids, weights = of
        tokens, top_k = ids.shape
        out = torch.empty_like(hidden)
        found = _cpu.layer_step(
            self.handle, hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, out.data_ptr(),
            decode_only, source,
        )  # fmt: skip
        if type(found) is not float:
            return found
        self.waited_s = found
        return out

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | Needed | None:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H] where all experts are resident, else as `begin`."""
        return self._begin(hidden, ids, weights, True)

    def begin(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Needed | None:
        """Make copies that have ended resident, cancel queued prefetches that the pass does not need, and find what it
        needs; None: `CpuKernel` can run it.

        It is so for other dtypes than float32, where an expert has more than `CPU_MAX_ROWS` rows, where more slots are
        needed than can be freed, and where the record is full. Raises ValueError: there is no such expert.
        """
        found = self._begin(hidden, ids, weights, False)
        assert not isinstance(found, torch.Tensor)
        return found

    def _begin(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, runs: bool
    ) -> torch.Tensor | Needed | None:
        operands = native_operands(hidden, ids, weights, self.width)
        if operands is None:
            return None
        hidden, ids, weights = operands
        tokens, top_k = ids.shape
        out = torch.empty_like(hidden)
        of = hidden.data_ptr(), ids.data_ptr(), weights.data_ptr()
        found = _cpu.layer_begin(self.handle, *of, tokens, top_k, out.data_ptr(), runs)
        if found is True:
            return out
        if found is None:
            return None
        self._pass = hidden, weights, out
        return tuple.__new__(Needed, found)

    def load(self, victims: list[int], decode_only: bool) -> bool:
        """Evict these, and load the missing experts; False: the link is closed."""
        return _cpu.layer_load(self.handle, victims, decode_only)

    def finish(self) -> torch.Tensor | None:
        """Run the pass, arrivals as they land: [T, H]. None: a copy was cancelled, and nothing has changed."""
        assert self._pass is not None  # of `begin`
        out = self._pass[2]
        waited_s = _cpu.layer_finish(self.handle)
        self._pass = None
        if waited_s is None:
            return None
        self.waited_s = waited_s
        return out


class Tables(Protocol):
    """Brings small tables to the device; see `engine.cuda.tables.TableRing`."""

    def put(self, table: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        """On the device, for later work on the current stream; a list is int32."""
        ...


class PlainTables:
    """`Tables` by plain copies, which wait: for the CPU, and for tests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(self, table: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        dtype = torch.int32 if isinstance(table, list) else None
        return torch.tensor(table, dtype=dtype, device=self._device)


class GroupedMmKernel:
    """Whole experts in two grouped products a call. Results may depend on the rows of the whole call.

    Args:
        operands: the slot pool, no biases.
        gate: as for `TorchKernel`.
        reference: runs segments of split experts and calls in another dtype than the slots', and sums.
        tables: copies the offsets to the device.

    Raises:
        ValueError: unsupported operands (see `supports`).
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
        """Whether torch has an asynchronous product for these operands: on GPUs from Hopper on, bfloat16."""
        gate_up = operands.gate_up
        _, neurons, _, width = gate_up.shape
        aligned = all(n * gate_up.element_size() % _ALIGNMENT_BYTES == 0 for n in (neurons, width))
        plain = hasattr(functional, "grouped_mm") and operands.plain and aligned
        if gate_up.device.type == "cpu":
            return plain
        return plain and gate_up.dtype == torch.bfloat16 and torch.cuda.get_device_capability(gate_up.device)[0] >= 9

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        same = hidden.dtype == y.dtype == self._gate_up.dtype
        whole = [g for g in groups if g[3] == self._neurons and g[2] % self._neurons == 0 and not g[4] and same]
        if len(whole) < len(groups):
            self._reference.run(hidden, pairs, [g for g in groups if g not in whole], top_k, y)
        for part in self._parts([g for g in whole if g[1] > g[0]]):
            self._run(hidden, pairs, part, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._reference.combine(y, weights)

    def _parts(self, groups: list[Group]) -> Iterator[list[Group]]:
        """The groups by slot, split into ranges of `MAX_SLOTS` slots."""
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


class ByRows:
    """Runs the groups of each row class with the kernel of that class; `combining` sums."""

    def __init__(self, kernels: Mapping[RowClass, ExpertKernel], combining: ExpertKernel) -> None:
        self._kernels, self._combining = dict(kernels), combining

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """Both segments of an expert are of one class, so their order stays."""
        parts: dict[int, tuple[ExpertKernel, list[Group]]] = {}
        for group in groups:
            kernel = self._kernels[row_class(group[1] - group[0])]
            parts.setdefault(id(kernel), (kernel, []))[1].append(group)
        for kernel, part in parts.values():
            kernel.run(hidden, pairs, part, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._combining.combine(y, weights)
