"""What a run did, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .tables import facts, seconds, size


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
        *_ndp(result),
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


def _ndp(result: Mapping[str, Any]) -> list[tuple[str, str]]:
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
