"""A trace in the place of a model's routers: for ours and for the references alike.

The routers run, so that their time is paid; what they chose is replaced just before the experts, by a hook on the
experts modules. A later layer's router that is asked on an earlier layer's hidden state answers with the logits of the
trace, at the recall that was measured for that distance; its own matrix product is paid there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .....actors.engine.model.model import ExpertLayer, RouterProbe, attach, detach
from .locality import RoutingTrace, foreseen

_OWN = 1e-4  # of the router's own logits: a product that is computed and changes no order


class Replay:
    """One trace on one model.

    Args:
        trace: of at least as many tokens as will be run, layers as the model has MoE layers.
        recalls: of distances 1, 2, ...
        weights: [E, H] of each layer's router.
        device: where the model runs. dtype: of its hidden states.
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
        tables = [trace.logits, *(foreseen(trace, share, seed) for seed, share in enumerate(recalls, start=1))]
        self._tables = [by_layer(torch.from_numpy(table), dtype) for table in tables]
        self._routers = [weight.to(dtype).t() for weight in weights]  # [H, E]
        self.tokens, self.layers, self.top_k = trace.ids.shape[0], trace.ids.shape[1], top_k
        self._at = self._rows = 0
        self._layer = 0
        self._hooks: list[Any] = []

    def begin(self, position: int, rows: int) -> None:
        """The next forward runs tokens position to position + rows of the trace.

        Raises:
            ValueError: the trace is shorter.
        """
        if position + rows > self.tokens:
            raise ValueError(f"the trace has {self.tokens} tokens, not {position + rows}")
        self._at, self._rows = position, rows

    def attach(self, modules: Sequence[Any]) -> None:
        """Replace the routing of these experts modules, one per layer, until `close`."""
        for layer, module in enumerate(modules):
            self._hooks.append(module.register_forward_pre_hook(self._replace(layer), with_kwargs=True))

    def inside(self, modules: Sequence[Any], layers: Sequence[ExpertLayer]) -> Replayed:
        """The same inside the experts' operator, for ours alone: the modules around it can then be compiled.

        Args:
            modules: experts modules that an engine runs. layers: its layers.
        """
        return Replayed(self, modules, layers)

    def routing(self, layer: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and weights [T, K] of a layer in the present forward; weights in the dtype of those given."""
        self._layer = layer
        stop = self._at + self._rows
        table = self._weights if weights.dtype == self._weights.dtype else self._weights_f32
        return self._ids[layer, self._at : stop], table[layer, self._at : stop]

    def probes(self) -> list[RouterProbe]:
        """What takes the place of each layer's router where it is asked ahead of time."""
        return [self._probe(layer) for layer in range(self.layers)]

    def close(self) -> None:
        """Leave the modules as they were."""
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
            start = self._at + (self._rows if wraps else 0)
            start = min(start, self.tokens - len(hidden))
            rows = table[layer, start : start + len(hidden)]
            return torch.addmm(rows, hidden.to(weight.dtype), weight, alpha=_OWN)

        return probe


class Replayed:
    """An engine's layers behind a replay; the modules lead to them until `close`, and then nowhere."""

    def __init__(self, replay: Replay, modules: Sequence[Any], layers: Sequence[ExpertLayer]) -> None:
        pairs = enumerate(zip(modules, layers, strict=True))
        self._handles = [attach(module, _ReplayedLayer(replay, i, layer)) for i, (module, layer) in pairs]

    def close(self) -> None:
        """Forget the layers."""
        for handle in self._handles:
            detach(handle)
        self._handles = []


class _ReplayedLayer:
    """One layer whose routing is the trace's."""

    def __init__(self, replay: Replay, index: int, layer: ExpertLayer) -> None:
        self._replay, self._index, self._inner = replay, index, layer

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._inner.forward(hidden, *self._replay.routing(self._index, weights))
