"""Runs a prefetch policy: shows it the forward's layers and queues the experts that it wants.

    begin (spans) -> layer: policy.observed -> queue here, post to shards

Everything except `end_sequence` runs on the forward's thread. The policy decides the experts and their order, the cache
finds room, the governor turns prefetch off while too little of it is used.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from ..policies.prefetch import LayerSeen, PrefetchPolicy, Span, Wanted, runs
from ..policies.prefetch_trials import DecodeForward, PrefetchTrials
from ..policies.routing import SequenceRows
from .cache.cache import ExpertCache
from .host_view import Asked, Fetch, LayerView, share

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from .hooks import Native
    from .model.model import MoeBlock, RouterProbe

_UNANNOUNCED = "a forward that was not announced"
_NO_IDS = np.empty((0, 0), np.int64)
See = Callable[[int, Sequence[Span], Any], LayerSeen]  # (layer, spans, view) -> the policy's view


class OtherShards(Protocol):
    """The shards beside this one (`peers.shards.Shards`)."""

    def peer_of(self, key: int) -> object | None:
        """The shard that loads an expert; None: this one."""
        ...

    def prefetch(self, layer: int, keys: Sequence[int]) -> None:
        """Ask their shards to load these."""
        ...


class Prefetching:
    """One policy on one cache, on any executor.

    Args:
        layers, experts: L and E.
        see: makes the policy's view of a layer.
        shards: the other shards; None: there are none. Experts of the next forward are not posted to shards, which
            count forwards by their messages.
        streams: where passes sweep, the policy may stream the next layer: shards do so, too.

    With `adapt`, decode forwards prefetch only while that pays (`policies.prefetch_trials`); the pause holds for whole
    forwards, prompts always prefetch.

    Attributes:
        on_predicted: called once a layer's routing is known with (next layer, predicted scores), if the policy has
            scores. They are [T, E] over the rows of this forward; for layer 0, predicted at the last layer for the next
            forward by policies that wrap, [S, E] over this forward's sequences. Read-only. While it is set, the policy
            is asked even if prefetch is off. It is set between forwards.
    """

    def __init__(
        self, policy: PrefetchPolicy, cache: ExpertCache, layers: int, experts: int, see: See,
        shards: OtherShards | None = None, streams: bool = True,
    ) -> None:  # fmt: skip
        self.policy, self._cache, self._experts, self._shards, self._see = policy, cache, experts, shards, see
        self._last, self.announced = layers - 1, _core.Announced()  # what native code goes by
        self.announced.waits = policy.synchronous
        self.on_predicted: Callable[[int, NDArray[np.floating]], None] | None = None
        self._spans: Sequence[Span] = ()
        self._reach = [self._keys_ahead(index) for index in range(layers)]
        self._trials: PrefetchTrials | None = None
        self._clock: Callable[[], float] = float
        self._before: tuple[int, DecodeForward] | None = None  # resets, and the counters when the last forward began
        self._paused, self._may_stream = False, streams

    def adapt(self, trials: PrefetchTrials, clock: Callable[[], float]) -> None:
        """Pause prefetch in decode forwards where these say so. clock: seconds."""
        self._trials, self._clock = trials, clock
        self._cache.stats.prefetch_trials = trials.result

    def _try(self, trials: PrefetchTrials, rows: int) -> None:
        """A forward begins: measure the one before, and pause for this one if prefetch does not pay."""
        before, self._before, self._paused = self._before, None, False
        if not self._cache.core.decode_only:
            return
        core = self._cache.core
        sums = core.summed
        so_far = DecodeForward(self._clock(), sums.blocked_io_s, sums.bytes_loaded_prefetch, sums.link_s)
        measured = None
        if before is not None and before[0] == core.resets:  # else the counters were reset
            measured = DecodeForward(*map(operator.sub, so_far, before[1]))
        self._before = core.resets, so_far
        self._paused = not trials.next(rows, measured)
        if self._paused:
            self._cache.governor.pause(self._last + 1)

    def begin(self, spans: Sequence[Span]) -> None:
        """The next forward carries these rows."""
        self._spans, self.announced.rests = spans, False
        self.announced.rows, self.announced.always = spans[-1].stop, self._always
        if self._trials is not None:
            self._try(self._trials, spans[-1].stop)
        self._ask(0, self.policy.begin_forward(spans), not self._cache.governor.resting)

    def rest(self) -> None:
        """The next forward, in place of `begin`: nothing is prefetched, and the trials do not compare it."""
        self._spans, self._before, self.announced.rests = (), None, True

    def end_sequence(self, name: str) -> None:
        """A sequence is over."""
        self.policy.end(name)

    def layer(self, index: int, view: Any) -> None:
        """A layer's routing is known and its loads are queued: queue loads for later layers."""
        if self.announced.rests:
            return
        policy, allowed = self.policy, self._cache.governor.allows()
        if self.idle(index, allowed):
            return
        if self._streams and self._cache.core.stream(self._cache.number_of(policy.name)):
            return
        self._ask(index, policy.observed(self._see(index, self._spans, view)), allowed)
        if self.on_predicted is not None and policy.predicted is not None:
            self.on_predicted(0 if index == self._last else index + 1, policy.predicted)
        if index == self._last:
            self.ended()

    def native(self, index: int, to: Native) -> Callable[[], object] | None:
        """As of `hooks.AheadHook`: native code prefetches by scores of later routers."""
        policy, ask = self.policy, to.core.ask_routers
        spec = policy.native() if self._shards is None else None  # else other devices load, too
        if spec is None or (policy.wraps and policy.distance > 1):
            return None
        by = _core.ByScores(spec.votes, spec.top, policy.wraps, policy.streams, self._cache.number_of(policy.name))
        self.announced.always = self._always
        asked = self._asked_ahead(index) if self._reach[index] else []
        if not asked:
            return lambda: ask(-1, 0, 0, by, self.announced)
        if asked[0] is None or any(one != asked[0] for one in asked) or not to.finds(asked[0]):  # not one product
            return None
        return lambda: ask(to.router(asked[0]), (index + 1) % (self._last + 1), len(asked), by, self.announced)

    def idle(self, index: int, allowed: bool) -> bool:
        """Whether a stateless policy need not be asked: prefetch rests, or every expert in its reach is in a slot."""
        return self.policy.stateless and self.announced.idle(self._cache.core, self._reach[index], allowed)

    def _asked_ahead(self, index: int) -> Sequence[Asked | None]:
        """The scores of later layers that a layer reads, by distance."""
        raise NotImplementedError

    @property
    def _streams(self) -> bool:
        return self.policy.streams and self._may_stream and not self._by_parts

    @property
    def _always(self) -> bool:
        """Whether a layer with others in its reach is never `idle`.

        Other shards have governors and slots of their own.
        """
        return self._shards is not None or self._by_parts

    @property
    def _by_parts(self) -> bool:
        """Whether the policy is asked in any case: of a split expert the bottom is loaded for each use, whether or not
        its top is in a slot.
        """
        split = self._cache.split
        bottoms = split is not None and split.buffer_slots > 0 and not self.policy.synchronous
        return bottoms or self.on_predicted is not None

    def _keys_ahead(self, index: int) -> list[tuple[int, int]]:
        """The keys of the layers that the policy prefetches for at a layer: first and end of each stretch."""
        policy, layers, experts = self.policy, self._last + 1, self._experts
        first, stop = index + min(policy.distance, 1), index + policy.distance + 1
        found = [(first * experts, min(stop, layers) * experts)] if first < layers else []
        return [*found, (0, (stop - layers) * experts)] if policy.wraps and stop > layers else found

    def ended(self) -> None:
        """The last layer was observed."""

    def _ask(self, layer: int, wanted: Sequence[Wanted], allowed: bool) -> None:
        """Queue loads behind the demand of `layer`, which counts the waits of a synchronous policy.

        A load does not evict an expert that is wanted more, or in the same run.
        """
        if not wanted:
            return
        cache, nearer, found = self._cache, set[int](), runs(wanted, self._experts)
        theirs: list[int] = []
        if self._shards is not None:
            found, theirs = self._by_owner(self._shards, layer, found)
        if allowed:
            for source, keys in found:
                cache.prefetch(keys, nearer, source or self.policy.name)
                if len(found) > 1:
                    nearer.update(keys)
        if self._shards is not None and theirs and not self._paused:
            self._shards.prefetch(layer, theirs)
        if allowed and self.policy.synchronous:
            cache.core.finish_prefetch([want.key for want in wanted], layer)

    def _by_owner(
        self, shards: OtherShards, layer: int, found: Sequence[tuple[str, list[int]]]
    ) -> tuple[list[tuple[str, list[int]]], list[int]]:
        """The runs of keys that are loaded here, and the keys from `layer` on that shards load."""
        mine: list[tuple[str, list[int]]] = []
        theirs: list[int] = []
        for source, keys in found:
            if keys[0] // self._experts >= layer:
                theirs += [key for key in keys if shards.peer_of(key) is not None]
            mine.append((source, [key for key in keys if shards.peer_of(key) is None]))
        return mine, theirs


class RouterPrefetching(Prefetching):
    """Prefetch for a live model, by its routers' scores and its input embeddings.

    Args:
        policy, cache, experts, shards, streams: as `Prefetching`.
        blocks: the model's MoE layers.
        gates: of layers 0..L-2, for `lookahead(1)` of a policy that `needs_gates`.
        fetch: brings the embeddings' means to the host, once a forward.
    """

    def __init__(
        self,
        policy: PrefetchPolicy,
        cache: ExpertCache,
        blocks: Sequence[MoeBlock],
        experts: int,
        shards: OtherShards | None = None,
        gates: Sequence[RouterProbe] | None = None,
        fetch: Fetch = share,
        streams: bool = True,
    ) -> None:
        super().__init__(policy, cache, len(blocks), experts, self._seen, shards, streams)
        self._routers, self._fetch = [block.router for block in blocks], fetch
        self._scores = self._ahead(gates)  # of each layer, by distance
        self._own = [None if router is None else Asked(router, softmax=True) for router in self._routers]
        self._rows: Sequence[SequenceRows] = ()
        self._embedded: torch.Tensor | None = None
        self._ended: deque[str] = deque()

    def watch_embeddings(self, model: torch.nn.Module) -> None:
        """Hook the model's input embeddings for a policy that needs them."""
        if self.policy.needs_embeddings:
            model.get_input_embeddings().register_forward_hook(self._see_embeddings)

    def begin_forward(self, rows: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows."""
        while self._ended:
            self.policy.end(self._ended.popleft())
        self._rows, self._embedded, self.announced.rows = rows, None, 0
        self.announced.always = self._always
        if not self.policy.needs_embeddings:
            self._begin_rows(None)

    def rest(self) -> None:
        super().rest()
        self._rows, self._embedded, self.announced.rows = (), None, 0

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread."""
        self._ended.append(name)

    def asks(self, layer: int, tokens: int) -> list[Asked]:
        """The scores that `layer` reads, as far as known before (`host_view.Asker`)."""
        policy = self.policy
        if self.announced.rests or self.idle(layer, not self._cache.governor.resting):
            return []
        if self._streams and self._cache.core.may_sweep(tokens):  # a row has a pair or more
            return []
        found = [self._lookahead(layer, distance, tokens) for distance in range(1, policy.looks_ahead + 1)]
        if policy.needs_probabilities:
            found.append(self._own[layer])
        return [asked for asked in found if asked is not None]

    def _asked_ahead(self, index: int) -> Sequence[Asked | None]:
        return self._scores[index] or [self._lookahead(index, 1, 1)]

    def ended(self) -> None:
        self._rows, self.announced.rows = (), 0

    def _announced(self, tokens: int) -> bool:
        return tokens > 0 and self.announced.rows == tokens

    def _seen(self, index: int, spans: Sequence[Span], view: LayerView) -> LayerSeen:
        policy, probabilities = self.policy, None
        by_spans = policy.wraps or (index == 0 and not policy.stateless)
        if by_spans and not self._announced(view.tokens):
            self._begin_unannounced(view.tokens)
            spans = self._spans

        def lookahead(distance: int) -> NDArray[np.floating] | None:
            asked = self._lookahead(index, distance, view.tokens)
            if asked is None:
                return None
            found = view.scores(asked)
            return found if found.ndim == 2 else found[:, distance - 1]  # of [T, D, E]

        if policy.needs_probabilities:
            own = self._own[index]
            probabilities = None if own is None else view.scores(own)
        return LayerSeen(index, spans, view.picked if policy.needs_ids else _NO_IDS, probabilities, lookahead)

    def _ahead(self, gates: Sequence[RouterProbe] | None) -> list[list[Asked | None]]:
        """The scores of the later layers on each layer's input, by distance: as one product where it can be."""
        from ...kernels.router import windows

        policy, layers = self.policy, len(self._routers)
        distance, found = policy.distance if policy.needs_lookahead else 0, list[list[Asked | None]]()
        together = windows(self._routers, distance) if distance > 1 else [None] * layers
        for layer, window in enumerate(together):
            probes = [window or router for router in self._routers[layer + 1 : layer + 1 + distance]]
            if gates is not None and probes:
                probes[0] = gates[layer]
            found.append([None if p is None else Asked(p, policy.lookahead_softmax) for p in probes])
        return found

    def _lookahead(self, index: int, distance: int, tokens: int) -> Asked | None:
        """The scores that have those of the layer `distance` after this one. tokens: rows of the forward."""
        found = self._scores[index]
        if distance <= len(found):
            return found[distance - 1]
        layer, policy = index + distance, self.policy
        if layer > self._last:
            if not policy.wraps:
                return None
            layer %= self._last + 1
        probe = self._routers[layer]
        rows = self._last_rows(tokens) if index + distance > self._last else ()
        return None if probe is None else Asked(probe, policy.lookahead_softmax, rows)

    def _last_rows(self, tokens: int) -> tuple[int, ...]:
        """The last row of each sequence; empty: each has one row."""
        if not self._announced(tokens):
            return (tokens - 1,) if tokens > 1 else ()
        return tuple([span.stop - 1 for span in self._spans]) if len(self._spans) != tokens else ()

    def _begin_rows(self, embedded: torch.Tensor | None) -> None:
        """Begin the forward for the policy; embedded: its rows' input embeddings [T, H]."""
        rows = self._rows
        means = None if embedded is None else self._fetch((_span_means(embedded, rows),))[0]
        self._spans = [
            Span(row.name, row.start, row.stop, row.decode, None if means is None else means[i])
            for i, row in enumerate(rows)
        ]
        if rows:
            self.announced.last_rows = len(rows) == rows[-1].stop
            self.begin(self._spans)

    def _begin_unannounced(self, tokens: int) -> None:
        """A forward outside the batcher: one sequence, which ends with it."""
        self._rows = (SequenceRows(_UNANNOUNCED, 0, tokens, decode=False),)
        embedded = self._embedded
        self._begin_rows(embedded if embedded is not None and len(embedded) == tokens else None)
        self._ended.append(_UNANNOUNCED)

    def _see_embeddings(self, module: torch.nn.Module, args: tuple[object, ...], output: torch.Tensor) -> None:
        self._embedded = output.detach().reshape(-1, output.shape[-1])  # [T, H]
        if not self.announced.rows and self._rows and self._rows[-1].stop == len(self._embedded):
            self._begin_rows(self._embedded)


def _span_means(embedded: torch.Tensor, rows: Sequence[SequenceRows]) -> torch.Tensor:
    """The mean of each sequence's rows [S, H] of embedded [T, H]."""
    import torch

    if len(rows) != rows[-1].stop:
        embedded = torch.stack([embedded[row.start : row.stop].float().mean(dim=0) for row in rows])
    return embedded.float()
