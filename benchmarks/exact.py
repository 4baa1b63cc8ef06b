"""`bench exact`: log-probabilities where experts run near data, beside those where all run in slots, by dtype."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing
from tiermoe.cluster.jobs.bench.serving import Prompt, heldout_prompts, run_config, start_worker

from .cases import Exact

if TYPE_CHECKING:
    import torch

PROMPT_TOKENS, BUDGET = 32, "0.25"
LEAST_NEAR = 0.4  # of the experts that run: without, both sides would be one kernel
REFERENCE = "all-resident"
# About twice what was measured in bfloat16, and ten times in float32, where only the order of additions differs.
MOST = {"bfloat16": 1.5, "float32": 1e-4}  # of a log-probability, any token at any position
MEAN_KL = {"bfloat16": 2e-3, "float32": 1e-6}
GAP = {"bfloat16": 0.5, "float32": 1e-4}  # nats between two tokens, within which either may be the likelier


def exact(options: Exact, progress: Progress | None) -> Report:
    """Held-out text, teacher-forced, a forward for each token: `policy` in `dtype` against all experts resident.

    In bfloat16 the slots' kernel is a GPU's in what it rounds: hidden states, activations between the projections and
    results are bfloat16, products are summed in float32. It rounds what enters the activation besides, which Triton's
    does not. The near-data worker computes in float32 from the same bfloat16 weights and hidden states. Dense layers
    are bfloat16 in both. The row of all-resident itself is against float32: what the dtype costs alone.

    `near`: share of the experts that ran near data. `most`, `rms`: of the differences of log-probabilities, all tokens
    of the vocabulary. `kl`: mean, in nats. `same`: share of positions with the same likeliest token; `gap`: nats that
    the reference puts between its own and the other's, at most.

    Bars, for each policy and dtype: `near`, `most`, `kl` and `gap` within the limits above.

    Raises:
        CheckpointError: the model ships too little held-out text. RuntimeFailure: a request failed.
    """
    model_dir = run_config(options.model).model_dir
    passages = heldout_prompts(model_dir, options.passages, PROMPT_TOKENS + options.tokens)
    settings = options.settings(prompt_tokens=PROMPT_TOKENS, budget=BUDGET, threads=1)
    report = Report("exact", "", settings=settings)
    chosen = (REFERENCE, *options.policy)
    advance = advancing(progress, "scoring", len(chosen) * len(MOST))
    found: dict[tuple[str, str], tuple[torch.Tensor, float]] = {}
    for dtype in ("float32", "bfloat16"):
        for policy in chosen:
            found[policy, dtype] = _scored(options, policy, dtype, passages, report)
            advance()
            if policy == REFERENCE and dtype == "float32":
                continue
            against = (REFERENCE, "float32" if policy == REFERENCE else dtype)
            row = differences(found[policy, dtype][0], found[against][0])
            report.rows.append({
                "policy": policy, "dtype": dtype, "against": " ".join(against), "near": found[policy, dtype][1], **row,
            })  # fmt: skip
            if policy != REFERENCE:
                of = f"{policy} in {dtype}"
                report.bars += [
                    Bar(f"{of}: share of experts near data", found[policy, dtype][1], ">=", LEAST_NEAR),
                    Bar(f"{of}: most of a log-probability", row["most"], "<=", MOST[dtype]),
                    Bar(f"{of}: mean KL in nats", row["kl"], "<=", MEAN_KL[dtype]),
                    Bar(f"{of}: nats between two likeliest tokens that differ", row["gap"], "<=", GAP[dtype]),
                ]
    return report


def _scored(
    options: Exact, policy: str, dtype: str, passages: list[Prompt], report: Report
) -> tuple[torch.Tensor, float]:
    """Log-probabilities [positions, V], and the share of experts that ran near data."""
    import torch

    from tiermoe.actors.engine.serving.scoring import score_with

    budget = "1.0" if policy == REFERENCE else BUDGET
    with closing(start_worker(run_config(options.model, policy=policy, budget=budget, dtype=dtype))) as worker:
        scored = torch.cat([score_with(worker, ids, PROMPT_TOKENS, rows=1) for ids in passages])
        stats: Any = worker.stats()
        total = stats.total()
        report.executor = stats.executor
    ran = total.ndp_experts + total.hits + total.misses
    return scored, total.ndp_experts / ran if ran else 0.0


def differences(found: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Of log-probabilities [positions, V]: see `exact`."""
    off, likeliest = (found - reference).abs(), found.argmax(-1, keepdim=True)
    gaps = reference.max(-1, keepdim=True).values - reference.gather(-1, likeliest)
    same = likeliest == reference.argmax(-1, keepdim=True)
    return {
        "most": float(off.max()), "rms": float(off.pow(2).mean().sqrt()),
        "kl": float((reference.exp() * (reference - found)).sum(-1).mean()), "same": float(same.float().mean()),
        "gap": float(gaps.max()),
    }  # fmt: skip
