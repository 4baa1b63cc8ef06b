"""Context-aware inference on GPU and near-data processing (NDP): the hot experts on the GPU, the bits of the others on
the NDP workers. Also MoNDE's rule and Fiddler's placement, the paper's baselines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from .cost import SplitCosts
from .registry import PolicyOptions, Preset, register


@register("placement", "cache", "context", "static", "monde")
class PlacementOptions(PolicyOptions):
    """Which experts run on the GPUs and which on the NDP workers.

    cache: no NDP workers; the caches decide. context: a sequence's most important experts after its prefill, fixed for
    its decode or placed again every `renew` tokens. static: the most popular experts of the calibration text, or of
    what has run where the store knows none. monde: in every layer those with the most tokens, as far as loading them
    pays. Placements by a planner: `policies.auto.PlannedOptions`.

    Attributes:
        planned: a planner decides each miss. ranks: it says what residents are worth, for eviction `worth`.
        scored: its planner reads the routers' scores.
        optional_workers: it loads every miss where there are no NDP workers.
        prefetches: kinds of prefetch beside it, for forwards that it does not plan.
    """

    planned: ClassVar[bool] = False
    ranks: ClassVar[bool] = False
    scored: ClassVar[bool] = False
    optional_workers: ClassVar[bool] = False
    prefetches: ClassVar[frozenset[str]] = frozenset({"none"})

    kind: str = "cache"
    alpha: float = Field(default=0.5, ge=0, le=1, description="weight of activation counts; the rest: routing scores")
    hot_per_layer: int | None = Field(
        default=None,
        ge=0,
        description="hot experts of a layer; default: as many as the budgets hold; 0, with "
        "monde: no loaded expert stays for the next forward, as in its paper",
    )
    prompts: Literal["gpu", "ndp"] = Field(
        default="gpu",
        description="with context: where a prompt runs experts that are not hot; ndp: nothing is loaded, and the hot "
        "set of earlier sequences stays; this is lossy if NDP workers hold replicas",
    )
    renew: int | None = Field(
        default=None,
        ge=1,
        description="with context: tokens after which a decode chooses the hot set again; default: never",
    )

    def check(self, policy: Preset) -> None:
        if self.kind != "cache" and (policy.prefetch.kind not in self.prefetches or policy.preload != "none"):
            raise ValueError(f"placement {self.kind} decides what is loaded: leave prefetch and preload out")
        if self.kind != "context" and (self.prompts != "gpu" or self.renew is not None):
            raise ValueError(f"prompts and renew are of placement context, not of {self.kind}")
        if self.planned and (self.hot_per_layer is not None or policy.precision.kind != "full"):
            raise ValueError(
                f"placement {self.kind} is exact and chooses what stays: leave hot_per_layer and precision out"
            )
        if self.ranks != (policy.eviction.kind == "worth"):
            raise ValueError(
                f"placement {self.kind} with eviction {policy.eviction.kind}: eviction worth and a placement that says "
                "what residents are worth, such as auto, need each other: give both, or neither"
            )
        if self.kind == "monde" and self.hot_per_layer:
            raise ValueError("placement monde keeps what it loads, or nothing: give hot_per_layer 0, or leave it out")


@register("precision", "full", "uniform", "prefix-split")
class PrecisionOptions(PolicyOptions):
    """Replicas that the NDP workers compute on.

    full: the store's own weights. uniform: all experts at `bits`. prefix-split: `bits` on average, widths by the gains
    in the loss table, never wider for a less important expert.
    """

    kind: str = "full"
    bits: float | None = Field(default=None, ge=1, le=8)

    @model_validator(mode="after")
    def _has_bits(self) -> PrecisionOptions:
        if (self.kind == "full") != (self.bits is None):
            raise ValueError(f"precision {self.kind} takes {'no bits' if self.kind == 'full' else 'bits'}")
        if self.kind == "uniform" and self.bits not in (1, 2, 3, 4, 8):
            raise ValueError("uniform precision takes 1, 2, 3, 4 or 8 bits")
        if self.kind == "prefix-split" and self.bits is not None and self.bits > 4:
            raise ValueError("prefix-split takes 1 to 4 bits on average")
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """Replica widths that may be used, ascending."""
        if self.kind == "prefix-split":
            return (1, 2, 3, 4)
        return () if self.bits is None else (int(self.bits),)

    def check(self, policy: Preset) -> None:
        if self.kind == "full":
            return
        if policy.lossless:
            raise ValueError("a policy on quantized replicas is not lossless")
        if not policy.uses_ndp:
            raise ValueError("precision is that of the NDP worker, which placement cache does not use")


@dataclass(frozen=True, eq=False)
class HotSlots:
    """The GPU of each expert, and the hot slots of each GPU in each layer: the capacity of a hot set.

    Every GPU has its own hot slots in every layer, so the hot experts of a layer, which run in parallel, spread over
    all GPUs.

    Args:
        owner: int [L, E], GPU 0..G-1 of each expert.
        count: int [L, G], hot slots of each GPU in each layer; at most the experts that it owns there.
    """

    owner: NDArray[np.int64]
    count: NDArray[np.int64]

    @staticmethod
    def fit(owner: ArrayLike, slots: Sequence[int], per_layer: int | None) -> HotSlots:
        """Hot slots within the slots of each GPU.

        Args:
            owner: int [L, E].
            slots: of each of G GPUs.
            per_layer: K, hot slots of a layer over all GPUs, dealt round-robin from GPU l mod G in layer l. None: as
                many as fit, floor(slots of the GPU / L) each.

        Raises:
            ValueError: K is outside [0, E], or a GPU has too few slots.
        """
        table = np.asarray(owner, np.int64)
        layers, experts = table.shape
        gpus = len(slots)
        owned = np.stack([np.bincount(row, minlength=gpus) for row in table])  # [L, G]
        if per_layer is None:
            return HotSlots(table, np.minimum(owned, np.asarray(slots) // layers))
        if not 0 <= per_layer <= experts:
            raise ValueError(f"hot_per_layer is {per_layer}; give 0 to {experts}, the experts of a layer")
        count = np.stack([_dealt(per_layer, row, layer % gpus) for layer, row in enumerate(owned.tolist())])
        for gpu, (needed, there) in enumerate(zip(count.sum(axis=0).tolist(), slots, strict=True)):
            if needed > there:
                where = f" on GPU {gpu}" if gpus > 1 else ""
                raise ValueError(
                    f"{per_layer} hot experts in {layers} layers take {needed} slots{where}; the budget holds {there}"
                )
        return HotSlots(table, count)

    @property
    def layers(self) -> int:
        return len(self.owner)

    @property
    def experts(self) -> int:
        return self.owner.shape[1]

    @property
    def per_layer(self) -> int:
        """Hot slots over all GPUs of the layer with the fewest."""
        return int(self.count.sum(axis=1).min())

    def first(self, layer: int, order: Sequence[int]) -> list[int]:
        """The experts that get a layer's hot slots when assigned in this order."""
        left, owner = self.count[layer].tolist(), self.owner[layer].tolist()
        out = []
        for expert in order:
            if left[owner[expert]]:
                left[owner[expert]] -= 1
                out.append(expert)
        return out


def _dealt(slots: int, owned: Sequence[int], first: int) -> list[int]:
    """Hot slots of each GPU: `slots` dealt round-robin, none above the experts that it owns."""
    out, gpu = [0] * len(owned), first
    while slots:
        if out[gpu] < owned[gpu]:
            out[gpu] += 1
            slots -= 1
        gpu = (gpu + 1) % len(owned)
    return out


class RoutingCounts:
    """P and W of Algorithm 1, line 11, for one sequence.

    State: `P` int64 [L, E], how often each expert was selected; `W` float64 [L, E], the sum of its routing weights.
    `add` is O(T K + E).
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.P = np.zeros((layers, experts), np.int64)
        self.W = np.zeros((layers, experts), np.float64)

    def add(self, layer: int, ids: ArrayLike, weights: ArrayLike) -> None:
        """Count the routing of token rows in one layer.

        Args:
            ids: int [T, K], the selected experts. weights: float [T, K], their routing weights.

        Raises:
            ValueError: an id is out of range, or the shapes differ; nothing is counted.
        """
        flat = np.asarray(ids).ravel()
        experts = self.P.shape[1]
        selected = np.bincount(flat, minlength=experts)
        scores = np.bincount(flat, np.asarray(weights, np.float64).ravel(), minlength=experts)
        if len(selected) > experts:
            raise ValueError(f"expert {len(selected) - 1} was selected, but layer {layer} has {experts}")
        self.P[layer] += selected
        self.W[layer] += scores


def importance(counts: RoutingCounts, alpha: float) -> NDArray[np.float64]:
    """S = alpha Norm(P) + (1 - alpha) Norm(W), float64 [L, E] (section 4.1; Algorithm 1, lines 14 and 15).

    Norm is the share of the layer's sum, so prompt length does not matter; an empty layer stays zero.

    Raises:
        ValueError: alpha is outside [0, 1], or a routing weight is not finite.
    """
    _check_alpha(alpha)
    if not np.isfinite(counts.W).all():
        raise ValueError("a routing weight is not finite")
    return alpha * _shares(counts.P) + (1.0 - alpha) * _shares(counts.W)


class HotSet:
    """Prefill-guided placement: the K most important experts of each layer live on the GPU (section 4.1).

    State: the importance S [L, E] of every active sequence, and the hot set H_l of each layer.

    Rule: one migration per sequence, at the end of its prefill (`admit`). The top-K experts by the active sequences'
    sum of S that are not hot enter, highest first; the lowest of H_l leave. At most |topK(S_incoming) - H_l| move, so a
    sequence whose top-K is hot moves nothing. With one active sequence H_l becomes exactly topK(S). `release` moves
    nothing. With several GPUs each applies the rule to its own experts and slots (`HotSlots`); the paper has one GPU.

    Ties: the lower number, hot or not, so that the hot set does not depend on ended sequences; a lossy preset would
    otherwise answer the same prompt differently.

    Cost: `admit` O(L E (n + G + log E)) for n active sequences. The sum is recomputed in order of admission, so that
    ended sequences leave no rounding error.

    Args:
        hot_slots: K of each GPU in each layer.
        alpha: share of activation counts in S; 0.5 in the paper.

    Raises:
        ValueError: alpha is outside [0, 1].
    """

    def __init__(self, hot_slots: HotSlots, alpha: float) -> None:
        _check_alpha(alpha)
        self.hot_slots, self.alpha = hot_slots, alpha
        self._shape = (hot_slots.layers, hot_slots.experts)
        self._active: dict[str, NDArray[np.float64]] = {}
        self._hot: list[frozenset[int]] = [frozenset()] * hot_slots.layers
        self._rank()

    def admit(self, name: str, counts: RoutingCounts) -> None:
        """The prefill of `name` has ended: make it active, or replace its S, and migrate.

        Raises:
            ValueError: the counts have another shape, or are not finite; nothing changes.
        """
        if counts.P.shape != self._shape:
            raise ValueError(f"counts are {list(counts.P.shape)}; this hot set is {list(self._shape)}")
        incoming = importance(counts, self.alpha)
        self._active[name] = incoming
        self._rank()
        self._hot = [self._moved(layer, own.tolist()) for layer, own in enumerate(_descending(incoming))]

    def release(self, name: str) -> None:
        """Sequence `name` has ended; nothing migrates. Raises KeyError if it is not active."""
        del self._active[name]
        self._rank()

    def hot(self, layer: int) -> frozenset[int]:
        """H_l, the experts of this layer on a GPU."""
        return self._hot[layer]

    def order(self, layer: int) -> list[int]:
        """The experts of this layer by descending importance to the active sequences, ties by number."""
        return list(self._order[layer].tolist())

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the active sequences, in order of admission."""
        return tuple(self._active)

    def _rank(self) -> None:
        total = np.zeros(self._shape)
        for scores in self._active.values():
            total += scores
        self._order = _descending(total)  # [L, E]

    def _moved(self, layer: int, own: Sequence[int]) -> frozenset[int]:
        """H_l after an admission; own: the experts by descending importance to the incoming sequence."""
        hot, order, hot_slots = self._hot[layer], self.order(layer), self.hot_slots
        best, wanted = hot_slots.first(layer, order), set(hot_slots.first(layer, own)) - hot
        out = set(hot)
        owner = hot_slots.owner[layer].tolist()
        for gpu, count in enumerate(hot_slots.count[layer].tolist()):
            limit = sum(owner[e] == gpu for e in wanted)
            enters = [e for e in best if owner[e] == gpu and e not in hot][:limit]
            here = [e for e in reversed(order) if owner[e] == gpu and e in hot]
            out -= set(here[: max(0, len(enters) - (count - len(here)))])
            out |= set(enters)
        return frozenset(out)


def static_hot(popularity: ArrayLike, hot_slots: HotSlots) -> list[frozenset[int]]:
    """Fiddler's placement: the most popular experts of each layer, ties to the lower number.

    Args:
        popularity: [L, E], selections counted over a calibration text. hot_slots: of each GPU in each layer.

    Raises:
        ValueError: the popularity is not [L, E], or not finite.
    """
    table = np.asarray(popularity, np.float64)
    if table.shape != hot_slots.owner.shape or not np.isfinite(table).all():
        raise ValueError(f"popularity must be finite numbers {list(hot_slots.owner.shape)}, not {list(table.shape)}")
    return [frozenset(hot_slots.first(layer, row.tolist())) for layer, row in enumerate(_descending(table))]


def monde_split(rows: Sequence[int], resident: Sequence[bool], costs: SplitCosts) -> list[bool]:
    """MoNDE's rule (DAC'24): where each needed expert of a layer runs, hot ones on the GPU, cold ones near data.

    Rule: experts by descending token rows go to the GPU, as many as minimise max(GPU time, NDP time). An absent expert
    is loaded first, one after another; a resident one runs at once. So two counts are searched, of resident and of
    absent experts. Ties: fewest loads, then fewest experts near data, then position. (MoNDE has no cache; without
    residents this is its rule.) O(n log n + residents x absent).

    Args:
        rows: token rows of each needed expert.
        resident: whether its weights are on the GPU.
        costs: seconds of each expert on either side.

    Returns:
        For each expert, True: on the GPU; False: near data.

    Raises:
        ValueError: the lengths differ.
    """
    count = len(rows)
    if not count == len(resident) == len(costs.gpu_s):
        raise ValueError(f"{count} row counts, {len(resident)} places and {len(costs.gpu_s)} costs; give one of each")
    by_rows = sorted(range(count), key=lambda i: -rows[i])
    here = [i for i in by_rows if resident[i]]
    absent = [i for i in by_rows if not resident[i]]
    gpu_s, ndp_s = np.asarray(costs.gpu_s, np.float64), np.asarray(costs.ndp_s, np.float64)
    gpu = _prefix(gpu_s[absent] + costs.load_s)[:, None] + _prefix(gpu_s[here])[None, :]  # [absent + 1, residents + 1]
    ndp = _suffix(ndp_s[absent])[:, None] + _suffix(ndp_s[here])[None, :]
    ndp += costs.ndp_once_s
    ndp[-1, -1] = 0.0  # nothing is sent
    slowest = np.maximum(gpu, ndp)[:, ::-1]  # fewest loads first, then most residents: argmin takes the first
    loads, cold = divmod(int(np.argmin(slowest)), len(here) + 1)
    on_gpu = {*absent[:loads], *here[: len(here) - cold]}
    return [i in on_gpu for i in range(count)]


def _prefix(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(([0.0], np.cumsum(seconds)))


def _suffix(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return _prefix(seconds[::-1])[::-1]


def _descending(table: NDArray[np.float64]) -> NDArray[np.intp]:
    """[L, E]: the experts of each layer from the highest value to the lowest, ties by number."""
    return np.argsort(-table, axis=1, kind="stable")


def _shares(table: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    total = table.sum(axis=1, keepdims=True, dtype=np.float64)
    return np.divide(table, total, out=np.zeros(table.shape), where=total > 0)


def _check_alpha(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}; give a share in [0, 1]")


_LEVELS = 4  # of the search: n4, n3, n2, n1
_ROUNDING = 1e-9  # n (average - 1) may fall this short of a whole number by float arithmetic alone


def prefix_split(losses: ArrayLike, widths: Sequence[int], average: float) -> list[int]:
    """PREFIXSPLIT of "Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems", section 4.2.

    Symbols: experts i = 1..n by descending importance; L_i(b) = `losses`; Delta_i(b) = L_i(1) - L_i(b); C_b(k) its
    prefix sums; n_b the number of experts at b bits; R = floor(n (average - 1)) increments.

    Rule: the n4 most important experts get 4 bits, the next n3 get 3, then n2 get 2 and n1 get 1. All n4 and n3 are
    tried; n2 and n1 follow from 3 n4 + 2 n3 + n2 = R and n4 + n3 + n2 + n1 = n; the largest gain G = C4(n4) +
    [C3(n4+n3) - C3(n4)] + [C2(n4+n3+n2) - C2(n4+n3)] wins. As in the paper, the whole budget is spent even where more
    bits lose more. Ties: fewest at 4 bits, then fewest at 3.

    Other consecutive widths work alike, as (2, 3, 4): the lowest takes the place of 1 bit. O(n^2), vectorised.

    Args:
        losses: float [n, W], the loss of each expert at each width.
        widths: the W widths, ascending by 1; at most 4.
        average: bits, between the lowest and the highest width; n average need not be whole.

    Returns:
        The width of each expert, [n], never ascending.

    Raises:
        ValueError: shapes, widths, average or a value out of range.
    """
    if not 1 <= len(widths) <= _LEVELS or list(widths) != list(range(widths[0], widths[0] + len(widths))):
        raise ValueError(f"widths are {list(widths)}; give up to four that follow each other, as 1, 2, 3, 4")
    if not widths[0] <= average <= widths[-1]:
        raise ValueError(f"the average width is {average}; give {widths[0]} to {widths[-1]} bits")
    table = np.asarray(losses, np.float64)
    count = len(table)
    if count == 0:
        return []
    if table.shape != (count, len(widths)) or not np.isfinite(table).all():
        raise ValueError(f"losses must be finite numbers [{count}, {len(widths)}], not {list(table.shape)}")
    gains = table[:, :1] - table  # Delta [n, W]; column 0 is zero
    increments = math.floor(count * (average - widths[0]) + _ROUNDING)
    sums = np.zeros((_LEVELS, count + 1))
    np.cumsum(gains.T, axis=1, out=sums[: len(widths), 1:])
    counts = _search(sums, increments, len(widths))
    above = [widths[0] + step for step in (3, 2, 1)]
    out = [width for width, n in zip(above, counts, strict=True) for _ in range(n)]
    return out + [widths[0]] * (count - len(out))


def _search(sums: NDArray[np.float64], increments: int, widths: int) -> tuple[int, int, int]:
    """(n4, n3, n2) of the largest gain.

    Args:
        sums: C [4, n + 1] by increments over the lowest width. increments: R, at most (widths - 1) n.
        widths: how many there are; 3: none at 4 bits, 2: none at 3.
    """
    _, c2, c3, c4 = sums
    count = sums.shape[1] - 1
    most4 = min(count, increments // 3) if widths > 3 else 0
    most3 = min(count, increments // 2) if widths > 2 else 0
    n4 = np.arange(most4 + 1)[:, None]
    n3 = np.arange(most3 + 1)[None, :]
    n2 = increments - 3 * n4 - 2 * n3  # [n4, n3]
    top3, top2 = n4 + n3, n4 + n3 + n2
    feasible = (n2 >= 0) & (top2 <= count)  # n2 >= 0 bounds n4 + n3 as well, for n1 >= 0
    top3, top2 = np.where(feasible, top3, 0), np.where(feasible, top2, 0)
    gain = c4[n4] + (c3[top3] - c3[n4]) + (c2[top2] - c2[top3])
    # argmax takes the first of equals: the smallest n4, then the smallest n3
    best = int(np.argmax(np.where(feasible, gain, -np.inf)))
    best4, best3 = divmod(best, most3 + 1)
    return best4, best3, increments - 3 * best4 - 2 * best3
