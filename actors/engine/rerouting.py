"""What a rerouting rule is told of one layer, on every executor.

Rerouting carried out: shows a rule the routing and the cache, and hands the layer what it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError
from ..policies.activeevict import BudgetAwareTopK
from ..policies.adapmoe import AdaptiveGating
from ..policies.residency import State
from ..policies.routing import RerouteView, Rerouting
from ..policy_settings import PolicySettings
from ..store.artifacts import PolicyArtifacts
from .cache.cache import ExpertCache
from .host_view import Asked, LayerView

if TYPE_CHECKING:
    from .model.model import MoeBlock
    from .peers.shards import PeerCaches

def reroute_view(cache: ExpertCache, layer: int, top_k: int) -> RerouteView:
    """Of a layer, as things stand."""
    states, slots = cache.standing(layer)
    available = np.array([state != State.ABSENT for state in states])
    free = slots - int(np.count_nonzero(available))
    return RerouteView(available, free, top_k, cache.vacant(layer))


_NOWHERE = np.zeros(0, np.bool_)


class Rerouter:
    """One rule on one engine. Runs on the forward's thread, after arrivals were looked for and before the plan.

    Args:
        rule: decides. cache: of the lead; its counters `substitutions` and `dropped` are filled.
        blocks: the model's MoE layers. top_k: of their routers.
        peers: the other shards' caches; None where there are none.

    Raises:
        ConfigError: the rule goes by probabilities that a layer does not expose.
    """

    def __init__(
        self,
        rule: Rerouting,
        cache: ExpertCache,
        blocks: Sequence[MoeBlock],
        top_k: int,
        peers: PeerCaches | None = None,
    ) -> None:
        mute = [layer for layer, block in enumerate(blocks) if block.router is None]
        if rule.needs_probabilities and mute:
            raise ConfigError(
                f"{rule.name} routing goes by the router's probabilities, which MoE layer {mute[0]} does not expose",
                "choose a policy with exact routing",
            )
        self.rule, self._cache, self._top_k, self._peers = rule, cache, top_k, peers
        self._asked = [
            Asked(block.router, softmax=True) if rule.needs_probabilities and block.router is not None else None
            for block in blocks
        ]

    def asks(self, layer: int, tokens: int) -> list[Asked]:
        """The scores that `layer` will look at (`host_view.Asker`)."""
        asked = self._asked[layer]
        return [] if asked is None else [asked]

    def layer(self, index: int, view: LayerView) -> bool:
        """Let the view have the routing to carry out for what the model picked; False: it stays the model's.

        A place that no token uses any more is left out, so ids and weights may become [T, K'], 1 <= K' <= K.
        """
        rule, asked = self.rule, self._asked[index]
        probabilities = None if asked is None else view.scores(asked)
        found = rule.reroute(index, view.picked, view.weights, probabilities, self._view(index))
        if not found.substituted and not found.dropped:
            return False
        stats = self._cache.stats
        stats.substitutions += found.substituted
        stats.dropped += found.dropped
        new_ids, new_weights = found.ids, found.weights
        if found.dropped:
            used = new_weights.any(axis=0)  # [K]
            if used.any() and not used.all():
                new_ids, new_weights = new_ids[:, used], new_weights[:, used]
        view.reroute(np.ascontiguousarray(new_ids), np.ascontiguousarray(new_weights))
        return True

    def _view(self, layer: int) -> RerouteView:
        if not self.rule.needs_view:
            return RerouteView(_NOWHERE, 0, self._top_k)
        own = reroute_view(self._cache, layer, self._top_k)
        return own if self._peers is None else self._peers.join(layer, own)


def make_rerouting(
    policy: PolicySettings, layers: int, normalised: bool, artifacts: PolicyArtifacts
) -> Rerouting | None:
    """The rule that a policy's `routing` and `on_miss` name; None where routing stays the model's.

    Args:
        normalised: whether the model normalises the weights of the experts that it picks.

    Raises:
        ConfigError: what `tiermoe prepare` measures for the rule was not given, or is of another model.
    """
    routing = policy.routing
    if routing.kind == "exact":
        return None
    if routing.kind == "budget-aware":
        return BudgetAwareTopK(normalised, routing.narrowest)
    sensitivity = artifacts.sensitivity
    if sensitivity is None or len(sensitivity) != layers:
        raise ConfigError(
            f"policy '{policy.name}' needs the sensitivity of {layers} layers",
            "measure it with `tiermoe prepare MODEL --sensitivity TEXT`",
        )
    return AdaptiveGating(sensitivity, routing.threshold or 0.0, normalised)
