"""What `tiermoe prepare` adds to a store besides the experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..profile.command import ProfileRequest
from .replica_options import ReplicaOptions
from .replicas import add_replicas

_STRIDE = 3  # layers ahead that predictors look where nothing else is said


@dataclass(frozen=True)
class Additions:
    """What is asked for; None: not that.

    replicas: widths, fitted to `calibration`. neuron_order, gates, sensitivity: texts to measure on. predictors: a
    trace, and layers ahead (`stride`).
    """

    replicas: ReplicaOptions | None
    calibration: Path | None
    neuron_order: Path | None
    predictors: Path | None
    stride: int | None
    gates: Path | None
    sensitivity: Path | None
    profile: ProfileRequest | None

    @property
    def nothing(self) -> bool:
        asked = (self.replicas, self.neuron_order, self.predictors, self.gates, self.sensitivity, self.profile)
        return all(one is None for one in asked)

    def add(self, store: Path, model: Path) -> None:
        """Make and store all of it.

        Raises:
            ConfigError, CheckpointError, StoreError, TraceError: as each of them.
        """
        if self.neuron_order is not None:  # before replicas, which are fitted to the order
            from .neuron_order import order_neurons

            order_neurons(store, model, self.neuron_order)
        if self.replicas is not None and self.calibration is not None:
            add_replicas(store, model, self.replicas, self.calibration)
        if self.predictors is not None:
            from .predictors import add_predictors

            add_predictors(store, self.predictors, _STRIDE if self.stride is None else self.stride)
        if self.gates is not None:
            from .gates import add_gates

            add_gates(store, model, self.gates)
        if self.sensitivity is not None:
            from .sensitivity import add_sensitivity

            add_sensitivity(store, model, self.sensitivity)
        if self.profile is not None:
            self.profile.run(store, model)
