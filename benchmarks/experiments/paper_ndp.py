"""Context-aware inference on GPU and CXL NDP: section 3 and Figures 5 and 6, on the system of its Table 2.

The end-to-end sections run a quarter of the layers, with a quarter of a forward's cost. `renew` and all after it change
one assumption at a time; `compute-*` have the GPU at its peak compute (Table 2 states no memory bandwidth), beside the
read of a layer's attention weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tiermoe.cluster.jobs.bench.experiment import Experiment, Variant, variants
from tiermoe.cluster.jobs.bench.metrics import Row
from tiermoe.cluster.jobs.bench.page import pivot, table

from ..papers import CLAIMS, ROUTING, Comparison, Synthetic, Traces, judged

on = partial(Synthetic, machine="h100-pcie4-ndp")
MONDE = Variant("MoNDE", "monde", {"placement": {"hot_per_layer": 0}})
MONDE_THAT_MIGRATES = Variant("MoNDE that migrates", "context-ndp-full", {"placement": {"prompts": "ndp", "renew": 10}})
FULL = Variant("full", "context-ndp-full", {"placement": {"prompts": "ndp"}})
BITS_3 = Variant("3 bits", "context-ndp-3bit", {"placement": {"prompts": "ndp"}})
BITS_2 = Variant("2 bits", "context-ndp-2bit", {"placement": {"prompts": "ndp"}})
DECODE_VARIANTS = variants(
    MONDE, Variant("MoNDE with a cache", "monde"), "hobbit", "static-ndp", MONDE_THAT_MIGRATES, FULL, BITS_3,
    BITS_2, Variant("3 bits each", "context-ndp-uniform", {"placement": {"prompts": "ndp"}}),
)  # fmt: skip
TRACES_8X7B = Traces(("flat", "sticky"), ("mixtral-8x7b",), learn=1, measure=1, prompt=128, decode=96, distances=1)
TRACES_8X22B = Traces(("flat", "sticky"), ("mixtral-8x22b",), learn=1, measure=1, prompt=128, decode=96, distances=1)
END_VARIANTS = variants(MONDE, "hobbit", MONDE_THAT_MIGRATES, BITS_3, BITS_2,
                        Variant("3 bits after a prompt on the GPU", "context-ndp-3bit"),
                        Variant("2 bits after a prompt on the GPU", "context-ndp-2bit"))  # fmt: skip
QUARTER = {"forward_s": 7.5e-5}
RENEW_VARIANTS = variants(*(Variant(str(renew), "context-ndp-full", {"placement": {"prompts": "ndp", "renew": renew}})
                            for renew in (4, 8, 10, 16, 32)), FULL, BITS_3, BITS_2)  # fmt: skip
FEW = variants(MONDE, "hobbit", MONDE_THAT_MIGRATES, BITS_3, BITS_2)
SHORT = Traces(("flat",), ("mixtral-8x7b",), learn=1, measure=2, prompt=64, decode=64, distances=1, layers=8)
COMPUTE_VARIANTS = variants(MONDE, BITS_3, BITS_2)


def _device(name: str, memory_gbps: int, arrays: int = 64, narrowest_bits: int = 1) -> dict[str, Any]:
    return {
        "name": name, "memory_gbps": memory_gbps, "capacity_bytes": 512_000_000_000, "arrays": arrays, "array_rows": 4,
        "array_cols": 4, "clock_ghz": 1, "narrowest_bits": narrowest_bits, "link_gbps": 25, "link_latency_us": 1,
    }  # fmt: skip


_DEVICES = (
    _device("half", 256), _device("table 2", 512), _device("twice the memory", 1024),
    _device("twice the memory and arrays", 1024, 128), _device("multipliers that do not split", 512, narrowest_bits=16),
)  # fmt: skip
_SECTIONS = (
    on("decode-8x7b", DECODE_VARIANTS, budgets=("0.5",), traces=TRACES_8X7B),
    on("decode-8x22b", DECODE_VARIANTS, budgets=("0.25",), traces=TRACES_8X22B),
    on("end-128-128", END_VARIANTS, budgets=("0.5",),
       traces=Traces(("flat", "sticky"), ("mixtral-8x7b",), learn=1, measure=1, prompt=128, decode=128, distances=1,
                     layers=8), assume=QUARTER),
    on("end-128-1024", END_VARIANTS, budgets=("0.5",),
       traces=Traces(("flat", "sticky"), ("mixtral-8x7b",), learn=1, measure=1, prompt=128, decode=1024, distances=1,
                     layers=8), assume=QUARTER),
    on("end-1024-128", END_VARIANTS, budgets=("0.5",),
       traces=Traces(("flat", "sticky"), ("mixtral-8x7b",), learn=1, measure=1, prompt=1024, decode=128, distances=1,
                     layers=8), assume=QUARTER),
    on("end-8x22b-128-512", END_VARIANTS, budgets=("0.25",),
       traces=Traces(("flat",), ("mixtral-8x22b",), learn=1, measure=1, prompt=128, decode=512, distances=1, layers=14),
       assume=QUARTER),
    on("renew", RENEW_VARIANTS, budgets=("0.5",), traces=TRACES_8X7B),
    on("renew-8x22b", RENEW_VARIANTS, budgets=("0.25",), traces=TRACES_8X22B),
    on("memory", FEW, budgets=("0.5",), traces=SHORT, assume=QUARTER, sweep={"machine.ndp": _DEVICES}),
    on("link", FEW, budgets=("0.5",), traces=SHORT, assume=QUARTER, sweep={"machine.link_gbps": (12.5, 25, 31.5, 63)}),
    on("gpu", FEW, budgets=("0.5",), traces=SHORT, assume=QUARTER,
       sweep={"machine.expert_s": (0.000115, 1e-6), "machine.dense_s": (8.5e-5, 5.5e-5, 2.5e-5, 0.0)}),
    on("share", FEW, budgets=("0.25", "0.375", "0.5", "0.625", "0.75"), traces=SHORT, assume=QUARTER),
    on("batch", FEW, budgets=("0.5",),
       traces=Traces(("flat",), ("mixtral-8x7b",), learn=0, measure=16, prompt=16, decode=16, distances=1, layers=8),
       assume=QUARTER, sweep={"batch": (1, 4, 16)}),
    on("context", variants(MONDE, "static-ndp", FULL, BITS_3, BITS_2), budgets=("0.5",),
       traces=Traces(("flat", "sticky", "drift"), ("mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b"), learn=2,
                     measure=2, prompt=128, decode=64, distances=1, layers=8), assume=QUARTER),
    on("compute-8x7b", COMPUTE_VARIANTS, budgets=("0.5",),
       traces=Traces(("flat", "sticky"), ("mixtral-8x7b",), learn=1, measure=1, prompt=128, decode=96, distances=1,
                     layers=8), assume={"forward_s": 0, "expert_s": 1e-6, "dense_s": 2.5e-5}),
    on("compute-8x22b", COMPUTE_VARIANTS, budgets=("0.25",),
       traces=Traces(("flat", "sticky"), ("mixtral-8x22b",), learn=1, measure=1, prompt=128, decode=96, distances=1,
                     layers=14), assume={"forward_s": 0, "expert_s": 1e-6, "dense_s": 5.3e-5}),
    on("hobbit", variants("hobbit", BITS_2), budgets=("0.5", "0.8"), traces=SHORT, assume=QUARTER,
       sweep={"on_miss.t1": (0.6, 0.3, 0.0), "machine.link_gbps": (25, 100)}),
)  # fmt: skip
COMPARISONS = (
    Comparison("decode, Mixtral-8x7B: times faster than MoNDE", "section 5.2: decoding throughput 8.7x and 11.2x",
               "decode-8x7b", "step_s", {"3 bits": 8.7, "2 bits": 11.2}, of="MoNDE",
               why="half of the factor: the GPU's own time, below"),
    Comparison("decode, Mixtral-8x22B: times faster than MoNDE", "section 5.2: 8.9x and 11.5x", "decode-8x22b",
               "step_s", {"3 bits": 8.9, "2 bits": 11.5}, of="MoNDE",
               why="half of the factor: the GPU's own time, below"),
    Comparison("the same with the GPU at its peak compute, Mixtral-8x7B",
               "Table 2 states no memory bandwidth of the GPU", "compute-8x7b", "step_s",
               {"3 bits": 8.7, "2 bits": 11.2}, of="MoNDE", headline=False),
    Comparison("the same with the GPU at its peak compute, Mixtral-8x22B", "the same", "compute-8x22b", "step_s",
               {"3 bits": 8.9, "2 bits": 11.5}, of="MoNDE", headline=False),
    Comparison("decode, Mixtral-8x7B: times faster than a MoNDE that migrates",
               "the same; the hot set in full precision, renewed every 10 tokens", "decode-8x7b", "step_s",
               {"3 bits": 8.7, "2 bits": 11.2}, of="MoNDE that migrates", headline=False),
    Comparison("decode, Mixtral-8x22B: times faster than a MoNDE that migrates", "the same", "decode-8x22b", "step_s",
               {"3 bits": 8.9, "2 bits": 11.5}, of="MoNDE that migrates", headline=False),
    Comparison("decode, Mixtral-8x7B: times faster than HOBBIT", "section 5.2: 2 bits up to 18x", "decode-8x7b",
               "step_s", {"2 bits": 18}, of="hobbit", why="our HOBBIT waits for its loads"),
    Comparison("decode, Mixtral-8x22B: times faster than HOBBIT", "section 5.2: 2 bits up to 19x", "decode-8x22b",
               "step_s", {"2 bits": 19}, of="hobbit", why="our HOBBIT waits for its loads"),
    Comparison("seconds of the NDP device: of full precision over",
               "section 5.2: NDP-side execution alone about 5x and 8x", "decode-8x7b", "ndp_modelled_s",
               {"3 bits": 5, "2 bits": 8}, of="full", why={"3 bits": "near 16/3", "2 bits": "near 16/2"}),
    Comparison("seconds of the NDP device: of MoNDE over", "the same", "decode-8x7b", "ndp_modelled_s",
               {"3 bits": 5, "2 bits": 8}, of="MoNDE", headline=False),
    Comparison("end to end, 128 + 128 tokens: times faster than MoNDE",
               "section 5.2: 6.6 to 8.3x and 7.9 to 10.6x over its lengths, which the text does not state",
               "end-128-128", "latency_p50_s", {"3 bits": 7.45, "2 bits": 9.25}, of="MoNDE",
               why="the one migration takes as long as eighty decode steps"),
    Comparison("end to end, 128 + 1024 tokens: times faster than MoNDE", "the same", "end-128-1024", "latency_p50_s",
               {"3 bits": 7.45, "2 bits": 9.25}, of="MoNDE"),
    Comparison("end to end, 1024 + 128 tokens: times faster than MoNDE", "the same", "end-1024-128", "latency_p50_s",
               {"3 bits": 7.45, "2 bits": 9.25}, of="MoNDE"),
    Comparison("end to end, Mixtral-8x22B, 128 + 512 tokens: times faster than MoNDE",
               "section 5.2: 7.6 to 8.7x and 9.5 to 11.2x", "end-8x22b-128-512", "latency_p50_s",
               {"3 bits": 8.15, "2 bits": 10.35}, of="MoNDE"),
    Comparison("end to end, 128 + 1024 tokens: times faster than a MoNDE that migrates",
               "section 5.2: 6.6 to 8.3x and 7.9 to 10.6x", "end-128-1024", "latency_p50_s",
               {"3 bits": 7.45, "2 bits": 9.25}, of="MoNDE that migrates", headline=False),
    Comparison("end to end, Mixtral-8x22B, 128 + 512 tokens: times faster than a MoNDE that migrates",
               "section 5.2: 7.6 to 8.7x and 9.5 to 11.2x", "end-8x22b-128-512", "latency_p50_s",
               {"3 bits": 8.15, "2 bits": 10.35}, of="MoNDE that migrates", headline=False),
    Comparison("end to end, 128 + 1024 tokens: times faster than HOBBIT", "section 5.2: 2 bits up to 18x",
               "end-128-1024", "latency_p50_s", {"2 bits": 18}, of="hobbit", why="the paper's lengths are not stated"),
)  # fmt: skip


def _step_ms(row: Row) -> str:
    return f"{row['step_s'] * 1e3:.2f}"


_TABLES = {
    "decode": table([("model", "{shape}"), ("routing", "{family}"), ("policy", "{policy}"),
                     ("decode step (ms)", _step_ms), ("TPOT with the migration (ms)", "{tpot_ms:.1f}"),
                     ("TTFT (s)", "{ttft_s:.2f}"), ("NDP device (s)", "{ndp_modelled_s:.2f}"),
                     ("experts near data", "{ndp_experts}"), ("migrations", "{migrations}")],
                    section=("decode-8x7b", "decode-8x22b")),
    "end": pivot([("lengths", "{section}"), ("routing", "{family}")], "{policy}",
                 "{latency_p50_s:.2f} s, of it {ttft_s:.2f}",
                 section=("end-128-128", "end-128-1024", "end-1024-128", "end-8x22b-128-512")),
    "renew": pivot([("model", "{shape}"), ("routing", "{family}")], "{policy}", _step_ms,
                   section=("renew", "renew-8x22b")),
    "memory": pivot([("device", "{ndp[name]}")], "{policy}", _step_ms, section="memory"),
    "link": pivot([("GB/s", "{link_gbps:g}")], "{policy}", _step_ms, section="link"),
    "gpu": pivot([("us of an expert on the GPU", lambda row: f"{row['expert_s'] * 1e6:.0f}"),
                  ("of a layer outside its experts", lambda row: f"{row['dense_s'] * 1e6:.0f}")], "{policy}", _step_ms,
                 section="gpu"),
    "share": pivot([("experts on the GPU", "{budget}")], "{policy}", _step_ms, section="share"),
    "batch": pivot([("batch", "{batch}")], "{policy}", _step_ms, section="batch"),
    "context": pivot([("model", "{shape}"), ("routing", "{family}")], "{policy}",
                     lambda row: f"{row['step_s'] * 1e3:.2f}, {row['ndp_experts']}", section="context"),
    "hobbit": pivot([("GB/s", "{link_gbps:g}"), ("experts on the GPU", "{budget}"), ("policy", "{policy}")], "t1 {t1}",
                    _step_ms, section="hobbit"),
}  # fmt: skip


def experiment() -> Experiment:
    """Context-aware NDP placement against MoNDE and HOBBIT: decode and end to end at 3 and 2 bits."""
    return Experiment(
        name="paper-ndp", title="Context-aware inference on GPU and NDP: the paper's figures, simulated",
        command="papers --only ndp",
        sections=_SECTIONS, after=partial(judged, COMPARISONS), tables=CLAIMS | ROUTING | _TABLES,
    )  # fmt: skip
