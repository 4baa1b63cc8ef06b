"""What every prefetch policy is told and what it answers: one protocol for the real, emulated and simulated executors.

The calls of one forward pass, in order:

    begin_forward(spans)        whose rows it carries           -> wanted in its first layers
    observed(seen) per layer    that layer's routing            -> wanted in later layers
    end(sequence)               a sequence is over (any time between forwards)

An answer is a list of `Wanted`, most wanted first. The executor queues it behind the layer's own loads, as far as
slots can be had, and never asks twice: a policy that wants an expert still, says so again. Policies see no cache, no
link and no clock; that an expert is resident already is the executor's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Lookahead = Callable[[int], NDArray[np.floating] | None]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `start` to `stop` of a forward are of one sequence.

    decode: its prefill is over. embedding: mean of the rows' input embeddings [H], where the policy needs it.
    """

    sequence: str
    start: int
    stop: int
    decode: bool
    embedding: Floats | None = None


class LayerSeen(NamedTuple):
    """What is known of a layer once its router has run.

    layer: counted from 0 over MoE layers. spans: as given to `begin_forward`. ids: [T, K] as the model picked them.
    probabilities: [T, E], softmax of the router's logits; None where the model exposes none. lookahead: distance ->
    scores [T, E] of layer `layer + distance`'s router on this layer's input, None where it cannot be asked. For a
    policy that `wraps` layers are counted on past the last one, into the next forward: there the scores are [S, E], of
    the last row of each span.
    """

    layer: int
    spans: Sequence[Span]
    ids: NDArray[np.integer]
    probabilities: NDArray[np.floating] | None
    lookahead: Lookahead


class Wanted(NamedTuple):  # made by the dozen in each layer: a frozen dataclass takes three times as long
    """An expert (`layer * E + e`) to prefetch; a greater priority goes first. Priorities compare within one policy.

    source: whose guess it is, for a policy that joins several; empty: the policy's own.
    """

    key: int
    priority: float
    source: str = ""


class PrefetchPolicy(ABC):
    """Which experts of later layers to ask for. Pure: NumPy, deterministic, owns its state.

    Attributes:
        name: what counters call its guesses.
        needs_ids, needs_probabilities, needs_embeddings, needs_lookahead: what executors must gather for it.
        stateless: it learns nothing from what it is shown, so it need not be asked while nothing would be fetched.
        lookahead_softmax: what `lookahead` gives are probabilities, the softmax over experts.
        needs_gates: `lookahead(1)` is answered by trained gates (`pre_gated.PreGate`) in place of routers.
        wraps: at the last layer it asks for the first ones of the next forward.
        predicted: scores of the next layer's experts by which `observed` answered last: [T, E], after the last layer
            [S, E] as from `lookahead`; None where it had none, or has no such scores.
        distance: layers ahead that it may ask for; `lookahead` is asked up to it.
        synchronous: the forward waits until what was asked for has arrived.
    """

    name: ClassVar[str]
    stateless: ClassVar[bool] = False
    needs_ids: bool = True
    needs_probabilities: ClassVar[bool] = False
    needs_embeddings: ClassVar[bool] = False
    needs_lookahead: ClassVar[bool] = False
    lookahead_softmax: ClassVar[bool] = False
    needs_gates: ClassVar[bool] = False
    wraps: ClassVar[bool] = False
    predicted: NDArray[np.floating] | None = None
    distance: int = 1
    synchronous: bool = False

    @property
    def looks_ahead(self) -> int:
        """Up to which distance `lookahead` will probably be asked at the next layer, so that it can be made ready."""
        return self.distance if self.needs_lookahead else 0

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        """A forward pass begins; sequences that were not seen before begin with it."""
        return []

    @abstractmethod
    def observed(self, seen: LayerSeen) -> list[Wanted]:
        """A layer's routing is known; layers come in order, and the last one ends the forward."""

    def end(self, sequence: str) -> None:
        """A sequence is over; also for one that no forward carried."""
        return None


def runs(wanted: Sequence[Wanted], experts: int) -> list[tuple[str, list[int]]]:
    """Neighbours of one layer and source, in order: (source, keys)."""
    out: list[tuple[str, list[int]]] = []
    last: tuple[int, str] | None = None
    for key, _, source in wanted:
        if (key // experts, source) != last:
            last = key // experts, source
            out.append((source, []))
        out[-1][1].append(key)
    return out


def ranked(wanted: Iterable[Wanted]) -> list[Wanted]:
    """The union over sequences and layers: each expert once with its highest priority, highest first, then by key."""
    best: dict[int, Wanted] = {}
    for want in wanted:
        held = best.get(want.key)
        if held is None or want.priority > held.priority:
            best[want.key] = want
    return sorted(best.values(), key=lambda want: (-want.priority, want.key))


def most_probable(scores: NDArray[np.floating], count: int) -> list[int]:
    """At most `count` experts of positive score [E], greatest first, ties by number."""
    order = np.argsort(-scores, kind="stable")[:count]
    return [int(e) for e in order if scores[e] > 0]


def by_sequence(seen: LayerSeen, values: NDArray[Any]) -> list[tuple[Span, NDArray[Any]]]:
    """The rows of `values` [T, ...] that belong to each span."""
    return [(span, values[span.start : span.stop]) for span in seen.spans]
