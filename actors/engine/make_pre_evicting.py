"""The pre-eviction of a preset, for the real engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..policies.activeevict import PreEviction
from ..policy_settings import PolicySettings
from .cache.cache import ExpertCache
from .host_view import Asked, Asker, LayerView
from .model.model import MoeBlock
from .pre_evicting import PreEvicting


def make_pre_evicting(
    policy: PolicySettings, cache: ExpertCache, blocks: Sequence[MoeBlock], experts: int, top_k: int
) -> PreEvicting | None:
    """What `policy.pre_evict` asks for; None where nothing is freed ahead. It takes a `LayerView` for hidden states.

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

    def score(layer: int, view: LayerView) -> NDArray[np.floating] | None:
        return view.scores(_asked(blocks[layer]))

    return PreEvicting(PreEviction(top_k, options.tau, options.r_max), cache, len(blocks), experts, score)


def pre_evicting_asks(pre_evicting: PreEvicting, blocks: Sequence[MoeBlock]) -> Asker:
    """The scores that pre-eviction will look at."""
    return lambda layer, tokens: [_asked(blocks[later]) for later in pre_evicting.scored_at(layer)]


def _asked(block: MoeBlock) -> Asked:
    assert block.router is not None  # `make_pre_evicting` refused
    return Asked(block.router, softmax=False)
