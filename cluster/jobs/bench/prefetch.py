"""`tiermoe bench prefetch`: what next-gate prefetch saves on a slow link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from rich.progress import Progress

from ....errors import RuntimeFailure
from .metrics import Bar, Case, Measures, Report, interleaved, ratio, rows_of
from .serving import heldout_prompts, run_config, serve, start_worker

POLICIES = ("on-demand", "next-gate")
PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 6, 48, 48
OWN_KEYS = ("policy", "budget", "link")


def bench_prefetch(
    model: str | None, repeats: int, budget: str, link_gbps: float, progress: Progress | None, file: str | None = None
) -> Report:
    """Blocked I/O seconds of one request at a time, with and without prefetch, on the same prompts.

    Each repetition goes on with the cache that the one before it left. All policies must give the same tokens.

    Bar: next-gate's median blocked I/O <= 0.8 of on-demand's.

    `file`: configuration of everything but `OWN_KEYS`.

    Raises:
        RuntimeFailure: the tokens differ.
    """
    link = {"gbps": link_gbps, "latency_us": 10.0}
    configs = {p: run_config(model, file, policy=p, budget=budget, link=link) for p in POLICIES}
    prompts = heldout_prompts(configs[POLICIES[0]].model_dir, PROMPTS, PROMPT_TOKENS)
    settings = {
        "config": file, "budget": budget, "link_gbps": link_gbps, "latency_us": 10.0, "prompts": PROMPTS,
        "threads": 1, "prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS, "repeats": repeats,
    }  # fmt: skip
    with ExitStack() as stack:  # a worker that is not closed keeps the process alive
        workers = {p: stack.enter_context(closing(start_worker(config))) for p, config in configs.items()}
        report = Report("prefetch", workers[POLICIES[0]].stats().executor, settings=settings)
        results = interleaved(_cases(workers, prompts), repeats, 1, progress)
    report.rows = rows_of(results)
    blocked = {name: measures["blocked_io_s"].median for name, measures in results.items()}
    value = ratio(blocked["next-gate"], blocked["on-demand"])
    report.bars = [Bar("blocked I/O of next-gate over on-demand", value, "<=", 0.8)]
    return report


def _cases(workers: dict[str, Any], prompts: Sequence[tuple[int, ...]]) -> list[Case]:
    expected: dict[int, list[int]] = {}

    def case(name: str, worker: Any) -> Callable[[], Measures]:
        def run() -> Measures:
            worker.reset_stats()
            times: list[Measures] = []
            for i, prompt in enumerate(prompts):
                measures, tokens = serve(worker.submit, [prompt], MAX_TOKENS)
                times.append(measures)
                if expected.setdefault(i, tokens[0]) != tokens[0]:
                    raise RuntimeFailure(f"{name} gives other tokens than {POLICIES[0]}", "report this as a bug")
            return _measures(worker, times)

        return run

    return [Case(name, case(name, worker)) for name, worker in workers.items()]


def _measures(worker: Any, times: Sequence[Measures]) -> Measures:
    stats = worker.stats()
    total = stats.total()
    return {
        "blocked_io_s": total.blocked_io_s,
        "total_io_s": total.total_io_s,
        "hit_rate": stats.hit_rate,
        "prefetched_hits": float(total.prefetched_hits),
        "late_prefetches": float(total.late_prefetches),
        "bytes_loaded": float(total.bytes_loaded),
        "bytes_wasted": float(total.bytes_wasted),
        "ttft_s": sum(t["ttft_s"] for t in times) / len(times),
        "tpot_s": sum(t["tpot_s"] for t in times) / len(times),
    }
