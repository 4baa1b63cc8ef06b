"""`streams`: eight requests over one, on models whose KV cache is not paged."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, interleaved, median_ratio, rows_of
from tiermoe.cluster.jobs.bench.serving import serve
from tiermoe.cluster.jobs.local_worker import run_config, start_worker

if TYPE_CHECKING:
    from rich.progress import Progress

    from .cases import Streams

SPEED = 2.5  # the bar
_BASE = {
    "vocab_size": 4096, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {  # model types, in sizes of which a test machine computes some tokens a second
    "qwen3_5_moe_text": {
        **_BASE, "num_hidden_layers": 4, "num_experts": 32, "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "deepseek_v2": {
        **_BASE, "num_hidden_layers": 4, "n_routed_experts": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 8,
    },
    "nemotron_h": {
        **_BASE, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "moe"], "n_routed_experts": 32,
        "moe_shared_expert_intermediate_size": 256, "ssm_state_size": 64, "mamba_num_heads": 16, "mamba_head_dim": 64,
        "n_groups": 2,
    },
}  # fmt: skip


def streams(options: Streams, progress: Progress | None) -> Report:
    """Tokens a second of one request and of several together, with all experts resident, by architecture.

    Weights are random. Bars: `options.streams` requests over one >= 2.5 for each architecture (medians of the rounds'
    ratios).

    Raises:
        RuntimeFailure: a request failed.
    """
    prompts = [tuple(3 + (i * 37 + k * 11) % 4000 for i in range(32)) for k in range(options.streams)]
    names = {1: "one request", options.streams: f"{options.streams} requests"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cases: list[Case] = []
        for family in options.family:
            _save(family, Path(folder) / family)
            config = run_config(str(Path(folder) / family), None, policy="all-resident", budget="1.0")
            worker = stack.enter_context(closing(start_worker(config)))
            cases += [_case(f"{family}, {names[count]}", worker, prompts[:count], options.tokens) for count in names]
        report = Report("streams", worker.stats().executor, settings=options.settings())
        found = interleaved(cases, options.repeats, 1, progress, "streams")
    report.rows = rows_of(found)
    for family in options.family:
        one, many = (found[f"{family}, {name}"]["tokens_per_s"] for name in names.values())
        report.bars.append(Bar(f"{family}: {options.streams} requests over one", median_ratio(many, one), ">=", SPEED))
    return report


def _save(family: str, folder: Path) -> None:
    """A checkpoint of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _case(name: str, worker: Any, prompts: list[tuple[int, ...]], tokens: int) -> Case:
    def run() -> Measures:
        measures, _ = serve(worker.submit, prompts, tokens)
        return {"tokens_per_s": len(prompts) / measures["tpot_s"], **measures}

    return Case(name, run)
