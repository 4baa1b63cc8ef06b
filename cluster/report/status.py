"""Residency as a picture of characters: a line for each layer, a cell for each expert or for several.

What `tiermoe status` knows of a deployment, as tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .runtime import prefetch_rows
from .tables import facts, seconds, size

_ABSENT, _LOADING, RESIDENT = 0, 1, 2  # `actors.policies.residency.State`
_MARKS = {_ABSENT: "·", _LOADING: "~", RESIDENT: "█"}
_STYLES = {_ABSENT: "dim", _LOADING: "yellow", RESIDENT: ""}
_HOTNESS = ("blue", "cyan", "green", "yellow", "red")  # a resident's share of the most used expert's uses
_SHARES = "·▁▂▃▄▅▆▇█"  # of a cell's experts that are resident, where a cell is several


def residency_map(layers: Sequence[tuple[Sequence[int], Sequence[int]]], width: int) -> list[Text]:
    """One line per layer.

    Args:
        layers: states and uses of each layer's experts.
        width: columns of the terminal. Where the experts do not fit, neighbours share a cell, which then shows how many
            of them are resident (by height) and how much the most used of them is used (by colour).

    Returns:
        lines of the form `L0  ██·~·· 2/6`.
    """
    most = max((use for _, uses in layers for use in uses), default=0)
    label = len(f"L{max(len(layers) - 1, 0)}")
    experts = max((len(states) for states, _ in layers), default=0)
    room = max(1, width - label - 1 - len(f" {experts}/{experts}"))
    each = max(1, -(-experts // room))
    lines = []
    for number, (states, uses) in enumerate(layers):
        line = Text(f"L{number}".ljust(label + 1), no_wrap=True)
        for start in range(0, len(states), each):
            line.append(*_cell(states[start : start + each], uses[start : start + each], most))
        line.append(f" {sum(state == RESIDENT for state in states)}/{len(states)}")
        lines.append(line)
    return lines


def legend() -> Text:
    """What the characters and colours mean."""
    text = Text("█ resident, ~ loading, · absent; uses: ")
    for number, colour in enumerate(_HOTNESS):
        text.append("█", colour)
        text.append(" few " if number == 0 else " most" if number == len(_HOTNESS) - 1 else "")
    return text


def _cell(states: Sequence[int], uses: Sequence[int], most: int) -> tuple[str, str]:
    resident = sum(state == RESIDENT for state in states)
    if len(states) == 1 and not resident:
        return _MARKS[states[0]], _STYLES[states[0]]
    if not resident:
        state = _LOADING if _LOADING in states else _ABSENT
        return _MARKS[state], _STYLES[state]
    hot = max(use for state, use in zip(states, uses, strict=True) if state == RESIDENT)
    colour = _HOTNESS[min(len(_HOTNESS) - 1, hot * len(_HOTNESS) // (most + 1))]
    # rounded up: a cell with one resident of many is not empty
    return _SHARES[-(-resident * (len(_SHARES) - 1) // len(states))], colour


def status_tables(record: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """Actors, residency and counters of one deployment.

    Args:
        record: one of the `deployments` that `tiermoe status --json` prints.
        width: columns of the terminal.
    """
    yield _actors(record)
    if record["residency"] is not None:
        layers = [(layer["states"], layer["uses"]) for layer in record["residency"]]
        yield Text("Residency, by layer and expert, on all GPUs", style="italic")
        yield from residency_map(layers, width)
        yield legend()
        yield Text("")
    if record["counters"] is not None:
        yield facts("Since the start", _counters(record))
    if len(gpus := record.get("gpus", ())) > 1:
        yield _gpus(gpus)


def _actors(record: Mapping[str, Any]) -> Table:
    title = f"Deployment {record['id']} at {record['address']}"
    table = Table(
        "actor", "class", "node", "pid", "state", "health", title=title, title_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False,
    )  # fmt: skip
    for actor in record["actors"]:
        restarts = f", restarted {actor['restarts']} times" if actor["restarts"] else ""
        cells = (
            actor["role"], actor["kind"], actor["host"] or "none", str(actor["pid"] or "none"),
            f"{actor['state'].lower()}{restarts}", _health(actor["health"]),
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Table:
    """Counters of each GPU; the lead's are those since the last reset, a shard's those since it started."""
    table = Table(
        "GPU", "state", "resident", "hit rate", "loaded", "link busy", "blocked", "memory", title="GPUs",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for gpu in gpus:
        cells = [str(gpu["shard"]), str(gpu["state"])]
        layers = gpu.get("residency")
        resident = None if layers is None else sum(state == RESIDENT for layer in layers for state in layer["states"])
        if "hits" in gpu:
            asked = gpu["hits"] + gpu["misses"]
            cells += [
                f"{'?' if resident is None else resident} in {gpu['slots']} slots",
                f"{gpu['hits'] / asked:.1%} of {asked}" if asked else "nothing asked",
                size(gpu["bytes_loaded"]), seconds(gpu["total_io_s"]), seconds(gpu["blocked_io_s"]),
                f"{size(gpu['expert_bytes_peak'])} of {size(gpu['expert_budget_bytes'])}",
            ]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _health(health: Mapping[str, Any]) -> str:
    if "error" in health:
        return f"NOT HEALTHY: {health['error']}"
    parts = [str(health["state"])] if "state" in health else []
    if "problem" in health:  # the store's
        if health["problem"]:
            return f"NOT HEALTHY: {health['problem']}"
        parts.append(f"{health['layers']} layers, {size(health['nbytes'])}")
    if "running" in health:
        parts.append(f"{health['running']} requests running")
    peers = [name for name in sorted(health) if "/" in name or name == "matcher"]  # the lead's
    parts += [f"{name} {health[name]}" for name in peers]
    if "maps" in health:
        parts.append(f"{health['maps']} of {health['capacity']} maps, begun from {health['begun_from']}")
        parts += [str(health["snapshot_problem"])] if health["snapshot_problem"] else []
    if "pairs" in health:
        busy = f", {seconds(health['busy_s'])} busy" if "busy_s" in health else ""  # an NDP worker's
        parts.append(f"{health['pairs']} pairs in {health['batches']} calls{busy}")
    return ", ".join(parts)


def _counters(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    total, plan = record["counters"], record["plan"] or {}
    rows = [
        ("policy", f"{plan['policy']}: {'lossless' if plan['lossless'] else 'LOSSY'}") if plan else ("policy", "none"),
        ("forwards", f"{max((layer['forwards'] for layer in total['layers']), default=0)}"),
        ("expert hit rate", f"{total['hit_rate']:.1%} ({total['hits']} hits, {total['misses']} misses)"),
        ("loaded", f"{size(total['bytes_loaded'])}, of it prefetched {size(total['bytes_loaded_prefetch'])}, "
                   f"wasted {size(total['bytes_wasted'])}"),
        ("link busy", f"{seconds(total['total_io_s'])}, compute blocked by it {seconds(total['blocked_io_s'])}"),
        ("expert memory", f"{size(total['expert_bytes_peak'])} of {size(total['expert_budget_bytes'])}, "
                          f"{total['slots']} slots for {total['experts']} experts"),
    ]  # fmt: skip
    rows += prefetch_rows(total)
    if plan.get("ndp"):
        trouble = f"; lost {total['ndp_losses']} times, refused {total['ndp_refusals']} calls"
        failed = total["ndp_losses"] or total["ndp_refusals"]
        rows.append(
            ("NDP worker", f"{total['ndp_tokens']} (token, expert) pairs in {total['ndp_calls']} calls, waited for "
                           f"{seconds(total['ndp_wait_s'])}{trouble if failed else ''}")
        )  # fmt: skip
    rows.append(("numbers are", str(total["executor"])))
    return rows
