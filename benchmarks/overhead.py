"""`bench overhead`: decode time with everything resident against transformers and llama.cpp, and what a policy adds.

All cases of a comparison answer the same prompts, on one thread, and take turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tiermoe.cluster.checkpoints.hub import located
from tiermoe.cluster.config import RunConfig, default_model_dir, load_run_config
from tiermoe.cluster.jobs.bench.cells import check_tokens
from tiermoe.cluster.jobs.bench.metrics import (
    Bar,
    Case,
    Measures,
    Report,
    Spread,
    interleaved,
    median_ratio,
    ratio,
    rows_of,
)
from tiermoe.cluster.jobs.bench.random_model import Form
from tiermoe.cluster.jobs.bench.serving import (
    Prompt,
    Submit,
    heldout_prompts,
    serve,
)
from tiermoe.cluster.jobs.local_worker import run_config, start_worker
from tiermoe.cluster.report.tables import show

from .cases import Against, Overhead
from .llama import INSTALL, LlamaCpp, missing, write_gguf
from .random_model import VOCABULARY, NamedModel, save_published

OURS = "tiermoe all-resident"
REFERENCES = ("grouped_mm", "batched_mm", "eager")  # transformers' experts implementations that run on a CPU
BATCHES = (1, 8)
PROMPT_TOKENS, MAX_TOKENS = 32, 48  # against transformers
LLAMA, NEXT_GATE, ON_DEMAND = "llama.cpp", "tiermoe next-gate", "tiermoe on-demand"
LLAMA_PROMPTS, LLAMA_TOKENS = 4, 24  # prompts, and generated tokens of each, against llama.cpp
MAPPED = "tiermoe without a GPU"
MODEL_BAR, LAYERS_BAR, MAPPED_BAR, POLICY_BAR, BLOCKS_BAR = 2.5, 1.15, 1.1, 1.15, 1.3
_NO_LINK = {"gbps": None, "latency_us": 0.0}

Generate = Callable[[Prompt, int], tuple[Measures, list[int]]]


def overhead(options: Overhead, progress: Progress | None) -> Report:
    """Decode time per token, against each of `options.against`.

    transformers: the unmodified model under the same manager, with its fastest experts implementation in this run.
    llama.cpp: the model as a GGUF of 32-bit floats; batch 1. qwen3-30b-layers: llama.cpp again, on random layers of
    Qwen3-30B-A3B's shape, of which ours and its read the same bytes. qwen3-30b-blocks: the same from one GGUF file with
    experts in Q4_0 and the dense part in Q8_0, as a machine without a GPU serves it, and all resident in slots.

    Bars: ratio of medians to transformers <= 1.0 at batch 1 and at batch 8. Medians of the rounds' ratios to llama.cpp
    <= 2.5 on the model, 1.1 as a machine without a GPU serves it, 1.15 on the layers, 1.3 in blocks; of `next-gate` to
    all-resident <= 1.15; each preset gives llama.cpp's tokens (but in blocks, where llama.cpp rounds activations to 8
    bits). Where llama-cpp-python is not installed, llama.cpp is not measured, and there are no bars on it.

    Raises:
        RuntimeFailure: the tokens of ours and transformers differ.
    """
    settings = options.settings(prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, threads=1)
    report = Report("overhead", "", settings=settings)
    if (absent := missing()) and set(options.against) - {Against.TRANSFORMERS}:
        report.not_measured.append(f"llama.cpp, without {absent[0]}: {INSTALL}")
        show(Console(stderr=True), *(f"not measured: {peer}" for peer in report.not_measured))  # it takes minutes
    config = options.run_of("all-resident")
    if Against.TRANSFORMERS in options.against:
        _against_transformers(options, config, report, progress)
    if Against.LLAMA_CPP in options.against:
        _against_llama(options, config, report, progress)
    if Against.LAYERS in options.against and not absent:  # of no use alone
        _layers(options, report, progress)
    if Against.BLOCKS in options.against and not absent:
        for threads in options.threads:
            _blocks(options, threads, report, progress)
    return report


def _against_transformers(options: Overhead, config: RunConfig, report: Report, progress: Progress | None) -> None:
    prompts = heldout_prompts(config.model_dir, max(BATCHES), PROMPT_TOKENS)

    def case(name: str, submit: Submit, batch: int, known: dict[int, list[int]]) -> Case:
        def run() -> Measures:
            measures, tokens = serve(submit, prompts[:batch], MAX_TOKENS)
            check_tokens(name, dict(enumerate(tokens)), known)
            return measures

        return Case(name, run)

    with ExitStack() as stack:  # an open worker keeps the process alive
        worker = stack.enter_context(closing(start_worker(config)))
        report.executor = worker.stats().executor
        submits: dict[str, Submit] = {OURS: worker.submit}
        for name in REFERENCES:
            submits[name] = stack.enter_context(closing(start_reference(config, name))).submit
        for batch in BATCHES:
            known: dict[int, list[int]] = {}
            cases = [case(name, submit, batch, known) for name, submit in submits.items()]
            results = interleaved(cases, options.repeats, 1, progress)
            report.rows += rows_of(results, batch=batch)
            medians = {name: measures["tpot_s"].median for name, measures in results.items()}
            fastest = min(REFERENCES, key=lambda name: medians[name])
            value = ratio(medians[OURS], medians[fastest])
            report.bars.append(Bar(f"tpot over transformers {fastest}, batch {batch}", value, "<=", 1.0))


def start_reference(config: RunConfig, experts: str) -> Any:
    """The unmodified model under transformers' continuous batching with one of its experts implementations."""
    import torch
    from transformers import AutoModelForCausalLM

    from tiermoe.actors.engine.serving.batching import ContinuousBatcher

    torch.set_num_threads(config.worker_threads)
    model = AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32, attn_implementation="sdpa")
    model.set_experts_implementation(experts)
    return ContinuousBatcher(model.eval(), config.kv)


def _against_llama(options: Overhead, config: RunConfig, report: Report, progress: Progress | None) -> None:
    """The model on llama.cpp and under three policies; bars on time, and on the tokens of each policy."""
    prompts = heldout_prompts(config.model_dir, LLAMA_PROMPTS, PROMPT_TOKENS)
    configs = {name: options.run_of(name.removeprefix("tiermoe ")) for name in (OURS, NEXT_GATE, ON_DEMAND)}
    configs[MAPPED] = _without_gpu(options.model, 1)
    generated: dict[str, list[list[int]]] = {}
    found = _pairs(options, report, config.model_dir, configs, prompts, LLAMA_TOKENS, generated, progress)
    report.rows += rows_of(found, batch=1)
    total = LLAMA_PROMPTS * LLAMA_TOKENS
    for name in configs if LLAMA in generated else ():
        pairs = zip(generated[LLAMA], generated[name], strict=True)
        same = sum(a == b for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True))
        report.bars.append(Bar(f"tokens of {total} that are llama.cpp's, {name}", same, ">=", total))
    if LLAMA in found:
        report.bars.append(Bar("tpot over llama.cpp, all-resident", _paired(found, OURS, LLAMA), "<=", MODEL_BAR))
        report.bars.append(Bar(f"tpot over llama.cpp, {MAPPED}", _paired(found, MAPPED, LLAMA), "<=", MAPPED_BAR))
    what = f"tpot over all-resident, next-gate at {options.budget} and {options.link_gbps:g} GB/s"
    report.bars.append(Bar(what, _paired(found, NEXT_GATE, OURS), "<=", POLICY_BAR))


def _layers(options: Overhead, report: Report, progress: Progress | None) -> None:
    """Random layers of Qwen3-30B-A3B's shape on llama.cpp and all-resident."""
    with tempfile.TemporaryDirectory(prefix="tiermoe-layers-") as scratch:
        shape = NamedModel("qwen3-30b-a3b", layers=options.layers).shape
        model_dir = save_published(Form.BF16, shape, Path(scratch) / "model")
        rng = np.random.default_rng(0)
        prompts = [tuple(map(int, rng.integers(3, VOCABULARY, PROMPT_TOKENS))) for _ in range(2)]
        store = str(Path(scratch) / "store")
        config = run_config(
            str(model_dir), options.config, policy="all-resident", budget="1.0", link=_NO_LINK, store=store
        )
        found = _pairs(options, report, model_dir, {OURS: config}, prompts, LLAMA_TOKENS, {}, progress)
    name = f"{options.layers} layers of Qwen3-30B-A3B"
    report.rows += rows_of({f"{case}, {name}": measures for case, measures in found.items()}, batch=1)
    report.bars.append(Bar(f"tpot over llama.cpp, {name}", _paired(found, OURS, LLAMA), "<=", LAYERS_BAR))


def _blocks(options: Overhead, threads: int, report: Report, progress: Progress | None) -> None:
    """Random layers of Qwen3-30B-A3B's shape in blocks, on llama.cpp, without a GPU, and all-resident."""
    made = NamedModel("qwen3-30b-a3b", layers=options.layers)
    folder = made.made()
    whole: dict[str, Any] = {"policy": "all-resident", "budget": "1.0", "link": _NO_LINK}
    configs = {
        MAPPED: _without_gpu(str(folder), threads), OURS: run_config(str(folder), None, **whole, threads=threads)
    }  # fmt: skip
    prompts = heldout_prompts(default_model_dir(), 2, PROMPT_TOKENS)  # it has that tokenizer
    (file,) = folder.glob("*.gguf")
    name = f"{options.layers} layers of Qwen3-30B-A3B in {made.form}, threads {threads}"
    for case, config in configs.items():  # apart: memory holds the slots of one
        generated: dict[str, list[list[int]]] = {}
        only = {case: config}
        found = _pairs(options, report, folder, only, prompts, LLAMA_TOKENS, generated, progress, file, threads)
        report.rows += rows_of({f"{of}, beside {case}, {name}": seen for of, seen in found.items()}, batch=1)
        same = sum(theirs == ours for theirs, ours in zip(generated[LLAMA], generated[case], strict=True))
        report.figures[f"answers of {len(prompts)} that are llama.cpp's, {case}, {name}"] = same
        first = median_ratio(found[case]["ttft_s"], found[LLAMA]["ttft_s"])
        report.figures[f"ttft over llama.cpp, {case}, {name}"] = first
        report.bars.append(Bar(f"tpot over llama.cpp, {case}, {name}", _paired(found, case, LLAMA), "<=", BLOCKS_BAR))


def _without_gpu(model: str | None, threads: int) -> RunConfig:
    """What a machine without a GPU serves: experts run where the store maps them."""
    options = {"model": model, "threads": threads, "device": "cpu", "kv": {"prefix_cache": False}}
    return located(load_run_config(None, options))


def _pairs(
    options: Overhead, report: Report, model_dir: Path, configs: Mapping[str, RunConfig], prompts: Sequence[Prompt],
    max_tokens: int, generated: dict[str, list[list[int]]], progress: Progress | None, file: Path | None = None,
    threads: int = 1,
) -> dict[str, dict[str, Spread]]:  # fmt: skip
    """Ours and, where it is installed, llama.cpp in turn, one prompt after the other; mean times over the prompts.

    generated: gets the tokens of each case's last round. file: the model as GGUF; None: it is written, in 32-bit
    floats.
    """

    def case(name: str, generate: Generate) -> Case:
        def run() -> Measures:
            taken = [generate(prompt, max_tokens) for prompt in prompts]
            generated[name] = [tokens for _, tokens in taken]
            return {key: fmean(measures[key] for measures, _ in taken) for key in ("ttft_s", "tpot_s")}

        return Case(name, run)

    def ours(worker: Any, prompt: Prompt, count: int) -> tuple[Measures, list[int]]:
        measures, tokens = serve(worker.submit, [prompt], count)
        return measures, tokens[0]

    with ExitStack() as stack:
        cases = []
        if not missing():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiermoe-gguf-")))
            whole = write_gguf(model_dir, folder / "model.gguf") if file is None else file
            llama = stack.enter_context(closing(LlamaCpp(whole, threads)))
            cases.append(case(LLAMA, llama.generate))
        for name, config in configs.items():
            worker = stack.enter_context(closing(start_worker(config, optional_workers=False)))
            report.executor = worker.stats().executor
            cases.append(case(name, partial(ours, worker)))
        return interleaved(cases, options.pairs, 1, progress, "against llama.cpp")


def _paired(found: Mapping[str, Mapping[str, Spread]], case: str, base: str) -> float:
    """Median of the rounds' ratios of time per token."""
    return median_ratio(found[case]["tpot_s"], found[base]["tpot_s"])
