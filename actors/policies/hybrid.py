"""Published rules for misses on a GPU beside a CPU, as planners: what is loaded, and what a near-data worker computes.

    llama-cpp-cache   every miss near data, copied behind it
    freetoken         of each step's misses the most recently used over the link, the others near data
    hybrimoe          a greedy schedule over GPU, link and near data; prefetch by its gain; a score-based cache

Each has the interface of `policies.auto.Auto`, and the same placer carries it out (`engine.peers.auto`). All actions
are exact, with the store's own weights. Rules decide by standalone costs, measured once at the start, as their systems
do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .auto import Action, Costs, LayerPlan, Owners, Part, PlannedOptions, Wanted
from .registry import PolicyContext, register
from .routing import softmax

_HERE = 2  # states from which an expert is here: resident, or staged
_ERRORS = 1000  # layers over which the mean error of the predicted time goes


class HybridRule(ABC):
    """A rule that decides each layer by what is here, by rows and by costs that do not change.

    Args:
        layers, experts, top_k: of the model.

    Attributes:
        Options: of the placement.
        keeps_prompt: False: a prompt's most used experts do not stay for its sake.
        worths: what each expert is worth [L, E], for eviction `worth`; all the same here.
        costs, workers, states: as `Auto` has them, given by `start`.
    """

    Options: ClassVar[type[PlannedOptions]] = PlannedOptions
    keeps_prompt: ClassVar[bool] = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> HybridRule:
        return cls(context.layers, context.experts, context.top_k)

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.layers, self.experts, self.top_k = layers, experts, top_k
        self.worths = np.zeros((layers, experts))
        self._expected_s: float | None = None  # of the last plan, of a decode
        self._error = 0.0

    def start(self, costs: Costs, workers: int, states: NDArray[np.uint8]) -> HybridRule:
        """Take measured costs, the number of near-data workers and the residency [L, E]; returns itself."""
        self.costs, self.workers, self.states = costs, workers, states
        return self

    @abstractmethod
    def choose(
        self, layer: int, needed: Sequence[int], rows: Sequence[int], here: Sequence[bool], prompt: bool
    ) -> list[bool]:
        """Which of a layer's experts the GPU runs; near-data workers compute the others.

        Args:
            needed, rows: experts and the rows of each. here: whether it is here or its copy is under way.
            prompt: whether rows of a prompt are among them.
        """

    def wanted(self, layer: int, away: Sequence[int], link_s: float, end_s: float, prompt: bool) -> list[Wanted]:
        """Background copies.

        Args:
            away: experts that near-data workers compute. link_s, end_s: seconds until demand copies and the layer end.
        """
        return []

    def plan(
        self, layer: int, needed: Any, rows: Any, now_s: float, link_free_s: float, flight_keys: Any = (),
        arrival_s: Any = (), prompt_tokens: int = 0, owners: Owners | None = None,
        room: int = 0,
    ) -> LayerPlan:  # fmt: skip
        """As `Auto.plan`. No rule knows several GPUs: what another one owns runs there."""
        if owners is not None:
            mine, codes = owners[0] == 0, np.full(len(needed), Action.OWNER, np.uint8)
            found = self.plan(
                layer, needed[mine], rows[mine], now_s, link_free_s, flight_keys, arrival_s, prompt_tokens
            )
            codes[mine] = found.actions
            return found._replace(actions=codes, workers=np.zeros(len(codes), np.uint8))
        experts, counts = needed.tolist(), rows.tolist()
        states = self.states[layer, needed].tolist()
        here, prompt = [state > 0 for state in states], prompt_tokens > 0
        on_gpu = [True] * len(experts) if not self.workers else self.choose(layer, experts, counts, here, prompt)
        actions, away = list[Action](), list[int]()
        link_s, gpu_s, near_s = max(0.0, link_free_s - now_s), 0.0, 0.0
        waits = dict(zip(np.asarray(flight_keys).tolist(), np.asarray(arrival_s).tolist(), strict=True))
        for expert, count, state, runs in zip(experts, counts, states, on_gpu, strict=True):
            if not runs:
                actions.append(Action.NEAR_DATA)
                away.append(expert)
                near_s += self.near_s(count)
                continue
            actions.append(Action.RUN_HERE if state >= _HERE else Action.WAIT if state else Action.LOAD)
            if actions[-1] == Action.WAIT:
                gpu_s = max(gpu_s, waits.get(layer * self.experts + expert, link_free_s) - now_s)
            elif actions[-1] == Action.LOAD:
                link_s += self.costs.copy_s
                gpu_s = max(gpu_s, link_s)
            gpu_s += self.gpu_s(count)
        end_s = max(gpu_s, near_s + (self.costs.message_s if away else 0.0))
        self._expected_s = None if prompt else end_s
        codes, loads = np.array(actions, np.uint8), actions.count(Action.LOAD)
        return LayerPlan(
            codes, np.zeros(len(experts), np.uint8), self.wanted(layer, away, link_s, end_s, prompt), now_s + end_s,
            near_s, now_s + link_s, loads, len(away), actions.count(Action.WAIT),
        )  # fmt: skip

    def gpu_s(self, rows: int) -> float:
        """Seconds of an expert on the GPU."""
        return self.costs.gpu_s + (rows - 1) * self.costs.gpu_row_s

    def near_s(self, rows: int) -> float:
        """Seconds that an expert adds near data, where all workers share the work."""
        return self.costs.near_s * max(1.0, rows / self.costs.free_rows) / max(1, self.workers)

    @property
    def native(self) -> HybridRule:
        """Itself: native code calls the rule."""
        return self

    # -- what most rules do not use ------------------------------------------------------------------------------------

    def used(self, layer: int, needed: Any) -> None:
        return None

    def prompt_end(self, counts: Any, tokens: int, requests: int, batch: int) -> None:
        return None

    def resize(self, slots: int) -> None:
        return None

    def admit(self, key: int) -> tuple[bool, int | None]:
        """Whatever is loaded takes a slot."""
        return True, None

    def saw(self, part: Part, expected_s: float, seen_s: float) -> None:
        return None

    def took(self, seen_s: float) -> None:
        if seen_s > 0 and self._expected_s is not None:  # of a decode
            self._error += (abs(seen_s - self._expected_s) / seen_s - self._error) / _ERRORS

    def filled(self) -> None:
        return None

    def followed(self) -> None:
        """It follows no other rule."""
        return None

    def error(self) -> float:
        """As `Auto.error`."""
        return self._error


@register("placement", "llama-cpp-cache")
class LlamaCppCache(HybridRule):
    """The expert caches of llama.cpp's forks: what is not in a slot runs on the CPU, and fills a slot behind it.

    Rule: an expert that is here runs on the GPU; every other one near data, also while its copy is under way. Each miss
    of a decode step is copied behind it, in the order of the routing, into the slot that was used least recently
    (`eviction: lru`). A prompt fills nothing, as forks bypass the cache for many rows. O(n).
    """

    class Options(PlannedOptions):
        kind: str = "llama-cpp-cache"

    def choose(
        self, layer: int, needed: Sequence[int], rows: Sequence[int], here: Sequence[bool], prompt: bool
    ) -> list[bool]:
        states = self.states[layer]
        return [bool(states[e] >= _HERE) for e in needed]

    def wanted(self, layer: int, away: Sequence[int], link_s: float, end_s: float, prompt: bool) -> list[Wanted]:
        if prompt:
            return []
        states, base = self.states[layer], layer * self.experts
        return [Wanted(base + e, None, 0.0) for e in away if not states[e]]


@register("placement", "freetoken")
class FreeToken(HybridRule):
    """FreeToken's hybrid backend (arXiv 2608.16157): link and CPU end together.

    State: the step in which each expert was last needed [L, E].

    Rule: of a decode step's m misses a share f = c / t goes over the link, t and c the seconds of a copy and of an
    expert near data; so fetched : computed = pcie : (cpu - pcie) in their bandwidths, where the CPU keeps what the copy
    leaves of the memory's. f m is rounded to the whole number n with the least max(n t, (m - n) c), ties down; where
    f >= 1, all are fetched. Those needed most recently are fetched, ties in the order of the routing. One LRU over all
    layers (`eviction: lru`). Prompts load. O(m log m).
    """

    class Options(PlannedOptions):
        kind: str = "freetoken"

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        super().__init__(layers, experts, top_k)
        self._last, self._step = np.full((layers, experts), -1, np.int64), 0

    def choose(
        self, layer: int, needed: Sequence[int], rows: Sequence[int], here: Sequence[bool], prompt: bool
    ) -> list[bool]:
        last = self._last[layer]
        missing = [i for i, there in enumerate(here) if not there]
        recent = sorted(missing, key=lambda i: -int(last[needed[i]]))
        fetched = set(missing if prompt else recent[: self.fetched(len(missing))])
        self._step += layer == 0
        last[list(needed)] = self._step
        return [there or i in fetched for i, there in enumerate(here)]

    def fetched(self, misses: int) -> int:
        """n: how many of so many misses go over the link."""
        copy_s, near_s = self.costs.copy_s, self.near_s(1)
        if near_s >= copy_s:
            return misses
        low = int(misses * near_s / copy_s)
        return min((low, low + 1), key=lambda n: max(n * copy_s, (misses - n) * near_s))


@register("placement", "hybrimoe")
class HybriMoe(HybridRule):
    """HybriMoE (arXiv 2504.05897; its public code where the text leaves a choice): schedule, prefetch and cache.

    State: the score S of each expert [L, E] (MRS, "minus recent score"), and what later layers are predicted to need.

    Schedule: the needed experts in one order, those here by falling rows, then the others by falling rows. The GPU
    takes from its front, after a copy where that one is not here; the CPU takes from its end. Whichever would end the
    expert that it takes sooner takes it, ties the GPU, until none is left; copies go one after the other. Prompts too.

    Prefetch: routers of the next `ahead` layers on this layer's input name the experts that these need. What having one
    of those that are absent would take off its layer's schedule is its gain. As many as the link can copy until the
    next layer begins are copied, greatest gain first, ties the nearer layer; none without a gain, none in prompts.

    Cache: S = alpha TopP(s) + (1 - alpha) S after each router, s its probabilities and TopP the 2 K greatest of them,
    the mean over rows. Each layer has an equal share of the slots; least S leaves first (`eviction: worth`).

    Differences: copies on their way count as here, where the original waits for its prefetches first; costs are
    measured, where its code has constants "to be tested". O(n log n), the prefetch O(ahead r n log n) where rows have
    r values.

    Args:
        alpha: weight of the last scores. ahead: layers that prefetch looks ahead.
    """

    class Options(PlannedOptions):
        kind: str = "hybrimoe"
        ranks: ClassVar[bool] = True
        scored: ClassVar[bool] = True
        alpha: float = Field(default=0.5, gt=0, le=1, description="with hybrimoe: weight of a router's last scores")
        ahead: int = Field(default=3, ge=1, description="with hybrimoe: prefetch distance in layers")

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> HybridRule:
        return cls(context.layers, context.experts, context.top_k, options.alpha, options.ahead)

    def __init__(self, layers: int, experts: int, top_k: int, alpha: float = 0.5, ahead: int = 3) -> None:
        super().__init__(layers, experts, top_k)
        self._alpha, self.ahead = alpha, ahead
        self._coming: dict[int, tuple[list[int], list[int]]] = {}  # by layer: experts, and rows of each

    def scored(self, layer: int, logits: NDArray[np.floating]) -> None:
        """The router's logits [T, E] of the layer that is planned next."""
        shares = softmax(logits)
        few = self.experts - min(2 * self.top_k, self.experts)
        np.put_along_axis(shares, np.argsort(shares, axis=1, kind="stable")[:, :few], 0.0, axis=1)
        self.worths[layer] += self._alpha * (shares.mean(axis=0) - self.worths[layer])

    def foreseen(self, layer: int, logits: NDArray[np.floating]) -> None:
        """The logits [T, E] of a later layer's router on that layer's input."""
        best = np.argsort(-logits, axis=1, kind="stable")[:, : self.top_k]
        experts, rows = np.unique(best, return_counts=True)
        self._coming[layer] = experts.tolist(), rows.tolist()

    def choose(
        self, layer: int, needed: Sequence[int], rows: Sequence[int], here: Sequence[bool], prompt: bool
    ) -> list[bool]:
        return self.schedule(rows, here)[0]

    def schedule(self, rows: Sequence[int], here: Sequence[bool]) -> tuple[list[bool], float]:
        """Whether each expert runs on the GPU, and the seconds until the last has ended."""
        order = sorted(range(len(rows)), key=lambda i: (not here[i], -rows[i]))
        on_gpu = [False] * len(rows)
        gpu_s, near_s, copied_s = 0.0, self.costs.message_s, 0.0
        first, last = 0, len(rows) - 1
        while first <= last:
            front, back = order[first], order[last]
            arrives_s = 0.0 if here[front] else copied_s + self.costs.copy_s
            gpu_end_s = max(gpu_s, arrives_s) + self.gpu_s(rows[front])
            near_end_s = near_s + self.near_s(rows[back])
            if gpu_end_s <= near_end_s:
                on_gpu[front], gpu_s, copied_s = True, gpu_end_s, max(copied_s, arrives_s)
                first += 1
            else:
                near_s = near_end_s
                last -= 1
        return on_gpu, max(gpu_s, 0.0 if all(on_gpu) else near_s)

    def wanted(self, layer: int, away: Sequence[int], link_s: float, end_s: float, prompt: bool) -> list[Wanted]:
        coming, self._coming = self._coming, {}
        room = int((end_s + self.costs.dense_s - link_s) / self.costs.copy_s)
        if prompt or room < 1:
            return []
        found = list[Wanted]()
        for later, (experts, rows) in sorted(coming.items()):
            here = [state > 0 for state in self.states[later, experts].tolist()]
            before_s = self.schedule(rows, here)[1]
            gains_s = dict[int, float]()  # by rows: a schedule's end knows nothing else of an expert
            for i, expert in enumerate(experts):
                if here[i]:
                    continue
                if rows[i] not in gains_s:
                    gains_s[rows[i]] = before_s - self.schedule(rows, [*here[:i], True, *here[i + 1 :]])[1]
                if gains_s[rows[i]] > 0:
                    found.append(Wanted(later * self.experts + expert, None, gains_s[rows[i]]))
        return sorted(found, key=lambda one: -one.worth_s)[:room]
