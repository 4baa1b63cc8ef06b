"""Part `prompt`: the first token of a long prompt where experts are offloaded, by the tokens of a forward.

The model is the shape's first layers with random weights, whose own routers spread a prompt over all experts.
"""

from __future__ import annotations

from contextlib import closing
from itertools import product

import torch

from tiermoe.actors.engine.model.attention import steady_sdpa
from tiermoe.actors.engine.serving.batching import ContinuousBatcher
from tiermoe.actors.settings import KvSettings
from tiermoe.cluster.jobs.bench.serving import serve

from .decode import OURS, PROMPT, Bench, free_memory
from .models import REAL, TOY, HostExperts, moe_layers
from .near_data import NearData
from .routing import draw
from .run_parts import Context, Record
from .transfers import record_peaks

PRESETS = ("on-demand", "next-gate")  # layers as they are needed; and whole, one ahead of the compute
LAYERS, TOKENS, TOY_TOKENS, BUDGET = 8, 8192, 64, 0.25
_CASE_S = 12.0  # a case with less time left does not start


def run(context: Context, record: Record) -> None:
    """Seconds to the first token in one forward and in sixteen, beside what the link needs for the absent experts."""
    shape = (TOY if context.toy else REAL)["qwen3"]
    torch.set_num_threads(1)
    steady_sdpa()
    layers, tokens = min(LAYERS, moe_layers(shape, context)), TOY_TOKENS if context.toy else TOKENS
    peaks = record_peaks(context, record)
    gpu = context.device.type == "cuda"
    with closing(HostExperts()) as host, closing(NearData(shape.expert, layers, 1)) as near_data:
        trace = draw(PROMPT + 1, layers, shape.experts, shape.top_k, seed=7)
        bench = Bench.of(context, record, shape, host, layers, trace)
        bench.replay.close()
        bench.built.use(OURS)
        absent = (1 - BUDGET) * layers * shape.experts * shape.expert.nbytes(context.dtype.itemsize)
        for rows, preset in product((tokens, tokens // 16), PRESETS):
            case = f"{shape.name}, a prompt of {tokens} tokens, {rows} at once, {preset}"
            if record.measured("prompt", rows=rows, preset=preset) or not record.has_time(context, _CASE_S, case):
                continue
            kv = KvSettings(page_size=16, tokens=tokens + 64, max_batch_tokens=rows, prefix_cache=False)
            with (
                record.trying(case, must_run=True),
                bench.engine(preset, BUDGET, near_data, replayed=False) as engine,
            ):
                with closing(ContinuousBatcher(bench.built.model, kv, engine, "triton" if gpu else "auto")) as batcher:
                    prompt = tuple((7 * i + 1) % 200 for i in range(tokens))
                    for _ in range(2):  # the first compiles
                        before = engine.stats().total().bytes_loaded
                        measured, _ = serve(batcher.submit, [prompt], 1)
                    loaded = engine.stats().total().bytes_loaded - before
                record.row(
                    "prompt", shape=shape.name, layers=layers, of_layers=shape.moe_layers, tokens=tokens, rows=rows,
                    preset=preset, ttft_s=measured["ttft_s"], gb=loaded / 1e9, link_s=loaded / peaks.h2d / 1e9,
                    least_link_s=absent / peaks.h2d / 1e9,
                )  # fmt: skip
            free_memory(context)
