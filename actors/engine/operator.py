"""One torch operator for all experts of a layer: `tiermoe::experts`.

The dense part around it can be compiled or graph-captured without looking inside. An operator takes
tensors and ints only, so it finds its layer by handle in a table of the living layers.

Under `torch.compile` the same goes by `tiermoe::experts_at`, whose handle is a tensor in host memory: an int of each
layer would be a constant of its code, which would be compiled anew for every layer. Both read the routing on the host,
so that no CUDA graph can hold them; a tag says so, and a compiler that makes graphs makes them of what lies between
(`engine.compile`).
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

# None where this torch does not know the tag
UNSAFE_IN_GRAPHS: torch.Tag | None = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS = () if UNSAFE_IN_GRAPHS is None else (UNSAFE_IN_GRAPHS,)

_library = torch.library.Library("tiermoe", "DEF")
_library.define("experts(Tensor hidden, Tensor ids, Tensor weights, int handle) -> Tensor", tags=_TAGS)
_library.define("experts_at(Tensor hidden, Tensor ids, Tensor weights, Tensor handle) -> Tensor", tags=_TAGS)


def _run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    return _layers[handle].forward(hidden, ids, weights)


def _run_at(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return _layers[int(handle)].forward(hidden, ids, weights)


for _device in ("CPU", "CUDA"):
    _library.impl("experts", _run, _device)
    _library.impl("experts_at", _run_at, _device)


def _fake(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)  # contiguous, as the kernels return it


torch.library.register_fake("tiermoe::experts", _fake, lib=_library)
torch.library.register_fake("tiermoe::experts_at", _fake, lib=_library)


def _experts_forward(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface: hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
    if torch.compiler.is_compiling():
        return torch.ops.tiermoe.experts_at(hidden, ids, weights, module.tiermoe_handle_there)
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
    module.tiermoe_handle_there = torch.tensor(handle, device="cpu")
    return handle


def detach(handle: int) -> None:
    """Forget a layer; its module can no longer run."""
    _layers.pop(handle, None)
