"""Two sources of guesses joined by how often each was right: expert maps and the next layers' routers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import LayerSeen, Span, Wanted
from .next_gate import predicted_experts

MAP, GATE = "expert-map", "next-gate"
_BOTH = "both"


class BlendPrefetch:
    """What several sources want of one layer, merged by their measured precision per layer and distance. Ours.

    State: per source, layer and distance how many guesses were made and how many were right, both fading by `fade` at
    each forward's guess; the guesses of maps for the layers ahead; all guesses of the forward under way, to be judged.

    Rule: a source's precision at a layer and distance is (right + 1) / (guessed + 2). Of a layer ahead, an expert is
    wanted with probability 1 - prod(1 - precision) over the sources that name it; of those the most probable are asked
    for, as many as the more precise source names. Priority: that probability over the distance. A map's distance is
    that at which its guess came. Cost: `distance` router runs per layer.

    Args:
        layers, experts: L and E. top: experts per token that a router picks. distance: layers ahead.
        fade: weight of the past at each new guess, in (0, 1].
    """

    def __init__(self, layers: int, experts: int, top: int, distance: int, fade: float = 0.98) -> None:
        self._layers, self._experts, self._top, self._fade = layers, experts, top, fade
        self.distance = distance
        self._right: dict[tuple[str, int, int], float] = {}
        self._guessed: dict[tuple[str, int, int], float] = {}
        self._mapped: dict[int, tuple[int, list[int]]] = {}  # layer -> distance and keys of the newest map's guess
        self._open: dict[tuple[str, int, int], set[int]] = {}

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        """Forget what was guessed for a forward that is over or broke off."""
        self._mapped, self._open = {}, {}
        return []

    def precision(self, source: str, layer: int, distance: int) -> float:
        """Share of a source's guesses for `layer`, made `distance` before it, that were right; 0.5 while unknown."""
        place = (source, layer, distance)
        return (self._right.get(place, 0.0) + 1.0) / (self._guessed.get(place, 0.0) + 2.0)

    def merged(self, seen: LayerSeen, mapped: Sequence[Wanted]) -> list[Wanted]:
        """Judge the guesses for this layer, take in those of maps that have just come, and say what is wanted now.

        Args:
            mapped: most wanted first.
        """
        self._judge(seen)
        for layer, keys in _by_layer(mapped, self._experts).items():
            if layer > seen.layer:
                self._mapped[layer] = (layer - seen.layer, keys)
                self._open[MAP, layer, layer - seen.layer] = set(keys)
        wanted: list[Wanted] = []
        for layer in range(seen.layer + 1, min(seen.layer + 1 + self.distance, self._layers)):
            wanted += self._of_layer(seen, layer)
        return sorted(wanted, key=lambda want: (-want.priority, want.key))

    def _of_layer(self, seen: LayerSeen, layer: int) -> list[Wanted]:
        ahead, base = layer - seen.layer, layer * self._experts
        guesses: list[tuple[str, float, list[int]]] = []
        scores = seen.lookahead(ahead)
        if scores is not None:
            keys = [base + e for e in predicted_experts(scores, self._top)]
            self._open[GATE, layer, ahead] = set(keys)
            guesses.append((GATE, self.precision(GATE, layer, ahead), keys))
        if layer in self._mapped:
            at, keys = self._mapped[layer]
            guesses.append((MAP, self.precision(MAP, layer, at), keys))
        if not guesses:
            return []
        missed: dict[int, float] = {}
        sources: dict[int, str] = {}
        for source, precision, keys in guesses:
            for key in keys:
                missed[key] = missed.get(key, 1.0) * (1.0 - precision)
                sources[key] = _BOTH if key in sources else source
        most = len(max(guesses, key=lambda guess: guess[1])[2])
        best = sorted(missed, key=lambda key: missed[key])[:most]  # stable: a source's own order decides among equals
        return [Wanted(key, (1.0 - missed[key]) / ahead, sources[key]) for key in best]

    def _judge(self, seen: LayerSeen) -> None:
        done = [place for place in self._open if place[1] == seen.layer]
        if not done:
            return
        base = seen.layer * self._experts
        picked = {base + e for e in np.unique(seen.ids).tolist()}
        for place in done:
            keys = self._open.pop(place)
            self._right[place] = self._fade * self._right.get(place, 0.0) + len(keys & picked)
            self._guessed[place] = self._fade * self._guessed.get(place, 0.0) + len(keys)
        self._mapped.pop(seen.layer, None)


def _by_layer(wanted: Sequence[Wanted], experts: int) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for want in wanted:
        out.setdefault(want.key // experts, []).append(want.key)
    return out
