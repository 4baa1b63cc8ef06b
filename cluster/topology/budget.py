"""The terms of `budget: auto`, from the configuration, the model's sizes, the nodes and the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from ...actors.budget import AutoBudget, ModelSizes, activation_bytes
from ...actors.gpu_driver import gpus_free_bytes
from ...actors.settings import EngineSettings
from ...actors.slot_budget import least_bytes
from ..config import RunConfig
from .spec import ModelFacts, NodeInfo, compute_item_bytes, replica_bytes, slot_sizes, wants_gpu

_RAY_BYTES, _PROCESS_BYTES = 1 << 30, 512 << 20  # of a local Ray, and of each of our processes without weights


def with_terms(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], here: bool
) -> EngineSettings:
    """The settings with the terms of `budget: auto`; any other budget stays as it is.

    On the CPU stand-in the free memory is that of the node with the least, which its devices share. On GPUs it is
    `cluster.gpu_memory`, or what this machine's say; each worker asks its own before it loads anything.

    Args:
        here: the nodes are this machine.

    Raises:
        BudgetError: too little for one expert; the message has every term. ConfigError: the memory is not known.
    """
    if not isinstance(settings.budget, AutoBudget):
        return settings
    gpu, kv, cluster = wants_gpu(settings, nodes), settings.kv, config.cluster
    item, tokens, rows = compute_item_bytes(settings, gpu), kv.num_blocks * kv.page_size, kv.max_batch_tokens
    slot, sizes = facts.slot_bytes(item), slot_sizes(settings, facts, item)
    terms = AutoBudget(
        dense=facts.dense_elements * item, kv=facts.kv_elements * item * tokens,
        activations=activation_bytes(_sizes(facts), rows, tokens, kv.max_num_seqs, item, settings.attention),
        slot=slot, least=least_bytes(settings.policy, sizes) or slot, most=slot * facts.layers * facts.experts,
        chunk=rows, tokens=tokens,
    )  # fmt: skip
    if gpu:
        found = [int(cluster.gpu_memory)] if cluster.gpu_memory is not None else []
        found += gpus_free_bytes()[: cluster.replicas * cluster.shards] if here else ()  # Ray takes the first ones
        terms = terms.model_copy(update={"free": min(found) if found else None})
    else:
        memory = [int(node.amount("memory")) for node in nodes if node.alive and node.amount("memory")]
        ndp = config.ndp_workers(settings.policy)
        widths = settings.policy.replica_widths
        replicas = sum(replica_bytes(facts, bits, settings.ndp.group_size) for bits in widths)
        processes = cluster.replicas * (cluster.shards + ndp + 1) + 1  # a store each, and the driver
        terms = terms.model_copy(update={
            "free": min(memory) if memory else None, "final": True, "leads": cluster.replicas,
            "devices": cluster.replicas * cluster.shards,
            "mapped": facts.all_bytes + replicas * facts.layers * facts.experts,
            "processes": processes * _PROCESS_BYTES + (_RAY_BYTES if config.ray.address is None else 0),
        })  # fmt: skip
    if terms.nbytes:  # or it is refused
        settings = settings.model_copy(update={"budget": terms})
    return settings


def _sizes(facts: ModelFacts) -> ModelSizes:
    return ModelSizes(
        hidden=facts.hidden, heads=facts.heads, head_size=facts.head_size, vocabulary=facts.vocabulary, mlp=facts.mlp,
        kv=facts.kv_elements // facts.depth, top_k=facts.top_k, intermediate=facts.intermediate,
        expert=facts.expert_elements,
    )  # fmt: skip
