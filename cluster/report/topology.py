"""A planned topology for people: the actors, what they take of their nodes, and the predicted speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .tables import facts, seconds, size

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
