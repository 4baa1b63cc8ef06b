"""The pre-eviction of a preset, for the real engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from ..policies.pre_evict import PreEviction
from ..policy_settings import PolicySettings
from .cache import ExpertCache
from .model import MoeBlock
from .pre_evicting import PreEvicting


def make_pre_evicting(
    policy: PolicySettings, cache: ExpertCache, blocks: Sequence[MoeBlock], experts: int, top_k: int
) -> PreEvicting | None:
    """What `policy.pre_evict` asks for; None where nothing is freed ahead.

    Raises:
        ConfigError: a layer's router cannot be asked.
    """
    options = policy.pre_evict
    if options.kind == "off":
        return None
    mute = [layer for layer, block in enumerate(blocks) if block.router is None]
    if mute:
        raise ConfigError(
            f"policy '{policy.name}' asks routers ahead of time, and MoE layer {mute[0]} exposes none",
            "choose a policy without pre_evict, such as on-demand",
        )

    def score(layer: int, hidden: torch.Tensor) -> NDArray[np.floating] | None:
        router = blocks[layer].router
        return None if router is None else router(hidden).float().cpu().numpy()

    return PreEvicting(PreEviction(top_k, options.tau, options.r_max), cache, len(blocks), experts, score)
