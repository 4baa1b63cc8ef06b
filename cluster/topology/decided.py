"""What a start decides, by the model's sizes and the nodes: where experts run without a GPU, the default policy and the
terms of `budget: auto`.

Without a GPU, and without anything that asks for the stand-in (`RunConfig.stands_in`), experts run where the store maps
them: there is no budget, nothing is copied, and no policy has anything to decide. Where the store is larger than what
host memory leaves for it, experts run in slots there that are read from the disk, by the policy `next-gate`.

The default policy is `next-gate` where copies are quick, else `auto`: there is too little to save there. While layers
were planned in Python `auto` took 1.04 (35 us a copy, latency included) and 1.19 (16 us) of `next-gate`'s time a token,
and 0.93 where a copy took 108 us (default model, a quarter of the experts, emulated; docs/auto.md). Both are lossless
and need nothing prepared, so the choice may wait until the nodes are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...actors.budget import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    AutoBudget,
    Budget,
    ModelSizes,
    activation_bytes,
    graph_bytes,
    in_words,
)
from ...actors.gpu_driver import gpus_free_bytes
from ...actors.settings import EngineSettings
from ...actors.slot_budget import least_bytes
from ...errors import ConfigError, size
from ...proto.options import Limits
from ..config import AUTO, DEFAULT_BUDGET, DEFAULT_POLICY, QUICK_COPY_US, STEPPED, RunConfig, chosen_policy
from .spec import (
    ModelFacts,
    NodeInfo,
    compute_item_bytes,
    computes_stored,
    has_ndp,
    replicas_bytes,
    slot_sizes,
    wants_gpu,
)

_PROMPT_ROWS = (1024, 2048, 4096, 8192)  # of a forward on a GPU, in place of the default
_PROMPT_SHARE = 1 / 8  # of what experts may have, for activations of a prompt's forward
_SCANS = 4 * 4  # bytes: a scan over a prompt keeps four numbers in float32 for each of a state, in one layer at a time
_MESSAGE_ROOM = 4 << 20  # of a message, for its routing
_NOT_NEAR_DATA = (
    "every miss is loaded: an NDP worker rounds otherwise than a GPU, and times decide which experts it gets; "
    "--ndp-workers asks for one"
)
_RAY_BYTES, _PROCESS_BYTES = 1 << 30, 512 << 20  # of a local Ray, and of each of our processes without weights


def decided(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], here: bool
) -> tuple[EngineSettings, tuple[str, ...]]:
    """The settings with the default policy, the budget and a GPU's `kv.max_batch_tokens` resolved, and why, as notes.

    What was given stays.

    Args:
        here: the nodes are this machine.

    Raises:
        BudgetError: too little for one expert; the message has every term. ConfigError: the memory is not known.
    """
    gpu, why = wants_gpu(settings, nodes), tuple[str, ...]()
    if settings.budget.mapped:
        if not gpu:
            return _in_host_memory(config, settings, facts, nodes, here)
        settings = settings.model_copy(update={"budget": Budget.parse(DEFAULT_BUDGET)})
    if config.policy == DEFAULT_POLICY:
        name, reason = _choice(config, facts.slot_bytes(compute_item_bytes(settings, gpu)), gpu)
        policy = chosen_policy(name)
        settings = settings.model_copy(update={"policy": policy})
        why = (f"the default policy is {policy.name} here: {reason}",)
    if gpu and settings.policy.uses_ndp and config.may_drop_workers(settings.policy):
        why += (_NOT_NEAR_DATA,)
    auto = settings.budget.auto is not None
    takes_rows = gpu and "max_batch_tokens" not in settings.kv.model_fields_set
    if auto or (takes_rows and _gpu_free(config, here) is not None):
        terms = _terms(config, settings, facts, nodes, here)
        if takes_rows:
            rows = _prompt_rows(settings, facts, terms, config.ndp_workers(settings.policy) > 0)
            terms = terms.model_copy(update={"chunk": rows, "activations": _activations(settings, facts, gpu, rows)})
            kv = settings.kv.model_copy(update={"max_batch_tokens": rows})
            settings = settings.model_copy(update={"kv": kv})
        if auto and terms.nbytes:
            settings = settings.model_copy(update={"budget": Budget(auto=terms)})
    host_bytes, because = _host_bytes(config, settings, facts, nodes, here)
    return settings.model_copy(update={"host_bytes": host_bytes}), why + because


def _in_host_memory(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], here: bool
) -> tuple[EngineSettings, tuple[str, ...]]:
    """Without a GPU: experts run where the store maps them; where host memory does not hold all of them, in slots there
    that are read from the disk.
    """
    terms = _terms(config, settings, facts, nodes, here)
    terms = terms.model_copy(update={
        "mapped": 0, "slot": facts.expert_bytes, "least": facts.expert_bytes, "most": facts.all_bytes,
    })  # fmt: skip
    room = None if terms.free is None else terms.terms["experts"]  # of each lead
    if room is None or room * terms.leads >= facts.all_bytes or room < terms.slot:
        return settings, ("without a GPU, experts run where the store maps them; --emulate stands in for a GPU",)
    policy = chosen_policy(STEPPED)
    why = (
        f"{in_words(terms.terms, terms.chunk, terms.tokens)}, and the store has {size(facts.all_bytes)}: they are read "
        f"from the disk, past the page cache, by policy {policy.name}"
    )
    return settings.model_copy(update={"host_bytes": room, "policy": policy}), (why,)


def _host_bytes(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], here: bool
) -> tuple[int | None, tuple[str, ...]]:
    """Host memory of each lead and shard that its slots are loaded from, where all of it does not hold the experts;
    None: the store is mapped.

    NDP workers that compute experts as stored map them, on nodes of their own. On a single node those that are optional
    are left out.

    Raises:
        ConfigError: such workers are needed, and this one node does not hold the store.
    """
    cluster, policy, gpu = config.cluster, settings.policy, wants_gpu(settings, nodes)
    memory, beside = _host_free(nodes), cluster.store.layout == "replicated" and cluster.store.nodes == "workers"
    if memory is None or not beside or (settings.budget.auto is not None and not gpu):
        return None, ()
    terms, keys, devices = _terms(config, settings, facts, nodes, here), facts.layers * facts.experts, cluster.shards
    taken = MARGIN_BYTES + int(MARGIN_SHARE * memory) + _process_bytes(config, settings)
    taken += cluster.replicas * keys * replicas_bytes(settings, facts)
    if not gpu:
        slots = min(devices * settings.budget.bytes_of(terms.slot, keys), terms.most)
        taken += cluster.replicas * (terms.dense + terms.kv + terms.states + terms.activations + slots)
    left = memory - taken
    room = left // (cluster.replicas * devices)
    if left >= facts.all_bytes or room < facts.expert_bytes:
        return None, ()
    why: tuple[str, ...] = (f"the store has {size(facts.all_bytes)} of experts",)
    alone = sum(node.alive for node in nodes) == 1
    if alone and has_ndp(config, settings, facts, nodes) and computes_stored(settings, facts):
        if not config.may_drop_workers(policy):
            raise ConfigError(
                f"NDP workers of policy '{policy.name}' compute experts where the store maps them, and host memory "
                f"leaves {size(max(0, left))} for {size(facts.all_bytes)}",
                "leave --ndp-workers out with policy auto, choose a policy that loads experts, such as next-gate, or "
                "raise --host-memory",
            )
        why += ("no NDP worker is started, since it would compute them where the store maps them",)
    where = f"host memory of each of {devices} GPUs" if devices > 1 else "host memory"
    read = f"{why[0]}: they are read from the disk, past the page cache, into {size(room)} of {where}"
    return room, (read, *why[1:])


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


def _prompt_rows(settings: EngineSettings, facts: ModelFacts, known: AutoBudget, ndp: bool) -> int:
    """Rows of a forward on a GPU: the more, the fewer times a prompt's forwards copy the experts that are offloaded.

    The most whose activations fit: beside experts of a given budget into what is free, and with `budget: auto` into
    `_PROMPT_SHARE` of what these and experts have together. With peers also the most whose inputs fit into a message.
    """
    least = settings.kv.max_batch_tokens
    if known.free is None:
        return least
    others = sum(nbytes for name, nbytes in known.terms.items() if name not in ("free", "activations", "experts"))
    room = known.free - others  # for activations and experts
    if settings.budget.auto is None:
        experts = settings.budget.bytes_of(known.slot, facts.layers * facts.experts)
        room -= experts
    else:
        experts, room = room - known.activations, int(_PROMPT_SHARE * room)
    if experts >= known.most:  # nothing is offloaded
        return least
    most = known.tokens
    if ndp or settings.shards.count > 1:
        most = min(most, (Limits().max_message_bytes - _MESSAGE_ROOM) // (4 * facts.hidden))  # float32
    fits = [
        rows for rows in _PROMPT_ROWS
        if least < rows <= most and _activations(settings, facts, True, rows) <= room
    ]  # fmt: skip
    return max(fits, default=least)


def _activations(settings: EngineSettings, facts: ModelFacts, gpu: bool, rows: int) -> int:
    """Bytes of those of a forward of so many rows."""
    kv, attention = settings.kv, "triton" if gpu and settings.asks_for_graphs else settings.attention
    tokens, item = kv.num_blocks * kv.page_size, compute_item_bytes(settings, gpu)
    # rows of 8 bits are gathered as they are stored, then read as float32
    decoded = 0 if kv.coded is None else 9 * (tokens + rows) * facts.kv_elements // facts.depth
    if facts.scanned:
        rows = max(rows, kv.request_tokens)
    scanned = _SCANS * facts.scanned * rows
    return activation_bytes(_sizes(facts), rows, tokens, kv.max_num_seqs, item, attention) + decoded + scanned


def _terms(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], here: bool
) -> AutoBudget:
    """The terms of `budget: auto`.

    On the CPU stand-in the free memory is that of the node with the least, which its devices share. On GPUs it is
    `cluster.gpu_memory`, or what this machine's say; each worker asks its own before it loads anything.
    """
    gpu, kv, cluster = wants_gpu(settings, nodes), settings.kv, config.cluster
    item, tokens, rows = compute_item_bytes(settings, gpu), kv.num_blocks * kv.page_size, kv.max_batch_tokens
    slot, sizes = facts.slot_bytes(item), slot_sizes(settings, facts, item)
    terms = AutoBudget(
        dense=facts.dense_bytes(item, gpu), kv=facts.kv_bytes(item, kv),
        states=facts.state_bytes * kv.max_num_seqs,
        activations=_activations(settings, facts, gpu, rows),
        graphs=graph_bytes(_sizes(facts), facts.layers, kv.max_num_seqs, tokens, item)
        if gpu and settings.asks_for_graphs else 0,
        slot=slot, least=least_bytes(settings.policy, sizes) or slot, most=slot * facts.layers * facts.experts,
        chunk=rows, tokens=tokens,
    )  # fmt: skip
    if gpu:
        return terms.model_copy(update={"free": _gpu_free(config, here)})
    return terms.model_copy(update={
        "free": _host_free(nodes), "final": True, "leads": cluster.replicas,
        "devices": cluster.replicas * cluster.shards,
        "mapped": facts.all_bytes + replicas_bytes(settings, facts) * facts.layers * facts.experts,
        "processes": _process_bytes(config, settings),
        "states": terms.states + (0 if facts.paged else kv.checkpoint_bytes),  # which are in host memory
    })  # fmt: skip


def _host_free(nodes: Sequence[NodeInfo]) -> int | None:
    """Free host memory of the node with the least; None: not known."""
    return min((int(node.amount("memory")) for node in nodes if node.alive and node.amount("memory")), default=None)


def _process_bytes(config: RunConfig, settings: EngineSettings) -> int:
    """Of all processes of a run, without weights."""
    cluster = config.cluster
    each = cluster.shards + config.ndp_workers(settings.policy) + 1  # a store
    processes = cluster.replicas * each + 1  # the driver
    return processes * _PROCESS_BYTES + (_RAY_BYTES if config.ray.address is None else 0)


def _gpu_free(config: RunConfig, here: bool) -> int | None:
    """Free bytes of the fullest GPU; None: not known."""
    cluster = config.cluster
    found = [int(cluster.gpu_memory)] if cluster.gpu_memory is not None else []
    found += gpus_free_bytes()[: cluster.replicas * cluster.shards] if here else ()  # Ray takes the first ones
    return min(found) if found else None


def _sizes(facts: ModelFacts) -> ModelSizes:
    return ModelSizes(
        hidden=facts.hidden, heads=facts.heads, head_size=facts.head_size, vocabulary=facts.vocabulary, mlp=facts.mlp,
        kv=facts.kv_elements // facts.depth, top_k=facts.top_k, intermediate=facts.intermediate,
        expert=facts.expert_elements,
    )  # fmt: skip
