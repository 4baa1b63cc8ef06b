"""BuddyMoE, section 5: speed columns of Tables 2 to 4 and Figure 8, simulated: DeepSeek-V2-Lite on one A100 (PCIe 4.0).

The budgets are the paper's cache rates. `host` to `gates` change one assumption at a time, all but the first on half of
the layers. Quality needs a model: `tiermoe bench buddymoe`.
"""

from __future__ import annotations

from functools import partial

from tiermoe.cluster.jobs.bench.experiment import Experiment, Variant, variants
from tiermoe.cluster.jobs.bench.metrics import Row
from tiermoe.cluster.jobs.bench.page import pivot

from ..papers import CLAIMS, ROUTING, Comparison, Synthetic, Traces, judged

on = partial(Synthetic, machine="a100-pcie4")
RANDOM = Variant("random", "random-replacement")
RHO_3 = Variant("CFT 0.95, 16 buddies, rho 3", "buddymoe")
FEW = variants("original", RANDOM, RHO_3)
HALF_TRACES = Traces(("flat",), ("deepseek-v2-lite",), learn=1, measure=1, prompt=64, decode=64, distances=1, layers=13)
HALF = {"forward_s": 0.00015}
_SECTIONS = (
    on("tables",
       variants("original", RANDOM, "drop", Variant("CFT 0.75, 4 buddies", "buddymoe-cft75"),
                Variant("CFT 0.99, 2 buddies", "buddymoe", {"on_miss": {"alpha": 0.99, "max_buddies": 2, "rho": None}}),
                Variant("CFT 0.95, 16 buddies", "buddymoe", {"on_miss": {"rho": None}}), RHO_3,
                Variant("CFT 0.95, 16 buddies, rho 4", "buddymoe-rho4")), budgets=("0.75", "0.5", "0.375"),
       traces=Traces(("flat", "sticky"), ("deepseek-v2-lite",), learn=1, measure=1, prompt=64, decode=96, distances=1)),
    on("host", FEW, budgets=("0.75", "0.5", "0.375"),
       traces=Traces(("flat",), ("deepseek-v2-lite",), learn=1, measure=1, prompt=64, decode=64, distances=1),
       sweep={"machine.forward_s": (0.0003, 0.01, 0.02)}),
    on("link", FEW, budgets=("0.75", "0.5", "0.375"), traces=HALF_TRACES, assume=HALF,
       sweep={"machine.link_gbps": (12.5, 25, 31.5)}),
    on("prefetch", FEW, budgets=("0.75", "0.5", "0.375"), traces=HALF_TRACES, assume=HALF,
       sweep={"prefetch.kind": ("next-gate", "none")}),
    on("gates", variants("original", RHO_3), budgets=("0.75", "0.5", "0.375"), traces=HALF_TRACES, assume=HALF,
       sweep={"on_miss.percentile": (None, 10, 20)}),
)  # fmt: skip
COMPARISONS = (
    Comparison("TPOT of original (ms), cache rate", "Tables 2 to 4: 34.23, 28.56, 24.78 tokens/s", "tables", "tpot_ms",
               {"0.75": 29.21, "0.5": 35.01, "0.375": 40.36}, of="original", by="budget", headline=False),
    Comparison("speed over original, c = 0.75", "Table 2", "tables", "tpot_s",
               {"random": 1.159, "CFT 0.75, 4 buddies": 1.093, "CFT 0.95, 16 buddies": 1.084,
                "CFT 0.95, 16 buddies, rho 3": 1.074, "CFT 0.95, 16 buddies, rho 4": 1.125}, of="original",
               where={"budget": "0.75"}, why={"random": "1.29 *flat*, 1.05 *sticky*, where nearly nothing misses"}),
    Comparison("speed over original, c = 0.5", "Table 3", "tables", "tpot_s",
               {"random": 1.16, "CFT 0.99, 2 buddies": 1.014, "CFT 0.95, 16 buddies": 1.116,
                "CFT 0.95, 16 buddies, rho 3": 1.058, "CFT 0.95, 16 buddies, rho 4": 1.086}, of="original",
               where={"budget": "0.5"},
               why={"CFT 0.99, 2 buddies": "eight times the published effect",
                    "CFT 0.95, 16 buddies": "two to three times it", "CFT 0.95, 16 buddies, rho 3": "the same",
                    "CFT 0.95, 16 buddies, rho 4": "the same"}),
    Comparison("speed over original, c = 0.375", "Table 4", "tables", "tpot_s",
               {"CFT 0.95, 16 buddies": 1.22, "CFT 0.95, 16 buddies, rho 3": 1.103,
                "CFT 0.95, 16 buddies, rho 4": 1.108}, of="original", where={"budget": "0.375"}),
    Comparison("speed of rho 3 over random, cache rate", "Tables 2 and 3: rho 3 is slower", "tables", "tpot_s",
               {"0.75": 0.926, "0.5": 0.912}, of="random", over="CFT 0.95, 16 buddies, rho 3", by="budget",
               why="half of the published effect"),
    Comparison("bytes that original loads over those of", "Figure 8: about 20% more; the cache rate is not stated",
               "tables", "bytes_loaded", {"CFT 0.95, 16 buddies, rho 3": 1.2}, of="original",
               why="the paper states no cache rate"),
    Comparison("speed of rho 3 over original with 20 ms of host a token, cache rate", "Tables 2 to 4", "host", "tpot_s",
               {"0.75": 1.074, "0.5": 1.058, "0.375": 1.103}, of="original", over="CFT 0.95, 16 buddies, rho 3",
               by="budget", where={"forward_s": 0.02}, headline=False),
    Comparison("speed of random over original with 20 ms of host a token, cache rate", "Tables 2 and 3", "host",
               "tpot_s", {"0.75": 1.159, "0.5": 1.16}, of="original", over="random", by="budget",
               where={"forward_s": 0.02}, headline=False),
)  # fmt: skip


def _speed(row: Row) -> str:
    return f"{1 / row['tpot_s']:.1f}"


_TABLES = {
    "tables": pivot([("method", "{policy}")], "c = {budget}",
                    lambda row: f"{1 / row['tpot_s']:.1f}, {row['decode_hit_rate']:.1%}, {row['loaded_mb']:.0f}",
                    each=("family",),
                    heading="Routing {family}: tokens/s in decode, hit rate in decode, MB loaded for each generated "
                            "token", section="tables"),
    "host": pivot([("cache rate", "{budget}"), ("method", "{policy}")],
                  lambda row: f"{row['forward_s'] * 1e3:.1f} ms a token", _speed, section="host"),
    "link": pivot([("cache rate", "{budget}"), ("method", "{policy}")], "{link_gbps:g} GB/s", _speed, section="link"),
    "prefetch": pivot([("cache rate", "{budget}"), ("method", "{policy}")], "prefetch {kind}",
                      lambda row: f"{1 / row['tpot_s']:.1f}, {row['loaded_mb']:.0f}", section="prefetch"),
    "gates": pivot([("cache rate", "{budget}"), ("method", "{policy}")],
                   lambda row: f"percentile {row.get('percentile', '-')}", _speed, section="gates"),
}  # fmt: skip


def experiment() -> Experiment:
    """BuddyMoE against loading, random replacement and dropping: speed at three cache rates."""
    return Experiment(
        name="paper-buddymoe", title="BuddyMoE's tables, simulated", command="papers --only buddymoe",
        sections=_SECTIONS, after=partial(judged, COMPARISONS), tables=CLAIMS | ROUTING | _TABLES,
    )  # fmt: skip
