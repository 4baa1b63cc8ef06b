"""`tiermoe bench scale`: the same requests on 1, 2 and 4 GPUs, each a process with its own slots and its own link.

The time that input and output take from a forward is `io_path_s`: in each layer the GPUs wait for their copies side by
side, and the forward goes on when the one that waited longest is done. So each layer counts the longest wait
of any GPU, not the sum over GPUs, and the sum over layers is what the forward lost. With one GPU it is the blocked
seconds of its cache.

CPU stand-ins share the machine's cores: where there are fewer cores than GPUs, tokens per second say little of
scaling. Bytes, hits and waits for the (emulated) links do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from ....errors import BudgetError, RuntimeFailure
from ...config import RunConfig, parse_budget
from .harness import Bar, Case, Measures, Report, Spread, interleaved, ratio, rows_of
from .serving import heldout_prompts, run_config, serve, start_worker

GPUS = (1, 2, 4)
PROMPT_TOKENS, MAX_TOKENS = 48, 32
BALANCE, SPEED = 1.1, 1.7


@dataclass(frozen=True)
class Variant:
    """How many GPUs, and of which budget each.

    equal: what does not grow with the GPUs: the budget of each, or that of all together.
    """

    gpus: int
    equal: str

    @property
    def name(self) -> str:
        return f"{self.gpus} GPU" if self.gpus == 1 else f"{self.gpus} GPUs, equal {self.equal} budget"

    def config(self, model: str | None, policy: str, budget: float, link_gbps: float) -> RunConfig:
        """The run, where one GPU has a budget of `budget`, a share of all experts."""
        return run_config(
            model,
            policy=policy,
            budget=f"{budget / self.gpus if self.equal == 'total' else budget:.6f}",
            link={"gbps": link_gbps, "latency_us": 10.0},
            cluster={"shards": self.gpus},
        )


VARIANTS = (
    Variant(1, "total"),
    *(Variant(gpus, equal) for equal in ("total", "per-GPU") for gpus in GPUS[1:]),
)


def bench_scale(
    model: str | None,
    repeats: int,
    policy: str,
    budget: str,
    link_gbps: float,
    batch: int,
    progress: Progress | None,
) -> Report:
    """Decode throughput, load per GPU and time lost to copies, at equal total and at equal per-GPU budget.

    Each repetition goes on with the caches that the one before it left. All must give the same tokens.

    Bars: bytes loaded by the busiest GPU <= 1.1 of those by the idlest, for every number of GPUs; `io_path_s` of one
    GPU >= 1.7 of that of two at equal per-GPU budget.

    Args:
        budget: of the one GPU, a share of all experts; two and four have as much together, or each.
        batch: prompts in flight together.

    Raises:
        RuntimeFailure: the tokens differ. ConfigError, BudgetError: the policy or the budget is of no use.
    """
    share = parse_budget(budget)
    if not isinstance(share, float):
        raise BudgetError(f"budget '{budget}' is not a share", "give a share of all experts, such as 0.125")
    configs = {v: v.config(model, policy, share, link_gbps) for v in VARIANTS}
    prompts = heldout_prompts(configs[VARIANTS[0]].model_dir, batch, PROMPT_TOKENS)
    settings = {
        "policy": policy, "budget": share, "link_gbps": link_gbps, "latency_us": 10.0, "prompts": batch,
        "prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS, "repeats": repeats, "threads": 1,
        "cores": os.cpu_count(), "ownership": configs[VARIANTS[0]].cluster.ownership,
    }  # fmt: skip
    with ExitStack() as stack:  # a worker that is not closed keeps the process alive
        workers = {v: stack.enter_context(closing(start_worker(config))) for v, config in configs.items()}
        report = Report("scale", workers[VARIANTS[0]].stats().executor, settings=settings)
        results = interleaved(_cases(workers, prompts), repeats, 1, progress)
    report.rows = rows_of(results)
    report.bars = _bars(results)
    return report


def _cases(workers: dict[Variant, Any], prompts: Sequence[tuple[int, ...]]) -> list[Case]:
    expected: list[list[int]] = []

    def case(variant: Variant, worker: Any) -> Callable[[], Measures]:
        def run() -> Measures:
            worker.reset_stats()
            before = worker.shard_stats()
            times, tokens = serve(worker.submit, prompts, MAX_TOKENS)
            if not expected:
                expected.extend(tokens)
            if tokens != expected:
                what = f"{variant.name} gives other tokens than {VARIANTS[0].name}"
                raise RuntimeFailure(what, "report this as a bug")
            return _measures(worker, before, len(prompts) / times["tpot_s"], times["ttft_s"])

        return run

    return [Case(variant.name, case(variant, worker)) for variant, worker in workers.items()]


def _measures(worker: Any, before: Sequence[dict[str, Any]], tokens_per_s: float, ttft_s: float) -> Measures:
    after = worker.shard_stats()
    if any(part["state"] != "serving" for part in (*before, *after)):
        raise RuntimeFailure("a shard was lost during the measurement", "run again; report it if it stays")

    def of_each(name: str) -> list[float]:
        return [float(b[name] - a[name]) for a, b in zip(before, after, strict=True)]

    loaded, hits, misses = of_each("bytes_loaded"), sum(of_each("hits")), sum(of_each("misses"))
    total = worker.stats().total()
    return {
        "tokens_per_s": tokens_per_s,
        "ttft_s": ttft_s,
        "io_path_s": total.io_path_s,
        "blocked_io_s_all": sum(of_each("blocked_io_s")),
        "shard_wait_s": total.shard_wait_s,
        "link_busy_s_mean": sum(of_each("total_io_s")) / len(loaded),
        "hit_rate": ratio(hits, hits + misses),
        "bytes_loaded": sum(loaded),
        "bytes_loaded_most": max(loaded),
        "bytes_loaded_least": min(loaded),
        "bytes_most_over_least": ratio(max(loaded), min(loaded)),
        "recomputed": float(total.shard_recomputed),
    }


def _bars(results: dict[str, dict[str, Spread]]) -> list[Bar]:
    bars = [
        Bar(f"bytes loaded, busiest over idlest GPU, {v.name}", found["bytes_most_over_least"].median, "<=", BALANCE)
        for v in VARIANTS
        if v.gpus > 1 and (found := results[v.name])
    ]
    one, two = (results[v.name]["io_path_s"].median for v in (VARIANTS[0], Variant(2, "per-GPU")))
    return [*bars, Bar("time lost to copies, 1 GPU over 2 GPUs of the same budget each", ratio(one, two), ">=", SPEED)]
