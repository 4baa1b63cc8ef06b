"""One torch operator for all experts of a layer: `tiermoe::experts`.

The dense part around it can be compiled or graph-captured without looking inside. An operator takes
tensors and ints only, so it finds its layer by handle in a table of the living layers.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch

IMPLEMENTATION = "tiermoe"  # name under which transformers knows it


class ExpertLayer(Protocol):
    """What the operator calls."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...


_layers: dict[int, ExpertLayer] = {}
_handles = itertools.count(1)

_library = torch.library.Library("tiermoe", "DEF")
_library.define("experts(Tensor hidden, Tensor ids, Tensor weights, int handle) -> Tensor")


def _run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    return _layers[handle].forward(hidden, ids, weights)


_library.impl("experts", _run, "CPU")
_library.impl("experts", _run, "CUDA")


@torch.library.register_fake("tiermoe::experts", lib=_library)
def _fake(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)  # contiguous, as the kernels return it


def _experts_forward(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface: hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
    return torch.ops.tiermoe.experts(hidden, ids, weights, module.tiermoe_handle)


def register_implementation() -> str:
    """Make `tiermoe` known to transformers' experts interface; its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    return IMPLEMENTATION


def attach(module: Any, layer: ExpertLayer) -> int:
    """Let an experts module run through `layer`; the handle for `detach`."""
    handle = next(_handles)
    _layers[handle] = layer
    module.tiermoe_handle = handle
    return handle


def detach(handle: int) -> None:
    """Forget a layer; its module can no longer run."""
    _layers.pop(handle, None)
