"""The effective plan: what runs where, how many bytes, over which link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .tables import facts, size


def plan_table(plan: Mapping[str, Any]) -> Table:
    """The worker's plan as a table.

    Args:
        plan: what `GpuWorker.start` returned.
    """
    rows = [
        ("model", f"{plan['model']} ({plan['architecture']}), {plan['dtype']}"),
        ("experts", _experts(plan)),
        ("policy", f"{plan['policy']}: {'lossless' if plan['lossless'] else 'LOSSY'}, "
                   f"prefetch {plan['prefetch']}, eviction {plan['eviction']}"),
        ("executor", _executor(plan)),
        *([("experts run by", _kernels(plan["expert_kernel"]))] if plan.get("expert_kernel") else []),
        ("on the device", f"{size(plan['dense_bytes'])} dense, "
                          f"{size(plan['expert_budget_bytes'])} for experts: {_slots(plan)}"),
        ("in host memory", f"{size(plan['store_bytes'])} in {plan['store_path']}{_pinned(plan)}"),
        *([("split", _split(plan["split"]))] if plan.get("split") else []),
        *([("NDP worker", _ndp(plan["ndp"]))] if plan.get("ndp") else []),
        *([("matcher", _matcher(plan["matcher"]))] if plan.get("matcher") else []),
        ("link", _link(plan)),
        ("KV cache", f"{plan['kv_tokens']} tokens, {plan['batching']} batching; "
                     f"prompt and text up to {plan['max_prompt_tokens']} tokens"),
    ]  # fmt: skip
    notes = [*plan.get("notes", ()), *plan.get("expert_kernel", {}).get("notes", ())]
    rows += [("note", str(note)) for note in notes]
    return facts("Plan", rows)


def _experts(plan: Mapping[str, Any]) -> str:
    layers, each = plan["moe_layers"], plan["experts_per_layer"]
    total = size(plan["expert_bytes_total"])
    return f"{layers} layers x {each}, top-{plan['top_k']}, {size(plan['slot_bytes'])} each, {total} in all"


def _kernels(choice: Mapping[str, Any]) -> str:
    """What runs experts of few, some and many rows, with its microseconds for a call where that was measured."""
    us = {(t["row_class"], t["kernel"]): f" ({t['us']:.0f} us for {t['experts']} experts)" for t in choice["times"]}
    chosen = {name: f"{kernel}{us.get((name, kernel), '')}" for name, kernel in choice["chosen"].items()}
    if len(set(chosen.values())) == 1:
        return next(iter(chosen.values()))
    return ", ".join(f"{name}: {kernel}" for name, kernel in chosen.items())


def _slots(plan: Mapping[str, Any]) -> str:
    share = plan["slots"] / plan["experts"] if plan["experts"] else 0.0
    return f"{plan['slots']} of {plan['experts']} slots ({share:.0%})"


def _executor(plan: Mapping[str, Any]) -> str:
    threads = f"{plan['threads']} thread{'s' if plan['threads'] != 1 else ''}"
    stand_in = " (the CPU stands in for a GPU)" if plan["executor"] == "emulated" else ""
    return f"{plan['executor']} on {plan['device']}, {threads}{stand_in}"


def _link(plan: Mapping[str, Any]) -> str:
    if plan["executor"] == "real":
        return "the hardware's own"
    link = plan["link"]
    speed = f"{link['gbps']:g} GB/s" if link["gbps"] else "unthrottled"
    return f"{speed}, {link['latency_us']:g} us before each copy (emulated)"


def _split(split: dict[str, Any]) -> str:
    """How the experts' memory is divided between tops and bottoms."""
    def span(values: list[Any], unit: str) -> str:
        least, most = min(values), max(values)
        return f"{least:g}{unit}" if least == most else f"{least:g} to {most:g}{unit}"

    tops = f"{span(split['top_slots'], '')} tops a layer, of {span([100 * r for r in split['top_ratio']], ' %')}"
    return f"{split['kind']}: {tops}; {split['buffer_slots']} slots for bottoms ({size(split['buffer_bytes'])})"


def _ndp(ndp: Mapping[str, Any]) -> str:
    precision = {
        "full": "in full precision",
        "uniform": f"at {ndp['bits'] or 0:g} bits",
        "prefix-split": f"at {ndp['bits'] or 0:g} bits on average",
    }[ndp["precision"]]
    hot = f", all but {ndp['hot_per_layer']} experts a layer" if ndp["hot_per_layer"] is not None else ""
    each = f"{len(ndp['workers'])} workers with " if len(ndp["workers"]) > 1 else ""
    threads = f"{each}{ndp['threads']} thread{'s' if ndp['threads'] != 1 else ''}"
    paced = f"paced as {ndp['hardware']}" if ndp["paced"] else f"modelled as {ndp['hardware']}"
    way = ndp["transport"] if ndp["activations"] == "plain" else f"{ndp['transport']} ({ndp['activations']})"
    return f"placement {ndp['placement']}{hot}, {precision}; {threads}, over {way}, {paced}"


def _matcher(matcher: Mapping[str, Any]) -> str:
    rules = [name for name in ("semantic", "dynamic", "learn") if not matcher[name]]
    without = f", without {', '.join(rules)}" if rules else ""
    held = f"{matcher['maps']} of {matcher['capacity']} maps" if matcher["maps"] is not None else matcher["state"]
    now = f"; prefetch begins with {matcher['source']}: {matcher['problem']}" if matcher["problem"] else ""
    return f"{held}, {matcher['distance']} layers ahead{without}{now}"


def _pinned(plan: Mapping[str, Any]) -> str:
    if not plan["pinned"] and plan.get("pinned_bytes"):
        return f", {size(plan['pinned_bytes'])} of it pinned"
    return {True: ", pinned", False: ", not pinned", None: ""}[plan["pinned"]]
