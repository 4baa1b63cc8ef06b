"""What a runtime is: the worker's effective plan, and the topology with what each actor takes of its node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...actors.budget import in_words
from .status_tables import coded, planned_by
from .tables import Facts, Grid, count, facts, grid, seconds, size

_KINDS = {
    "dense": "dense", "kv": "kv", "slots": "slots", "low_bit": "slots for replicas", "mapped": "mapped",
    "replicas": "replicas", "copied": "host copy",
}  # fmt: skip
_STORE_NODES = {"workers": "each node with a GPU worker", "marked": "each node with the resource `store`"}


def plan_table(plan: Mapping[str, Any]) -> Facts:
    """The worker's plan as a table.

    Args:
        plan: what `GpuWorker.start` returned.
    """
    stand_in = " (the CPU stands in for a GPU)" if plan["executor"] == "emulated" else ""
    rows = [
        ("model", f"{plan['model']} ({plan['architecture']}), {plan['dtype']}"),
        ("experts", f"{plan['moe_layers']} layers x {plan['experts_per_layer']}, top-{plan['top_k']}, "
                    f"{size(plan['slot_bytes'])} each{_form(plan, 'expert_form')}, "
                    f"{size(plan['expert_bytes_total'])} in all"),
        ("policy", f"{plan['policy']}: {'lossless' if plan['lossless'] else 'LOSSY'}, "
                   f"prefetch {plan['prefetch']}, eviction {plan['eviction']}"),
        ("executor", f"{plan['executor']} on {plan['device']}, {count(plan['threads'], 'thread')}{stand_in}"),
        *([("experts run by", _kernels(plan["expert_kernel"]))] if plan.get("expert_kernel") else []),
        ("on the device", f"{size(plan['dense_bytes'])} dense, {_experts(plan)}"),
        *_auto(plan.get("budget_auto")),
        *([("shared memory", _shared(plan["shared"]))] if plan.get("shared") else []),
        ("in host memory", f"{size(plan['store_bytes'])} in {plan['store_path']}{_pinned(plan)}"),
        *([("split", _split(plan["split"]))] if plan.get("split") else []),
        *([("low precision", _low_bit(plan["low_bit"]))] if plan.get("low_bit") else []),
        *([("NDP worker", _ndp(plan["ndp"]))] if plan.get("ndp") else []),
        *([("misses", _misses(plan))] if plan.get("planner") else []),
        *([("matcher", _matcher(plan["matcher"]))] if plan.get("matcher") else []),
        *([("drafts", _drafts(plan["drafts"]))] if plan.get("drafts") else []),
        ("link", _link(plan)),
        ("KV cache", f"{plan['kv_tokens']} tokens{coded(plan.get('kv_dtype', 'auto'))}, {plan['batching']} batching; "
                     f"prompt and text up to {plan['max_prompt_tokens']} tokens"),
    ]  # fmt: skip
    notes = [*plan.get("notes", ()), *plan.get("expert_kernel", {}).get("notes", ())]
    return facts("Plan", [*rows, *(("note", str(note)) for note in notes)])


def _experts(plan: Mapping[str, Any]) -> str:
    """Where experts run."""
    if plan.get("mapped"):
        return "and all experts, where the store maps them"
    share = plan["slots"] / plan["experts"] if plan["experts"] else 0.0
    slots = f"{plan['slots']} of {plan['experts']} slots ({share:.0%})"
    return f"{size(plan['expert_budget_bytes'])} for experts: {slots}"


def _auto(terms: Mapping[str, int] | None) -> list[tuple[str, str]]:
    """The row with the terms of `budget: auto`; none if the budget was given."""
    return [] if terms is None else [("budget auto", in_words(terms, terms["chunk"], terms["tokens"]))]


def _shared(shared: Mapping[str, Any]) -> str:
    """How experts and KV cache share one memory."""
    return (
        f"experts have {shared['slots_least']} slots beside a KV cache of {shared['kv_tokens_most']} tokens, up to "
        f"{shared['slots_most']} while requests need fewer tokens"
    )


def _form(record: Mapping[str, Any], key: str = "form") -> str:
    """The published form of the experts, for after their size."""
    return f" ({record[key]})" if record.get(key) else ""


def topology_tables(record: Mapping[str, Any]) -> list[Facts | Grid]:
    """Tables of what `tiermoe plan --json` prints.

    Args:
        record: as `topology.estimate.PlanResult.as_dict` makes it.
    """
    topology = record["topology"]
    actors, nodes = _actors(topology["actors"], "Actors", scheduled=True), _nodes(topology["loads"])
    return [_summary(record), actors, nodes, _prediction(record["prediction"]), *_notes(record)]


def placed_tables(record: Mapping[str, Any]) -> list[Facts | Grid]:
    """The same plan carried out, in short: each actor with its node and bytes, and what copies take.

    Args:
        record: as `topology.estimate.PlanResult.as_dict` makes it.
    """
    addresses = {load["node"]: load["address"] for load in record["topology"]["loads"]}
    actors = [actor | {"node": addresses.get(actor["node"], actor["node"])} for actor in record["topology"]["actors"]]
    placed = _actors(actors, f"Topology on {record['nodes_from']}", scheduled=False)
    return [placed, _prediction(record["prediction"]), *_notes(record)]


def _kernels(choice: Mapping[str, Any]) -> str:
    """The kernels for experts of few, some and many rows, with their measured microseconds for a call."""
    us = {(t["row_class"], t["kernel"]): f" ({t['us']:.0f} us for {t['experts']} experts)" for t in choice["times"]}
    chosen = {name: f"{kernel}{us.get((name, kernel), '')}" for name, kernel in choice["chosen"].items()}
    if len(set(chosen.values())) == 1:
        return next(iter(chosen.values()))
    return ", ".join(f"{name}: {kernel}" for name, kernel in chosen.items())


def _link(plan: Mapping[str, Any]) -> str:
    if plan.get("mapped"):
        return "none: nothing is copied"
    link = plan["link"]
    if plan["executor"] == "real":
        of_disk = plan["device"] == "cpu" and link["gbps"] is not None
        return f"the disk, measured at {link['gbps']:.2f} GB/s" if of_disk else "the hardware's own"
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
    """The misses that are loaded as replicas, and their slots."""
    rule = f"a miss after {low['t1']:.0%} of its token's weight is loaded in {low['bits']} bits"
    rest = f", after {low['t2']:.0%} not at all" if low["t2"] < 1 else ""
    slots = f"{low['slots']} slots of {size(low['slot_bytes'])} ({size(low['bytes'])})"
    return f"{rule}{rest}; {slots}, {low['kernel']} kernel"


def _ndp(ndp: Mapping[str, Any]) -> str:
    precision = {
        "full": "in full precision",
        "uniform": f"at {ndp['bits'] or 0:g} bits",
        "prefix-split": f"at {ndp['bits'] or 0:g} bits on average",
    }[ndp["precision"]]
    if ndp["form"] is not None:
        as_is = f"as published ({ndp['form']})"
        precision = as_is if ndp["precision"] == "full" else f"{precision}, from {ndp['form_width']} bits on {as_is}"
    hot = f", all but {ndp['hot_per_layer']} experts a layer" if ndp["hot_per_layer"] is not None else ""
    each = f"{len(ndp['workers'])} workers with " if len(ndp["workers"]) > 1 else ""
    threads = f"{each}{count(ndp['threads'], 'thread')}"
    paced = f"paced as {ndp['hardware']}" if ndp["paced"] else f"modelled as {ndp['hardware']}"
    way = ndp["transport"] if ndp["activations"] == "plain" else f"{ndp['transport']} ({ndp['activations']})"
    return f"placement {ndp['placement']}{hot}, {precision}; {threads}, over {way}, {paced}"


def _misses(plan: Mapping[str, Any]) -> str:
    """The choices of the planner of `auto`, and its measured costs."""
    planner = plan["planner"]
    if not plan["ndp"]:
        return f"all loaded, since no NDP worker computes: {seconds(planner['copy_s'])} an expert"
    return f"each loaded or computed near data, whichever ends the layer sooner: {planned_by(planner)} (measured)"


def _drafts(drafts: Mapping[str, Any]) -> str:
    source = "by the model's own head, or from the request's text" if drafts["head"] else "from the request's own text"
    return f"up to {count(drafts['tokens'], 'token')} {source}, as many as pay"


def _matcher(matcher: Mapping[str, Any]) -> str:
    rules = [name for name in ("semantic", "dynamic", "learn") if not matcher[name]]
    without = f", without {', '.join(rules)}" if rules else ""
    maps = f"{matcher['maps']} of {matcher['capacity']} maps" if matcher["maps"] is not None else matcher["state"]
    now = f"; prefetch begins with {matcher['source']}: {matcher['problem']}" if matcher["problem"] else ""
    return f"{maps}, {matcher['distance']} layers ahead{without}{now}"


def _pinned(plan: Mapping[str, Any]) -> str:
    if not plan["pinned"] and plan.get("pinned_bytes"):
        return f", {size(plan['pinned_bytes'])} of it pinned"
    return {True: ", pinned", False: ", not pinned", None: ""}[plan["pinned"]]


def _notes(record: Mapping[str, Any]) -> list[Facts]:
    notes = [("note", str(note)) for note in record["notes"]]
    return [facts("Notes", notes)] if notes else []


def _summary(record: Mapping[str, Any]) -> Facts:
    model, spec = record["model"], record["spec"]
    each, low, mapped = spec["budget_bytes"] // spec["slot_bytes"], spec["low_bit"], spec["mapped"]
    slots = f"{count(each, 'slot')} of {size(spec['slot_bytes'])}" if low is None else (
        f"{low['share']:.0%} of it for replicas of {size(low['replica_bytes'])}, the rest for experts in full of "
        f"{size(spec['slot_bytes'])}"
    )  # fmt: skip
    stored = model["layer_form_bytes"] or [model["expert_bytes"]]
    range_of = " to ".join(dict.fromkeys(size(n) for n in (min(stored), max(stored))))
    stay = f"; {size(model['mapped_bytes'])} of experts stay in the checkpoint" if model["mapped_bytes"] else ""
    replicas = sum(part["replica_bytes"] for part in (spec["ndp"], low) if part) * model["layers"] * model["experts"]
    more = f" and {size(replicas)} of replicas" if replicas else ""
    return facts("Planned, not started", [
        ("model", f"{model['name']}: {model['layers']} layers x {model['experts']} experts, top-{model['top_k']}, "
                  f"{range_of} each as stored{_form(model)}, {size(model['all_bytes'])} in all"),
        ("sizes from", model["source"]),
        ("nodes", record["nodes_from"]),
        ("policy", spec["policy"]),
        ("workers", f"{count(spec['shards'], 'GPU' if spec['gpu'] else 'CPU' if mapped else 'CPU stand-in')}, "
                    f"{count(spec['threads'], 'thread')} each, strategy {spec['strategy']}, "
                    f"experts by '{spec['ownership']}'"),
        ("budget of each", "none: experts run where the store maps them" if mapped and not spec["budget_bytes"] else
                           f"{size(spec['budget_bytes'])}{' of host memory' if mapped else ''}, {slots}"),
        *_auto(spec["auto"]),
        ("store", f"{spec['store_layout']}, on {_STORE_NODES[spec['store_nodes']]}; "
                  f"{size(model['store_bytes'])} on disk{more}{stay}"),
        *([("NDP workers compute", _near_data(spec["ndp"], model))] if spec["ndp"] else []),
    ])  # fmt: skip


def _near_data(ndp: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """What NDP workers compute on."""
    form = f"the published form ({model['form']})" if model["form"] else "experts in full precision"
    if not ndp["widths"]:
        return form
    replicas = f"replicas of {', '.join(map(str, ndp['widths']))} bits, {size(ndp['replica_bytes'])} an expert"
    return f"{replicas}; {form} from {model['form_width']} bits on" if ndp["stored"] else replicas


def _actors(actors: Iterable[Mapping[str, Any]], title: str, *, scheduled: bool) -> Grid:
    columns = ("actor", "node", "reserves", "experts", "bytes", *(["scheduled"] if scheduled else []))
    rows = []
    for actor in actors:
        nbytes = ", ".join(f"{size(actor['nbytes'][k])} {kind}" for k, kind in _KINDS.items() if actor["nbytes"][k])
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in actor["resources"].items()) or "nothing"
        how = f"group {actor['group']}, bundle {actor['bundle']}" if actor["group"] else "alone"
        cells = (actor["name"], actor["node"], amounts, str(actor["experts"]), nbytes)
        rows.append((*cells, how) if scheduled else cells)
    return grid(title, columns, rows)


def _nodes(loads: Iterable[Mapping[str, Any]]) -> Grid:
    rows = []
    for load in loads:
        used = ", ".join(f"{used:g} of {total:g} {name}" for name, (used, total) in load["resources"].items())
        total = size(load["host_total"]) if load["host_total"] is not None else "unknown"
        sizes = map(size, (load["device_bytes"], load["kinds"]["mapped"], load["kinds"]["replicas"],
                           load["kinds"]["copied"]))  # fmt: skip
        rows.append((load["node"], load["address"], used, f"{size(load['host_bytes'])} of {total}", *sizes))
    columns = ("node", "address", "used", "host memory", "devices", "shared pages", "replicas", "copies")
    return grid("Nodes", columns, rows)


def _prediction(prediction: Mapping[str, Any]) -> Facts:
    if not prediction["copy_bytes"]:
        return facts("Predicted, not measured", [
            ("tokens/s", prediction["not_predicted"]), ("copies", "none: experts run where the store maps them"),
        ])  # fmt: skip
    hardware = prediction["hardware"]
    one, token = seconds(prediction["copy_s_least"]), seconds(prediction["token_copies_s_least"])
    prompt = prediction["prompt_tokens"], prediction["prompt_rows"]
    ndp = f"; NDP modelled as {prediction['ndp_hardware']}" if prediction["ndp_hardware"] else ""
    return facts("Predicted, not measured", [
        ("tokens/s", prediction["not_predicted"]),
        ("copies", f"{size(prediction['copy_bytes'])} each, at least {one} over these links; at least {token} for a "
                   "token whose experts are all copied"),
        ("prompt", f"of {prompt[0]} tokens, {prompt[1]} at once: copies of {size(prediction['prompt_copy_bytes'])}, "
                   f"{seconds(prediction['prompt_copies_s_least'])} before its first token, if each pass "
                   "uses every expert"),
        ("links", f"{hardware['name']}: {hardware['link_gbps']:g} GB/s after {hardware['link_latency_us']:g} us, "
                  f"network {hardware['network_gbps']:g} GB/s after {hardware['network_latency_us']:g} us{ndp}"),
    ])  # fmt: skip
