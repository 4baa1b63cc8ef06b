"""The engine's connection to the matcher of expert maps: publish router probabilities, take commands, never wait.

    begin (embedding) -> [layer: take -> commands for later layers; observe (probabilities)] for each layer

All methods run on the forward's thread: `begin` and `observe` write one request to the channel, `take` reads the
answers that have come. A sending thread would take the interpreter for as long, at a worse moment.

While the matcher is lost, slow or without maps, `MatcherLink.source` says so and `MatcherPrefetch` asks the next
layers' routers instead. Publishing continues, so that the matcher can recover.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....errors import DeadlinePassed, MessageError, PeerLost, RuntimeFailure
from ....proto.channel import Channel, Pending
from ....proto.messages import Context, HealthReport, HealthRequest, PrefetchCommand
from ....proto.peers import PeerLink, ReconnectingChannel
from ...policies.eviction import EvictionPolicy
from ...policies.fmoe import ExpertMapEviction, MapOptions
from ...policies.prefetch import LayerSeen, NextGatePrefetch, PrefetchPolicy, Span, Wanted, WantedKeys, joined
from ...settings import MatcherSettings
from ...store.artifacts import MapShape
from ..stats import Timeline

_log = logging.getLogger(__name__)
_WINDOW, _JUDGED_FROM = 64, 16  # outcomes that decide whether the matcher is slow
_COUNTS = "published", "dropped", "commands", "late", "silent", "lost", "fallbacks", "fallback_layers"
_NO_MAPS = "the matcher has no maps yet"
_REMEMBERED = 4096  # publish times and lags, for their percentiles

Source = Literal["expert-map", "next-gate"]


class _Asked(NamedTuple):
    pending: Pending
    iteration: int
    begins: bool
    sent_s: float


class MatcherLink:
    """Sends contexts to the matcher and takes its commands.

    Args:
        link: looks up the matcher's address.
        settings: transport and deadline; the rest is the matcher's.
        maps: the policy's.
        shape: of the model; a matcher for another model is not used.

    Attributes:
        timeline: each answered context is a span of the track `matcher`; the engine puts its own here.
    """

    def __init__(self, link: PeerLink, settings: MatcherSettings, maps: MapOptions, shape: MapShape) -> None:
        self.shape, self._deadline_s = shape, settings.deadline_s
        self._semantic = maps.semantic  # False: the first forecast of an iteration comes with its first layer
        expected = asdict(shape) | {"distance": maps.distance}
        self._peer = ReconnectingChannel("matcher", link, settings.transport, expected)
        self._tail_from = max(0, shape.layers - 1 - maps.distance)  # from here on no forecast is left to ask for
        self._held: list[NDArray[np.float32]] = []  # probabilities of the layers that were not sent yet
        self._most = 2 * (self._tail_from + 2)  # contexts without answer: two iterations
        self._channel: Channel | None = None  # of the last publish
        self._asked: deque[_Asked] = deque()
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)  # whether a command came in time
        self._nothing = np.empty((0, 0), np.float32)  # [S, 0]
        self._slow = False
        self._forecasts = False  # the newest answered iteration had a forecast
        self._logged: str | None = None  # the last problem
        self._started = False
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._publish_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._lag_s: deque[float] = deque(maxlen=_REMEMBERED)
        self.timeline = Timeline(False)

    def start(self) -> None:
        """Connect in the background."""
        self._started = True
        self._peer.start()

    def wait_until_found(self, deadline_s: float) -> bool:
        """Whether the matcher is connected within `deadline_s` seconds."""
        return self._peer.wait(deadline_s)

    @property
    def problem(self) -> str | None:
        """Why the matcher's commands are not used alone; None: they are."""
        if self._peer.current is None:
            return f"the matcher is not there: {self._peer.problem}"
        if self._slow:
            return "the matcher is slow: most of its commands come too late"
        if not self._forecasts:
            return _NO_MAPS
        return None

    @property
    def source(self) -> Source:
        """The prefetch source to use now; changes are logged."""
        problem = self.problem
        kind = None if problem is None else problem.split(":")[0]
        if kind != self._logged:
            if problem is None:
                _log.info("prefetch follows expert maps again")
            elif self._started:
                self._counts["fallbacks"] += 1
                level = logging.INFO if problem == _NO_MAPS else logging.WARNING
                _log.log(level, "prefetch falls back to next-gate: %s", problem)
            self._logged = kind
        return "expert-map" if problem is None else "next-gate"

    def traffic(self) -> dict[str, float]:
        """As `RemoteExperts.traffic`; it sends no rows."""
        return self._peer.traffic.of_client()

    def fell_back(self) -> None:
        """Next-gate prefetched for a layer instead."""
        self._counts["fallback_layers"] += 1

    @property
    def waiting(self) -> int:
        """Number of contexts whose answers were not taken."""
        return len(self._asked)

    def begin(self, iteration: int, sequences: NDArray[np.int64], embeddings: NDArray[np.float32]) -> None:
        """Publish, before the first layer, each sequence's mean input embedding in this iteration.

        iteration: number of this forward; numbers rise. sequences: ids [S]. embeddings: [S, H].
        """
        self._held.clear()
        self._publish(Context(iteration, 0, sequences, embeddings, self._none_for(sequences)), True)

    def observe(
        self, iteration: int, layer: int, sequences: NDArray[np.int64], probabilities: NDArray[np.float32]
    ) -> None:
        """Publish a layer's router probabilities [S, E]: each sequence's mean over its tokens.

        They are held, and go with the next layer's in one message, while the matcher owes an answer: if each layer were
        sent, a slow matcher would fall behind without end. So are those of the last layers, on which no forecast of
        this iteration depends. The last layer is always sent.
        """
        held, last = self._held, layer == self.shape.layers - 1
        held.append(probabilities)
        if not last and (layer >= self._tail_from or self._asked):
            return
        if len(held) > 1:
            layer, probabilities = layer + 1 - len(held), np.concatenate(held, axis=1)
        held.clear()
        self._publish(Context(iteration, layer, sequences, self._none_for(sequences), probabilities), False)

    def take(self, iteration: int, layer: int) -> list[PrefetchCommand]:
        """New commands of this iteration for layers after `layer`, oldest first.

        A partly late command keeps its other keys; a late command is dropped and counted.
        """
        asked, out = self._asked, list[PrefetchCommand]()
        while asked and asked[0].pending.done():
            command = self._answer(asked.popleft())
            if command is not None:
                command = self._in_time(command, iteration, layer)
                self._judge(command is not None)
            if command is not None:
                out.append(command)
        return out

    def report(self) -> dict[str, Any]:
        """Counters since the last reset; percentiles of microseconds per publish, and from publish to command."""
        out: dict[str, Any] = {"source": self.source, "problem": self.problem or ""} | self._counts
        for name, values in (("publish_us", self._publish_s), ("lag_us", self._lag_s)):
            if values:
                p50, p99 = np.percentile(np.fromiter(values, np.float64), (50, 99)) * 1e6
                out |= {f"{name}_p50": float(p50), f"{name}_p99": float(p99)}
        return out

    def reset(self) -> None:
        """Zero the counters."""
        self._counts = dict.fromkeys(self._counts, 0)
        self._publish_s.clear()
        self._lag_s.clear()

    def account(self, deadline_s: float) -> dict[str, Any]:
        """The details of the matcher's health report; without a report its `state`, "lost" or "late"."""
        channel = self._peer.current
        try:
            report = None if channel is None else channel.call(HealthRequest(), deadline_s)
        except RuntimeFailure:
            return {"state": "late"}
        return dict(report.details) if isinstance(report, HealthReport) else {"state": "lost"}

    @property
    def connected(self) -> bool:
        """Whether the matcher is connected."""
        return self._peer.current is not None

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._peer.close()

    def _none_for(self, sequences: NDArray[np.int64]) -> NDArray[np.float32]:
        if len(self._nothing) != len(sequences):
            self._nothing = np.empty((len(sequences), 0), np.float32)
        return self._nothing

    def _publish(self, context: Context, begins: bool) -> None:
        begin_s = time.perf_counter()
        channel = self._peer.current
        if channel is not self._channel:
            self._change(channel)
        if channel is None:
            return
        if len(self._asked) >= self._most:
            self._counts["dropped"] += 1
            self._judge(False)
            return
        try:
            pending = channel.submit(context, self._deadline_s)
        except (DeadlinePassed, MessageError):
            self._counts["dropped"] += 1
            self._judge(False)
            return
        except RuntimeFailure as failure:
            self._peer.lost(channel, failure.what)
            self._change(None)
            return
        self._counts["published"] += 1
        self._asked.append(_Asked(pending, context.iteration, begins, begin_s))
        self._publish_s.append(time.perf_counter() - begin_s)

    def _answer(self, asked: _Asked) -> PrefetchCommand | None:
        """The command of an answer that has come; None: the answer has no command, or the call failed."""
        try:
            answer = asked.pending.result()
        except PeerLost:
            return None  # the next publish notices
        except RuntimeFailure as failure:  # too late for the deadline, or refused
            self._counts["late"] += 1
            self._judge(False)
            _log.debug("a context was not answered: %s", failure)
            return None
        if not isinstance(answer, PrefetchCommand):
            if asked.begins and self._semantic:
                self._forecasts = False
            self._counts["silent"] += 1
            return None
        self._forecasts = True
        now_s = time.perf_counter()
        self._lag_s.append(now_s - asked.sent_s)
        if self.timeline.enabled:
            args = {"experts": len(answer.keys) - answer.hints, "iteration": answer.iteration}
            self.timeline.span("matcher", f"search {answer.iteration}", asked.sent_s, now_s, args)
        return answer

    def _in_time(self, command: PrefetchCommand, iteration: int, layer: int) -> PrefetchCommand | None:
        wanted = len(command.keys) - command.hints
        if command.iteration == iteration:
            first = (layer + 1) * self.shape.experts
            if min(command.keys.tolist(), default=first) >= first:
                self._counts["commands"] += 1
                return command
            later = command.keys >= first
            left = int(later[:wanted].sum())
            if left:
                self._counts["commands"] += 1
                keys, priorities = command.keys[later], command.priorities[later]
                return PrefetchCommand(iteration, command.layer, keys, priorities, len(keys) - left, command.mapped)
        self._counts["late"] += 1
        return None

    def _judge(self, in_time: bool) -> None:
        """Slow once half of the last outcomes were late, until at most a quarter is."""
        outcomes = self._outcomes
        outcomes.append(in_time)
        if len(outcomes) < _JUDGED_FROM:
            return
        late = len(outcomes) - sum(outcomes)
        self._slow = late * 4 > len(outcomes) if self._slow else late * 2 >= len(outcomes)

    def _change(self, channel: Channel | None) -> None:
        """The connection changed: drop the state of the old one."""
        self._counts["lost"] += channel is None
        self._channel = channel
        self._asked.clear()
        self._outcomes.clear()
        self._slow = self._forecasts = False


def wanted_keys(command: PrefetchCommand) -> tuple[list[int], list[float]]:
    """The keys that a command wants loaded, most wanted first, and their priorities."""
    wanted = len(command.keys) - command.hints
    keys, priorities = command.keys[:wanted].tolist(), command.priorities[:wanted].tolist()
    if priorities != sorted(priorities, reverse=True):  # the matcher sends them in order
        order = sorted(range(wanted), key=priorities.__getitem__, reverse=True)  # stable
        keys, priorities = [keys[i] for i in order], [priorities[i] for i in order]
    return keys, priorities


def tell_eviction(eviction: EvictionPolicy, command: PrefetchCommand, experts: int) -> None:
    """Give an expert-map eviction the probabilities of a mapped command. experts: of a layer."""
    if command.mapped and isinstance(eviction, ExpertMapEviction):
        eviction.expect_map(command.keys, command.priorities, command.layer, experts)


def sequence_means(values: NDArray[np.floating], starts: Sequence[int]) -> NDArray[np.float32]:
    """Mean over each sequence's rows [S, X] of values [T, X] where sequence s has rows starts[s]:starts[s + 1]."""
    if len(starts) == len(values) + 1:  # one row a sequence, as in decode
        return np.ascontiguousarray(values, np.float32)
    sums = np.add.reduceat(values, starts[:-1], axis=0, dtype=np.float64)
    return (sums / np.diff(starts)[:, None]).astype(np.float32)


Relay = Callable[[PrefetchCommand], PrefetchCommand]


class MatcherPrefetch(PrefetchPolicy):
    """The lead's side of fMoE (sections 4.1 and 4.5): publish each layer, prefetch by the commands that have come.

    State: numbers of the running sequences. Rule: once a layer's router has run, its probabilities are published, and
    the commands since the last layer are the wanted experts. They answer the publish of a layer ago, so a prefetch
    distance d counts from the present layer. While the matcher is lost, slow or without maps, the routers of the next
    layers are asked too (`MatcherLink.source`). Cost: one publish and one read a layer, and in fallback the cost of
    `NextGatePrefetch`.

    Args:
        experts: of a layer.
        fallback: used while the matcher has a problem.
        eviction: gets the probabilities of a command's experts.
        iteration: gives the number of the forward that begins, as other shards count; None: counted here.
        relay: `Shards.relay`; None: one GPU.
    """

    name: ClassVar[str] = "expert-map"
    needs_ids = False
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
        relay: Relay | None = None,
    ) -> None:
        self._link, self._experts, self._eviction = link, experts, eviction
        self._fallback, self._relay = fallback, relay
        self._next_iteration = iteration if iteration is not None else count(1).__next__
        self._iteration = 0
        self._numbers: dict[str, int] = {}
        self._next_number = count()
        self._sequences: NDArray[np.int64] = np.empty(0, np.int64)
        self._starts: list[int] = []

    @property
    def looks_ahead(self) -> int:
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
        return []

    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        """Raises ValueError: the model exposes no probabilities."""
        if seen.probabilities is None:
            raise ValueError("expert maps need the router's probabilities, which this model does not expose")
        link = self._link
        commands = link.take(self._iteration, seen.layer)
        means = sequence_means(seen.probabilities[: self._starts[-1]], self._starts)
        link.observe(self._iteration, seen.layer, self._sequences, means)
        found = [self._wanted(command) for command in commands]
        if link.source == "expert-map":
            return joined(found) if found else []
        link.fell_back()
        instead = self._fallback.observed(seen)
        assert isinstance(instead, WantedKeys)
        return joined(found).then(instead, NextGatePrefetch.name)

    def end(self, sequence: str) -> None:
        self._numbers.pop(sequence, None)

    def _wanted(self, command: PrefetchCommand) -> WantedKeys:
        tell_eviction(self._eviction, command, self._experts)
        if self._relay is not None:
            command = self._relay(command)
        keys, priorities = wanted_keys(command)
        return WantedKeys([keys], priorities)

    def _number(self, sequence: str) -> int:
        if sequence not in self._numbers:
            self._numbers[sequence] = next(self._next_number)
        return self._numbers[sequence]
