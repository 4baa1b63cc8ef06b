"""The rule that a policy's `on_miss` names, with what was profiled for it and what the link carries."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...kernels.substitute import replaceable_arrays, substitute_arrays
from ..policies.buddymoe import MissRule, RandomRule, lists_of, no_buddies
from ..policies.buddymoe.buddies import BuddyOptions, ExpertProfile, OutputsMissing, alpha_schedule
from ..policies.buddymoe.substitution import AdaptiveBeta, Buddies, SubstitutionOptions
from ..policy_settings import PolicySettings, SubstitutionSettings
from .stats import EngineStats

_CALLS = 64  # of a layer that an adaptive beta remembers
_PROFILE = "make it with `tiermoe prepare MODEL --profile TEXT`"


def make_miss_rule(
    policy: PolicySettings,
    layers: int,
    experts: int,
    normalised: bool,
    profile: ExpertProfile | None,
    expert_bytes: int,
    shards: int = 1,
) -> MissRule | None:
    """None where misses are loaded.

    Args:
        layers, experts: L and E. normalised: whether the model normalises the weights of the experts that it picks.
        profile: of the store; needed where `policy.needs_profile`.
        expert_bytes: of one expert. shards: how many GPUs share them.

    Raises:
        ConfigError: there is no profile, or it has no output similarity and the policy ranks by it.
    """
    if policy.on_miss in ("load", "low-bit"):  # low-bit replicas are `low_bits`' affair
        return None
    settings = policy.substitution
    options = SubstitutionOptions(
        rho=settings.rho, search=settings.search, temperature=settings.temperature, gamma=settings.gamma,
        eta=settings.eta, kappa=settings.kappa, reuse=settings.reuse,
        fallback="drop" if policy.on_miss == "drop" else settings.fallback,
        weights=settings.weights, renormalise=normalised,
    )  # fmt: skip
    betas = None
    if settings.link_ms is not None:
        betas = [AdaptiveBeta(expert_bytes, settings.link_ms * 1e-3, _CALLS * shards) for _ in range(layers)]
    taus: tuple[float, ...] | None = None if settings.tau is None else (settings.tau,) * layers
    if settings.percentile is not None:
        taus = _needed(policy, profile).taus(settings.percentile, settings.temperature)
    gates: dict[str, Any] = {
        "taus": taus, "beta": settings.beta, "betas": betas,
        "replaceable": replaceable_arrays, "substitute": substitute_arrays,
    }  # fmt: skip
    if policy.on_miss == "random":
        return RandomRule(layers, experts, options, **gates)
    if policy.on_miss == "drop":
        return MissRule(no_buddies(layers, experts), options, **gates)
    return MissRule(_buddies(policy, settings, layers, profile), options, **gates)


def _buddies(
    policy: PolicySettings, settings: SubstitutionSettings, layers: int, profile: ExpertProfile | None
) -> list[Buddies]:
    alpha: float | tuple[float, ...] = settings.alpha
    if settings.alpha_last is not None:
        alpha = alpha_schedule(settings.alpha, settings.alpha_last, layers)
    options = BuddyOptions(
        by=settings.by, alpha=alpha, max_buddies=settings.max_buddies, weighted=settings.weighted,
        epsilon=settings.epsilon, mix=settings.mix,
    )  # fmt: skip
    try:
        return lists_of(_needed(policy, profile).buddies(options))
    except OutputsMissing as error:
        raise ConfigError(f"policy '{policy.name}': {error}", _PROFILE) from error


def _needed(policy: PolicySettings, profile: ExpertProfile | None) -> ExpertProfile:
    if profile is None:
        raise ConfigError(f"policy '{policy.name}' needs a profile of the experts", _PROFILE)
    return profile


def meter(rule: MissRule, stats: EngineStats) -> None:
    """Tell a rule what the link carried per busy second until now; nothing before the first copy."""
    busy_s = sum(layer.link_s for layer in stats.layers)
    if busy_s > 0:
        rule.measured(sum(layer.bytes_loaded for layer in stats.layers) / busy_s)
