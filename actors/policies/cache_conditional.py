"""Cache-conditional experts (arXiv 2412.00099): the router's choice leans towards experts that are resident."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .registry import PolicyContext, register
from .routing import Ids, Rerouted, RerouteView, Rerouting, RoutingOptions, Weights


@register("routing", "cache-prior")
class CachePrior(Rerouting):
    """Cache-Prior of "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference" (arXiv 2412.00099).

    State: Delta of each layer, the running average over its tokens of max(z) - min(z), z the router's logits.

    Rule: a token's experts are the K greatest of z'_i = z_i + lambda Delta m_i; m_i = 1 where expert i is resident, in
    flight, or among the token's J best by z, which so are always kept, else 0. Weights are the router's own for the
    experts that run. Ties: the token's own picks, then the lower number.

    Rows of a forward take turns as tokens one after the other would: what an earlier row has the layer load is resident
    for the next ones. Prompts are no exception.

    z is the logarithm of the router's probabilities, since differences are all that counts; an expert of probability 0
    takes no part. A token whose picks are not the K most probable experts, as a router with groups or a bias gives
    them, keeps its routing. O(T E log E).

    Args:
        layers: L. strength: lambda. guaranteed: J.
        renormalise: whether the model normalises the weights of the experts that it picks.
    """

    class Options(RoutingOptions):
        refusal: ClassVar[str] = "routing {kind} takes no {keys}"
        kind: str = "cache-prior"
        strength: float = Field(ge=0, le=1, description="lambda: bonus of cached experts, in average ranges of logits")
        guaranteed: int | None = Field(
            default=None, ge=0, description="J: best experts that every token keeps; default: half of top-k, at most 2"
        )

    name: ClassVar[str] = "cache-prior"
    needs_probabilities: bool = True
    traced: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        return cls(context.layers, options.strength, options.guaranteed, context.renormalise)

    def __init__(self, layers: int, strength: float, guaranteed: int | None = None, renormalise: bool = True) -> None:
        self._strength, self._guaranteed, self._renormalise = strength, guaranteed, renormalise
        self._range, self._tokens = np.zeros(layers), np.zeros(layers, np.int64)

    def reroute(
        self, layer: int, ids: Ids, weights: Weights, probabilities: NDArray[np.floating] | None, view: RerouteView
    ) -> Rerouted:
        assert probabilities is not None
        p = np.asarray(probabilities, np.float64)
        z = np.log(p, out=np.full(p.shape, -np.inf), where=p > 0)
        ranges = z.max(axis=1) - np.where(p > 0, z, np.inf).min(axis=1)
        here, (tokens, top_k) = view.available.copy(), ids.shape
        kept = min(2, top_k // 2) if self._guaranteed is None else self._guaranteed
        out: Ids | None = None
        for t in range(tokens):
            self._tokens[layer] += 1
            self._range[layer] += (ranges[t] - self._range[layer]) / self._tokens[layer]
            picked = ids[t]
            if not here[picked].all():
                chosen = self._chosen(layer, z[t], picked, here, kept)
                if chosen is not None:
                    out = ids.copy() if out is None else out
                    out[t] = chosen
                    picked = chosen
            here[picked] = True
        if out is None:
            return Rerouted(ids, weights)
        return Rerouted(out, self._weights(ids, out, weights, p), substituted=int(np.count_nonzero(out != ids)))

    def _chosen(
        self, layer: int, z: NDArray[np.float64], picked: Ids, here: NDArray[np.bool_], kept: int
    ) -> Ids | None:
        """A token's experts, those that stay in their places; None: nothing changes."""
        own = np.zeros(len(z), np.bool_)
        own[picked] = True
        if z[picked].min() < z[~own].max(initial=-np.inf):
            return None
        prior = here.copy()
        prior[picked[np.argsort(-z[picked], kind="stable")[:kept]]] = True
        biased = z + self._strength * self._range[layer] * prior
        best = np.lexsort((np.arange(len(z)), ~own, -biased))[: len(picked)]
        stays = np.isin(picked, best)
        if stays.all():
            return None
        chosen = picked.copy()
        chosen[~stays] = [e for e in best.tolist() if not own[e]]
        return chosen

    def _weights(self, ids: Ids, out: Ids, weights: Weights, p: NDArray[np.float64]) -> Weights:
        """The router's weights of the experts that run: where they change, in the ratio of the probabilities."""
        old, new = np.take_along_axis(p, ids, axis=1), np.take_along_axis(p, out, axis=1)
        scale = weights.sum(axis=1, keepdims=True) / (new if self._renormalise else old).sum(axis=1, keepdims=True)
        changed = (out != ids).any(axis=1, keepdims=True)
        found: Weights = np.where(changed, new * scale, weights).astype(np.float32)
        return found
