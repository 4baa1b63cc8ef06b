"""Routing of the measured models: drawn by the simulator's generator at their shape, and replayed.

The measured models have random weights, so a trace replaces their routers' choices, for ours and for the references
alike. It is of a family of `simulate.synthetic`, which is held to published figures of reuse, popularity and recall.

The routers run, for their time; a hook on the experts modules replaces their choices. A later layer's router that is
asked ahead of time computes its product, and answers with the trace's logits at the recall of that distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiermoe.actors.engine.model.model import ExpertLayer, RouterProbe, attach, detach
from tiermoe.actors.policies.buddymoe.buddies import Coactivations, ExpertProfile, Outputs, entropy_counts, renormalised
from tiermoe.cluster.simulate.synthetic import FAMILIES, Generator, agreement, blurred, top

FAMILY = "sticky"  # of the decode of Qwen3-30B-A3B, as reported
DISTANCES = 3  # layers ahead that a router is asked
_MARGIN = 0.1  # logits between picked and other experts: more than bfloat16 rounds away

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RoutingTrace:
    """Routing of T tokens in L layers of E experts, K of which a token uses.

    Attributes:
        ids: int64 [T, L, K], most probable first.
        logits: float32 [T, L, E], whose K greatest are `ids`.
        ahead: the same as routers 1, 2, .. layers before foresee it.
    """

    ids: NDArray[np.int64]
    logits: Floats
    ahead: tuple[Floats, ...]


def draw(tokens: int, layers: int, experts: int, top_k: int, seed: int) -> RoutingTrace:
    """One request of `FAMILY` at a shape."""
    family = FAMILIES[FAMILY]
    generator, rng = Generator(family, layers, experts, top_k, seed), np.random.default_rng(seed)
    raw = generator.logits(generator.tokens(tokens))

    def apart(logits: NDArray[np.float64]) -> Floats:
        picked = top(logits, top_k)
        found = family.sharpness * logits
        np.put_along_axis(found, picked, np.take_along_axis(found, picked, -1) + _MARGIN, -1)
        return found.astype(np.float32)

    recalls = family.recalls[:DISTANCES]
    seen = (blurred(raw, agreement(family, layers, experts, top_k, recall), rng) for recall in recalls)
    return RoutingTrace(top(raw, top_k), apart(raw), tuple(apart(logits) for logits in seen))


_OWN = 1e-4  # of the router's own logits: a product that is computed and changes no order


class Replay:
    """One trace on one model.

    Args:
        trace: at least as many tokens as will run, as many layers as the model has MoE layers.
        weights: [E, H] of each layer's router.
        device, dtype: of the model's hidden states.
    """

    def __init__(
        self,
        trace: RoutingTrace,
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
        self._tables = [by_layer(torch.from_numpy(table), dtype) for table in (trace.logits, *trace.ahead)]
        self._routers = [(weight * _OWN).to(dtype) for weight in weights]  # [E, H]
        self._rows_of = cache(lambda table, layer: self._tables[table][layer].unbind())  # of each token [E]
        self.tokens, self.layers, self.top_k = trace.ids.shape[0], trace.ids.shape[1], top_k
        self._now = slice(0, 0)  # tokens of the trace in the current forward
        self._next = slice(0, 0)  # and in the one after it
        self._layer = 0
        self._hooks: list[Any] = []

    def begin(self, position: int, rows: int) -> None:
        """The next forward runs tokens position to position + rows of the trace.

        Raises:
            ValueError: the trace is shorter.
        """
        if position + rows > self.tokens:
            raise ValueError(f"the trace has {self.tokens} tokens, not {position + rows}")
        self._now = slice(position, position + rows)
        start = min(position + rows, self.tokens - rows)
        self._next = slice(start, start + rows)

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
        return _ReplayedRouter(self, layer)

    def operands(self, layer: int) -> tuple[torch.Tensor, int, slice]:
        """A layer's router as it answers now: weight [E, H], the table of logits, and their tokens."""
        distance = layer - self._layer
        wraps = distance < 0  # the next forward's
        table = len(self._tables) - 1 if wraps else min(distance, len(self._tables) - 1)
        return self._routers[layer], table, self._next if wraps else self._now

    def logits(self, table: int, layer: int, tokens: slice) -> torch.Tensor:
        """[T, E]."""
        return self._tables[table][layer, tokens]

    def row(self, table: int, layer: int, token: int) -> torch.Tensor:
        """The same of one token [E], without an operation on the device."""
        return self._rows_of(table, layer)[token]


class _ReplayedRouter:
    """A linear router whose bias is the trace's logits."""

    def __init__(self, replay: Replay, layer: int) -> None:
        self._replay, self._layer = replay, layer

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> logits [T, E]."""
        weight, table, tokens = self._replay.operands(self._layer)
        rows = self._replay.logits(table, self._layer, tokens)[: len(hidden)]  # a policy may ask about some of the rows
        return torch.addmm(rows, hidden.to(weight.dtype), weight.t())

    def on_device(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """As of `LinearRouter`, for the present token alone: the next one's are others."""
        weight, table, tokens = self._replay.operands(self._layer)
        if rows != 1:
            return None
        return weight, self._replay.row(table, self._layer, tokens.start), 1


class _ReplayedLayer:
    def __init__(self, replay: Replay, index: int, layer: ExpertLayer) -> None:
        self._replay, self._index, self._inner = replay, index, layer

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._inner.forward(hidden, *self._replay.routing(self._index, weights))

    def forward_into(
        self, out: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        self._inner.forward_into(out, hidden, *self._replay.routing(self._index, weights))


def profile_of(trace: RoutingTrace, seed: int = 0) -> ExpertProfile:
    """The statistics of a trace that BuddyMoE's presets read; products of outputs, which it lacks, are random."""
    (_, layers, _), experts = trace.ids.shape, trace.logits.shape[2]
    counts, entropies = [], []
    for layer in range(layers):
        ids = trace.ids[:, layer]
        logits = np.take_along_axis(trace.logits[:, layer], ids, axis=1)
        shares = renormalised(np.exp(logits - logits.max(axis=1, keepdims=True)))
        counts.append(Coactivations(experts))
        counts[-1].add(ids, shares)
        entropies.append(entropy_counts(shares, np.ones(len(ids))))
    norms = np.random.default_rng(seed).uniform(1.0, 2.0, (layers, experts, experts))
    return ExpertProfile(
        np.stack([c.activations for c in counts]), np.stack([c.binary for c in counts]),
        np.stack([c.weighted for c in counts]), np.stack(entropies), Outputs(norms / 2, norms),
    )  # fmt: skip
