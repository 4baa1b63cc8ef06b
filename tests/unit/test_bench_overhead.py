"""`bench overhead`: the GGUF of a checkpoint, llama.cpp's tokens, and what is missed without it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import reference_greedy
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.benchmarks import llama
from tiermoe.benchmarks import overhead as overhead_bench
from tiermoe.benchmarks.cases import Against, Overhead
from tiermoe.benchmarks.llama import LlamaCpp, missing, write_gguf
from tiermoe.benchmarks.overhead import LLAMA, NEXT_GATE, OURS, overhead
from tiermoe.cluster.jobs.bench.metrics import Measures, Report, Spread
from tiermoe.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("overhead") / "model")


def test_a_gguf_has_every_weight_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    read = gguf.GGUFReader(write_gguf(checkpoint, tmp_path / "model.gguf"))
    found = {tensor.name: tensor.data for tensor in read.tensors}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    for layer in range(layers):
        gate, up = np.split(state[f"model.layers.{layer}.mlp.experts.gate_up_proj"], 2, axis=1)
        assert gate.shape[0] == experts > 2
        for name, expected in (("gate", gate), ("up", up), ("down", None)):
            if expected is None:
                expected = state[f"model.layers.{layer}.mlp.experts.down_proj"]
            assert np.array_equal(found[f"blk.{layer}.ffn_{name}_exps.weight"], expected), name
        assert np.array_equal(
            found[f"blk.{layer}.attn_q.weight"], state[f"model.layers.{layer}.self_attn.q_proj.weight"]
        )
    assert np.array_equal(found["token_embd.weight"], state["model.embed_tokens.weight"])
    assert sum(data.size for data in found.values()) == sum(p.numel() for p in model.parameters())
    assert read.fields["qwen3moe.expert_used_count"].contents() == model.config.num_experts_per_tok


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(UnsupportedModelError, match="mixtral"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


@pytest.mark.skipif(bool(missing()), reason="llama-cpp-python is not installed")
def test_llama_cpp_gives_the_model_s_tokens(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [(5, 6, 7, 8), (9, 3)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = dict(zip(prompts, reference_greedy(model, prompts, 6, ignore_eos=True), strict=True))
    with closing(LlamaCpp(write_gguf(checkpoint, tmp_path / "model.gguf"))) as runner:
        for prompt in [*prompts, prompts[0]]:  # nothing of an earlier request is left
            measures, tokens = runner.generate(prompt, 6)
            assert tokens == expected[prompt]
            assert measures["tpot_s"] > 0


def _found(*cases: tuple[str, list[float]]) -> dict[str, dict[str, Spread]]:
    return {name: {"tpot_s": Spread.of(values)} for name, values in cases}


@pytest.mark.parametrize(("installed", "ok"), [(True, [True, False, False, True]), (False, [False] * 3 + [True])])
def test_bars_are_paired_and_missed_without_llama_cpp(
    installed: bool, ok: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pairs(options: Any, report: Report, folder: Path, configs: Any, prompts: Any, tokens: int, generated: Any,
              progress: Any) -> dict[str, dict[str, Spread]]:  # fmt: skip
        cases = [(OURS, [2.0, 4.0, 60.0]), (NEXT_GATE, [2.2, 4.4, 10.0])]
        generated |= {name: [[1] * tokens] * len(prompts) for name in configs}
        generated[NEXT_GATE] = [[2] + [1] * (tokens - 1)] * len(prompts)
        if installed:
            generated[LLAMA] = generated[OURS]
            cases.append((LLAMA, [1.0, 1.0, 10.0]))  # ratios 2, 4, 6
        return _found(*cases)

    monkeypatch.setattr(overhead_bench, "_pairs", pairs)
    report = overhead(Overhead(against=(Against.LLAMA_CPP,)), None)
    bars = {bar.name.split(" at 0.25")[0]: bar for bar in report.bars}
    names = (
        f"tokens of 96 that are llama.cpp's, {OURS}", f"tokens of 96 that are llama.cpp's, {NEXT_GATE}",
        "tpot over llama.cpp, all-resident", "tpot over all-resident, next-gate",
    )  # fmt: skip
    assert [bars[name].ok for name in names] == ok
    if installed:
        assert [bars[name].value for name in names] == pytest.approx([96, 92, 4.0, 1.1])


def test_without_llama_cpp_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Worker:
        def stats(self) -> Report:
            return Report("", "emulated")

        def submit(self) -> None: ...
        def close(self) -> None: ...

    def serve(submit: Any, prompts: Any, tokens: int) -> tuple[Measures, list[list[int]]]:
        return {"ttft_s": 1.0, "tpot_s": 0.5}, [[1] * tokens]

    monkeypatch.setattr(overhead_bench, "missing", lambda: ["llama_cpp"])
    monkeypatch.setattr(overhead_bench, "start_worker", lambda config: Worker())
    monkeypatch.setattr(overhead_bench, "serve", serve)
    report = overhead(Overhead(against=(Against.LLAMA_CPP,), pairs=1), None)
    assert llama.INSTALL in capsys.readouterr().err
    assert {row["case"] for row in report.rows} == {OURS, NEXT_GATE, "tiermoe on-demand"}
    assert not report.ok
