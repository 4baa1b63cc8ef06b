"""The policy of a run that names none: `next-gate` where copies are quick, else `auto`; by what is known at the start.

`auto` plans a layer in Python, which costs 0.2 ms a layer on a CPU and 0.55 beside a GPU. Where copies are quick there
is too little to save: `auto` took 1.04 (35 us a copy, latency included) and 1.19 (16 us) of `next-gate`'s time a token,
and 0.93 where a copy took 108 us (default model, a quarter of the experts, emulated; docs/auto.md).
Both policies are lossless and need nothing prepared, so the choice may wait until the nodes are known.
"""

from __future__ import annotations

from ...actors.settings import EngineSettings
from ..config import AUTO, DEFAULT_POLICY, QUICK_COPY_US, STEPPED, RunConfig, chosen_policy
from .spec import ModelFacts, compute_item_bytes


def with_default_policy(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, gpu: bool
) -> tuple[EngineSettings, tuple[str, ...]]:
    """The settings with the policy that the start decides, and a note that says why; a policy that was given stays.

    Args:
        gpu: whether the workers run on GPUs.
    """
    if config.policy != DEFAULT_POLICY:
        return settings, ()
    name, why = _choice(config, facts.slot_bytes(compute_item_bytes(settings, gpu)), gpu)
    policy = chosen_policy(name)
    return settings.model_copy(update={"policy": policy}), (f"the default policy is {policy.name} here: {why}",)


def _choice(config: RunConfig, slot_bytes: int, gpu: bool) -> tuple[str, str]:
    """The name of a policy, and the reason."""
    if config.asks_for_auto:
        return AUTO, "NDP workers are asked for"
    if gpu:
        return STEPPED, f"on a GPU, planning a layer of {AUTO} costs more than it saves"
    if config.link.gbps is None:
        return STEPPED, "the link is not throttled"
    copy_us = config.link.latency_us + slot_bytes / config.link.gbps * 1e-3
    bound = f"a copy of an expert takes {copy_us:.0f} us, and {AUTO} is for {QUICK_COPY_US:g} us and more"
    return (STEPPED if copy_us < QUICK_COPY_US else AUTO), bound
