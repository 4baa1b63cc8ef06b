"""Routing: the locality of the default model's routing, traces of other shapes with the same locality, their replay.

    recorded routing of a small model -> Locality -> Stickiness (fitted) -> trace for a model of any shape -> replay

The measured models have random weights, so a trace replaces their routers' choices, for ours and for the references
alike. It reproduces the shares of use (resampled to the other number of experts, in another order in each layer), the
reuse (hit rates of LRU caches of several sizes, by which the process is fitted), the router's confidence (mean sorted
probabilities), and how well a later layer is predicted (recall of its router on an earlier layer's hidden state). It
does not reproduce which experts of two layers go together, so a policy that follows trajectories, such as fMoE, finds
nothing there.

The routers run, for their time; a hook on the experts modules replaces their choices. A later layer's router that is
asked ahead of time computes its product, and answers with the trace's logits at the recall of that distance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiermoe.actors.engine.model.model import ExpertLayer, RouterProbe, attach, blocks_at, detach
from tiermoe.actors.policies.buddymoe.buddies import Coactivations, ExpertProfile, Outputs, entropy_counts, renormalised
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.errors import CheckpointError

from .models import experts_modules

FRACTIONS = (0.1, 0.25, 0.5, 0.75)  # of a layer's experts that an LRU cache holds
SHARES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
DECAYS = (0.0, 0.5, 0.8, 0.9, 0.97)
_FIT_TOKENS = 192
_MARGIN = 0.1  # logits between picked and other experts: more than bfloat16 rounds away

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Locality:
    """The locality of a recorded routing.

    Attributes:
        popularity: [E], shares of a layer's uses, descending, mean over layers.
        probabilities: [E], a token's router probabilities, descending, mean over tokens and layers.
        hit_rates: of an LRU cache of `FRACTIONS` of each layer's experts.
        recalls: share of a layer's experts that its router picks on the hidden state of 1, 2, ... layers before.
        top_k: experts per token.
    """

    popularity: tuple[float, ...]
    probabilities: tuple[float, ...]
    hit_rates: tuple[float, ...]
    recalls: tuple[float, ...]
    top_k: int


@dataclass(frozen=True)
class Stickiness:
    """How a token's experts depend on earlier ones: p = (1 - share) popularity + share recent use.

    Attributes:
        decay: weight of a use after one more token; 0: only the previous token counts.
        error: root mean square difference of the hit rates to the recorded ones.
        hit_rates: of the fitted process, at the recorded shape.
    """

    share: float
    decay: float
    error: float
    hit_rates: tuple[float, ...]


@dataclass(frozen=True)
class RoutingTrace:
    """Routing of T tokens in L layers of E experts, K of which a token uses.

    Attributes:
        ids: int64 [T, L, K], most probable first.
        logits: float32 [T, L, E], log-probabilities that agree with `ids`.
    """

    ids: Ids
    logits: Floats


def lru_hit_rates(ids: Ids, experts: int, fractions: Sequence[float] = FRACTIONS) -> tuple[float, ...]:
    """Hit rates of one LRU cache per layer with a share of its experts, at least K, on ids [T, L, K].

    The first half of the tokens warms the caches.
    """
    tokens, layers, top_k = ids.shape
    last = np.full((layers, experts), -1.0)
    last -= np.arange(experts) * 1e-6  # a fixed order of those that were never used
    slots = [max(top_k, round(share * experts)) for share in fractions]
    hits, asked = np.zeros(len(slots)), 0
    rows = np.arange(layers)[:, None]
    for t in range(tokens):
        chosen = ids[t]  # [L, K]
        if 2 * t >= tokens:
            used = last[rows, chosen]
            depth = (last[:, None, :] > used[:, :, None]).sum(axis=2)  # experts used since [L, K]
            known = used >= 0
            hits += [(known & (depth < size)).sum() for size in slots]
            asked += chosen.size
        last[rows, chosen] = t + np.arange(top_k) * 1e-3
    return tuple((hits / max(1, asked)).tolist())


def popularity_of(ids: Ids, experts: int) -> tuple[float, ...]:
    """Shares of the uses of ids [T, L, K], descending, mean over layers."""
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])])
    shares = np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)[:, ::-1]
    return tuple(shares.mean(axis=0).tolist())


def recall(predicted: Ids, picked: Ids) -> float:
    """Share of picked [N, K] that is in predicted [N, K]."""
    return float((predicted[:, :, None] == picked[:, None, :]).any(axis=1).mean())


def resampled(curve: Sequence[float], size: int) -> NDArray[np.float64]:
    """A descending curve of shares for another number of experts: the same Lorenz curve, normalised [size]."""
    cumulative = np.concatenate([[0.0], np.cumsum(curve)])
    positions = np.linspace(0.0, 1.0, len(cumulative))
    shares = np.diff(np.interp(np.linspace(0.0, 1.0, size + 1), positions, cumulative))
    return np.asarray(shares / shares.sum(), np.float64)


def draw(
    locality: Locality, share: float, decay: float, tokens: int, layers: int, experts: int, top_k: int, seed: int
) -> RoutingTrace:
    """A routing of any shape: each token draws K distinct experts of each layer, as `Stickiness` describes.

    Raises:
        ValueError: a layer has fewer experts than a token uses.
    """
    if not 0 < top_k <= experts:
        raise ValueError(f"a token cannot use {top_k} of {experts} experts")
    rng = np.random.default_rng(seed)
    curve = resampled(locality.popularity, experts)
    popularity = np.stack([rng.permutation(curve) for _ in range(layers)])  # [L, E]
    profile = np.log(np.maximum(resampled(locality.probabilities, experts), 1e-6))
    profile[:top_k] += _MARGIN
    recent = popularity.copy()
    ids = np.empty((tokens, layers, top_k), np.int64)
    logits = np.empty((tokens, layers, experts), np.float32)
    rows = np.arange(layers)[:, None]
    for t in range(tokens):
        chance = (1.0 - share) * popularity + share * recent / recent.sum(axis=1, keepdims=True)
        scores = np.log(np.maximum(chance, 1e-9)) + rng.gumbel(size=chance.shape)  # the top K: K draws without repeat
        order = np.argsort(-scores, axis=1, kind="stable")
        ids[t] = order[:, :top_k]
        logits[t][rows, order] = profile
        recent *= decay
        recent[rows, ids[t]] += 1.0
    return RoutingTrace(ids, logits)


def fit(locality: Locality, layers: int, seed: int = 0) -> Stickiness:
    """The share and decay whose LRU hit rates, at the recorded shape, are nearest to the recorded ones."""
    experts = len(locality.popularity)
    best: Stickiness | None = None
    for share, decay in itertools.product(SHARES, DECAYS):
        trace = draw(locality, share, decay, _FIT_TOKENS, layers, experts, locality.top_k, seed)
        rates = lru_hit_rates(trace.ids, experts)
        error = float(np.sqrt(np.mean(np.square(np.subtract(rates, locality.hit_rates)))))
        if best is None or error < best.error:
            best = Stickiness(share, decay, error, rates)
    assert best is not None
    return best


def predicted_logits(trace: RoutingTrace, recall_share: float, seed: int) -> Floats:
    """Logits [T, L, E] whose K greatest agree with the trace's choice at this recall.

    Each expert of a token's choice is missed with probability 1 - recall_share, and replaced by the next in order.
    """
    tokens, layers, top_k = trace.ids.shape
    rng = np.random.default_rng(seed)
    order = np.argsort(-trace.logits, axis=2, kind="stable")  # [T, L, E]
    profile = np.take_along_axis(trace.logits, order, axis=2)
    right = rng.random((tokens, layers, top_k)) < recall_share
    missed = top_k - right.sum(axis=2, keepdims=True)  # [T, L, 1]
    place = np.broadcast_to(np.arange(order.shape[2]), order.shape)
    predicted = (place >= top_k) & (place < top_k + missed)
    predicted[:, :, :top_k] = right
    new = np.take_along_axis(order, np.argsort(~predicted, axis=2, kind="stable"), axis=2)
    out = np.empty_like(trace.logits)
    np.put_along_axis(out, new, profile, axis=2)
    return out


DISTANCES = 3  # layers ahead that a router is asked


@torch.no_grad()
def record_locality(device: torch.device, documents: int = 8, tokens: int = 96) -> tuple[Locality, int]:
    """The locality of the default model's routing on held-out text, and its MoE layers.

    A later layer's router is asked on the input of this layer's experts, as next-gate prefetch does.

    Raises:
        CheckpointError: the model ships too little held-out text, or has a router that cannot be asked.
    """
    from transformers import AutoModelForCausalLM

    folder = default_model_dir()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    names = experts_modules(model)
    experts = int(model.get_submodule(names[0]).gate_up_proj.shape[0])
    routers = [block.router for block in blocks_at(model, names, experts)]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, ids = (*args, *kwargs.values())[:2]
        seen.append((hidden.reshape(-1, hidden.shape[-1]), ids))

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(see, with_kwargs=True)
    parts, probabilities = [], []
    recalls: list[list[float]] = [[] for _ in range(DISTANCES)]
    for prompt in heldout_prompts(folder, documents, tokens):
        seen.clear()
        model(torch.tensor([prompt], device=device), use_cache=False)
        ids = [picked.cpu().numpy().astype(np.int64) for _, picked in seen]
        parts.append(np.stack(ids, axis=1))  # [T, L, K]
        for layer, (hidden, _) in enumerate(seen):
            for distance in range(min(DISTANCES + 1, len(names) - layer)):
                router = routers[layer + distance]
                if router is None:
                    raise CheckpointError("the model's routers cannot be asked", "use the default model")
                scores = router(hidden).float()
                if distance == 0:
                    probabilities.append(torch.softmax(scores, -1).sort(-1, descending=True)[0].mean(0).cpu())
                    continue
                predicted = scores.topk(ids[0].shape[1], dim=-1)[1].cpu().numpy()
                recalls[distance - 1].append(recall(predicted, ids[layer + distance]))
    found = np.concatenate(parts)
    return Locality(
        popularity_of(found, experts), tuple(torch.stack(probabilities).mean(0).tolist()),
        lru_hit_rates(found, experts), tuple(float(np.mean(values)) for values in recalls), found.shape[2],
    ), len(names)  # fmt: skip


_OWN = 1e-4  # of the router's own logits: a product that is computed and changes no order


class Replay:
    """One trace on one model.

    Args:
        trace: at least as many tokens as will run, as many layers as the model has MoE layers.
        recalls: of distances 1, 2, ...
        weights: [E, H] of each layer's router.
        device, dtype: of the model's hidden states.
    """

    def __init__(
        self,
        trace: RoutingTrace,
        recalls: Sequence[float],
        weights: Sequence[torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        top_k = trace.ids.shape[2]
        logits = torch.from_numpy(trace.logits)
        chosen = torch.softmax(logits, -1).gather(2, torch.from_numpy(trace.ids))
        scale = chosen.sum(-1, keepdim=True)

        def by_layer(table: torch.Tensor, to: torch.dtype) -> torch.Tensor:
            return table.transpose(0, 1).contiguous().to(device=device, dtype=to)  # [L, T, ...]

        self._ids = by_layer(torch.from_numpy(trace.ids), torch.int64)
        self._weights = by_layer(chosen / scale, dtype)
        self._weights_f32 = self._weights.float()
        tables = [trace.logits, *(predicted_logits(trace, share, seed) for seed, share in enumerate(recalls, start=1))]
        self._tables = [by_layer(torch.from_numpy(table), dtype) for table in tables]
        self._routers = [weight.to(dtype).t() for weight in weights]  # [H, E]
        self.tokens, self.layers, self.top_k = trace.ids.shape[0], trace.ids.shape[1], top_k
        self._rows = 0
        self._now: slice | torch.Tensor = slice(0, 0)  # tokens of the trace in the current forward
        self._next: slice | torch.Tensor = slice(0, 0)  # and in the one after it
        self._layer = 0
        self._hooks: list[Any] = []

    def begin(self, position: int, rows: int, batch: int = 1) -> None:
        """The next forward runs tokens position to position + rows of the trace.

        Args:
            batch: sequences side by side, each of which begins at another token of the trace, which repeats.

        Raises:
            ValueError: the trace is shorter.
        """
        if position + rows > self.tokens:
            raise ValueError(f"the trace has {self.tokens} tokens, not {position + rows}")
        self._rows = batch * rows
        if batch == 1:
            self._now = slice(position, position + rows)
            start = min(position + rows, self.tokens - rows)
            self._next = slice(start, start + rows)
            return
        device = self._ids.device
        starts = torch.arange(batch, device=device)[:, None] * (self.tokens // batch)
        at = (position + starts + torch.arange(rows, device=device)).flatten()
        self._now, self._next = at % self.tokens, (at + rows) % self.tokens

    def attach(self, modules: Sequence[Any]) -> None:
        """Replace the routing of these experts modules, one per layer, until `close`."""
        for layer, module in enumerate(modules):
            self._hooks.append(module.register_forward_pre_hook(self._replace(layer), with_kwargs=True))

    def inside(self, modules: Sequence[Any], layers: Sequence[ExpertLayer]) -> ExitStack:
        """The same inside the experts' operator, so that the modules around it can be compiled.

        Args:
            modules: experts modules that an engine runs; attached to its layers until the stack closes.
            layers: of the engine.
        """
        attached = ExitStack()
        for i, (module, layer) in enumerate(zip(modules, layers, strict=True)):
            attached.callback(detach, attach(module, _ReplayedLayer(self, i, layer)))
        return attached

    def routing(self, layer: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and weights [T, K] of a layer in the current forward; weights in the dtype of the given ones."""
        self._layer = layer
        table = self._weights if weights.dtype == self._weights.dtype else self._weights_f32
        return self._ids[layer, self._now], table[layer, self._now]

    def probes(self) -> list[RouterProbe]:
        """The replacement of each layer's router, for predictions."""
        return [self._probe(layer) for layer in range(self.layers)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _replace(self, layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            hidden, _, weights = (*args, *kwargs.values())[:3]
            return (hidden, *self.routing(layer, weights)), {}

        return hook

    def _probe(self, layer: int) -> RouterProbe:
        weight = self._routers[layer]

        def probe(hidden: torch.Tensor) -> torch.Tensor:
            """hidden [T, H] -> logits [T, E]."""
            distance = layer - self._layer
            wraps = distance < 0  # the next forward's
            table = self._tables[-1 if wraps else min(distance, len(self._tables) - 1)]
            rows = table[layer, self._next if wraps else self._now]
            rows = rows[: len(hidden)]  # a policy may ask about some of the rows
            return torch.addmm(rows, hidden.to(weight.dtype), weight, alpha=_OWN)

        return probe


class _ReplayedLayer:
    def __init__(self, replay: Replay, index: int, layer: ExpertLayer) -> None:
        self._replay, self._index, self._inner = replay, index, layer

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._inner.forward(hidden, *self._replay.routing(self._index, weights))


def profile_of(trace: RoutingTrace, seed: int = 0) -> ExpertProfile:
    """The statistics of a trace that BuddyMoE's presets read; products of outputs, which it lacks, are random."""
    (_, layers, _), experts = trace.ids.shape, trace.logits.shape[2]
    counts, entropies = [], []
    for layer in range(layers):
        ids = trace.ids[:, layer]
        shares = renormalised(np.exp(np.take_along_axis(trace.logits[:, layer], ids, axis=1)))
        counts.append(Coactivations(experts))
        counts[-1].add(ids, shares)
        entropies.append(entropy_counts(shares, np.ones(len(ids))))
    norms = np.random.default_rng(seed).uniform(1.0, 2.0, (layers, experts, experts))
    return ExpertProfile(
        np.stack([c.activations for c in counts]), np.stack([c.binary for c in counts]),
        np.stack([c.weighted for c in counts]), np.stack(entropies), Outputs(norms / 2, norms),
    )  # fmt: skip
