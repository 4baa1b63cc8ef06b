"""The effective plan: what runs where, how many bytes, over which link.

A planned topology for people: the actors, what they take of their nodes, and the predicted speed.

What a run did, as a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .tables import facts, seconds, size


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
        *([("low precision", _low_bit(plan["low_bit"]))] if plan.get("low_bit") else []),
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


def _low_bit(low: Mapping[str, Any]) -> str:
    """Which misses are loaded as replicas, and the slots for those."""
    rule = f"a miss behind {low['t1']:.0%} of its token's weight is loaded in {low['bits']} bits"
    rest = f", behind {low['t2']:.0%} not at all" if low["t2"] < 1 else ""
    slots = f"{low['slots']} slots of {size(low['slot_bytes'])} ({size(low['bytes'])})"
    return f"{rule}{rest}; {slots}, {low['kernel']} kernel"


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


_KINDS = {
    "dense": "dense", "kv": "kv", "slots": "slots", "low_bit": "slots for replicas", "mapped": "mapped",
    "replicas": "replicas",
}  # fmt: skip


def topology_tables(record: Mapping[str, Any]) -> list[Table]:
    """Tables of what `tiermoe plan --json` prints.

    Args:
        record: as `topology.make.PlanResult.as_dict` makes it.
    """
    topology = record["topology"]
    tables = [_summary(record), _actors(topology["actors"], "Actors", scheduled=True), _nodes(topology["loads"])]
    return [*tables, _prediction(record["prediction"]), *_notes(record)]


def placed_tables(record: Mapping[str, Any]) -> list[Table]:
    """The same plan carried out, in short: each actor with its node and bytes, and what was predicted.

    Args:
        record: as `topology.make.PlanResult.as_dict` makes it.
    """
    addresses = {load["node"]: load["address"] for load in record["topology"]["loads"]}
    actors = [actor | {"node": addresses.get(actor["node"], actor["node"])} for actor in record["topology"]["actors"]]
    prediction = record["prediction"]
    predicted = facts("Predicted, not measured", [
        ("decode", f"{prediction['tokens_per_s']:.4g} tokens/s for one request on {prediction['hardware']['name']}, "
                   f"bound by {prediction['bound_by']}; {size(prediction['bytes_loaded_per_token'])} loaded a token"),
    ])  # fmt: skip
    placed = _actors(actors, f"Topology on {record['nodes_from']}", scheduled=False)
    return [placed, predicted, *_notes(record)]


def _notes(record: Mapping[str, Any]) -> list[Table]:
    notes = [("note", str(note)) for note in record["notes"]]
    return [facts("Notes", notes)] if notes else []


def _summary(record: Mapping[str, Any]) -> Table:
    model, spec = record["model"], record["spec"]
    total = model["layers"] * model["experts"] * model["expert_bytes"]
    each, low = spec["budget_bytes"] // spec["slot_bytes"], spec["low_bit"]
    held = f"{_count(each, 'slot')} of {size(spec['slot_bytes'])}" if low is None else (
        f"{low['share']:.0%} of it for replicas of {size(low['replica_bytes'])}, the rest for experts in full of "
        f"{size(spec['slot_bytes'])}"
    )  # fmt: skip
    return facts("Planned, not started", [
        ("model", f"{model['name']}: {model['layers']} layers x {model['experts']} experts, top-{model['top_k']}, "
                  f"{size(model['expert_bytes'])} each as stored, {size(total)} in all"),
        ("sizes from", model["source"]),
        ("nodes", record["nodes_from"]),
        ("policy", spec["policy"]),
        ("workers", f"{_count(spec['shards'], 'GPU' if spec['gpu'] else 'CPU stand-in')}, "
                    f"{_count(spec['threads'], 'thread')} each, strategy {spec['strategy']}, "
                    f"experts by '{spec['ownership']}'"),
        ("budget of each", f"{size(spec['budget_bytes'])}, {held}"),
        ("store", f"{spec['store_layout']}, on {spec['store_nodes']} nodes"),
    ])  # fmt: skip


def _actors(actors: Iterable[Mapping[str, Any]], title: str, *, scheduled: bool) -> Table:
    table = _grid(title, "actor", "node", "reserves", "experts", "bytes", *(["scheduled"] if scheduled else []))
    for actor in actors:
        nbytes = ", ".join(f"{size(actor['nbytes'][k])} {kind}" for k, kind in _KINDS.items() if actor["nbytes"][k])
        how = f"group {actor['group']}, bundle {actor['bundle']}" if actor["group"] else "alone"
        cells = actor["name"], actor["node"], _amounts(actor["resources"]), str(actor["experts"]), nbytes
        _add(table, *cells, *([how] if scheduled else []))
    return table


def _nodes(loads: Iterable[Mapping[str, Any]]) -> Table:
    table = _grid("Nodes", "node", "address", "used", "host memory", "devices", "shared pages", "replicas")
    for load in loads:
        used = ", ".join(f"{used:g} of {total:g} {name}" for name, (used, total) in load["resources"].items())
        total = size(load["host_total"]) if load["host_total"] is not None else "unknown"
        host = f"{size(load['host_bytes'])} of {total}"
        devices, shared, replicas = (
            size(nbytes) for nbytes in (load["device_bytes"], load["kinds"]["mapped"], load["kinds"]["replicas"])
        )
        _add(table, load["node"], load["address"], used, host, devices, shared, replicas)
    return table


def _prediction(prediction: Mapping[str, Any]) -> Table:
    hardware = prediction["hardware"]
    parts = ", ".join(f"{name.removesuffix('_s')} {seconds(value)}" for name, value in prediction["parts_s"].items())
    ndp = f"; NDP modelled as {prediction['ndp_hardware']}" if prediction["ndp_hardware"] else ""
    return facts("Predicted, not measured", [
        ("decode", f"{prediction['tokens_per_s']:.4g} tokens/s for one request, bound by {prediction['bound_by']}"),
        ("one layer", f"{seconds(prediction['layer_s'])}, before overlap: {parts}"),
        ("loads", f"{size(prediction['bytes_loaded_per_token'])} a token"),
        ("assumed hits", f"{prediction['hit_share']:.1%}: the share of experts that is resident"),
        ("assumed hardware", f"{hardware['name']}: memory {hardware['memory_gbps']:g} GB/s, link "
                             f"{hardware['link_gbps']:g} GB/s after {hardware['link_latency_us']:g} us, network "
                             f"{hardware['network_gbps']:g} GB/s after {hardware['network_latency_us']:g} us, "
                             f"prefetch brings {hardware['prefetch_useful']:.0%} of the misses in time{ndp}"),
    ])  # fmt: skip


def _grid(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *values: str) -> None:
    table.add_row(*(Text(value) for value in values))  # Text: names of nodes are not markup


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def summary_table(result: Mapping[str, Any]) -> Table:
    """The measurements of one request.

    Args:
        result: the record that `tiermoe run --json` prints.
    """
    rows = [
        ("tokens", f"{result['prompt_tokens']} prompt, {result['generated_tokens']} generated ({result['finish']})"),
        ("time to first token", seconds(result["ttft_s"])),
        ("time per output token", _per_token(result["tpot_s"])),
        ("expert hit rate", f"{result['hit_rate']:.1%} ({result['hits']} hits, {result['misses']} misses)"),
        ("loaded", f"{size(result['bytes_loaded'])}, of it prefetched {size(result['bytes_loaded_prefetch'])}, "
                   f"wasted {size(result['bytes_wasted'])}"),
        *low_bit_rows(result),
        *prefetch_rows(result),
        *configurator_rows(result),
        ("link busy", f"{seconds(result['total_io_s'])}, compute blocked by it {seconds(result['blocked_io_s'])}"),
        *_ndp_summary(result),
        ("expert memory", f"peak {size(result['expert_bytes_peak'])} of {size(result['expert_budget_bytes'])}"),
        ("start-up", seconds(result["startup_s"])),
        ("numbers are", _label(result)),
    ]  # fmt: skip
    if not result["lossless"]:
        quantized = f"{result['ndp_tokens']} pairs on quantized replicas, " if result["ndp_tokens"] else ""
        rows.append(("lossy", f"{quantized}{result['substitutions']} substitutions, {result['dropped']} dropped"))
    return facts("Summary", rows)


def low_bit_rows(counters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What ran in low precision; nothing where there are no slots for that."""
    if not counters.get("low_bit_slots"):
        return []
    hits, misses = counters["low_bit_hits"], counters["low_bit_misses"]
    loaded = size(counters["bytes_loaded_low_bit"])
    return [
        ("low precision", f"{counters['low_bit_pairs']} (token, expert) pairs on replicas: {hits} replicas were there, "
                          f"{misses} not; {loaded} of what was loaded, with guesses"),
    ]  # fmt: skip


def prefetch_rows(counters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of prefetches, by source, and how the matcher fared; nothing where nothing was prefetched."""
    rows = [
        (f"by {name}", f"{found['queued']} experts asked for, {found['hits']} there in time, {found['late']} late, "
                       f"{found['wasted']} unused, {found['cancelled']} cancelled")
        for name, found in counters.get("prefetch_sources", {}).items()
    ]  # fmt: skip
    matcher = counters.get("matcher")
    if matcher:
        lag = f", {matcher['lag_us_p50']:.0f} us after its context" if "lag_us_p50" in matcher else ""
        cost = f"; a publish takes {matcher['publish_us_p50']:.0f} us" if "publish_us_p50" in matcher else ""
        now = f"; now {matcher['source']}: {matcher['problem']}" if matcher["problem"] else ""
        rows.append(
            ("matcher", f"{matcher['commands']} commands{lag}, {matcher['late']} late, {matcher['dropped']} contexts "
                        f"dropped, lost {matcher['lost']} times, next-gate instead in {matcher['fallback_layers']} "
                        f"layers{cost}{now}")
        )  # fmt: skip
    return rows


def configurator_rows(counters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How often experts were cut anew, and what that was expected to gain; nothing where no configurator runs."""
    found = counters.get("configurator")
    if not found:
        return []
    gain = ""
    if found["reconfigurations"]:
        before, after = seconds(found["expected_before_s"]), seconds(found["expected_after_s"])
        gain = f"; the last was expected to bring what loading adds to a token from {before} to {after}"
    trouble = f"; it failed: {found['problem']}" if found["problem"] else ""
    cost = f"recording took {seconds(found['record_s'])} of the forwards"
    return [
        ("cache split", f"cut anew {found['reconfigurations']} times in {found['configurations']} configurations"
                        f"{gain}; {cost}{trouble}"),
    ]  # fmt: skip


def _ndp_summary(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the NDP worker did, where there is one."""
    if not result.get("plan", {}).get("ndp"):
        return []
    losses, refusals, why = (result[key] for key in ("ndp_losses", "ndp_refusals", "ndp_last_failure"))
    trouble = f"; lost {losses} times, refused {refusals} calls (the last: {why})"
    lost = f"{trouble}, {result['ndp_recomputed']} pairs recomputed" if losses or refusals else ""
    return [
        ("placement", f"{result['migrations']} migrations, {size(result['bytes_loaded_migration'])}; "
                      f"{size(result['bytes_demanded_decode'])} loaded by decode"),
        ("NDP worker", f"{result['ndp_tokens']} (token, expert) pairs in {result['ndp_calls']} calls; kernels "
                       f"{seconds(result['ndp_measured_s'])}, modelled {seconds(result['ndp_modelled_s'])}, "
                       f"waited for {seconds(result['ndp_wait_s'])}{lost}"),
    ]  # fmt: skip


def _per_token(tpot_s: float | None) -> str:
    return f"{seconds(tpot_s)} ({1 / tpot_s:.1f} tokens/s)" if tpot_s else "none (fewer than two tokens)"


def _label(result: Mapping[str, Any]) -> str:
    return "emulated: the CPU stands in for a GPU" if result["executor"] == "emulated" else str(result["executor"])
