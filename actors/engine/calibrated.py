"""What `tiermoe prepare` measured or trained on calibration text, as far as a policy needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..gate_file import gates_of
from ..policies.expert_profile import ExpertProfile
from ..policies.prefetch.pre_gated import PreGate
from ..policy_settings import PolicySettings
from ..profile_file import read_profile
from ..sensitivity_file import sensitivity_of
from ..store_format import Manifest


@dataclass(frozen=True)
class Calibrated:
    """None where the policy does without.

    sensitivity: of each MoE layer, see `AdaptiveGating`. gates: of layers 0..L-2, for `PreGatedPrefetch`.
    profile: of the experts, for buddies and thresholds.
    """

    sensitivity: tuple[float, ...] | None = None
    gates: tuple[PreGate, ...] | None = None
    profile: ExpertProfile | None = None


def read_calibrated(policy: PolicySettings, store: Path, manifest: Manifest) -> Calibrated:
    """Read from a store's folder what a policy needs.

    Raises:
        StoreError: a file is missing, damaged or of another model; the remedy is the command that makes it.
    """
    return Calibrated(
        sensitivity=sensitivity_of(store, manifest) if policy.routing.kind == "adaptive" else None,
        gates=gates_of(store, manifest) if policy.prefetch.kind == "pre-gated" else None,
        profile=read_profile(store, manifest) if policy.needs_profile else None,
    )
