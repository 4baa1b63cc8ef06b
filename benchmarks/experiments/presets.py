"""Which lossless preset to take, simulated: decode speed by routing, size of the experts, link and budget."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, chosen_policies, variants
from tiermoe.cluster.jobs.bench.page import pivot

from ..papers import ROUTING, Synthetic, Traces, judged

on = partial(Synthetic, machine="a100-pcie4")
_FAMILIES = ("flat", "sticky", "drift")
# 8 layers stand for a model: the host's time of a forward is scaled with them.
_SIZES: dict[str, Any] = {"learn": 3, "measure": 2, "prompt": 32, "decode": 48, "distances": 3, "layers": 8}
# Beside a CPU that reads 85 GB/s, as a host of 100 GB/s, and gives 12 rows the time of one; 25 us a message and its
# answer.
_NEAR_DATA = on(
    "near-data", variants("next-gate", "auto", "monde", "context-ndp-full", "freetoken", "hybrimoe"),
    budgets=("0.25",),
    traces=Traces(_FAMILIES, ("qwen3-30b-a3b",), **_SIZES),
    assume={
        "forward_s": 5e-5,
        "ndp": {
            "name": "host-cpu", "memory_gbps": 85, "capacity_bytes": 1024000000000, "arrays": 11, "array_rows": 12,
            "array_cols": 4, "clock_ghz": 1, "narrowest_bits": 16, "link_gbps": 85, "link_latency_us": 12.5,
        },
    },
    sweep={"machine.link_gbps": (25,)},
)  # fmt: skip
_TABLES = {
    "presets": pivot([("GB/s", "{link_gbps:g}"), ("budget", "{budget}")], "{policy}", "{tpot_ms:.2f}",
                     each=("shape", "family"), heading="### {shape}, routing {family}: ms a decoded token",
                     section="presets"),
    "near-data": pivot([("GB/s", "{link_gbps:g}"), ("budget", "{budget}")], "{policy}", "{tpot_ms:.2f} ({ttft_ms:.0f})",
                       each=("shape", "family"),
                       heading="### {shape}, routing {family}, beside a CPU: ms a decoded token (ms to the first "
                               "token)", section="near-data"),
    "hits": pivot([("budget", "{budget}")], "{policy}", "{decode_hit_rate:.1%}", each=("shape", "family"),
                  heading="### {shape}, routing {family}: hit rate in decode at 25 GB/s", section="presets",
                  link_gbps=25.0),
}  # fmt: skip


def experiment(
    budgets: Annotated[str, typer.Option(help="Shares of the experts that fit, in section presets.")] = "0.25,0.5,0.75",
    policies: Annotated[str, typer.Option(help="Presets or YAML files of section presets, separated by commas.")] = (
        "on-demand,next-gate,mixtral-offloading,moe-infinity,fmoe,cache-only,moepic,adapmoe-lossless,"
        "activeevict-lossless"
    ),
    parts: Annotated[
        str, typer.Option(help="Sections to run: presets, near-data. What is left out is taken from --out.")
    ] = "",
) -> Experiment:
    """Lossless presets by routing family, expert size, link and budget, simulated: which one to take."""
    presets = on(
        "presets",
        chosen_policies(policies),
        options.budgets(budgets),
        assume={"forward_s": 5e-05},
        traces=Traces(_FAMILIES, ("mixtral-8x7b", "qwen3-30b-a3b"), **_SIZES),
        sweep={"machine.link_gbps": (12.5, 25, 50)},
    )
    return Experiment(
        name="presets", title="Which preset to take, simulated", sections=(presets, _NEAR_DATA),
        parts=options.parts(parts),
        after=partial(judged, ()),
        shown=("section", "family", "shape", "link_gbps", "budget", "policy", "tpot_ms", "ttft_ms", "decode_hit_rate"),
        tables=ROUTING | _TABLES,
    )  # fmt: skip
