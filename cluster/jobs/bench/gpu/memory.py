"""What memory this machine gives a run, and how much of a model that holds."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from .....errors import ConfigError
from .options import Context
from .shapes import RealShape

_HOST_SHARE, _GPU_SHARE = 0.75, 0.85
_SHRUNK_SHARE = 0.65  # of the GPU, where layers can be left out: batched_mm gathers copies of what a prompt uses
_MOST_LAYERS = 16  # of a shape that may shrink: more would take the time of the other parts
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def host_free_bytes() -> int:
    """Memory that this process may still take: of the machine, and of the control group around it."""
    free = int(psutil.virtual_memory().available)
    for limit, usage in _CGROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(usage).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        free = min(free, max(0, left))
    return free


def moe_layers(shape: RealShape, context: Context) -> int:
    """MoE layers to run: all, or of a shape that shrinks as many as memory holds.

    Host memory has the experts once; the GPU's twice: the reference's, and ours at budget 1.0.

    Raises:
        ConfigError: all must fit, and do not.
    """
    wanted = shape.layers - shape.dense_layers
    if context.toy:
        return wanted
    layer_bytes = shape.experts * shape.expert.nbytes(context.dtype.itemsize)
    room = int(_HOST_SHARE * host_free_bytes() / layer_bytes)
    if context.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(context.device)
        share = _SHRUNK_SHARE if shape.shrinks else _GPU_SHARE
        room = min(room, int(share * free / 2 / layer_bytes))
    if shape.shrinks and room >= 2:
        return min(wanted, room, _MOST_LAYERS)
    if room < wanted:
        raise ConfigError(
            f"{shape.name} has {wanted} layers of {layer_bytes / 1e9:.2f} GB, there is room for {room}",
            "leave this part out with --parts, or use a machine with more memory",
        )
    return wanted
