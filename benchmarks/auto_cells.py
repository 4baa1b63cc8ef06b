"""Cells of `bench auto`: the planner of `auto` and the fixed rules of the field on the same routing and machine.

A cell is a shape, a family of routing, a budget, a link, a host's memory bandwidth and a batch. Each rule replays the
same routing on the same machine in discrete events (`kernels/cpu/planner_replay.hpp`); the planner there is the object
that the engine uses.

Rules, each as published as we read it:

    on-demand        every miss over the link; LRU of each layer
    next-gate        on-demand, and the next router's top-K are prefetched
    ktransformers    the experts that other requests used most stay on the GPU, all others run on the CPU
    llama-cpp-cache  LRU; misses run on the CPU and are copied behind it, oldest dropped
    freetoken        one LRU over all layers; of each step's misses link : CPU by standalone rates, most recently used
                     first (arXiv 2608.16157)
    hybrimoe         list schedule over link and CPU by standalone rates, prefetch while the link is idle, score-based
                     cache (arXiv 2504.05897), without CPU work on cached experts
    context+cpu      after a prompt the experts that it used most, fixed for the decode; all others run on the CPU

`+start`: the same, and after a prompt the slots hold its most used experts among those that were here or loaded in it;
ktransformers+start is context+cpu. Prompts: on-demand, next-gate and context+cpu load every miss; the other rivals
split each layer at its best; the planner decides by its own rule. What a prompt did not load is not there after it.

`policies.hybrid` states four of the rules for the engine, in Python, where a layer takes 130 to 370 us; here it takes 2
to 4, and half of the grid has 10^8 layers. hybrimoe there also gives cached experts to the CPU.

Not modelled: host overheads of a copy or a wait, cores that the GPU's driver takes, NUMA, several near-data workers,
kernels below the memory's bandwidth, prompts of over 64 tokens, requests that come and go one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.core import _core
from tiermoe.actors.policies.auto import Auto, Costs, Without
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.statistics import loads
from tiermoe.cluster.simulate.synthetic import FAMILIES, Generator, agreement, blurred, top
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.cluster.yaml_file import read_yaml

SHAPES = {  # dense bytes of a layer, by our count of attention, shared experts and norms
    "mixtral-8x7b": 84e6, "qwen3-30b-a3b": 38e6, "gpt-oss-120b": 53e6, "deepseek-v3": 231e6,
}  # fmt: skip
BUDGETS, LINKS_GBPS, HOSTS_GBPS, BATCHES = (0.125, 0.25, 0.5, 0.75), (12.5, 25.0, 50.0), (40.0, 100.0, 400.0), (1, 4, 8)
GPU_BYTES_S, LAUNCH_S, DENSE_S, COPY_S, MESSAGE_S = 1.5e12, 5e-6, 40e-6, 10e-6, 25e-6
USABLE, LINK_SHARE = 0.85, 0.8  # of a host's bandwidth; of that, what a link takes at most
FLOP_PER_BYTE = 12.0  # of the CPU: rows that one reading of an expert feeds, at 16 bits
PROMPT, DECODE, OTHERS = 64, 96, 6  # tokens; requests whose popularity is known
ROUNDS = {1: 4, 4: 2, 8: 2}  # of requests together; at batch 1 the first round is not counted, else the first half
RECALL = 0.86  # of the next router
RECORDED = "recorded"  # the family of routing that `recorded` gives
RULES = (
    "on-demand", "next-gate", "ktransformers", "llama-cpp-cache", "freetoken", "hybrimoe", "context+cpu", "auto",
)  # fmt: skip
PUBLISHED = RULES[:-1]
STARTED = tuple(f"{name}+start" for name in ("on-demand", "next-gate", "llama-cpp-cache", "freetoken", "hybrimoe"))
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

    def costs(self) -> Costs:
        """The machine's: copies and the CPU share the host's memory."""
        shape = shape_named(self.shape)
        usable = USABLE * self.host_gbps * 1e9
        link = min(self.link_gbps * 1e9, LINK_SHARE * usable)
        expert = shape.expert_bytes
        return Costs(
            copy_s=COPY_S + expert / link, gpu_s=LAUNCH_S + expert / GPU_BYTES_S, gpu_row_s=0.0,
            near_s=expert / usable, near_busy_s=expert / (usable - link), free_rows=FLOP_PER_BYTE * shape.bits / 16,
            message_s=MESSAGE_S, dense_s=DENSE_S + SHAPES[self.shape] / GPU_BYTES_S,
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
    """Requests of one shape, family and seed: ids [R, t, L, K], ranks [R, t, L, E], predicted by recall [R, t, L, P],
    prompts [R, L, E] of `prompt` tokens each, uses of other requests [L, E] and their tokens."""

    layers: int
    experts: int
    top_k: int
    ids: NDArray[np.int32]
    ranks: NDArray[np.uint8]
    predicted: dict[float, NDArray[np.int32]]
    prompts: NDArray[np.int64]
    popular: NDArray[np.int64]
    tokens: int
    prompt: int = PROMPT


def draw(
    shape_name: str, family: str, seed: int, layers: int, requests: int, decode: int, recalls: Sequence[float]
) -> Drawn:
    """Draw requests of synthetic routing; `layers` of the shape's, none of them: all."""
    shape = shape_named(shape_name)
    count, experts, k = min(shape.moe_layers, layers or shape.moe_layers), shape.experts, shape.top_k
    generator, rng = Generator(FAMILIES[family], count, experts, k, seed, PROMPT), np.random.default_rng(100 + seed)
    named = min(2 * k, experts)
    popular = np.zeros((count, experts), np.int64)
    for _ in range(OTHERS):
        popular += _uses(top(generator.logits(generator.tokens(PROMPT + decode)), k), experts)
    ids, ranks, prompts = [], [], []
    predicted: dict[float, list[NDArray[np.int32]]] = {recall: [] for recall in recalls}
    for _ in range(requests):
        logits = generator.logits(generator.tokens(PROMPT + decode))
        prompts.append(_uses(top(logits[:PROMPT], k), experts))
        logits = logits[PROMPT:]
        order = np.argsort(-logits, axis=-1)
        ids.append(order[..., :k].astype(np.int32))
        place = np.empty(order.shape, np.uint8)
        np.put_along_axis(place, order, np.arange(experts, dtype=np.uint8), -1)
        ranks.append(place)
        for recall, found in predicted.items():
            seen = blurred(logits, agreement(FAMILIES[family], count, experts, k, recall), rng)
            found.append(top(seen, named).astype(np.int32))
    return Drawn(
        count, experts, k, np.stack(ids), np.stack(ranks), {r: np.stack(p) for r, p in predicted.items()},
        np.stack(prompts), popular, OTHERS * (PROMPT + decode),
    )  # fmt: skip


def recorded(others: int = 2) -> Drawn:
    """The routing of the default model on held-out text, as it ships; the first requests are the others'."""
    trace = Trace(default_model_dir() / "routing")
    header, requests = trace.header, list(trace.requests())
    layers, experts, k = header.layers, header.experts, header.top_k
    others_ids = np.concatenate([step.ids for one in requests[:others] for step in one.iterations])  # [t, L, K]
    prompts, ids, ranks, predicted = [], [], [], []
    for one in requests[others:]:
        first, *rest = one.iterations
        prompts.append(_uses(first.ids, experts))
        ids.append(np.concatenate([step.ids for step in rest]).astype(np.int32))
        scores = np.concatenate([step.probabilities for step in rest])
        ranks.append(np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1).astype(np.uint8))
        ahead = np.concatenate([step.next_ids[:, :, 0] for step in rest]).astype(np.int32)  # of layer l + 1, at l
        predicted.append(np.roll(ahead, 1, axis=1))
    return Drawn(
        layers, experts, k, np.stack(ids), np.stack(ranks), {RECALL: np.stack(predicted)}, np.stack(prompts),
        _uses(others_ids, experts), len(others_ids), len(requests[0].iterations[0].ids),
    )  # fmt: skip


def _uses(ids: NDArray[np.integer], experts: int) -> NDArray[np.int64]:
    """Of each expert [L, E], by ids [t, L, K]."""
    return loads(ids.transpose(1, 0, 2), experts).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Steps:
    """Decode steps of requests together, as `_core.replay` takes them."""

    needed: NDArray[np.int32]
    rows: NDArray[np.int32]
    count: NDArray[np.int32]
    predicted: dict[float, NDArray[np.int32]]
    share: NDArray[np.float32]
    prompts: NDArray[np.int64]
    rounds: int
    first: int


def together(drawn: Drawn, batch: int) -> Steps:
    """The first requests in rounds of `batch`, step by step."""
    rounds = min(ROUNDS[batch], len(drawn.ids) // batch)
    n, decode = rounds * batch, drawn.ids.shape[1]
    layers, experts, k = drawn.layers, drawn.experts, drawn.top_k

    def stepped(values: NDArray[Any]) -> NDArray[Any]:  # [R, t, L, X] -> [S, L, batch, X]
        by_round = values[:n].reshape(rounds, batch, decode, layers, -1)
        return np.ascontiguousarray(by_round.transpose(0, 2, 3, 1, 4)).reshape(rounds * decode, layers, batch, -1)

    ids = stepped(drawn.ids).reshape(rounds * decode, layers, batch * k)
    used = np.zeros((rounds * decode, layers, experts), np.int32)
    np.add.at(used, (np.arange(len(ids))[:, None, None], np.arange(layers)[None, :, None], ids), 1)
    widest = min(experts, batch * k)
    needed = np.argsort(-used, axis=-1, kind="stable")[..., :widest].astype(np.int32)
    # as `policies.auto.router_shares`
    softness = 0.33 * k
    asked = 1 / (1 + np.exp(np.minimum(60.0, (np.arange(256, dtype=np.float32) + 0.5 - k) / softness)))
    share = (1 - np.prod(1 - asked[stepped(drawn.ranks)], axis=2)).astype(np.float32)
    return Steps(
        needed, np.take_along_axis(used, needed, -1), (used > 0).sum(-1).astype(np.int32),
        {recall: stepped(p) for recall, p in drawn.predicted.items()}, share,
        drawn.prompts[:n].reshape(rounds, batch, layers, experts).sum(1), rounds,
        decode if batch == 1 and rounds > 1 else decode // 2 if rounds == 1 else decode,
    )  # fmt: skip


# -- replays -----------------------------------------------------------------------------------------------------------


def replayed(
    drawn: Drawn, steps: Steps, cell: Cell, rule: str, planner_s: float, *, start: bool | None = None,
    belief: Sequence[float] = (1.0, 1.0), contention: bool = True, without: str = "NOTHING",
    recall: float = RECALL,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a decoded token, of a prompt and of a request, and shares of the needed experts.

    Args:
        rule: one of RULES, or one with `+start`. start: whether residents are chosen after a prompt; None: auto does.
        belief: factors of the start values of link and CPU that the planner has. contention: it has `near_busy_s`, too.
        without: name of a part of `Without`.
    """
    name, started = rule.removesuffix("+start"), rule.endswith("+start")
    costs = cell.costs()
    near_s = costs.near_s * belief[1]
    busy_s = costs.near_busy_s * belief[1] if contention else near_s
    believed = costs._replace(copy_s=costs.copy_s * belief[0], near_s=near_s, near_busy_s=busy_s)
    slots = max(1, int(cell.budget * drawn.experts))
    shape = (drawn.layers, drawn.experts, drawn.top_k, cell.batch, steps.rounds, drawn.prompt)
    decode_s, prompt_s, error, tokens, prompts, needed, hits, loads, ran_near, waits, fills, fetched = _core.replay(
        RULES.index(name), slots, shape, steps.needed, steps.rows, steps.count, steps.predicted[recall], steps.share,
        steps.prompts, drawn.popular, float(drawn.tokens), costs, believed, int(Without[without]),
        (started or name == "auto") if start is None else start, planner_s, steps.first,
    )  # fmt: skip
    token_s = decode_s / tokens
    first_s = prompt_s / max(1, prompts // cell.batch) if prompts else 0.0  # of a round's prompts
    return {
        "token_s": token_s, "prompt_s": first_s, "request_s": first_s + token_s * drawn.ids.shape[1], "error": error,
        "hits": hits / needed, "loads": loads / needed, "near": ran_near / needed, "waits": waits / needed,
        "fills": fills / needed, "prefetches": fetched / needed,
    }  # fmt: skip


def planner_us(shape_name: str, batch: int, layers: int = 8, rounds: int = 5) -> float:
    """Microseconds of `plan` and `used` for a layer, in this process: median of the fastest of `rounds`, since other
    work on the machine only adds."""
    shape, rng = shape_named(shape_name), np.random.default_rng(0)
    experts, k = shape.experts, shape.top_k
    states = np.zeros((layers, experts), np.uint8)
    states[:, : max(1, experts // 4)] = 2
    costs = Cell(shape_name, "flat", 0.25, 25.0, 100.0, batch).costs()
    planner = Auto(layers, experts, k, max(1, experts // 4), costs, 1, states)
    inputs = []
    for _ in range(8):
        ids = np.stack([rng.permutation(experts)[:k] for _ in range(batch)])
        experts_of, counts = np.unique(ids, return_counts=True)
        ahead = np.stack([rng.permutation(experts)[: min(2 * k, experts)] for _ in range(batch)]).astype(np.int32)
        inputs.append((experts_of.astype(np.int32), counts.astype(np.int32), ahead))
    share = np.zeros(experts, np.float32)

    def spent() -> Iterator[float]:
        for step in range(40):
            for layer in range(layers):
                needed, rows, ahead = inputs[(step + layer) % 8]
                begun = perf_counter()
                if layer + 1 < layers:
                    planner.predict(layer + 1, ahead)
                planner.plan(layer, needed, rows, 0.0, 0.0)
                planner.used(layer, needed, share)
                yield perf_counter() - begun

    return 1e6 * min(median(spent()) for _ in range(rounds))


def group(
    cells: Sequence[Cell], seed: int, layers: int, decode: int, own_us: dict[str, float], variants: Sequence[Cell]
) -> list[dict[str, Any]]:
    """The lines of cells of one shape and family at one seed; variants: cells that run all VARIANTS, too."""
    first = (cells or variants)[0]
    needs = sorted({cell.batch for cell in (*cells, *variants)})
    recalls = (RECALL, 0.6) if variants else (RECALL,)
    requests = max(batch * ROUNDS[batch] for batch in needs)
    if first.family == RECORDED:
        drawn = recorded()
    else:
        drawn = draw(first.shape, first.family, seed, layers, requests, decode, recalls)
    lines = []
    for batch in needs:
        steps = together(drawn, batch)
        own_s = 1e-6 * own_us[f"{first.shape} {batch}"]
        for cell in (one for one in cells if one.batch == batch):
            found = {rule: replayed(drawn, steps, cell, rule, own_s) for rule in (*RULES, *STARTED)}
            line = {"cell": cell.name, "seed": seed} | {
                measure: {rule: one[measure] for rule, one in found.items()}
                for measure in ("token_s", "prompt_s", "request_s")
            }
            line["auto"] = {name: v for name, v in found["auto"].items() if not name.endswith("_s")}
            lines.append(line)
        for cell in (one for one in variants if one.batch == batch):
            times = {
                name: replayed(drawn, steps, cell, "auto", own_s, **changes)["token_s"]
                for name, changes in VARIANTS.items()
            }
            best = min(replayed(drawn, steps, cell, rule, own_s)["token_s"] for rule in PUBLISHED)
            lines.append({"cell": cell.name, "seed": seed, "variants": {n: t / best for n, t in times.items()}})
    return lines
