"""`tiermoe bench overhead`: what serving through the expert cache costs when everything is resident."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from rich.progress import Progress

from ....errors import RuntimeFailure
from .metrics import Bar, Case, Measures, Report, Spread, interleaved, ratio, rows_of
from .serving import Submit, heldout_prompts, run_config, serve, start_reference, start_worker

OURS = "tiermoe all-resident"
REFERENCES = ("grouped_mm", "batched_mm", "eager")  # transformers' experts implementations that run on a CPU
BATCHES = (1, 8)
PROMPT_TOKENS, MAX_TOKENS = 32, 48
OWN_KEYS = ("policy", "budget", "link")


def bench_overhead(model: str | None, repeats: int, progress: Progress | None, file: str | None = None) -> Report:
    """Decode time per token with all experts resident, against transformers' continuous batching.

    The reference is the unmodified model under the same manager with whichever of its experts implementations
    has the lowest median in this run. Both must give the same tokens, or nothing is reported.

    Bars: ratio of medians <= 1.0 at batch 1 and at batch 8.

    `file`: configuration of everything but `OWN_KEYS`.

    Raises:
        RuntimeFailure: the tokens differ.
    """
    config = run_config(model, file, policy="all-resident", budget="1.0", link={"gbps": None, "latency_us": 0.0})
    prompts = heldout_prompts(config.model_dir, max(BATCHES), PROMPT_TOKENS)
    settings = {
        "config": file, "prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS, "threads": 1, "repeats": repeats,
    }  # fmt: skip
    with ExitStack() as stack:  # a worker that is not closed keeps the process alive
        worker = stack.enter_context(closing(start_worker(config)))
        submits: dict[str, Submit] = {OURS: worker.submit}
        for name in REFERENCES:
            submits[name] = stack.enter_context(closing(start_reference(config, name))).submit
        report = Report("overhead", worker.stats().executor, settings=settings)
        for batch in BATCHES:
            results = interleaved(_cases(submits, prompts[:batch]), repeats, 1, progress)
            report.rows += rows_of(results, batch=batch)
            medians = {name: measures["tpot_s"].median for name, measures in results.items()}
            fastest = min(REFERENCES, key=lambda name: medians[name])
            value = ratio(medians[OURS], medians[fastest])
            report.bars.append(Bar(f"tpot over transformers {fastest}, batch {batch}", value, "<=", 1.0))
        report.rows += _host_rows(worker, prompts)
    return report


def host_measures(engine: Any, run: Callable[[], object], tokens: int) -> dict[str, Spread]:
    """What a layer's decode pass of so many tokens consists of, on the host: microseconds by part, calls by kind.

    Args:
        run: sends requests and waits for them.
    """
    from ....actors.engine.model.profile import PARTS, device_calls, host_passes

    with host_passes(engine) as passes:
        run()
    decode = [p for p in passes if p.tokens == tokens]
    found = {f"host_{part}_us": Spread.of([p.parts[part] * 1e6 for p in decode]) for part in PARTS}
    found["host_outside_us"] = Spread.of([p.outside_s * 1e6 for p in decode])
    measures = {name: spread for name, spread in found.items() if spread.median > 0}
    if engine.device.executor == "real":
        calls = device_calls(engine, run, tokens)
        for where, counts in (("experts", calls.experts), ("dense", calls.dense)):
            measures |= {f"{where}_{kind}_per_layer": Spread.of([n]) for kind, n in vars(counts).items()}
    return measures


def _cases(submits: dict[str, Submit], prompts: list[tuple[int, ...]]) -> list[Case]:
    expected: list[list[int]] = []

    def case(name: str, submit: Submit) -> Callable[[], Measures]:
        def run() -> Measures:
            measures, tokens = serve(submit, prompts, MAX_TOKENS)
            if not expected:
                expected.extend(tokens)
            if tokens != expected:
                raise RuntimeFailure(f"{name} gives other tokens than {next(iter(submits))}", "report this as a bug")
            return measures

        return run

    return [Case(name, case(name, submit)) for name, submit in submits.items()]


def _host_rows(worker: Any, prompts: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Microseconds of a layer's decode pass outside its kernels, and by part; on a GPU its calls per layer too.

    Parts are of a run of their own, which timing them makes slower.
    """
    from ....actors.engine.model.profile import layer_passes

    rows = []
    for batch in BATCHES:
        run = partial(serve, worker.submit, prompts[:batch], MAX_TOKENS)
        with layer_passes(worker.engine) as passes:
            run()
        decode = [p for p in passes if p.tokens == batch]
        measures = {
            "host_us_per_layer": Spread.of([(p.total_s - p.kernel_s) * 1e6 for p in decode]),
            "kernel_us_per_layer": Spread.of([p.kernel_s * 1e6 for p in decode]),
        } | host_measures(worker.engine, run, batch)
        rows += rows_of({OURS: measures}, batch=batch)
    return [row | {"values": ()} for row in rows]  # thousands of passes: their median and range tell enough
