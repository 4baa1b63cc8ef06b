"""A decode step's time from a recorded routing, replayed with this machine's costs: hits, bytes and waits are those of
the policy at its budget. `bench validation` compares it with what it measures.

A model may ship a routing trace (folder `routing`, made by `tiermoe record`).
"""

from __future__ import annotations

from dataclasses import replace

from ...actors.policies.cost import Link
from ...errors import ConfigError
from ..config import RunConfig, chosen_policy
from ..simulate.executor import context_of
from ..simulate.machine import Machine, machine_of
from ..simulate.trace import Trace, TraceHeader
from ..topology.estimate import WITHIN, Prediction, layer_bytes, threads_note
from ..topology.machine_costs import MachineCosts, PolicyCosts
from ..topology.spec import ClusterSpec, ModelFacts
from .replay import replay, require_replayable

ROUTING = "routing"


def predict_by_trace(
    assumed: Prediction, spec: ClusterSpec, facts: ModelFacts, config: RunConfig, costs: MachineCosts, trace: Trace
) -> Prediction:
    """Replay a trace under the run's policy and budget.

    Args:
        assumed: the prediction without the trace; what a replay does not change is taken from it.

    Raises:
        ConfigError: the trace is of another shape, or the policy cannot be replayed. TraceError: it is corrupt.
        BudgetError: the budget holds no expert.
    """
    header = trace.header
    settings = chosen_policy(config.policy)
    require_replayable(settings)
    _require_same(header, facts)
    policy, note = costs.of_policy(settings.name)
    slots = spec.budget_bytes // spec.slot_bytes
    machine = simulated_machine(header, spec, facts, costs, assumed, policy)
    record = replay(trace, settings, context_of(header), machine, slots * header.slot_bytes)
    forwards = max(1, record["forwards_run"])
    nbytes = record["bytes_loaded"] / header.slot_bytes * spec.slot_bytes / forwards
    loads = record["bytes_loaded"] / header.slot_bytes / forwards / facts.layers  # of a layer
    token_s, hits = record["tpot_s"], record["hit_rate"] or 0.0  # of no forward
    parts = dict(assumed.parts_s) | {
        "dense_s": costs.dense_s(layer_bytes(spec, facts)),
        "host_s": (policy.layer_us + loads * policy.load_us) * 1e-6,
        "hit_s": hits * facts.top_k * costs.expert_s(spec.slot_bytes),
        "miss_s": (1 - hits) * facts.top_k * costs.expert_s(spec.slot_bytes),
        "load_s": record["blocked_io_s"] / forwards / facts.layers,
    }
    return replace(
        assumed,
        tokens_per_s=1 / token_s,
        low=1 / (token_s * (1 + WITHIN)),
        high=1 / (token_s * (1 - WITHIN)),
        hit_share=hits,
        bytes_loaded_per_token=nbytes,
        layer_s=token_s / facts.layers,
        parts_s=parts,
        bound_by=max(parts, key=lambda name: parts[name]).removesuffix("_s"),
        basis=("host time measured", f"routing of {record['generated_tokens']} recorded tokens, replayed",
               *(() if note is None else (note,)), *threads_note(costs, spec)),
    )  # fmt: skip


def simulated_machine(
    header: TraceHeader, spec: ClusterSpec, facts: ModelFacts, costs: MachineCosts, assumed: Prediction,
    policy: PolicyCosts, grows: bool = False,
) -> Machine:  # fmt: skip
    """The machine on which a trace is replayed. grows: attention reads the trace's contexts, not `CONTEXT_TOKENS`."""
    hardware = assumed.hardware
    kv_bytes = facts.kv_elements * spec.compute_item_bytes / facts.layers if grows else 0.0
    return machine_of(
        costs, policy, header, dense_bytes=spec.dense_bytes / facts.layers if grows else layer_bytes(spec, facts),
        kv_bytes=kv_bytes, slot_bytes=spec.slot_bytes,
        # a copy's bytes are those of this run's slots, not of the recording's
        copy_bytes=facts.expert_bytes if spec.gpu else spec.slot_bytes,
        link=Link(hardware.link_gbps, hardware.link_latency_us),
    )  # fmt: skip


def _require_same(header: TraceHeader, facts: ModelFacts) -> None:
    own = (facts.layers, facts.experts, facts.top_k)
    if (header.layers, header.experts, header.top_k) != own:
        what = f"it has {header.layers} layers of {header.experts} experts, top-{header.top_k}"
        raise ConfigError(what, "record one with this model: `tiermoe record`")
