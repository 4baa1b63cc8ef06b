"""What a runtime has done: the measurements of one request, and the actors, residency and counters of a deployment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ...actors.engine.stats import count_needed, hit_rate, needed_shares
from .tables import Facts, Grid, facts, grid, seconds, share, size

_ABSENT, _LOADING, RESIDENT = 0, 1, 2  # `actors.policies.residency.State`
_SLOW = 0.2  # of a request's time, from which a policy is named as its cause
_MARKS = {_ABSENT: "·", _LOADING: "~", RESIDENT: "█"}
_STYLES = {_ABSENT: "dim", _LOADING: "yellow", RESIDENT: ""}
_HOTNESS = ("blue", "cyan", "green", "yellow", "red")  # a resident's share of the most used expert's uses
NOTHING_RAN = "none: nothing ran yet"
_ELSEWHERE = {"ndp_experts": "near data", "shard_experts": "on other GPUs"}
_LEAST_SHARE = 0.0005  # of the needed experts that is named
_WAYS = {  # of `needed_shares`
    "hit": "hits", "loaded": "loaded on demand", "near_data": "computed near data", "other_gpu": "on other GPUs",
    "waited": "waited for",
}  # fmt: skip
_SHARES = "·▁▂▃▄▅▆▇█"  # of a cell's experts that are resident, where a cell is several


def brief_table(result: Mapping[str, Any]) -> Facts:
    """One request in few lines: what ran, how fast, its experts, and the executor.

    Args:
        result: the record that `tiermoe run --json` prints.
    """
    tpot_s, plan = result["tpot_s"], result["plan"]
    loss = "lossless" if result["lossless"] else f"LOSSY: {_lost(result)}"
    each = f"{seconds(tpot_s)} a token ({1 / tpot_s:.1f} tokens/s)" if tpot_s else "fewer than two tokens, no rate"
    whose = "; of all its requests" if "attached_to" in result else ""
    return facts("", [
        ("ran", f"{plan['model']} with {result['policy']} ({loss}); {plan['slots']} of {plan['experts']} experts, "
                f"{'where the store maps them' if plan.get('mapped') else size(plan['expert_budget_bytes'])}"),
        ("speed", f"{each}, the first after {seconds(result['ttft_s'])}"),
        ("experts", f"{_needed(result)} {size(result['bytes_loaded'])} loaded, "
                    f"{seconds(result['blocked_io_s'])} lost to copies{whose}"),
        *_slow_policies(result),
        _executor_row(result),
    ])  # fmt: skip


def _slow_policies(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row for each policy from outside whose own code took much of a request's time."""
    whole_s = (result["ttft_s"] or 0.0) + (result["tpot_s"] or 0.0) * max(0, result.get("generated_tokens", 1) - 1)
    if "attached_to" in result or not whole_s:  # its counters are of other requests, too
        return []
    return [
        ("slow policy", f"the code of {kind} took {seconds(spent_s)}, {share(spent_s / whole_s)} of the request's time")
        for kind, spent_s in result.get("policy_s", {}).items() if spent_s >= _SLOW * whole_s
    ]


def _lost(result: Mapping[str, Any]) -> str:
    """What a lossy policy changed."""
    parts = [
        f"{result['ndp_tokens']} pairs on NDP workers" if result["ndp_tokens"] else "",
        f"{result['substitutions']} substitutions", f"{result['dropped']} dropped",
        f"the KV cache{coded(kv)}" if (kv := (result.get("plan") or {}).get("kv_dtype", "auto")) != "auto" else "",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def coded(kv_dtype: str) -> str:
    """` in FORM` of a KV cache in 8 bits; of another, nothing."""
    return "" if kv_dtype == "auto" else f" in {kv_dtype}"


def summary_table(result: Mapping[str, Any]) -> Facts:
    """The measurements of one request, all of them.

    Args:
        result: the record that `tiermoe run --json` prints.
    """
    tpot_s = result["tpot_s"]
    rows = [
        ("tokens", f"{result['prompt_tokens']} prompt, {result['generated_tokens']} generated ({result['finish']})"),
        ("time to first token", seconds(result["ttft_s"])),
        ("time per output token",
         f"{seconds(tpot_s)} ({1 / tpot_s:.1f} tokens/s)" if tpot_s else "none (fewer than two tokens)"),
        *_counter_rows(result, result.get("plan") or {}),
        *_slow_policies(result),
        ("start-up", _startup(result)),
        _executor_row(result),
    ]  # fmt: skip
    if not result["lossless"]:
        rows.append(("lossy", _lost(result)))
    return facts("Summary", rows)


def _startup(result: Mapping[str, Any]) -> str:
    steps = ", ".join(f"{name} {seconds(value)}" for name, value in result.get("startup_steps_s", {}).items())
    return seconds(result["startup_s"]) + (f": {steps}" if steps else "")


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
        yield _legend()
        yield Text("")
    if (total := record["counters"]) is not None:
        plan = record["plan"] or {}
        policy = f"{plan['policy']}: {'lossless' if plan['lossless'] else 'LOSSY'}" if plan else "none"
        forwards = max((layer["forwards"] for layer in total["layers"]), default=0)
        rows = [("policy", policy), ("forwards", str(forwards)), *_counter_rows(total, plan), _executor_row(total)]
        yield facts("Since the start", rows)
    if len(gpus := record.get("gpus", ())) > 1:
        yield _gpus(gpus)
    yield from _rates(record.get("samples", ()))


def merged_residency(gpus: Sequence[list[dict[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Residency on any GPU: an expert is on one, which owns it (or on the lead, whose owner is lost). The lead counts
    all uses, another GPU those of its own experts.

    Args:
        gpus: layers of each, with states and uses by expert; None: it does not answer.
    """
    known = [layers for layers in gpus if layers is not None]
    if not known:
        return None
    return [
        {
            "states": [max(states) for states in zip(*(layer["states"] for layer in at), strict=True)],
            "uses": [max(uses) for uses in zip(*(layer["uses"] for layer in at), strict=True)],
        }
        for at in zip(*known, strict=True)
    ]


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


def _legend() -> Text:
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


def _counter_rows(total: Mapping[str, Any], plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The engine's counters, without those that the policy does not use."""
    return [
        ("expert hit rate", _hit_rate(total)),
        ("loaded", f"{size(total['bytes_loaded'])}, of it prefetched {size(total['bytes_loaded_prefetch'])}, "
                   f"wasted {size(total['bytes_wasted'])}"),
        *_low_bit_rows(total),
        *_prefetch_rows(total),
        *configurator_rows(total),
        ("link busy", f"{seconds(total['total_io_s'])}, compute blocked by it {seconds(total['blocked_io_s'])}"),
        *_writeback_rows(total),
        *planner_rows(total),
        *(_ndp_rows(total) if plan.get("ndp") else []),
        ("expert memory", _expert_memory(total)),
        *shared_rows(total),
        *_disk_rows(total),
        *_draft_rows(total),
    ]  # fmt: skip


def _disk_rows(total: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of a store that is larger than host memory."""
    if (host := total.get("host_memory")) is None:
        return []
    needed, read = host["hits"] + host["misses"], host["bytes_demand"] + host["bytes_prefetch"]
    rate = share(host["hits"] / needed) if needed else NOTHING_RAN
    return [("host memory", f"{host['slots']} experts in {size(host['budget_bytes'])}, hits {rate}; {size(read)} read "
                            f"from the disk at up to {host['gbps']:.2f} GB/s, {seconds(host['waited_s'])} waited for, "
                            f"the longest read {seconds(host['longest_s'])}")]  # fmt: skip


def _draft_rows(total: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of steps that verified drafted tokens; nothing if there were none."""
    drafts = total.get("drafts")
    if not drafts or not drafts["steps"]:
        return []
    each = f"{drafts['accepted'] / drafts['steps']:.1f} of {drafts['drafted'] / drafts['steps']:.1f}"
    extra = drafts["extra_experts"] / drafts["steps"]
    return [("drafts", f"{each} tokens accepted a step, in {drafts['steps']} steps; {extra:.0f} experts more a step; "
                       f"{_saved(drafts['saved_s'])}")]  # fmt: skip


def _saved(saved_s: float) -> str:
    return f"{seconds(saved_s)} saved" if saved_s >= 0 else f"{seconds(-saved_s)} lost"


def _expert_memory(total: Mapping[str, Any]) -> str:
    if not total["expert_budget_bytes"]:
        return f"none of its own: {total['experts']} experts run where the store maps them"
    return (
        f"peak {size(total['expert_bytes_peak'])} of {size(total['expert_budget_bytes'])}, "
        f"{total['slots']} slots for {total['experts']} experts"
    )


def _hit_rate(total: Mapping[str, Any]) -> str:
    """The share of needed experts that were hits, and the counts of all that it is a share of."""
    if not count_needed(total):
        return NOTHING_RAN
    counts = [f"{total['hits']} hits", f"{total['misses']} misses"]
    counts += [f"{n} {said}" for name, said in _ELSEWHERE.items() if (n := total.get(name))]
    return f"{share(hit_rate(total))} ({', '.join(counts)})"


def _executor_row(total: Mapping[str, Any]) -> tuple[str, str]:
    stand_in = ": the CPU stands in for a GPU" if total["executor"] == "emulated" else ""
    return "numbers are", f"{total['executor']}{stand_in}"


def _writeback_rows(total: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of policies that copy evicted experts back to the host."""
    if not total.get("writebacks"):
        return []
    return [("copied back", f"{total['writebacks']} experts, {size(total['bytes_written_back'])}, of the link "
                            f"{seconds(total['writeback_link_s'])}, compute blocked by it "
                            f"{seconds(total['writeback_blocked_s'])}")]  # fmt: skip


def _low_bit_rows(counters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What ran in low precision; nothing if there are no slots for that."""
    if not counters.get("low_bit_slots"):
        return []
    hits, misses = counters["low_bit_hits"], counters["low_bit_misses"]
    loaded = size(counters["bytes_loaded_low_bit"])
    return [
        ("low precision", f"{counters['low_bit_pairs']} (token, expert) pairs on replicas: {hits} resident, "
                          f"{misses} not; {loaded} of what was loaded, prefetches included"),
    ]  # fmt: skip


def _prefetch_rows(counters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Outcome of prefetches by source, and the matcher's counters; empty without prefetches."""
    rows = [
        (f"by {name}", f"{found['queued']} experts queued, {found['hits']} in time, {found['late']} late, "
                       f"{found['wasted']} unused, {found['cancelled']} cancelled")
        for name, found in counters.get("prefetch_sources", {}).items()
    ]  # fmt: skip
    if found := counters.get("prefetch_trials"):
        now, compared = "on" if found["pays"] else "paused, since it does not pay", "not compared yet"
        if found["trials"]:
            compared = (f"saves {1e3 * found['saved_wait_s']:.3f} ms of waits a token and costs "
                        f"{1e3 * found['cost_s']:.3f} ms, in the last of {found['trials']} trials")  # fmt: skip
        paused = f"{found['paused_forwards']} decode steps without it"
        rows.append(("prefetch is", f"{now}; {compared}; {paused}"))
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
    """How often experts were split again, and the expected gain; empty without a configurator."""
    found = counters.get("configurator")
    if not found:
        return []
    gain = ""
    if found["reconfigurations"]:
        before, after = seconds(found["expected_before_s"]), seconds(found["expected_after_s"])
        gain = f"; the last was expected to lower the loading time of a token from {before} to {after}"
    trouble = f"; it failed: {found['problem']}" if found["problem"] else ""
    cost = f"recording took {seconds(found['record_s'])} of the forwards"
    return [
        ("cache split", f"split again {found['reconfigurations']} times in {found['configurations']} configurations"
                        f"{gain}; {cost}{trouble}"),
    ]  # fmt: skip


def shared_rows(total: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How experts and KV cache share one memory now; empty where each has its own."""
    shared = total.get("shared")
    if not shared:
        return []
    moves = f"given to the KV cache {shared['to_kv']} times, back to experts {shared['to_experts']} times"
    return [
        ("shared memory", f"KV cache of {shared['kv_tokens']} of {shared['kv_tokens_most']} tokens, {total['slots']} "
                          f"of {shared['slots_least']} to {shared['slots_most']} slots; {moves}"),
    ]  # fmt: skip


def planner_rows(total: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the planner of `auto` chose for missing experts, and its costs; empty without a planner."""
    planner = total.get("planner")
    if not planner:
        return []
    behind = total.get("prefetch_sources", {}).get("background")
    copies = f"; {behind['queued']} copied in the background, {behind['hits']} of them used" if behind else ""
    streamed = total.get("prefetch_sources", {}).get("streamed")
    copies += f"; {streamed['queued']} streamed ahead in prompts, {streamed['hits']} of them used" if streamed else ""
    error = f"; a layer's predicted time is off by {planner['error']:.0%}" if planner["planned"] else ""
    return [
        ("needed experts", f"{_shares(total)}{copies}"),
        ("forwards", _forwards(planner)),
        ("planned by", f"{planned_by(planner)}{error}"),
        *_followed(planner),
    ]


def _followed(planner: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rule that the planner follows, and what a token takes by each; empty before a token has been planned."""
    token_s = planner.get("token_s")
    if not token_s or not token_s["seen"]:
        return []
    others = ", ".join(f"{rule} {seconds(taken)}" for rule, taken in token_s.items() if rule != "seen")
    return [("follows", f"{planner['follows']}: a token's experts took {seconds(token_s['seen'])} of late; {others}")]


def _needed(total: Mapping[str, Any]) -> str:
    """Where the needed experts were, or what became of them, where there are several ways."""
    if not count_needed(total):
        return f"{NOTHING_RAN},"
    ways = any(total.get(name) for name in ("planner", *_ELSEWHERE))
    return f"{_shares(total)};" if ways else f"{share(hit_rate(total))} hits,"


def _shares(total: Mapping[str, Any]) -> str:
    """What became of the needed experts, in shares of all of them, which add up to 100%."""
    found = needed_shares(total)
    if found is None:
        return NOTHING_RAN
    return ", ".join(f"{share(found[way])} {said}" for way, said in _WAYS.items() if found[way] > _LEAST_SHARE)


def _forwards(planner: Mapping[str, Any]) -> str:
    """How many forwards were planned, and why the others were not."""
    planned, local = planner["planned"], planner["local"]
    if not planned + local:
        return NOTHING_RAN
    if not local:
        return f"all {planned} planned"
    each = [planner[kind] and seconds(planner[kind]) for kind in ("planned_s", "local_s")]
    why = f"; a token takes {each[0]} planned and {each[1]} so" if all(each) else ""
    return f"{planned} planned, {local} in native code, which loads every miss{why}"


def planned_by(planner: Mapping[str, Any]) -> str:
    """The costs by which a miss is loaded or computed near data."""
    copy_s, near_s, busy_s = planner["copy_s"], planner["near_s"], planner["near_busy_s"]
    return (
        f"{seconds(copy_s)} to load an expert; near data {seconds(near_s)}, {seconds(busy_s)} while the link copies, "
        f"and {seconds(planner['message_s'])} a message"
    )


def _ndp_rows(total: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the NDP workers did."""
    losses, refusals, why = (total[key] for key in ("ndp_losses", "ndp_refusals", "ndp_last_failure"))
    trouble = f"; lost {losses} times, refused {refusals} calls (the last: {why})"
    lost = f"{trouble}, {total['ndp_recomputed']} pairs recomputed" if losses or refusals else ""
    return [
        ("placement", f"{total['migrations']} migrations, {size(total['bytes_loaded_migration'])}; "
                      f"{size(total['bytes_demanded_decode'])} loaded by decode"),
        ("NDP worker", f"{total['ndp_tokens']} (token, expert) pairs in {total['ndp_calls']} calls; kernels "
                       f"{seconds(total['ndp_measured_s'])}, modelled {seconds(total['ndp_modelled_s'])}, "
                       f"waited for {seconds(total['ndp_wait_s'])}{lost}"),
    ]  # fmt: skip


def _actors(record: Mapping[str, Any]) -> Grid:
    rows = []
    for actor in record["actors"]:
        restarts = f", restarted {actor['restarts']} times" if actor["restarts"] else ""
        rows.append((
            actor["role"], actor["kind"], actor["host"] or "none", str(actor["pid"] or "none"),
            f"{actor['state'].lower()}{restarts}", _health(actor["health"]),
        ))  # fmt: skip
    title = f"Deployment {record['id']} at {record['address']}"
    return grid(title, ("actor", "class", "node", "pid", "state", "health"), rows)


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Grid:
    """Counters of each GPU; the lead's are those since the last reset, a shard's those since it started."""
    rows = []
    for gpu in gpus:
        cells = [str(gpu["shard"]), str(gpu["state"])]
        layers = gpu.get("residency")
        resident = None if layers is None else sum(state == RESIDENT for layer in layers for state in layer["states"])
        if "hits" in gpu:
            asked = gpu["hits"] + gpu["misses"]  # near data and other GPUs are the lead's to count
            cells += [
                f"{'?' if resident is None else resident} in {gpu['slots']} slots",
                f"{gpu['hits'] / asked:.1%} of {asked}" if asked else NOTHING_RAN,
                size(gpu["bytes_loaded"]), seconds(gpu["total_io_s"]), seconds(gpu["blocked_io_s"]),
                f"{size(gpu['expert_bytes_peak'])} of {size(gpu['expert_budget_bytes'])}",
            ]  # fmt: skip
        rows.append(cells)
    columns = ("GPU", "state", "resident", "hits of its own", "loaded", "link busy", "blocked", "memory")
    return grid("GPUs", columns, rows)


def _rates(samples: Sequence[Mapping[str, Any]]) -> Iterator[Grid]:
    """What each process does in a second, and what goes between them; empty where no process was asked twice."""
    over_s = next((sample["rates"]["over_s"] for sample in samples if sample["rates"] is not None), None)
    if over_s is None:
        return
    of, between = [], []
    for sample in samples:
        if (rates := sample["rates"]) is None or not rates["counters"]:
            continue
        found = rates["counters"]
        needed_s = count_needed(found)
        of.append((
            sample["name"], str(sample["host"]),
            "" if "hits" not in found else f"{needed_s:.0f}" + (f": {_shares(found)}" if needed_s else ""),
            *(f"{found[key]:.0%}" if key in found else "" for key in ("total_io_s", "blocked_io_s", "busy_s")),
            f"{found['rows']:.0f}" if "rows" in found else "",
        ))  # fmt: skip
        for peer, now in rates["peers"].items():
            total = sample["peers"][peer]
            between.append((
                f"{sample['name']} to {peer}",
                *(f"{now[k]:.0f} of {total[k]:.0f}" if k in now else "" for k in ("rows_sent", "rows_received")),
                *(f"{size(now[k])} of {size(total[k])}" for k in ("bytes_sent", "bytes_received")),
                f"{now['waited_s']:.0%} of {seconds(total['waited_s'])}",
            ))  # fmt: skip
    columns = ("process", "node", "experts needed", "link busy", "waits for copies", "computes", "rows")
    yield grid(f"A second, over the last {over_s:.1f} s", columns, of)
    if between:
        ways = ("who to whom", "rows there", "rows back", "bytes there", "bytes back", "waits")
        yield grid("Between processes: a second, of all since the start", ways, between)


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
