"""Which experts of later layers to prefetch, and when prefetching pays.

One protocol for all executors. The calls of one forward pass:

    begin_forward(spans)        sequences of the forward         -> wanted in its first layers
    observed(seen) per layer    that layer's routing             -> wanted in later layers
    end(sequence)               a sequence is over (between forwards)

Answers are `Wanted`, most wanted first. The executor queues them behind the layer's demand loads while slots are
available, skips resident experts, and does not repeat a request: a policy asks again. Policies see no cache, link or
clock.

Here: the protocol, and the policies that belong to no single paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ..core import _core
from .foreign import shown
from .registry import PolicyContext, PolicyOptions, policy_base, register

Floats = NDArray[np.float32]
Lookahead = Callable[[int], NDArray[np.floating] | None]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `start` to `stop` of a forward belong to one sequence.

    decode: its prefill is over. embedding: mean of the rows' input embeddings [H], where the policy needs it.
    """

    sequence: str
    start: int
    stop: int
    decode: bool
    embedding: Floats | None = None


def predicted_experts(logits: NDArray[np.floating], top: int, base: int = 0) -> list[int]:
    """Experts that a later router would pick, most wanted first.

    Each token votes for its `top` experts, ties to the lowest number; experts are ordered by votes, then highest logit,
    then number. This is the gate look-ahead of Mixtral-Offloading, AdapMoE and MoEpic, over all tokens of a batch.

    Args:
        logits: router logits [T, E], float32 or float64. top: experts per token. base: key of the first expert.
    """
    return _core.rank_by_votes(logits, top, base)


def by_score(scores: NDArray[np.floating], top: int, base: int = 0) -> tuple[list[int], list[float]]:
    """Experts of the rows' `top` highest positive scores [T, E], highest first, ties by number; and their maxima.

    base: key of the first expert.
    """
    return _core.rank_by_score(scores, top, base)


class Ranking(NamedTuple):
    """The two orders of experts by scores. Arguments: scores [T, E], experts that each row names, key of the first."""

    by_votes: Callable[[NDArray[np.floating], int, int], list[int]] = predicted_experts
    by_score: Callable[[NDArray[np.floating], int, int], tuple[list[int], list[float]]] = by_score


RANKING = Ranking()


class LayerSeen(NamedTuple):
    """What is known once a layer's router has run.

    layer: from 0 over MoE layers. spans: as given to `begin_forward`. ids: [T, K] as the model picked them.
    probabilities: [T, E], softmax of the router's logits; None where the model exposes none. lookahead: distance ->
    scores [T, E] of layer `layer + distance`'s router on this layer's input, None where unavailable. For a policy that
    `wraps`, layers past the last one are those of the next forward; their scores are [S, E], of the last row of each
    span. rank: orders experts by such scores.
    """

    layer: int
    spans: Sequence[Span]
    ids: NDArray[np.integer]
    probabilities: NDArray[np.floating] | None
    lookahead: Lookahead
    rank: Ranking = RANKING


class Wanted(NamedTuple):  # made by the dozen in each layer: a frozen dataclass takes three times as long
    """An expert (`layer * E + e`) to prefetch, higher priority first; priorities compare within one policy.

    source: which predictor asks, for a policy that combines several; else empty.
    """

    key: int
    priority: float
    source: str = ""


class WantedKeys(Sequence[Wanted]):
    """Experts to prefetch, with an object for each only where somebody reads one.

    Args:
        runs: keys, most wanted first; the keys of a run go to the cache together and do not evict each other.
        priorities: of all of them in this order. source: as in `Wanted`.
    """

    __slots__ = ("priorities", "runs")

    def __init__(self, runs: Iterable[list[int]], priorities: Sequence[float], source: str = "") -> None:
        self.runs, self.priorities = [(source, keys) for keys in runs if keys], priorities

    def then(self, other: WantedKeys, source: str) -> WantedKeys:
        """These, and less wanted than all of them the other's, which `source` asks for."""
        both = WantedKeys((), [*self.priorities, *other.priorities])
        both.runs = [*self.runs, *[(source, keys) for _, keys in other.runs]]
        return both

    @property
    def keys(self) -> list[int]:
        runs = self.runs
        return runs[0][1] if len(runs) == 1 else [key for _, keys in runs for key in keys]

    def __len__(self) -> int:
        return len(self.priorities)

    def __iter__(self) -> Iterator[Wanted]:
        sources = [source for source, keys in self.runs for _ in keys]
        return map(Wanted, self.keys, self.priorities, sources)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        return list(self) == other


@register("prefetch", "none")
class PrefetchOptions(PolicyOptions):
    """Options of every prefetch policy; kind none prefetches nothing."""

    kind: str = "none"
    distance: int = Field(
        default=1, ge=0, le=8, description="prefetch distance in layers; 0, with layerwise only: the rest of this layer"
    )
    top: int | None = Field(
        default=None, ge=1, description="experts per token, or per layer and sequence; default: the router's top-k"
    )
    min_useful: float = Field(
        default=0.25, ge=0, le=1, description="least share of used prefetches; below it prefetch pauses"
    )
    synchronous: bool = Field(default=False, description="the forward pass waits until prefetched experts have arrived")
    adaptive: bool | None = Field(
        default=None, description="pause prefetch while it saves less than it costs; default: in lossless policies only"
    )

    @model_validator(mode="after")
    def _distance_fits(self) -> PrefetchOptions:
        self.check_distance()
        return self

    def check_distance(self) -> None:
        """Raises ValueError: the policy does not support this distance."""
        if self.distance == 0:
            raise ValueError(f"prefetch {self.kind} looks at least one layer ahead")

    def experts(self, context: PolicyContext) -> int:
        """Experts to ask for."""
        return context.top_k if self.top is None else self.top

    @property
    def streams(self) -> bool:
        """`PrefetchPolicy.streams` of what is made of these, as far as other GPUs are to do the same by themselves."""
        return False


class NextLayerOptions(PrefetchOptions):
    """Options of a policy that prefetches for the next layer only."""

    def check_distance(self) -> None:
        if self.distance != 1:
            raise ValueError(f"prefetch {self.kind} is for the next layer: leave distance out")


class NextGateOptions(PrefetchOptions):
    """Options of `next-gate`."""

    whole_layers: bool = Field(
        default=False, description="a forward with 64 pairs of token and expert for each expert, or more, that needs "
        "most experts of its layer prefetches all of the next one; not with synchronous",
    )  # fmt: skip

    @property
    def streams(self) -> bool:
        return self.whole_layers and not self.synchronous


class PrefetchAnswers:
    """Checks what a prefetch policy answers; raises TypeError or ValueError."""

    def __init__(self, context: PolicyContext) -> None:
        self._keys, self._experts = context.layers * context.experts, context.experts

    def begin_forward(self, answer: Any, spans: Sequence[Span]) -> Sequence[Wanted]:
        return self._checked(answer)

    def observed(self, answer: Any, seen: LayerSeen) -> Sequence[Wanted]:
        return self._checked(answer)

    def _checked(self, answer: Any) -> Sequence[Wanted]:
        if not isinstance(answer, list | tuple | WantedKeys):
            raise TypeError(f"it answered {shown(answer)}, not a list of Wanted")
        found: Sequence[Wanted] = answer
        if not isinstance(answer, WantedKeys):
            if not all(isinstance(want, tuple) and len(want) == 3 for want in answer):
                raise TypeError("it answered a list with something in it that is no Wanted(key, priority)")
            found = [Wanted(*want) for want in answer]
        elif len(answer.priorities) != len(answer.keys):
            raise ValueError(f"it answered {len(answer.priorities)} priorities for {len(answer.keys)} keys")
        for _, keys in runs(found, self._experts):
            for key in keys:
                if not isinstance(key, int | np.integer):
                    raise TypeError(f"it answered {shown(key)} as a key")
                if not 0 <= key < self._keys:
                    raise ValueError(f"it answered key {key}; keys are 0 to {self._keys - 1}")
            if len(set(keys)) < len(keys):
                raise ValueError(f"it answered a key twice: {keys}")
        return found if isinstance(found, WantedKeys) else [want._replace(key=int(want.key)) for want in found]


@policy_base("prefetch", answers=PrefetchAnswers)
class PrefetchPolicy(ABC):
    """Which experts of later layers to prefetch. Pure: NumPy, deterministic, owns its state.

    Attributes:
        Options: of the policy.
        name: of its prefetches in counters.
        needs_ids, needs_probabilities, needs_embeddings, needs_lookahead: inputs that executors must gather.
        stateless: it learns nothing from `observed`, so executors may skip the call when nothing could be fetched.
        lookahead_softmax: `lookahead` gives probabilities, the softmax over experts.
        needs_gates: trained gates (`baselines.PreGate`) answer `lookahead(1)` in place of routers.
        wraps: at the last layer it prefetches for the first ones of the next forward.
        predicted: scores of the next layer's experts behind the last answer of `observed` [T, E]; after the last layer
            [S, E] as from `lookahead`; None where there are none.
        distance: layers ahead that it prefetches and may ask `lookahead` for.
        synchronous: the forward waits until its prefetches have arrived.
        streams: a pass that sweeps, with 64 pairs an expert or more and most experts of its layer, prefetches the next
            layer whole and as urgently as demand, in place of asking this policy (`core.Core.stream`).
    """

    Options: ClassVar[type[PrefetchOptions]] = PrefetchOptions
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
    streams: bool = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        """The policy in its first state.

        Raises:
            NotPrepared: an artifact of `tiermoe prepare` is missing.
        """
        return cls()

    @property
    def looks_ahead(self) -> int:
        """Farthest `lookahead` that it will probably ask for at the next layer, to prepare for."""
        return self.distance if self.needs_lookahead else 0

    def begin_forward(self, spans: Sequence[Span]) -> Sequence[Wanted]:
        """A forward pass begins; unknown sequences begin with it."""
        return []

    def native(self) -> NativeScores | None:
        """How native code prefetches in place of `observed`; None: it does not. A class that defines methods of its
        own loses what it inherits.
        """
        return None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "native" not in vars(cls) and any(isinstance(found, FunctionType) for found in vars(cls).values()):
            cls.native = PrefetchPolicy.native  # type: ignore[method-assign]

    @abstractmethod
    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        """A layer's routing is known; layers come in order, and the last one ends the forward."""

    def end(self, sequence: str) -> None:
        """A sequence is over, perhaps one that no forward carried."""
        return None


def runs(wanted: Sequence[Wanted], experts: int) -> list[tuple[str, list[int]]]:
    """The keys that go to the cache together, in order: (source, keys). Of a list: neighbours of a layer and source."""
    if isinstance(wanted, WantedKeys):
        return wanted.runs
    out: list[tuple[str, list[int]]] = []
    last: tuple[int, str] | None = None
    for key, _, source in wanted:
        if (key // experts, source) != last:
            last = key // experts, source
            out.append((source, []))
        out[-1][1].append(key)
    return out


def ranked(wanted: Iterable[Wanted]) -> list[Wanted]:
    """The union: each expert once with its highest priority, highest first, then by key."""
    best: dict[int, Wanted] = {}
    for want in wanted:
        held = best.get(want.key)
        if held is None or want.priority > held.priority:
            best[want.key] = want
    return sorted(best.values(), key=lambda want: (-want.priority, want.key))


def joined(found: Sequence[WantedKeys]) -> WantedKeys:
    """`ranked` of several answers of one source, as one run."""
    if len(found) == 1:
        return found[0]
    best: dict[int, float] = {}
    for lowered, key in sorted([(-p, key) for one in found for p, key in zip(one.priorities, one.keys, strict=True)]):
        best.setdefault(key, -lowered)
    return WantedKeys([[*best]], [*best.values()])


def most_probable(scores: NDArray[np.floating], count: int) -> list[int]:
    """At most `count` experts of positive score [E], highest first, ties by number."""
    order = (-scores).argsort(kind="stable")[:count]
    return [int(e) for e in order if scores[e] > 0]


class LayeredPrefetch(PrefetchPolicy):
    """Base of policies that are made from the shape of the model and the common options alone.

    Args:
        layers, experts: L and E. top: experts per token, or per layer. distance, synchronous: see `PrefetchPolicy`.

    Attributes:
        top: experts per token, or per layer.
    """

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        return cls(context.layers, context.experts, options.experts(context), options.distance, options.synchronous)

    def __init__(self, layers: int, experts: int, top: int, distance: int = 1, synchronous: bool = False) -> None:
        self._layers, self._experts, self.top = layers, experts, top
        self.distance, self.synchronous = distance, synchronous


@register("prefetch", "next-gate")
class NextGatePrefetch(LayeredPrefetch):
    """Look-ahead by the gates of later layers (Mixtral-Offloading, arXiv 2312.17238, section 3.2; MoEpic; AdapMoE).

    State: none. Rule: after layer l's router, the routers of layers l+1..l+distance run on layer l's input; the experts
    that they pick are prefetched, nearer layers first (`predicted_experts`). Accurate for near layers, because the
    residual stream changes little per layer. Cost: distance * T * H * E multiply-adds per layer.

    Mixtral-Offloading is this with LRU, distance 1 and `synchronous`.

    With `whole_layers` it is not asked in long prompts (`streams`): thousands of rows name nearly all experts, and to
    rank their scores takes the host 32 ms a layer (8,192 rows, 128 experts), in which a GPU has nothing to do.

    Args:
        layers, experts: L and E. top: experts per token. whole_layers: see above; not where the forward waits.
    """

    Options: ClassVar[type[PrefetchOptions]] = NextGateOptions
    name: ClassVar[str] = "next-gate"
    stateless: ClassVar[bool] = True
    needs_ids = False
    needs_lookahead: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        top = options.experts(context)
        return cls(context.layers, context.experts, top, options.distance, options.synchronous, options.whole_layers)

    def __init__(
        self, layers: int, experts: int, top: int, distance: int = 1, synchronous: bool = False,
        whole_layers: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(layers, experts, top, distance, synchronous)
        self.streams = whole_layers and not synchronous  # as of the options

    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        layers: list[list[int]] = []
        self.predicted = None
        for layer in range(seen.layer + 1, min(seen.layer + 1 + self.distance, self._layers)):
            scores = seen.lookahead(layer - seen.layer)
            if scores is not None:
                if layer == seen.layer + 1:
                    self.predicted = scores
                layers.append(seen.rank.by_votes(scores, self.top, layer * self._experts))
        return WantedKeys(layers, range(0, -sum(map(len, layers)), -1))

    def native(self) -> NativeScores:
        return NativeScores(self.top, votes=True)


class NativeScores(NamedTuple):
    """Prefetch by routers' scores for native code. top: experts of a row. votes: rank by votes; else by scores."""

    top: int
    votes: bool


@register("prefetch", "layerwise")
class LayerwisePrefetch(PrefetchPolicy):
    """Layer-wise parameter offloading, regardless of routing (ZeRO-Inference in DeepSpeed, arXiv 2207.00032, section
    6).

    State: none. Rule: after layer l's router, prefetch every expert of layer l + distance, lowest number first.
    Distance 0 loads the rest of layer l on demand, which is how fMoE (section 6.1) runs DeepSpeed-Inference as a
    baseline. Cost: O(E) per layer, E experts of traffic.

    Args:
        layers, experts: L and E. distance: 0 or 1. synchronous: the layer waits for all of it, as DeepSpeed's gather.
    """

    class Options(PrefetchOptions):
        def check_distance(self) -> None:
            if self.distance > 1:
                raise ValueError("layer-wise prefetch is for this layer (0) or the next (1)")

    name: ClassVar[str] = "layerwise"
    stateless: ClassVar[bool] = True
    needs_ids = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        return cls(context.layers, context.experts, options.distance, options.synchronous)

    def __init__(self, layers: int, experts: int, distance: int = 1, synchronous: bool = False) -> None:
        if distance not in (0, 1):
            raise ValueError(f"layer-wise prefetch is for this layer (0) or the next (1), not {distance}")
        self._layers, self._experts = layers, experts
        self.distance, self.synchronous = distance, synchronous

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        return self._all_of(0) if self.distance else []

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        return self._all_of(seen.layer + self.distance)

    def _all_of(self, layer: int) -> list[Wanted]:
        if layer >= self._layers:
            return []
        base = layer * self._experts
        return [Wanted(base + e, 1.0 - e / self._experts) for e in range(self._experts)]


@register("prefetch", "popularity")
class PopularityPrefetch(LayeredPrefetch):
    """The most popular experts of each layer, over all requests so far.

    State: counts [L, E] of (token, expert) pairs. Rule: after layer l's router, prefetch the `top` most counted experts
    of layers l+1..l+distance, nearer layers first; before a forward those of its first `distance` layers. Cost:
    O(distance * E log E) per layer.

    Args:
        layers, experts: L and E. top: experts per layer.
    """

    name: ClassVar[str] = "popularity"

    def __init__(self, layers: int, experts: int, top: int, distance: int = 1, synchronous: bool = False) -> None:
        super().__init__(layers, experts, top, distance, synchronous)
        self.counts = np.zeros((layers, experts), np.int64)

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        return self._popular(0)

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        self.counts[seen.layer] += np.bincount(seen.ids.ravel(), minlength=self._experts)
        return self._popular(seen.layer + 1)

    def _popular(self, first: int) -> list[Wanted]:
        wanted = []
        for ahead, counts in enumerate(self.counts[first : first + self.distance]):
            for place, e in enumerate(np.argsort(-counts, kind="stable")[: self.top]):
                if counts[e]:
                    # a nearer layer's experts all go before a farther one's
                    wanted.append(Wanted((first + ahead) * self._experts + int(e), -float(ahead * self.top + place)))
        return wanted


@register("prefetch", "random")
class RandomPrefetch(LayeredPrefetch):
    """Random experts of the next layer (MoEpic, section 5, "w/o SP").

    Like `SpeculativePrefetch`, first layer included, with uniform random scores: each row names `top` experts. State: a
    seeded generator. Cost: T E.

    Args:
        layers, experts: L and E. top: experts per row. seed: of the numbers.
    """

    Options = NextLayerOptions
    name: ClassVar[str] = "random"
    stateless: ClassVar[bool] = True
    wraps: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        return cls(context.layers, context.experts, options.experts(context), options.synchronous, context.seed)

    def __init__(self, layers: int, experts: int, top: int, synchronous: bool = False, seed: int = 0) -> None:
        super().__init__(layers, experts, top, synchronous=synchronous)
        self._rng = np.random.default_rng(seed)

    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        rows = len(seen.spans) if seen.layer == self._layers - 1 else len(seen.ids)
        self.predicted = 1.0 - self._rng.random((rows, self._experts))  # (0, 1]
        keys, scores = seen.rank.by_score(self.predicted, self.top, (seen.layer + 1) % self._layers * self._experts)
        return WantedKeys([keys], scores)
