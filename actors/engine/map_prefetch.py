"""Prefetch by the matcher, behind the protocol of all prefetch policies; by the next layers' routers without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...proto.messages import PrefetchCommand
from ..policies.eviction import EvictionPolicy
from ..policies.fmoe import BlendPrefetch
from ..policies.prefetch import LayerSeen, NextGatePrefetch, PrefetchPolicy, Span, Wanted, ranked
from .matching import MatcherLink, sequence_means, tell_eviction

Relay = Callable[[PrefetchCommand, bool], PrefetchCommand]


class MatcherPrefetch(PrefetchPolicy):
    """The lead's side of fMoE (sections 4.1 and 4.5): publish each layer, carry out the commands that have come.

    State: numbers of the running sequences. Rule: after a layer's router has run, its probabilities are published and
    the commands that came since the last layer give what is wanted. They answer what was published a layer ago, so a
    prefetch distance d is counted from the layer that runs now. While the matcher is lost, slow or without maps the
    routers of the next layers are asked as well (`MatcherLink.source`). Nothing waits. Cost: one publish and one look
    per layer, and while it falls back that of `NextGatePrefetch`.

    Args:
        link: to the matcher.
        experts: of a layer.
        fallback: asked while the matcher is of no use.
        eviction: told how probable a command's experts are.
        iteration: number of the forward that begins, as the other shards count; None: counted here.
        blend: joins the commands with next-gate; None: commands alone.
        relay: `Shards.relay`; None: there are no other shards.
    """

    name: ClassVar[str] = "expert-map"
    needs_probabilities: ClassVar[bool] = True
    needs_embeddings: ClassVar[bool] = True
    needs_lookahead: ClassVar[bool] = True

    def __init__(
        self,
        link: MatcherLink,
        experts: int,
        fallback: NextGatePrefetch,
        eviction: EvictionPolicy,
        iteration: Callable[[], int] | None = None,
        blend: BlendPrefetch | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._link, self._experts, self._eviction = link, experts, eviction
        self._fallback, self._blend, self._relay = fallback, blend, relay
        self.needs_ids = blend is not None  # which judges by them
        self._next_iteration = iteration if iteration is not None else count(1).__next__
        self._iteration = 0
        self._numbers: dict[str, int] = {}
        self._next_number = count()
        self._sequences: NDArray[np.int64] = np.empty(0, np.int64)
        self._starts: list[int] = []

    @property
    def looks_ahead(self) -> int:
        if self._blend is not None:
            return self._blend.distance
        return self._fallback.looks_ahead if self._link.problem is not None else 0

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        self._iteration = self._next_iteration()
        self._sequences = np.array([self._number(span.sequence) for span in spans], np.int64)
        self._starts = [span.start for span in spans] + [spans[-1].stop]
        if spans[0].embedding is None:
            embeddings = np.zeros((len(spans), self._link.shape.hidden), np.float32)
        else:
            embeddings = np.stack([span.embedding for span in spans if span.embedding is not None])
        self._link.begin(self._iteration, self._sequences, embeddings)
        if self._blend is not None:
            self._blend.begin_forward(spans)
        return []

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        """Raises ValueError: the model exposes no probabilities."""
        if seen.probabilities is None:
            raise ValueError("expert maps need the router's probabilities, which this model does not expose")
        link = self._link
        commands = link.take(self._iteration, seen.layer)
        means = sequence_means(seen.probabilities[: self._starts[-1]], self._starts)
        link.observe(self._iteration, seen.layer, self._sequences, means)
        wanted = [want for command in commands for want in self._wanted(command)]
        if self._blend is not None:
            return self._blend.merged(seen, wanted)
        if link.source == "next-gate":
            link.fell_back()
            guesses = self._fallback.observed(seen)
            return [*wanted, *(Wanted(want.key, want.priority, NextGatePrefetch.name) for want in guesses)]
        return ranked(wanted) if len(commands) > 1 else wanted

    def end(self, sequence: str) -> None:
        self._numbers.pop(sequence, None)

    def _wanted(self, command: PrefetchCommand) -> list[Wanted]:
        tell_eviction(self._eviction, command, self._experts)
        if self._relay is not None:
            command = self._relay(command, self._blend is None)
        n = len(command.keys) - command.hints
        order = np.argsort(-command.priorities[:n], kind="stable")
        pairs = zip(command.keys[order].tolist(), command.priorities[order].tolist(), strict=True)
        return [Wanted(key, priority) for key, priority in pairs]

    def _number(self, sequence: str) -> int:
        if sequence not in self._numbers:
            self._numbers[sequence] = next(self._next_number)
        return self._numbers[sequence]
