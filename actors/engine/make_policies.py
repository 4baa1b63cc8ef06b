"""The policies of a preset for the real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from ...kernels.router import LinearRouter
from ..policies.baselines import Predictor
from ..policies.eviction import EvictionPolicy
from ..policies.prefetch import NextGatePrefetch, PrefetchPolicy
from ..policies.registry import NotPrepared, PolicyContext, make
from ..policies.routing import Rerouting
from ..policy_settings import PolicySettings
from ..store.artifacts import PolicyArtifacts
from .cache.cache import ExpertCache
from .host_view import Asked, Asker, LayerView
from .model.model import MoeBlock, RouterProbe
from .peers.matcher import MatcherLink, MatcherPrefetch
from .peers.shards import Shards
from .placer import Placer
from .pre_evicting import PreEvicting


@contextmanager
def _configured(policy: PolicySettings) -> Iterator[None]:
    """A policy that cannot be made is a ConfigError."""
    try:
        yield
    except NotPrepared as error:
        raise ConfigError(f"policy '{policy.name}' {error}", error.remedy) from error
    except ValueError as error:
        raise ConfigError(f"policy '{policy.name}': {error}", "choose another policy") from error


def make_rerouting(
    policy: PolicySettings,
    layers: int,
    experts: int,
    normalised: bool,
    artifacts: PolicyArtifacts,
    expert_bytes: int = 1,
    gpus: int = 1,
) -> Rerouting | None:
    """The rule of a policy's `routing` or `on_miss`; None where the model's routing is carried out unchanged.

    Args:
        layers, experts: L and E. normalised: whether the model normalises the weights of the experts that it picks.
        expert_bytes: of one expert. gpus: that share them.

    Raises:
        ConfigError: an artifact of `tiermoe prepare` is missing, or of another model.
    """
    context = PolicyContext(
        layers, experts, renormalise=normalised, profile=artifacts.profile, expert_bytes=expert_bytes, gpus=gpus
    )
    with _configured(policy):
        rule: Rerouting | None = make("routing", policy.routing, context)
        return make("on_miss", policy.on_miss, context) if rule is None else rule


def make_policy(
    policy: PolicySettings,
    blocks: Sequence[MoeBlock],
    experts: int,
    top_k: int,
    eviction: EvictionPolicy,
    matcher: MatcherLink | None = None,
    shards: Shards | None = None,
    predictors: Sequence[Predictor] | None = None,
) -> PrefetchPolicy | None:
    """The policy of `policy.prefetch`; None: no prefetch.

    Args:
        blocks: of the model. experts: of a layer. top_k: of its router.
        eviction: informed of map probabilities. matcher, shards, predictors: as given to `ExpertEngine`.

    Raises:
        ConfigError: the policy needs what the model or the runtime lacks.
    """
    prefetch, layers = policy.prefetch, len(blocks)
    context = PolicyContext(layers, experts, top_k, eviction=eviction, predictors=predictors)
    made: PrefetchPolicy | None
    if policy.maps is None:
        with _configured(policy):
            made = policy.make_prefetch(context)
    elif matcher is None:
        raise ConfigError(f"policy '{policy.name}' needs a matcher of expert maps", "start one")
    else:
        top = prefetch.experts(context)
        made = MatcherPrefetch(
            matcher,
            experts,
            NextGatePrefetch(layers, experts, top),
            eviction,
            None if shards is None else lambda: shards.iteration,
            None if shards is None else shards.relay,
        )
    mute = [layer for layer, block in enumerate(blocks) if block.router is None]
    if made is not None and made.needs_probabilities and mute:
        raise ConfigError(
            f"policy '{policy.name}' goes by the router's probabilities, which MoE layer {mute[0]} does not expose",
            "choose one that does not, such as next-gate or moe-infinity",
        )
    return made


def unasked_layers(blocks: Sequence[MoeBlock]) -> list[int]:
    """Layers after the first whose routers cannot run ahead of time."""
    return [layer for layer, block in enumerate(blocks) if layer and block.router is None]


def gate_probes(
    policy: PolicySettings, artifacts: PolicyArtifacts, layers: int, device: torch.device
) -> list[RouterProbe]:
    """The trained gates of layers 0..L-2 as router probes, computed in float32.

    Raises:
        ConfigError: they are missing, or of another model.
    """
    gates = artifacts.gates
    if gates is None or len(gates) != layers - 1:
        raise ConfigError(
            f"policy '{policy.name}' needs gates between {layers} layers",
            "train them with `tiermoe prepare MODEL --gates TEXT`",
        )
    return [
        LinearRouter(torch.from_numpy(gate.weight).to(device), torch.from_numpy(gate.bias).to(device)) for gate in gates
    ]


def make_pre_evicting(
    policy: PolicySettings, cache: ExpertCache, blocks: Sequence[MoeBlock], experts: int, top_k: int
) -> PreEvicting | None:
    """The pre-eviction of `policy.pre_evict`; None: none. It takes a `LayerView` for hidden states.

    Raises:
        ConfigError: a layer's router cannot run ahead of time.
    """
    decide = make("pre_evict", policy.pre_evict, PolicyContext(len(blocks), experts, top_k))
    if decide is None:
        return None
    score = router_scores(policy, blocks)
    return PreEvicting(decide, cache, len(blocks), experts, score, [block.router for block in blocks])


def router_scores(
    policy: PolicySettings, blocks: Sequence[MoeBlock]
) -> Callable[[int, LayerView], NDArray[np.floating] | None]:
    """(layer, view) -> logits [T, E] of that layer's router on the viewed layer's input.

    Raises:
        ConfigError: a layer's router cannot run ahead of time.
    """
    mute = [layer for layer, block in enumerate(blocks) if block.router is None]
    if mute:
        raise ConfigError(
            f"policy '{policy.name}' asks routers ahead of time, and MoE layer {mute[0]} exposes none",
            "choose a policy that does not, such as on-demand",
        )
    asked = [_asked(block) for block in blocks]
    return lambda layer, view: view.scores(asked[layer])


def scores_asked(reader: PreEvicting | Placer, blocks: Sequence[MoeBlock]) -> Asker:
    """The router scores that a reader of `router_scores` needs."""
    return lambda layer, tokens: [_asked(blocks[later]) for later in reader.scored_at(layer)]


def _asked(block: MoeBlock) -> Asked:
    assert block.router is not None  # `router_scores` refused
    return Asked(block.router, softmax=False)
