"""`auto`: the cheapest exact action for every miss, decided by predicted seconds.

Each expert that a layer needs and that is not resident may be waited for, loaded and run here, or computed on a
near-data worker where its weights lie. All of these are *exact*: the same weights in the same form; sums differ
in rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from .context_ndp import PlacementOptions
from .registry import register

Ids = NDArray[np.int32]
_SHARED_ROWS = 4  # of a decode, between one client's and a full batch
_NO_KEYS, _NO_TIMES = np.zeros(0, np.int32), np.zeros(0)


class PlannedOptions(PlacementOptions):
    """A planner decides for each expert that is not there. The rules of other systems: `policies.hybrid`."""

    planned: ClassVar[bool] = True


@register("placement", "auto")
class AutoOptions(PlannedOptions):
    """It is waited for, loaded or computed near data, whichever ends the layer sooner; without NDP workers, loaded."""

    kind: str = "auto"
    ranks: ClassVar[bool] = True
    optional_workers: ClassVar[bool] = True
    prefetches: ClassVar[frozenset[str]] = frozenset({"none", "next-gate"})


class Action(IntEnum):
    """What happens to a needed expert."""

    RUN_HERE = 0
    """It is here: it runs on the GPU."""
    WAIT = 1
    """Its copy is under way: it runs on the GPU when the copy has ended."""
    LOAD = 2
    """A demand copy, then the GPU."""
    NEAR_DATA = 3
    """A near-data worker computes it. A copy under way goes on: judge it by `Auto.admit` when it arrives."""
    OWNER = 4
    """It belongs to another GPU, which runs it: there, or after a copy there."""


class Part(IntEnum):
    """A part of the costs that is measured by itself: `Auto.saw`."""

    COPY = 0
    """copy_s: one copy on the link."""
    GPU = 1
    """gpu_s and gpu_row_s: experts on the GPU."""
    NEAR = 2
    """near_s: a near-data worker's kernels while the link was idle."""
    NEAR_BUSY = 3
    """near_busy_s: the same while the link copied all the time."""
    NEAR_MIXED = 4
    """Both: while it copied for a part of the time."""
    MESSAGE = 5
    """message_s: a message from the plan to its answer, without the worker's kernels."""
    DENSE = 6
    """dense_s: a layer's dense part, from the end of the layer before to its plan."""
    OWNER = 7
    """From the plan to the last answer of other GPUs: `LayerPlan.owner_s`."""


class Without(IntFlag):
    """Parts of the rule that are left out, for ablations.

    FUTURE: the choice between link and near data ignores later uses. VALUES: victims by last use (LRU), all admitted.
    LEARNING: fixed weights w. BACKGROUND: a miss that is computed near data is not copied behind it. PREFETCH: nothing
    is copied for a prompt's next layer. RESIDENTS: what is here runs here. CORRECTION: costs stay as given. ADMISSION:
    what is loaded always takes a slot. PRICE: background copies cost nothing. REFUSAL: a copy under way is always
    waited for. SPLIT: every miss is computed near data. SHADOWS: no other rule is followed.
    """

    NOTHING = 0
    FUTURE = 1
    VALUES = 2
    LEARNING = 4
    BACKGROUND = 8
    PREFETCH = 16
    RESIDENTS = 32
    CORRECTION = 64
    ADMISSION = 128
    PRICE = 256
    REFUSAL = 512
    SPLIT = 1024
    SHADOWS = 2048


class Costs(NamedTuple):
    """Start values, in seconds, of one model on one machine; `Auto.saw` corrects them.

    Attributes:
        copy_s: t, one expert over the link.
        gpu_s, gpu_row_s: g, one expert on the GPU: its first row, and each further one.
        near_s, near_busy_s: c and c_busy, one expert on one near-data worker, all workers at work: while the link is
            idle, and while it copies. Measure both: a copy takes memory bandwidth from the worker.
        free_rows: rows of one expert that a worker computes in the time of one.
        message_s: one message to near-data workers and its answer.
        dense_s: a layer's dense part, between a layer's end and the next layer's plan.
        beside: an expert on the GPU takes so many times as long while near-data workers are at work, which may take its
            cores or its memory bandwidth. `saw` does not correct it: what it does not explain is a source's (`took`).
    """

    copy_s: float
    gpu_s: float
    gpu_row_s: float
    near_s: float
    near_busy_s: float
    free_rows: float
    message_s: float
    dense_s: float
    beside: float = 1.0


class Wanted(NamedTuple):
    """A background copy. victim: the resident that it displaces; None: its layer has a free slot. worth_s: seconds that
    it is expected to save."""

    key: int
    victim: int | None
    worth_s: float


class Followed(NamedTuple):
    """The rule by which decodes are planned: one of `FOLLOWED`. seen_s: mean seconds of the layers of a token, of late;
    rules_s: those that the other rules would have taken, by name."""

    rule: str
    seen_s: float
    rules_s: dict[str, float]


FOLLOWED = ("auto", "on-demand", "fill", "split")  # as `Follow` in planner.hpp


class LayerPlan(NamedTuple):
    """A plan of one layer.

    Attributes:
        actions, workers: [n], of each needed expert: its `Action`; the near-data worker, 0 where it has none. Views,
            valid until the next plan.
        wanted: background copies, to be queued in this order behind the demand copies. What has not begun before the
            next plan is withdrawn: that plan names it again if it is still worth it.
        end_s: when the layer is expected to end, in the caller's time.
        near_s: expected seconds of the near-data work, without the message. link_s: when the last demand copy ends.
        loads, near_data, waits: how many experts.
        owner_s: expected seconds until the last other GPU has answered; 0: none is asked.
    """

    actions: NDArray[np.uint8]
    workers: NDArray[np.uint8]
    wanted: list[Wanted]
    end_s: float
    near_s: float
    link_s: float
    loads: int
    near_data: int
    waits: int
    owner_s: float = 0.0


class Owners(NamedTuple):
    """Whose needed experts are, uint8 [n] each. gpus: 0 is this GPU. held: whether another GPU holds its expert."""

    gpus: NDArray[np.uint8]
    held: NDArray[np.uint8]


class Auto:
    """One exact planner for expert misses.

    Every decision asks one thing of few candidates: by how much does the predicted end of this layer move, and what is
    it worth later? From the simulation of issue S; the split of misses between link and CPU is that of FreeToken (arXiv
    2608.16157) and HybriMoE (arXiv 2504.05897), here by predicted end, with contention and with the worth of a load.

    State:
        c, c_busy, t, g, message: `Costs`, corrected by `saw`: cost *= (seen / expected)^s, by `Part`; s falls to 0.1.
        d[source]: seconds that layers without misses, by the link, near data, or both took beyond their parts, and the
            mean deviation: averages of `took`. Ends of that source are predicted d later, and half the deviation more.
            A link that copies for other layers counts. Of near data and both, the unused one loses 2% a layer of what
            it is worse. Of prompts a ratio instead, 1 to 4, which of unused sources goes to 1 by 2% a layer.
        phi[l, e]: averages of use: of 3 tokens, of 14 (decay 0.7, 0.93), of the request with its prompt, of all time;
            and 0.9^age, the age of its last use in tokens, by which LRU orders.
        w: 6 weights, V = w . (1, phi): later uses, discounted by gamma = 0.9 a token. Learned by least-squares temporal
            differences: w = A^-1 b, A += x (x - gamma x')^T, b += x used; every fourth expert, solved every 4 tokens.
        S[l]: seconds that one more resident of the layer would have saved; average of its layers with misses, of weight
            1 / (1 + n) at the n-th, at least 0.05.
        rho: share of the wanted background copies that got done.
        shadows: of three rules with a cache of their own, LRU in each layer's share: on-demand (every miss over the
            link), fill (every miss near data, and copied behind, newest 24), split (misses over the link and near data,
            so that the layer ends first, a load worth S / 4); who holds which expert, and mean seconds of a token by
            the costs above. All begin a request with the residents that there are, if no other one decodes.
        owner: seconds of other GPUs' answers, over a message, g and, where they lack the expert, t; a factor.

    Flow of a layer, `plan`:
        1. Misses in order of S V' + c work, V' the value after this use; v_1, v_2, ..: the V of the layer's residents,
           least first, the 12th for all that follow.
        2. For each number of copies under way that are waited for, and each number n of misses loaded (the first n):
           end = max(GPU, near-data) - (1 - rho) S sum max(0, V'_k - v_k); the least end wins. Near-data work slows by
           c_busy / c while the link copies, and the GPU by `beside` if any is near data. Work goes to the least loaded
           worker. A step is O(1), with W workers O(W).
        3. Experts of other GPUs run on their owners. From the one that ends last one after the other goes near data,
           while it ends there before that GPU would: first what spares most there for its work. So many go as give the
           least end, plus S max(0, V' - v_1) for each that its owner would have loaded.
        4. Background: misses computed near data are worth S (V' - v_1), or if more S R (q - q_1), q the request's
           average, q_1 that of the resident of least V, R half of a request's remaining tokens. The best 24 stay in a
           pool until their layer comes. A copy may begin if its worth is at least its price: what it delays this
           layer's near-data work, plus for the part beyond the next layer's begin n c / (c + t) + P(near data ends
           last) (1 - c / c_busy), n the loads of a layer, at most 1; for the first one where the link was idle, plus
           what d grows by.
        5. Residents go near data one by one while that ends the layer sooner.
        6. Tries: link or near data, unused for 64 layers with misses, is taken for 1 and 4 where the first loses at
           most what its tries may cost: 1% of the time, less what earlier ones lost. If a layer ended so much sooner
           than predicted that at most half of its loss was left, the try goes on for 16; else the next one waits for
           twice as many layers and may cost half as much, five times at most. Owners alike, where all went near data.
    Every 8 tokens: the rule whose shadow takes least is followed if since the last change, or since the request began,
    it would have saved the time of two tokens, and saves in 64 tokens what moving costs: a miss for each expert that it
    holds and that was used in the last 8 tokens. So a loss of a quarter is seen after 8 tokens, one of 3% after 64. Its
    choice of loads then takes the place of 2, 4 and 5, and V is 0.9^age, of a prompt's experts by how often it used
    them. The own rule comes back, after 24 tokens at the earliest, when the followed one takes longer than the own rule
    is put at: the best shadow's time, by what the own rule took over that (128 tokens that followed it), less 0.5%
    every 8 tokens, so it is tried again. So what a prompt or an average promises costs little once decodes do not
    confirm it. Not with several GPUs: a shadow knows one.
    A prompt's layer is planned alike, by its own worth of a load and without what follows a decode. Where it uses more
    than half of the experts, the next layer is streamed ahead: as many of its absent experts, those of greatest V
    first, as the link can copy before its plan and find room. That layer's end is predicted with and without them, its
    hits, misses and rows in this layer's proportion; the difference must exceed what near data here loses. The dense
    part of a prompt grows with its tokens, and is learned from plan to plan. So a layer is streamed, loaded on demand,
    or computed near data, or a part each, as its costs say.
    After a layer, `used`: averages, S, V. What was loaded takes a slot if its V exceeds the least: `admit`.
    After a prompt, `prompt_end`: V is of the prompt's counts blended with popularity. Eviction by V keeps its experts.

    Cost: `plan` O(n (log n + W F) + E) for n needed experts and F copies under way, `used` O(E); no allocation.
    Microseconds by shape: `docs/results/auto.md`. Deterministic: equal calls give equal plans.

    Args:
        layers, experts, top_k: of the model. slots: of a layer. workers: near-data workers; 0: none, all misses load.
        states: uint8 [L, E], read at each call: absent 0, loading 1, resident 2 (`State`), staged 3: here, in no
            slot that counts.
        without: parts of the rule to leave out.

    Attributes:
        keeps_prompt: whether what a prompt uses most stays while it runs.
        native: what decides, for `_core.PlannedPlacement`.

    Raises:
        ValueError: a number is out of range, or a cost is not a positive number.
    """

    keeps_prompt: ClassVar[bool] = True

    def __init__(
        self, layers: int, experts: int, top_k: int, slots: int, costs: Costs, workers: int, states: NDArray[np.uint8],
        without: Without = Without.NOTHING,
    ) -> None:  # fmt: skip
        self.layers, self.experts, self.top_k, self.slots, self.workers = layers, experts, top_k, slots, workers
        self.states = states
        self.native = _core.Planner(layers, experts, top_k, slots, workers, costs, states, int(without))
        self._actions, self._workers = np.zeros(experts, np.uint8), np.zeros(experts, np.uint8)
        self._views = [(self._actions[:n], self._workers[:n]) for n in range(experts + 1)]  # by needed experts

    def plan(
        self, layer: int, needed: Ids, rows: Ids, now_s: float, link_free_s: float, flight_keys: Ids = _NO_KEYS,
        arrival_s: NDArray[np.float64] = _NO_TIMES, prompt_tokens: int = 0, owners: Owners | None = None,
        room: int = 0,
    ) -> LayerPlan:  # fmt: skip
        """Decide a layer whose routing is known.

        Args:
            needed, rows: int32 [n], distinct experts and the rows of each.
            now_s, link_free_s: seconds on one clock; when the link could begin a demand copy.
            flight_keys, arrival_s: [F], copies under way and when each ends; one that is LOADING in `states` and absent
                here is taken to arrive at `link_free_s`.
            prompt_tokens: 0 in decode. In a prompt, its tokens: a load is worth what it has after `prompt_end`;
                nothing is learned, and nothing is copied behind it but what is streamed ahead.
            owners: the GPUs that the experts belong to; None: all are of this one.
            room: slots that a prompt's copies for the next layer may take, since they hold nothing of worth.

        Raises:
            ValueError: there is no such layer or expert, or arrays differ in length.
        """
        gpus, held = (None, None) if owners is None else owners
        actions, workers = self._views[min(len(needed), self.experts)]
        end_s, near_s, link_s, owner_s, loads, near, waits, wanted = self.native.plan(
            layer, needed, rows, now_s, link_free_s, flight_keys, arrival_s, actions, workers, prompt_tokens, gpus,
            held, room,
        )  # fmt: skip
        named = [Wanted(key, None if victim < 0 else victim, worth_s) for key, victim, worth_s in wanted]
        return LayerPlan(actions, workers, named, end_s, near_s, link_s, loads, near, waits, owner_s)

    def used(self, layer: int, needed: Ids) -> None:
        """Tell that a layer of a decode step has run, and after the last layer that the step has."""
        self.native.used(layer, needed)

    def prompt_end(self, counts: NDArray[np.int64], tokens: int, requests: int, batch: int) -> None:
        """Prompts have run: V is what they and popularity say of each expert.

        Args:
            counts: int64 [L, E], uses in the prompts. tokens: of all of them together.
            requests: whose prompts these were. batch: requests that decode from now on, these included.
        """
        self.native.prompt_end(np.ascontiguousarray(counts, np.int64), tokens, requests, batch)

    def popularity(self, counts: NDArray[np.int64], tokens: int, batch: int = 1) -> None:
        """Start from counts [L, E] of other requests' `tokens` tokens, such as those of earlier runs."""
        self.native.popularity(np.ascontiguousarray(counts, np.int64), tokens, self.top_k, batch)

    @property
    def worths(self) -> NDArray[np.float64]:
        """V of each expert [L, E], as further calls change it; not to be written."""
        return np.asarray(_Values(self.native.values(), (self.layers, self.experts), self.native))

    def resize(self, slots: int) -> None:
        """A layer has so many slots from now on. Raises ValueError: more than it has experts."""
        self.native.resize(slots)
        self.slots = slots

    def admit(self, key: int) -> tuple[bool, int | None]:
        """Whether an expert that is here or arrives takes a slot, and whose; None: a free one. Ask after `used`."""
        admitted, victim = self.native.admit(key)
        return admitted, None if victim < 0 else victim

    def worth_s(self, key: int) -> float:
        """S V: seconds that keeping an expert is worth, comparable between layers."""
        return float(self.native.worth(key))

    def saw(self, part: Part, expected_s: float, seen_s: float) -> None:
        """Correct a part of the costs: so much was expected of it (NEAR*: `LayerPlan.near_s`), and so much was seen."""
        self.native.saw(part, expected_s, seen_s)

    def took(self, seen_s: float) -> None:
        """Tell the seconds of the layer planned last, from its plan to its end, after `saw` of its parts.

        What its parts do not explain is its source's: the link, near data, both, or none of them.
        """
        self.native.took(seen_s)

    def filled(self) -> None:
        """Tell that a background copy has ended which was no prefetch."""
        self.native.filled()

    @property
    def costs(self) -> Costs:
        """As corrected so far."""
        return Costs._make(self.native.costs())

    def followed(self) -> Followed:
        """By which rule decodes are planned, and why."""
        rule, seen_s, *rules_s = self.native.followed()
        return Followed(FOLLOWED[rule], seen_s, dict(zip(FOLLOWED[1:], rules_s, strict=True)))

    def error(self) -> float:
        """Mean difference of predicted and seen layer time, as a share of the time; over about 1,000 layers."""
        return float(self.native.error())


class _Values:
    """An array in a planner's memory, which the array keeps alive."""

    def __init__(self, address: int, shape: tuple[int, int], planner: object) -> None:
        self.planner = planner
        kind = np.dtype(np.float64).str
        self.__array_interface__ = {"data": (address, True), "shape": shape, "typestr": kind, "version": 3}


def sharing(
    costs: Costs, messages_s: Sequence[float], memory: Sequence[float], nbytes: int, layers: int, experts: int,
    top_k: int, slots: int,
) -> tuple[int, ...]:  # fmt: skip
    """The near-data workers that own experts, by index: of the quickest to reach as many as end a forward soonest.

    More of them share the work, but a layer waits for the slowest message: `forward_seconds` of `_SHARED_ROWS` rows.
    Where the experts do not fit into the memory of those, as many as hold them; at least one.

    Args:
        messages_s: seconds of a message to each worker and back. memory: bytes of each, for experts.
        nbytes: of all experts. layers, experts, top_k: of the model. slots: of a layer.
    """
    quick = sorted(range(len(messages_s)), key=messages_s.__getitem__)
    counts = range(1, len(quick) + 1)
    fitting = [n for n in counts if n * min(memory[i] for i in quick[:n]) >= nbytes] or [len(quick)]

    def seconds(count: int) -> float:
        reached = costs._replace(message_s=messages_s[quick[count - 1]])
        return forward_seconds(reached, layers, experts, top_k, slots, count, _SHARED_ROWS)[0]

    return tuple(sorted(quick[: min(fitting, key=seconds)]))


class Faster:
    """Which of two ways to run forwards is faster, by whole forwards, apart for decodes and prompts and for 1, 2, 3 to
    4, 5 to 8, .. rows.

    State, of each way: mean of the seconds of a forward (weight 1 / n at the n-th, at least 0.1; a forward counts as at
    most three means); forwards since the last use of the slower one.
    Rule: each forward goes the way of the lower mean. A way without a mean has the other's and the expected difference;
    where both lack one, the expected seconds decide. The slower way is tried for 4 forwards once it was not used for 64
    (at first: for 8), and once 2% of the time so far, less what earlier tries lost, pays for them. The first forward
    after a change is not counted: its residents are the other way's. O(1) a forward, deterministic.

    Attributes:
        only: the way of all forwards, for measurements, and of planners that decide every layer; None: the faster one.
    """

    _FIRST, _BURST, _UNUSED, _SHARE = 8, 4, 64, 0.02

    def __init__(self) -> None:
        self._ways: dict[tuple[bool, int], _Ways] = {}
        self._last = 0
        self.only: int | None = None

    def choose(self, rows: int, expected_s: tuple[float, float], prompt: bool = False) -> int:
        """0 or 1: the way of the next forward.

        Args:
            rows: of the forward. prompt: some are a prompt's. expected_s: of a forward, by way; what both have in
                common may be left out.
        """
        if self.only is not None:
            return self.only
        ways = self._of(rows, prompt)
        seconds = ways.seconds(expected_s)
        best = int(seconds[1] < seconds[0])
        other, loss = 1 - best, abs(seconds[1] - seconds[0])
        ways.tries_s += self._SHARE * seconds[best]
        ways.unused += 1
        rested = ways.unused > (self._UNUSED if ways.count[other] else self._FIRST)
        if ways.trying == 0 and rested and self._BURST * loss <= ways.tries_s:
            ways.trying = self._BURST
        if ways.trying == 0:
            return best
        ways.trying -= 1
        ways.unused = 0
        ways.tries_s -= loss
        return other

    def seconds(self, rows: int) -> tuple[float | None, float | None]:
        """Mean seconds of a decode forward, by way; None: none went that way."""
        ways = self._of(rows, False)
        first_s, second_s = (mean_s if count else None for mean_s, count in zip(ways.mean_s, ways.count, strict=True))
        return first_s, second_s

    def took(self, rows: int, way: int, seconds: float, prompt: bool = False) -> None:
        """Tell the seconds of a forward."""
        changed, self._last = way != self._last, way
        ways = self._of(rows, prompt)
        count = ways.count[way]
        if changed and count:
            return
        ways.count[way] += 1
        mean_s = ways.mean_s[way]
        seen_s = min(seconds, 3.0 * mean_s) if count >= 4 else seconds
        ways.mean_s[way] += max(0.1, 1.0 / (1 + count)) * (seen_s - mean_s)

    def _of(self, rows: int, prompt: bool) -> _Ways:
        return self._ways.setdefault((prompt, (rows - 1).bit_length()), _Ways())


@dataclass(slots=True)
class _Ways:
    """What `Faster` knows of forwards of about so many rows; by way: forwards, mean seconds."""

    count: list[int] = field(default_factory=lambda: [0, 0])
    mean_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    unused: int = 0
    trying: int = 0
    tries_s: float = 0.0

    def seconds(self, expected_s: tuple[float, float]) -> tuple[float, float]:
        """Of a forward, by way."""
        (first_s, second_s), more_s = self.mean_s, expected_s[1] - expected_s[0]
        if not any(self.count):
            return expected_s
        if not self.count[1]:
            return first_s, max(0.0, first_s + more_s)
        return first_s if self.count[0] else max(0.0, second_s - more_s), second_s


def forward_seconds(
    costs: Costs, layers: int, experts: int, top_k: int, slots: int, workers: int, rows: int,
    missed: float | None = None, prompt: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the experts of a forward, planned and with all misses loaded, before one has run.

    By flat routing on full slots, or by the share of misses. Experts here follow their copies; they and near data end
    together, and near data begins a message later. A planned layer is put at one message more, since the host takes
    about as long to decide and to send; of a prompt at one for each top-K experts, since what is not loaded is not here
    when the decode begins.

    Args:
        slots: of a layer. workers: near-data workers, at least 1. rows: of the forward. missed: share of a layer's
            experts that are not here; None: not seen yet. prompt: some rows are a prompt's.
    """
    needed = experts * (1.0 - (1.0 - top_k / experts) ** rows)
    missing = needed * (1.0 - slots / experts if missed is None else missed)
    each = rows * top_k / needed  # rows of an expert
    gpu_s = costs.gpu_s + (each - 1.0) * costs.gpu_row_s
    hits_s = (needed - missing) * gpu_s
    loaded_s = max(missing * costs.copy_s + gpu_s if missing else 0.0, hits_s + missing * gpu_s)
    gpu_s, hits_s = costs.beside * gpu_s, costs.beside * hits_s  # from here on beside near data
    near_s = max(1.0, each / costs.free_rows) * costs.near_busy_s / workers
    all_near_s = costs.message_s + missing * near_s

    def together(begun_s: float, load_s: float) -> float:
        """When this GPU, which takes `load_s` a load after `begun_s`, and near data end together."""
        return max(begun_s, (begun_s * near_s + all_near_s * load_s) / (near_s + load_s))

    # by the copies, or by the experts
    split_s = max(together(gpu_s, costs.copy_s), together(hits_s, gpu_s)) if missing else loaded_s
    more_s = costs.message_s * (needed / top_k if prompt else 1.0)
    return layers * (min(loaded_s, split_s) + more_s), layers * loaded_s
