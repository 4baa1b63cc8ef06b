"""`tiermoe bench scale`: the same requests on 1, 2 and 4 GPUs, each a process with its own slots and its own link.

Every round takes other held-out prompts, the same for all cases. So times are compared within a round, and bytes of a
GPU are added up over rounds: which experts a few prompts ask for is chance, and the balance of GPUs over a few prompts
is mostly that chance.

The time that copies take from a forward is given twice. In each layer the GPUs wait for their copies side by side, and
the forward goes on when the one that waited longest is done: `io_path_s` adds up the longest wait of each layer, by the
wall clock. `link_path_s` adds up the longest time that a link was busy with the layer's copies, by the emulated links'
own clock: what would be lost if no process waited for a core, and nothing were computed meanwhile. (Copies that a
prefetch brought before are in neither or in both; on demand, the two are about the same copies.)

CPU stand-ins share the machine's cores: where there are fewer cores than GPUs, tokens per second say little of
scaling. Bytes, hits and the links' own clock do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import Progress

from ....actors.policies.sharding import Ownership
from ....actors.settings import check_combination
from ....errors import BudgetError, RuntimeFailure
from ...config import RunConfig, engine_settings, parse_budget
from ...host import usable_cores
from .metrics import Bar, Case, Measures, Report, Spread, interleaved, ratio
from .serving import heldout_prompts, run_config, serve, start_worker

GPUS = (1, 2, 4)
BATCHES = (1, 4, 8, 16)
PROMPT_TOKENS, MAX_TOKENS = 48, 24
LATENCY_US = 10.0
BALANCE, SPEED = 1.1, 1.7
OWN_KEYS = ("policy", "budget", "link")

Prompt = tuple[int, ...]
Found = Mapping[str, Mapping[str, Spread]]  # by case, by measure


@dataclass(frozen=True)
class Workload:
    """What all cases have in common.

    budget: of the one GPU, a share of all experts; two and four have as much together, or each. link_gbps: of each
    GPU, 1e9 bytes per second. batches: prompts in flight together, one measurement each. prompts: of each measurement,
    at least.
    """

    policy: str = "on-demand"
    budget: str = "0.125"
    link_gbps: float = 2.0
    batches: tuple[int, ...] = BATCHES
    prompts: int = 20
    ownership: Ownership = "layer-expert"

    @property
    def share(self) -> float:
        """The budget. Raises BudgetError: it is not a share."""
        share = parse_budget(self.budget)
        if not isinstance(share, float):
            raise BudgetError(f"budget '{self.budget}' is not a share", "give a share of all experts, such as 0.125")
        return share

    def rounds(self, batch: int, repeats: int) -> int:
        """Rounds that count, of `batch` prompts each."""
        return max(repeats, math.ceil(self.prompts / batch))


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

    def config(self, model: str | None, work: Workload, file: str | None = None) -> RunConfig:
        """The run. Raises BudgetError: the budget is not a share."""
        share = work.share / self.gpus if self.equal == "total" else work.share
        return run_config(
            model,
            file,
            policy=work.policy,
            budget=f"{share:.6f}",
            link={"gbps": work.link_gbps, "latency_us": LATENCY_US},
            cluster={"shards": self.gpus, "ownership": work.ownership},
        )


VARIANTS = (
    Variant(1, "total"),
    *(Variant(gpus, equal) for equal in ("total", "per-GPU") for gpus in GPUS[1:]),
)


def bench_scale(
    model: str | None, repeats: int, work: Workload, progress: Progress | None, file: str | None = None
) -> Report:
    """Decode throughput, load per GPU and time lost to copies, at equal total and at equal per-GPU budget.

    Each round goes on with the caches that the one before it left. All must give the same tokens.

    Bars, for every batch size: bytes loaded by the busiest GPU <= 1.1 of those by the idlest, for every number of GPUs;
    `io_path_s` of one GPU >= 1.7 of that of two at equal per-GPU budget (median of the rounds' ratios).

    Args:
        repeats: rounds that count, at least; a round is as many prompts as are in flight together. Where the held-out
            text has fewer prompts than that takes, it starts again.
        file: configuration of everything but `OWN_KEYS` and `cluster`.

    Raises:
        RuntimeFailure: the tokens differ. ConfigError, BudgetError: the policy or the budget is of no use.
    """
    configs = {v: v.config(model, work, file) for v in VARIANTS}
    for config in configs.values():  # refused before anything is loaded
        check_combination(engine_settings(config))
    groups = {b: _groups(configs[VARIANTS[0]], b, work.rounds(b, repeats)) for b in work.batches}
    settings = {
        "config": file, "policy": work.policy, "budget": work.share, "link_gbps": work.link_gbps,
        "latency_us": LATENCY_US, "ownership": work.ownership,
        "rounds": {str(b): work.rounds(b, repeats) for b in work.batches}, "prompts": work.prompts,
        "prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS, "repeats": repeats, "threads": 1,
        "cores": usable_cores(),
    }  # fmt: skip
    with ExitStack() as stack:  # a worker that is not closed keeps the process alive
        workers = {v: stack.enter_context(closing(start_worker(config))) for v, config in configs.items()}
        report = Report("scale", workers[VARIANTS[0]].stats().executor, settings=settings, shown=_SHOWN)
        for batch, prompts in groups.items():
            cases = _cases(workers, prompts)
            found = interleaved(cases, work.rounds(batch, repeats), 1, progress, f"batch {batch}")
            report.rows += [_row(batch, v, found) for v in VARIANTS]
            report.bars += _bars(batch, found)
    return report


def _groups(config: RunConfig, batch: int, rounds: int) -> list[list[Prompt]]:
    """The prompts of each round, of the warm-up before them first; as many different ones as the text allows."""
    prompts = heldout_prompts(config.model_dir, (rounds + 1) * batch, PROMPT_TOKENS, at_least=batch)
    return [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]


def _cases(workers: dict[Variant, Any], groups: Sequence[list[Prompt]]) -> list[Case]:
    expected: dict[int, list[list[int]]] = {}

    def case(variant: Variant, worker: Any) -> Callable[[], Measures]:
        done = 0

        def run() -> Measures:
            nonlocal done
            group, done = done % len(groups), done + 1
            worker.reset_stats()
            before = worker.shard_stats()
            times, tokens = serve(worker.submit, groups[group], MAX_TOKENS)
            if expected.setdefault(group, tokens) != tokens:
                what = f"{variant.name} gives other tokens than {VARIANTS[0].name}"
                raise RuntimeFailure(what, "report this as a bug")
            rate = len(groups[group]) / times["tpot_s"]
            return {"tokens_per_s": rate, "ttft_s": times["ttft_s"]} | _measures(worker, before)

        return run

    return [Case(variant.name, case(variant, worker)) for variant, worker in workers.items()]


def _measures(worker: Any, before: Sequence[dict[str, Any]]) -> Measures:
    after = worker.shard_stats()
    if any(part["state"] != "serving" for part in (*before, *after)):
        raise RuntimeFailure("a shard was lost during the measurement", "run again; report it if it stays")

    def of_each(name: str) -> list[float]:
        return [float(b[name] - a[name]) for a, b in zip(before, after, strict=True)]

    loaded, hits, misses = of_each("bytes_loaded"), of_each("hits"), of_each("misses")
    total = worker.stats().total()
    return {
        "io_path_s": total.io_path_s,
        "link_path_s": total.link_path_s,
        "link_s_mean": sum(of_each("link_s")) / len(loaded),
        "blocked_io_s_all": sum(of_each("blocked_io_s")),
        "shard_wait_s": total.shard_wait_s,
        "recomputed": float(total.shard_recomputed),
        "hit_rate": ratio(sum(hits), sum(hits) + sum(misses)),
        **{f"bytes_loaded_{i}": loaded[i] for i in range(len(loaded))},
        **{f"needed_{i}": hits[i] + misses[i] for i in range(len(loaded))},
    }


_SHOWN = (
    "batch", "case", "tokens_per_s", "hit_rate", "needed_max_min", "bytes_max_min",
    "io_path_s", "io_path_gain", "link_path_s", "link_path_gain",
)  # fmt: skip


def _row(batch: int, variant: Variant, found: Found) -> dict[str, Any]:
    """Medians over rounds; what is per GPU is the sum over rounds; `spread` has the rounds themselves.

    `..._max_min`: of the busiest GPU over that of the idlest. `..._gain`: one GPU's over this case's.
    """
    spreads = found[variant.name]
    loaded, needed = _of_gpus(spreads, "bytes_loaded"), _of_gpus(spreads, "needed")
    return {
        "batch": batch, "case": variant.name, "gpus": variant.gpus, "equal": variant.equal,
        **{name: spread.median for name, spread in spreads.items() if not name[-1].isdigit()},
        "io_path_gain": _gain(found, variant, "io_path_s"),
        "link_path_gain": _gain(found, variant, "link_path_s"),
        "loaded_mb": sum(loaded) / 1e6,
        "bytes_loaded": loaded,
        "needed": needed,
        "bytes_max_min": ratio(max(loaded), min(loaded)),
        "needed_max_min": ratio(max(needed), min(needed)),
        "spread": {name: asdict(spread) for name, spread in spreads.items()},
    }  # fmt: skip


def _of_gpus(spreads: Mapping[str, Spread], measure: str) -> list[float]:
    """A measure of each GPU, the sum over rounds [G]."""
    return [sum(spread.values) for name, spread in spreads.items() if name.startswith(f"{measure}_")]


def _gain(found: Found, variant: Variant, measure: str) -> float:
    """One GPU's over this case's: the median of the rounds' ratios; not a number where there is nothing to compare."""
    pairs = zip(found[VARIANTS[0].name][measure].values, found[variant.name][measure].values, strict=True)
    ratios = [ratio(one, this) for one, this in pairs]
    return math.nan if any(map(math.isnan, ratios)) else statistics.median(ratios)


def _bars(batch: int, found: Found) -> list[Bar]:
    bars = []
    for v in VARIANTS[1:]:
        loaded = _of_gpus(found[v.name], "bytes_loaded")
        name = f"batch {batch}: bytes loaded, busiest over idlest GPU, {v.name}"
        bars.append(Bar(name, ratio(max(loaded), min(loaded)), "<=", BALANCE))
    gain = _gain(found, Variant(2, "per-GPU"), "io_path_s")
    return [*bars, Bar(f"batch {batch}: time lost to copies, 1 GPU over 2 of the same budget each", gain, ">=", SPEED)]
