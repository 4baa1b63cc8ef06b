"""Cells of `bench auto`: the preset `auto` and the rules of the field on the same routing and machine.

A cell is a shape, a family of routing, a budget, a link, a host's memory bandwidth and a batch. Each rule is a preset,
and the simulated executor runs it: the engine's own cache, layers and placements on a virtual clock. What a preset
does is in configs/policies and in the class that it names; there is no other statement of it here.

    on-demand, next-gate             every miss over the link
    ktransformers                    the experts that other requests used most stay, all others run on the CPU
    llama-cpp-cache, freetoken, hybrimoe    `policies.hybrid`
    context-ndp-full                 a prompt's most important experts, fixed for the decode

The near-data worker is the host's CPU, which shares the host's memory with the link: it slows down beside copies.

Not modelled: host overheads of a copy or a wait, cores that the GPU's driver takes, NUMA, several near-data workers,
kernels below the memory's bandwidth, longer prompts, requests that come and go one by one. The planner's own time is
charged as `PLANNER_S`, that of the other rules is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.budget import Budget
from tiermoe.actors.policies.auto import Without
from tiermoe.actors.policies.cost import NdpDevice
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.replay import checked_prefetch, popularity
from tiermoe.cluster.simulate.executor import SimulatedEngine, context_of, eviction_of, policies_of
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.synthetic import FAMILIES, Generator
from tiermoe.cluster.simulate.trace import Iteration, Request, Trace, TraceHeader
from tiermoe.cluster.simulate.trace_writer import Rows
from tiermoe.cluster.yaml_file import read_yaml

SHAPES = {  # dense bytes of a layer, by our count of attention, shared experts and norms
    "mixtral-8x7b": 84e6, "qwen3-30b-a3b": 38e6, "gpt-oss-120b": 53e6, "deepseek-v3": 231e6,
}  # fmt: skip
BUDGETS, LINKS_GBPS, HOSTS_GBPS, BATCHES = (0.125, 0.25, 0.5, 0.75), (12.5, 25.0, 50.0), (40.0, 100.0, 400.0), (1, 4, 8)
GPU_BYTES_S, LAUNCH_S, DENSE_S, COPY_S, MESSAGE_S = 1.5e12, 5e-6, 40e-6, 10e-6, 25e-6
PLANNER_S = 5e-6  # of `plan` and `used` in a layer of these shapes: 3 to 9 us on our machine
USABLE, LINK_SHARE = 0.85, 0.8  # of a host's bandwidth; of that, what a link takes at most
FLOP_PER_BYTE = 12.0  # of the CPU: rows that one reading of an expert feeds, at 16 bits
PROMPT, DECODE, OTHERS = 64, 96, 4  # tokens; requests whose popularity is known
ROUNDS, FILLING = {1: 4, 4: 2, 8: 2}, {1: 2, 4: 1, 8: 1}  # of requests together; the first ones, which fill the cache
DISTANCES = 3  # layers ahead for which routers are asked: as far as hybrimoe looks
RECORDED = "recorded"  # the family of routing that `recorded` gives
RULES = (
    "on-demand", "next-gate", "ktransformers", "llama-cpp-cache", "freetoken", "hybrimoe", "context-ndp-full", "auto",
)  # fmt: skip
PUBLISHED = RULES[:-1]
VARIANTS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("auto.yaml"))["variants"]


@dataclass(frozen=True)
class Cell:
    """gbps: 1e9 bytes a second. batch: requests that decode together."""

    shape: str
    family: str
    budget: float
    link_gbps: float
    host_gbps: float
    batch: int

    @property
    def name(self) -> str:
        return (
            f"{self.shape} {self.family} budget {self.budget:g} link {self.link_gbps:g} host {self.host_gbps:g} "
            f"batch {self.batch}"
        )

    def machine(self, link: float = 1.0, near: float = 1.0, contention: bool = True) -> Machine:
        """Copies and the CPU share the host's memory. The header's experts have 16 bits, so bandwidths are scaled.

        link, near: factors of the time of a copy, and of an expert on the CPU. contention: copies slow the CPU down.
        """
        shape = shape_named(self.shape)
        usable = USABLE * self.host_gbps * 1e9
        link_bytes_s = min(self.link_gbps * 1e9, LINK_SHARE * usable)
        wide = 16 / shape.bits
        cpu_gbps = 1e-9 * usable * wide / near
        cpu = NdpDevice(
            "cpu", memory_gbps=cpu_gbps, capacity_bytes=1 << 44, arrays=1, array_cols=1, clock_ghz=cpu_gbps / 2,
            array_rows=round(FLOP_PER_BYTE / wide), narrowest_bits=16, link_gbps=1e-9 * usable,
            link_latency_us=1e6 * MESSAGE_S / 2,
        )  # fmt: skip
        return Machine(
            name=self.name, forward_s=0, dense_s=DENSE_S + SHAPES[self.shape] / GPU_BYTES_S, dense_row_s=0,
            expert_s=LAUNCH_S + shape.expert_bytes / GPU_BYTES_S, expert_row_s=0,
            link_gbps=1e-9 * link_bytes_s * wide / link, link_latency_us=1e6 * COPY_S * link, ndp=cpu,
            ndp_share=1 - link_bytes_s / usable if contention else 1,
        )  # fmt: skip


def grid() -> list[Cell]:
    """All cells, in one order."""
    return [
        Cell(*values)
        for values in itertools.product(SHAPES, FAMILIES, BUDGETS, LINKS_GBPS, HOSTS_GBPS, BATCHES)
    ]  # fmt: skip


def chosen(share: float) -> list[Cell]:
    """A random share of the cells, drawn before anything is measured, of each shape, family and batch."""
    rng = np.random.default_rng(2026)
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in grid():
        groups.setdefault((cell.shape, cell.family, cell.batch), []).append(cell)
    return [cell for cells in groups.values() for cell in _some(cells, share, rng)]


def _some(cells: Sequence[Cell], share: float, rng: np.random.Generator) -> list[Cell]:
    """At least one; a larger share adds cells."""
    order = rng.permutation(len(cells))
    return [cells[i] for i in sorted(order[: max(1, round(share * len(cells)))])]


def recorded_cells(share: float) -> list[Cell]:
    """Of the recorded routing, one request at a time, experts and dense part of Qwen3-30B-A3B; drawn as `chosen`."""
    machines = itertools.product(BUDGETS, LINKS_GBPS, HOSTS_GBPS)
    cells = [Cell("qwen3-30b-a3b", RECORDED, *machine, 1) for machine in machines]
    return _some(cells, share, np.random.default_rng(2026))


# -- routing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn:
    """Routing of one shape, family and seed. popular: uses of each expert by other requests [L, E]."""

    header: TraceHeader
    requests: list[Request]
    popular: NDArray[np.int64]


def header_of(shape_name: str, layers: int, experts: int, top_k: int, distances: int) -> TraceHeader:
    """Of experts of a shape's size, at 16 bits."""
    shape = shape_named(shape_name)
    return TraceHeader(
        model=shape_name, fingerprint="drawn", layers=layers, experts=experts, top_k=top_k, hidden=shape.hidden,
        distances=distances, slot_bytes=2 * 3 * shape.hidden * shape.intermediate, expert_dtype="bfloat16",
    )  # fmt: skip


def draw(shape_name: str, family: str, seed: int, layers: int, requests: int, decode: int) -> Drawn:
    """Draw requests of synthetic routing; `layers` of the shape's, none of them: all."""
    shape = shape_named(shape_name)
    count = min(shape.moe_layers, layers or shape.moe_layers)
    header = header_of(shape_name, count, shape.experts, shape.top_k, min(DISTANCES, count - 1))
    generator = Generator(FAMILIES[family], count, shape.experts, shape.top_k, seed, PROMPT)
    drawn = [
        request_of(header, number, rows, PROMPT)
        for number, rows in enumerate(generator.requests(OTHERS + requests, PROMPT + decode, header.distances))
    ]
    return Drawn(header, drawn[OTHERS:], popularity(header, drawn[:OTHERS]))


def request_of(header: TraceHeader, number: int, rows: Rows, prompt: int) -> Request:
    """A request whose first rows are its prompt; the others decode one by one."""
    nothing = np.zeros(1, np.float32)  # nobody reads embeddings here
    arrays = {name: getattr(rows, name).astype(dtype) for name, (dtype, _) in header.row_arrays().items()}

    def iteration(start: int, stop: int, decode: bool) -> Iteration:
        return Iteration(decode, embedding=nothing, **{name: found[start:stop] for name, found in arrays.items()})

    steps = [iteration(t, t + 1, True) for t in range(prompt, len(rows.tokens))]
    return Request(number, prompt, nothing, (iteration(0, prompt, False), *steps))


def recorded() -> Drawn:
    """The routing of the default model on held-out text, as it ships, as of experts of Qwen3-30B-A3B."""
    trace = Trace(default_model_dir() / "routing")
    of, requests = trace.header, list(trace.requests())
    header = header_of("qwen3-30b-a3b", of.layers, of.experts, of.top_k, of.distances)
    return Drawn(header, requests[2:], popularity(header, requests[:2]))


# -- replays -----------------------------------------------------------------------------------------------------------


def replayed(
    drawn: Drawn, cell: Cell, rule: str, *, belief: Sequence[float] = (1.0, 1.0), contention: bool = True,
    without: str = "NOTHING",
) -> dict[str, float]:  # fmt: skip
    """Seconds of a decoded token, of a prompt and of a request; shares of the experts that decodes need.

    Args:
        rule: a preset. belief: factors of the start values of link and CPU that a planner has. contention: it knows
            that copies slow the CPU down.
        without: name of a part of `Without`.
    """
    settings, header, machine = load_policy(rule), drawn.header, cell.machine()
    budget = Budget(share=cell.budget)
    eviction = eviction_of(settings, header)
    prefetch = checked_prefetch(settings, replace(context_of(header), eviction=eviction), header)
    policies = policies_of(settings, header, machine, budget, eviction, prefetch, drawn.popular)
    if rule == "auto":
        machine = machine.model_copy(update={"dense_s": machine.dense_s + PLANNER_S})
        link, near = belief
        policies = replace(policies, believed=cell.machine(link, near, contention), without=Without[without])
    engine = SimulatedEngine(header, machine, budget, policies)
    filling = FILLING[cell.batch] * cell.batch
    serve(engine, drawn.requests[:filling], cell.batch)
    engine.reset_stats()
    counted = drawn.requests[filling : ROUNDS[cell.batch] * cell.batch]
    served, stats = serve(engine, counted, cell.batch), engine.live_stats()
    steps = sum(len(one.iterations) - 1 for one in counted) / len(counted)
    hits, loads, near = stats.decode_hits, stats.decode_misses, stats.decode_ndp_experts
    needed = max(1, hits + loads + near)
    return {
        "token_s": served.tpot_s, "prompt_s": served.ttft_s, "request_s": served.ttft_s + served.tpot_s * steps,
        "error": 0.0 if stats.planner is None else stats.planner.error, "hits": hits / needed, "loads": loads / needed,
        "near": near / needed,
    }  # fmt: skip


def group(cells: Sequence[Cell], seed: int, layers: int, decode: int, variants: Sequence[Cell]) -> list[dict[str, Any]]:
    """The lines of cells of one shape and family at one seed; variants: cells that run all VARIANTS, too."""
    first, requests = (cells or variants)[0], max(cell.batch * ROUNDS[cell.batch] for cell in (*cells, *variants))
    real = first.family == RECORDED
    drawn = recorded() if real else draw(first.shape, first.family, seed, layers, requests, decode)
    lines = []
    for cell in cells:
        found = {rule: replayed(drawn, cell, rule) for rule in RULES}
        line = {"cell": cell.name, "seed": seed} | {
            measure: {rule: one[measure] for rule, one in found.items()}
            for measure in ("token_s", "prompt_s", "request_s")
        }
        line["auto"] = {name: v for name, v in found["auto"].items() if not name.endswith("_s")}
        lines.append(line)
        if cell in variants:
            best_s = min(found[rule]["token_s"] for rule in PUBLISHED)
            tried = {name: replayed(drawn, cell, "auto", **changes) for name, changes in VARIANTS.items()}
            lines.append({
                "cell": cell.name, "seed": seed, "variants": {n: one["token_s"] / best_s for n, one in tried.items()},
            })  # fmt: skip
    return lines
