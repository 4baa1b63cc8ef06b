"""A plan with all that it came from: what `tiermoe plan` prints, and what a deployment carries out.

configuration + sizes of the model + nodes -> topology -> prediction
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...actors.settings import EngineSettings
from ..config import RunConfig
from .estimate import Prediction, predict, resolve_hardware
from .plan import Topology
from .planner import plan_topology
from .spec import ClusterSpec, ModelFacts, NodeInfo, cluster_spec


@dataclass(frozen=True)
class PlanResult:
    """A plan with all that it came from.

    Attributes:
        nodes_from: where the nodes come from, for people.
        notes: the topology's and our own.
    """

    facts: ModelFacts
    spec: ClusterSpec
    topology: Topology
    prediction: Prediction
    nodes_from: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        return {
            "model": asdict(self.facts) | {"expert_bytes": self.facts.expert_bytes},
            "spec": asdict(self.spec),
            "nodes_from": self.nodes_from,
            "topology": self.topology.as_dict(),
            "prediction": self.prediction.as_dict(),
            "notes": list(self.notes),
        }


def make_plan(
    config: RunConfig,
    settings: EngineSettings,
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    nodes_from: str,
    notes: Sequence[str] = (),
) -> PlanResult:
    """Place every actor and predict what comes of it.

    Args:
        notes: in addition to the topology's.

    Raises:
        ConfigError: which resource is short where. BudgetError: the budget does not fit.
    """
    spec = cluster_spec(config, settings, facts, nodes)
    topology = plan_topology(spec, facts, nodes)
    hardware = resolve_hardware(config.hardware, spec.gpu, config.link.gbps, config.link.latency_us)
    found = [*topology.notes, *notes]
    if facts.dense_estimated:
        found.append("dense bytes are computed from config.json: the weights are not here")
    return PlanResult(facts, spec, topology, predict(topology, spec, facts, hardware), nodes_from, tuple(found))
