"""Part `served`: the default model by the product's own worker and batching, beside `generate` of transformers.

Without Ray, whose part of a token `bench host` measures. Where a step's time goes is in microseconds of the host; on a
GPU that is launching, since nothing waits but the reading of the routing and of the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from tiermoe.actors.engine.host_times import KERNEL_PARTS, STEP_PARTS, host_steps
from tiermoe.actors.engine.model.attention import steady_sdpa
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import Prompt, heldout_prompts, serve
from tiermoe.cluster.jobs.local_worker import run_config, start_worker

from .run_parts import Context, Record
from .transfers import spread_of


class Case(NamedTuple):
    """budget: of each GPU. graphs: decode steps are CUDA graphs. shards: GPUs; a case for which there are too few is
    left out.
    """

    preset: str
    budget: float
    graphs: bool
    shards: int = 1

    @property
    def name(self) -> str:
        shards = f", {self.shards} GPUs" if self.shards > 1 else ""
        return f"served, {self.preset}" + (", graphs" if self.graphs else "") + shards


CASES = (
    Case("auto", 0.25, False), Case("auto", 0.25, True), Case("all-resident", 1.0, False),
    Case("all-resident", 1.0, True), Case("next-gate", 0.25, True), Case("on-demand", 0.25, True),
    Case("next-gate", 0.125, True, shards=2), Case("all-resident", 0.5, True, shards=2),
)  # fmt: skip
TOY_CASES = (Case("auto", 0.25, False), Case("next-gate", 0.125, False, shards=2))
BATCHES, PROMPT_TOKENS, TOKENS, REPEATS = (1, 8), 64, 48, 5
TOY_TOKENS = 6  # of one sequence, once
_CASE_S = 6.0  # a case with less time left does not start


def run(context: Context, record: Record) -> None:
    """Time between tokens, and until the first, of each case and batch; the reference first."""
    torch.set_num_threads(1)
    steady_sdpa()
    prompts = heldout_prompts(default_model_dir(), max(BATCHES), PROMPT_TOKENS)
    _reference(context, record, prompts)
    gpus = torch.cuda.device_count() if context.device.type == "cuda" else 2  # the CPU stands in for any number
    for case in TOY_CASES if context.toy else CASES:
        if case.shards > gpus:
            record.note(f"{case.name}: this machine has {gpus}")
        elif record.has_time(context, _CASE_S, case.name):
            with record.trying(case.name, must_run=True):
                _case(context, record, case, prompts)


def _sizes(context: Context) -> tuple[Sequence[int], int, int]:
    """Batches, tokens of a request, and repetitions."""
    return ((1,), TOY_TOKENS, 1) if context.toy else (BATCHES, TOKENS, REPEATS)


def _case(context: Context, record: Record, case: Case, prompts: Sequence[Prompt]) -> None:
    compile = "graphs" if case.graphs else "off" if context.device.type == "cuda" else "auto"
    config = run_config(
        None, device=context.device.type, policy=case.preset, budget=case.budget, compile=compile,
        cluster={"shards": case.shards},
    )  # fmt: skip
    batches, tokens, repeats = _sizes(context)
    with closing(start_worker(config)) as worker:
        for note in worker.plan()["notes"] if case.graphs else ():
            record.note(f"{case.name}: {note}")
        for batch in batches:
            some = prompts[:batch]
            for _ in range(2):
                serve(worker.submit, some, tokens)  # compiled, and experts as they are while serving
            found = [serve(worker.submit, some, tokens)[0] for _ in range(repeats)]
            with host_steps(worker.engine, worker.model, worker.batcher, KERNEL_PARTS) as steps:
                serve(worker.submit, some, tokens)
            of = [step for step in steps if step.rows == batch]
            parts = {part: median(step.parts[part] for step in of) * 1e6 for part in STEP_PARTS}
            layers = [fmean(layer.host_s for layer in step.layers) * 1e6 for step in of]
            waits = [fmean(layer.parts["wait"] for layer in step.layers) * 1e6 for step in of]
            record.row(
                "served", **case._asdict(), batch=batch,
                tpot_ms=spread_of([measures["tpot_s"] * 1e3 for measures in found]),
                ttft_ms=spread_of([measures["ttft_s"] * 1e3 for measures in found]),
                hit_rate=worker.stats().hit_rate, step_us=parts, layer_us=median(layers), layer_wait_us=median(waits),
            )  # fmt: skip


@torch.no_grad()
def _reference(context: Context, record: Record, prompts: Sequence[Prompt]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=context.dtype)
    model = model.to(context.device).eval()
    batches, tokens, repeats = _sizes(context)
    for batch in batches:
        ids = torch.tensor(prompts[:batch], device=context.device)

        def seconds(tokens: int, ids: torch.Tensor = ids) -> float:
            context.synchronize()
            begin_s = time.perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            context.synchronize()
            return time.perf_counter() - begin_s

        seconds(tokens)
        first = [seconds(1) for _ in range(repeats)]
        whole = [seconds(tokens) for _ in first]
        record.row(
            "reference", case="transformers' generate, all experts resident", batch=batch,
            tpot_ms=spread_of([(both - one) / (tokens - 1) * 1e3 for one, both in zip(first, whole, strict=True)]),
            ttft_ms=spread_of([one * 1e3 for one in first]),
        )  # fmt: skip
