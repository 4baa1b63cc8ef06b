"""The effective plan of a worker, for users to read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...errors import size
from ..settings import EngineSettings, LinkSettings
from ..store.files import StoreView
from ..store.format import Published
from .cache.device import PinReport
from .engine import ExpertEngine
from .model.published_linear import held_parameters, published_bytes, published_notes
from .peers.shards import account, owners
from .serving.batcher import Batcher
from .stats import EngineStats

_REPORT_S = 5.0


def describe(
    settings: EngineSettings, view: StoreView, engine: ExpertEngine, batcher: Batcher, model: Any,
    pinned: PinReport | None, head: Any = None,
) -> dict[str, Any]:
    """The plan as flat names and values; sizes in bytes. pinned: None: nothing is pinned on this device.

    head: of the model, for drafts; None: there is none, or it is not asked.
    """
    manifest, stats, policy = view.manifest, engine.stats(), settings.policy
    parts = [model] if head is None else [model, head]
    dense = {p.data_ptr(): p.nbytes for part in parts for p in held_parameters(part)}  # tied parameters once
    emulated = engine.device.executor == "emulated"
    no_link: dict[str, Any] = dict.fromkeys(LinkSettings.model_fields)
    return {
        "model": manifest.model,
        "architecture": manifest.architecture,
        "policy": policy.name,
        "lossless": policy.lossless and settings.kv.coded is None,
        "executor": engine.device.executor,
        "device": str(engine.device.torch_device),
        "dtype": str(engine.cache.pool.dtype).removeprefix("torch."),
        "threads": settings.threads,
        "compile": settings.compile,
        "decode_graphs": batcher.replays,
        "moe_layers": len(manifest.layers),
        "expert_form": manifest.expert_form,
        "experts_per_layer": manifest.experts.num_experts,
        "top_k": engine.top_k,
        "experts": stats.experts,
        "mapped": settings.budget.mapped and settings.host_bytes is None,
        "slots": _slots(stats),
        "slot_bytes": engine.slot_bytes,
        "expert_bytes_total": stats.experts * engine.slot_bytes,
        "expert_budget_bytes": stats.expert_budget_bytes,
        "expert_bytes_allocated": stats.expert_bytes_peak,
        "budget_auto": None if (auto := settings.budget.auto) is None else auto.in_terms,
        "shared": None if stats.shared is None else asdict(stats.shared),
        "dense_bytes": sum(dense.values()) + published_bytes(model),
        "store_path": view.path,
        "store_bytes": sum(record.nbytes for record in manifest.files()),
        "expert_kernel": engine.kernels.plan.as_dict(),
        "link": settings.link.model_dump() if emulated else no_link | {"gbps": engine.cache.disk_gbps},
        "pinned": None if pinned is None else pinned.staged == 0 and len(view.layers) == len(manifest.layers),
        "pinned_bytes": None if pinned is None else pinned.registered + pinned.copied,
        "staged_bytes": None if pinned is None else pinned.staged,
        "prefetch": policy.prefetch.kind,
        "prefetch_distance": policy.prefetch.distance if policy.prefetch.kind != "none" else None,
        "prefetch_synchronous": policy.prefetch.synchronous,
        "eviction": policy.eviction.kind,
        "routing": policy.routing.model_dump(exclude_none=True),
        "split": _split(settings, engine),
        "low_bit": _low_bit(settings, engine),
        "ndp": _ndp(settings, engine),
        "planner": None if stats.planner is None else asdict(stats.planner),
        "drafts": None if stats.drafts is None else settings.drafts.model_dump() | {"head": head is not None},
        "shards": _shards(settings, engine),
        "matcher": _matcher(settings, engine),
        "batching": "continuous" if batcher.shares else "turns" if batcher.max_requests > 1 else "serial",
        "max_requests": batcher.max_requests,
        "kv_tokens": batcher.streams.capacity_tokens,
        "kv_dtype": settings.kv.dtype,
        "max_prompt_tokens": batcher.streams.limit_tokens,
        "vocabulary": batcher.streams.vocabulary,
        "notes": [*_notes(engine, batcher, pinned), *published_notes(model)],
    }


def _slots(stats: EngineStats) -> int:
    """While no request needs their memory."""
    return stats.slots if stats.shared is None else stats.shared.slots_most


def _split(settings: EngineSettings, engine: ExpertEngine) -> dict[str, Any] | None:
    """How experts are split now; None: experts are whole."""
    split = engine.cache.split
    if split is None:
        return None
    return {
        "kind": settings.policy.split.kind,
        "top_ratio": [round(top / split.neurons, 4) for top in split.tops],
        "top_slots": list(split.slots),
        "buffer_slots": split.buffer_slots,
        "buffer_bytes": split.buffer_slots * split.buffer_neurons * engine.slot_bytes // split.neurons,
    }


def _low_bit(settings: EngineSettings, engine: ExpertEngine) -> dict[str, Any] | None:
    """The expert memory for low-bit replicas; None: there is none."""
    part, low = engine.cache.low_bit, settings.policy.low_bit
    if part is None or low is None or engine.packed_kernel is None:
        return None
    chosen = low.model_dump(exclude={"kind"}) | {"kernel": engine.packed_kernel.name}
    return chosen | {"slots": part.slots, "slot_bytes": part.slot_bytes, "bytes": part.pool.bytes}


def _ndp(settings: EngineSettings, engine: ExpertEngine) -> dict[str, Any] | None:
    """The NDP workers, placement and replicas; None: the policy uses no NDP worker."""
    policy, pool = settings.policy, engine.ndp
    if pool is None:
        return None
    published: Published | None = getattr(engine.cache.pool, "published", None)
    workers = [
        {"worker": peer.name, "experts": pool.experts_of(peer.name), "transport": peer.transport}
        for peer in pool.members
    ]
    return {
        "workers": workers,
        "placement": policy.placement.kind,
        "alpha": policy.placement.alpha,
        "hot_per_layer": engine.hot_per_layer,
        "precision": policy.precision.kind,
        "bits": policy.precision.bits,
        "form": None if published is None else published.label(),
        "form_width": None if published is None else published.width,
        "group_size": settings.ndp.group_size if policy.precision.kind != "full" else None,
        "threads": settings.ndp.worker_threads,
        "transport": ", ".join(sorted({str(worker["transport"]) for worker in workers})),
        "activations": engine.activations.label,
        "hardware": settings.ndp.device.name,
        "paced": settings.ndp.pace,
    }


def _matcher(settings: EngineSettings, engine: ExpertEngine) -> dict[str, Any] | None:
    """The matcher's settings and state; None: the policy uses no matcher."""
    if engine.matcher is None:
        return None
    chosen = settings.matcher.model_dump(include={"capacity", "learn"})
    chosen |= settings.policy.prefetch.model_dump(include={"distance", "semantic", "dynamic"})
    account = engine.matcher.account(_REPORT_S)
    found = {name: account.get(name) for name in ("state", "maps", "begun_from")}
    return chosen | found | {"source": engine.matcher.source, "problem": engine.matcher.problem or ""}


def _shards(settings: EngineSettings, engine: ExpertEngine) -> list[dict[str, Any]] | None:
    """Each GPU's part of the expert cache, the lead's first; None: there is one GPU."""
    if engine.shards is None:
        return None
    stats = engine.stats()
    owned = owners(len(stats.layers), engine.experts, settings.shards)
    lead = account(stats) | {"device": str(engine.device.torch_device), "activations": engine.activations.label}
    parts = [lead, *engine.shards.reports()]
    return [
        {
            "shard": i,
            "experts": owned.count(i),
            "slots": part.get("slots"),
            "expert_bytes_allocated": part.get("expert_bytes_peak"),
            "device": part.get("device"),
            "transport": peer.transport if peer is not None else None,
            "activations": part.get("activations"),
        }
        for i, (part, peer) in enumerate(zip(parts, [None, *engine.shards.peers.values()], strict=True))
    ]


def _notes(engine: ExpertEngine, batcher: Batcher, pinned: PinReport | None) -> list[str]:
    """Facts that a user would not expect."""
    notes, slots = list(engine.notes), _slots(engine.stats())
    if batcher.note is not None:
        notes.append(batcher.note)
    if pinned is not None and pinned.problem is not None:
        notes.append(
            f"not all experts could be pinned where they lie ({pinned.problem}): {size(pinned.copied)} were copied to "
            f"pinned memory; {size(pinned.staged)} go through a staging buffer, slower, and the forward waits for them"
        )
    if slots < engine.top_k:
        notes.append(f"{slots} slots are fewer than one token's {engine.top_k} experts: layers run in waves")
    return notes
