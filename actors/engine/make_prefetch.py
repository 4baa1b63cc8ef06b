"""The prefetch policy of a preset, for the real engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ConfigError
from ..policies.baselines import Predictor
from ..policies.eviction import EvictionPolicy
from ..policies.fmoe import BlendPrefetch
from ..policies.prefetch import NextGatePrefetch, PrefetchPolicy
from ..policies.registry import PrefetchOptions, make_prefetch
from ..policy_settings import PolicySettings
from ..store.artifacts import PolicyArtifacts
from .model.model import MoeBlock, RouterProbe, linear_probe
from .peers.matcher import MatcherLink, MatcherPrefetch
from .peers.shards import Shards


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
    """What `policy.prefetch` names; None where nothing is prefetched.

    Args:
        blocks: of the model. experts: of a layer. top_k: of its router.
        eviction: told what maps say. matcher, shards, predictors: as given to `ExpertEngine`.

    Raises:
        ConfigError: the policy needs what the model or the runtime lacks.
    """
    prefetch, layers = policy.prefetch, len(blocks)
    top = prefetch.top if prefetch.top is not None else top_k
    if not prefetch.uses_maps:
        options = PrefetchOptions(
            layers, experts, top, prefetch.distance, prefetch.synchronous, predictors,
            precisions=policy.guess_precisions,
        )  # fmt: skip
        try:
            made = make_prefetch(prefetch.kind, options)
        except ValueError as error:
            raise ConfigError(f"policy '{policy.name}': {error}", "see `tiermoe prepare --help`") from error
        _refuse_mute(policy, made, blocks)
        return made
    if matcher is None:
        raise ConfigError(f"policy '{policy.name}' needs a matcher of expert maps", "start one")
    made = MatcherPrefetch(
        matcher,
        experts,
        NextGatePrefetch(layers, experts, top),
        eviction,
        None if shards is None else lambda: shards.iteration,
        BlendPrefetch(layers, experts, top, prefetch.distance) if prefetch.kind == "blend" else None,
        None if shards is None else shards.relay,
    )
    _refuse_mute(policy, made, blocks)
    return made


def unasked_layers(blocks: Sequence[MoeBlock]) -> list[int]:
    """Layers but the first whose routers cannot be asked ahead of time."""
    return [layer for layer, block in enumerate(blocks) if layer and block.router is None]


def gate_probes(
    policy: PolicySettings, artifacts: PolicyArtifacts, layers: int, device: torch.device
) -> list[RouterProbe]:
    """The trained gates of layers 0..L-2, to be asked as routers are; computed in float32.

    Raises:
        ConfigError: they were not given, or are of another model.
    """
    gates = artifacts.gates
    if gates is None or len(gates) != layers - 1:
        raise ConfigError(
            f"policy '{policy.name}' needs gates between {layers} layers",
            "train them with `tiermoe prepare MODEL --gates TEXT`",
        )
    return [
        linear_probe(torch.from_numpy(gate.weight).to(device), torch.from_numpy(gate.bias).to(device)) for gate in gates
    ]


def _refuse_mute(policy: PolicySettings, made: PrefetchPolicy | None, blocks: Sequence[MoeBlock]) -> None:
    mute = [layer for layer, block in enumerate(blocks) if block.router is None]
    if made is not None and made.needs_probabilities and mute:
        raise ConfigError(
            f"policy '{policy.name}' goes by the router's probabilities, which MoE layer {mute[0]} does not expose",
            "choose one that does not, such as next-gate or moe-infinity",
        )
