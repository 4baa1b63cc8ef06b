"""accelerate's CPU offload on the experts modules: its own hooks, its own copies, whole layers of experts at a time.

The weights that its hooks copy are views of our pinned experts (random numbers fit any layout), so it needs no memory
beside, and its copies run at the speed of pinned memory, better than those of `cpu_offload`, which keeps pageable ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from .host_experts import HostExperts
from .random_models import RandomModel


def offload_problem() -> str | None:
    """Why it cannot be measured; None: it can."""
    return None if find_spec("accelerate") is not None else "accelerate is not installed"


@contextmanager
def offloaded(built: RandomModel, host: HostExperts, device: torch.device) -> Iterator[None]:
    """Experts in host memory under accelerate's hooks; their parameters are on meta before and after."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    for module, layer in zip(built.modules, host.layers, strict=True):
        gate_up, down = layer.tensors
        weights = {
            "gate_up_proj": gate_up.view(module.gate_up_proj.shape), "down_proj": down.view(module.down_proj.shape),
        }  # fmt: skip
        hook = AlignDevicesHook(execution_device=device, offload=True, io_same_device=False, weights_map=weights)
        add_hook_to_module(module, hook)
    try:
        yield
    finally:
        for module in built.modules:
            remove_hook_from_module(module)
