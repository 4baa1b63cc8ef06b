"""Runs the rules that change a layer's routing: rerouting, and low-bit replicas in place of missing experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError
from ..policies.foreign import is_ours
from ..policies.hobbit import MixedPrecision
from ..policies.residency import State
from ..policies.routing import NativeRule, RerouteView, Rerouting
from .cache.cache import ExpertCache
from .hooks import NO_KEYS, View
from .host_view import Asked

if TYPE_CHECKING:
    from .hooks import Native
    from .model.model import MoeBlock


def reroute_view(cache: ExpertCache, layer: int, top_k: int) -> RerouteView:
    """One layer's cache as a rerouting rule sees it."""
    available, slots = cache.occupancy(layer)
    free = slots - int(np.count_nonzero(available))
    return RerouteView(available, free, top_k, cache.vacant(layer), None, None, cache.residency.emptied)


class Rerouter:
    """One rerouting rule on one engine, on the forward's thread; counts `substitutions` and `dropped`.

    Args:
        blocks: the model's MoE layers. top_k: of their routers.
        joined: a layer's view with what the other shards hold (`PeerCaches.join`); None: there are none.

    Raises:
        ConfigError: the rule needs probabilities that a layer does not expose.
    """

    def __init__(
        self,
        rule: Rerouting,
        cache: ExpertCache,
        blocks: Sequence[MoeBlock],
        top_k: int,
        joined: Callable[[int, RerouteView], RerouteView] | None = None,
    ) -> None:
        mute = [layer for layer, block in enumerate(blocks) if block.router is None]
        if rule.needs_probabilities and mute:
            raise ConfigError(
                f"{rule.name} routing goes by the router's probabilities, which MoE layer {mute[0]} does not expose",
                "choose a policy with exact routing",
            )
        self.rule, self._cache, self._top_k, self._joined = rule, cache, top_k, joined
        self._asked = [
            Asked(block.router, softmax=True) if rule.needs_probabilities and block.router is not None else None
            for block in blocks
        ]

    def asks(self, layer: int, tokens: int) -> list[Asked]:
        """The scores that `layer` reads (`host_view.Asker`)."""
        asked = self._asked[layer]
        return [] if asked is None else [asked]

    def layer(self, index: int, view: View) -> frozenset[int]:
        """Apply the rule to the view's routing."""
        rule, now = self.rule, self._view(index)
        if rule.keeps(view.picked, now):
            return NO_KEYS
        asked = self._asked[index] if rule.needs_probabilities else None
        probabilities = None if asked is None else view.scores(asked)  # type: ignore[attr-defined]  # of a `LayerView`
        found = rule.reroute(index, view.picked, view.weights, probabilities, now)
        if found.substituted or found.dropped:
            self._cache.core.rerouted(found.substituted, found.dropped)
            view.reroute(found.ids, found.weights, dropped=found.dropped > 0)
        return NO_KEYS

    def native(self, index: int, to: Native) -> Callable[[], object] | None:
        """As of `hooks.RerouteHook`: the pass calls a native rule itself.

        Not one that goes by other GPUs' caches, too, nor a class from outside of this repository, which may have
        changed what it inherits: `layer` calls these.
        """
        rule, asked = self.rule, self._asked[index]
        if self._joined is not None or not isinstance(rule, NativeRule) or not is_ours(type(rule)):
            return None
        if asked is not None and not to.finds(asked):
            return None
        return lambda: to.core.rule(rule.handle, to.router(asked))

    def _view(self, layer: int) -> RerouteView:
        own = reroute_view(self._cache, layer, self._top_k)
        return own if self._joined is None else self._joined(layer, own)


def report_link_speed(rule: Rerouting, cache: ExpertCache) -> None:
    """Report the measured bytes per busy second of link to a rule; nothing before the first copy."""
    link_s = cache.core.summed.link_s
    if link_s > 0:
        rule.measured(cache.bytes_loaded / link_s)


class LowBits:
    """One mixed-precision rule on one engine. cache: with a `LowBitPart`. experts: of a layer."""

    def __init__(self, rule: MixedPrecision, cache: ExpertCache, experts: int) -> None:
        self.rule, self._cache, self._experts = rule, cache, experts
        self._keys = cache.where.keys

    def native(self, index: int, to: Native) -> None:
        """As of `hooks.RerouteHook`: it is Python's."""
        return None

    def layer(self, index: int, view: View) -> frozenset[int]:
        """The keys of experts that run on a replica; dropped pairs leave the view's routing."""
        residency, base, keys = self._cache.residency, index * self._experts, self._keys

        def full(expert: int) -> bool:
            return residency.state(base + expert) != State.ABSENT

        picked = view.ids
        if all(map(full, set(picked.ravel().tolist()))):
            return NO_KEYS
        found = self.rule.decide(
            picked, view.weights, full, lambda e: residency.state(keys + base + e) != State.ABSENT
        )  # fmt: skip
        if found.low:
            pairs = int(np.isin(found.ids, list(found.low)).sum())
            self._cache.stats.layers[index].low_bit_pairs += pairs
        if found.dropped:
            self._cache.core.rerouted(0, found.dropped)
            view.reroute(found.ids, found.weights, dropped=True)
        return frozenset([base + expert for expert in found.low])
