"""Checkpoints as people find them, on top of what `save_pretrained` writes: transformers' tokens, or a refusal."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import PROMPTS, RELEASES, TOKENS, reference, write
from quantizers import compressed
from quick import quick
from safetensors.torch import load_file, save_file
from serving import greedy, serving, settings
from tiny_models import edit_config, save_tiny_checkpoint, tiny_model

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.checkpoints.checkpoint import open_checkpoint
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.convert import plan_store
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import UnsupportedModelError

torch.set_num_threads(1)
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path, Tensors], object]  # of the folder, and of the tensors in place


def edited(model_type: str, edit: Edit, folder: Path) -> Path:
    """A tiny checkpoint with a change."""
    checkpoint = save_tiny_checkpoint(model_type, folder / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    edit(checkpoint, tensors)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


_EXPERT = "model.layers.0.block_sparse_moe.experts.0"
SAME: dict[str, tuple[str, Edit]] = {
    # both matrices are there: transformers ties them only where they are equal
    "a head apart, though config.json ties it": ("qwen3_moe", lambda folder, _: edit_config(
        folder, tie_word_embeddings=True)),
    "no head, and tied": ("qwen3_moe", lambda folder, tensors: (
        edit_config(folder, tie_word_embeddings=True), tensors.pop("lm_head.weight"))),
    "a head alone, and tied": ("qwen3_moe", lambda folder, tensors: (
        edit_config(folder, tie_word_embeddings=True), tensors.pop("model.embed_tokens.weight"))),
    "rope_scaling of old": ("qwen3_moe", lambda folder, _: edit_config(
        folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})),
    "biases of zeros beside experts, as of AutoGPTQ": ("mixtral", lambda folder, tensors: tensors.update(
        {f"{_EXPERT}.w1.bias": torch.zeros(24), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    checkpoint = edited(*SAME[case], tmp_path)
    store = ExpertStore(prepare(checkpoint, tmp_path / "store", progress=False))
    with serving(store, settings(0.5)) as worker:
        assert greedy(worker, PROMPTS, TOKENS) == reference(checkpoint)


def test_attention_of_a_package_that_is_not_here(tmp_path: Path) -> None:
    """Which implementation computes attention is no part of a model: this one is not installed with a CPU's torch."""
    checkpoint = save_tiny_checkpoint("phimoe", tmp_path / "checkpoint")
    expected = reference(checkpoint)
    edit_config(checkpoint, _attn_implementation="flash_attention_2")
    store = ExpertStore(prepare(checkpoint, tmp_path / "store", progress=False))
    with serving(store, settings(0.5)) as worker:
        assert greedy(worker, PROMPTS, TOKENS) == expected


def surplus(name: str) -> Edit:
    return lambda folder, tensors: tensors.update({name: torch.ones(4)})


LEFT_OUT: dict[str, tuple[str, Edit, tuple[str, ...]]] = {
    "a bias": ("qwen3_moe", surplus("model.layers.0.self_attn.q_proj.bias"), ("model.layers.0.self_attn.q_proj.bias",)),
    "an adapter's": ("qwen3_moe", surplus("model.layers.0.self_attn.q_proj.lora_A.weight"),
                     ("model.layers.0.self_attn.q_proj.lora_A.weight",)),
    "a classifier's": ("qwen3_moe", surplus("score.weight"), ("score.weight",)),
    "of layers that config.json has not": ("qwen3_moe", lambda folder, tensors: (
        edit_config(folder, num_hidden_layers=1), [
            tensors.pop(name) for name in list(tensors) if ".layers.1." in name and "layernorm" not in name]),
        ("model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight")),
    "buffers of old": ("qwen3_moe", surplus("model.layers.0.self_attn.rotary_emb.inv_freq"), ()),
    "a head for drafts": ("qwen3_next", surplus("mtp.fc.weight"), ()),
    "towers": ("gemma4", lambda folder, tensors: None, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_left_out_is_said(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors that transformers reports as unexpected, and serves without."""
    model_type, edit, names = LEFT_OUT[case]
    prepare(edited(model_type, edit, tmp_path), tmp_path / "store", progress=True)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    assert len(said) == bool(names)
    assert all(line.endswith(f"has no such tensors: {', '.join(names)}") for line in said)


# with layers without experts, as each family's configuration names them
LAYERS = (
    "afmoe", "axk1", "beam", "deepseek_v3", "ernie4_5_moe", "ernie4_5_vl_moe", "glm4_moe_lite", "glm5_next", "hy_v3",
    "jamba", "kimi_linear", "laguna", "lfm2_moe", "mimo_v2_flash", "muse_spark", "nemotron_h", "qwen3_moe",
)  # fmt: skip


@pytest.mark.parametrize("model_type", quick(LAYERS, [name for name in LAYERS if name != "muse_spark"]))
def test_a_plan_counts_the_experts_of_the_model(model_type: str, tmp_path: Path) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    experts = plan_store(open_checkpoint(tmp_path)).experts
    shape, facts = experts[0].shape, facts_of_checkpoint(tmp_path)
    assert (facts.layers, facts.experts, facts.gates) == (len(experts), shape.num_experts, shape.gates)
    assert (facts.hidden, facts.intermediate) == (shape.hidden, shape.intermediate)
    assert facts.expert_elements == pytest.approx(shape.elements(), rel=0.01)
    (tmp_path / "model.safetensors").unlink()
    assert facts_of_checkpoint(tmp_path).layers == len(experts)


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {  # fields of published configurations, and layers with experts
    "Nemotron-3-Nano": ({"hybrid_override_pattern": "MEMEM*EM", "num_hidden_layers": 8}, 3),
    "MiMo-V2-Flash": ({"moe_layer_freq": [0, 1, 1, 1], "num_hidden_layers": 4}, 3),
    "Hunyuan-A13B": ({"moe_intermediate_size": [24] * 4, "moe_topk": [8] * 4, "num_hidden_layers": 4}, 4),
    "ERNIE-4.5-21B": ({"moe_layer_start_index": 1, "moe_layer_end_index": 5, "moe_layer_interval": 1,
                       "num_hidden_layers": 6}, 5),
    "Jamba": ({"expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 8}, 4),
    "Qwen3": ({"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 8}, 3),
    "DeepSeek-V3": ({"first_k_dense_replace": 3, "moe_layer_freq": 1, "num_hidden_layers": 8}, 5),
    "LFM2-8B-A1B": ({"num_dense_layers": 2, "num_hidden_layers": 8}, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_from_a_published_configuration(name: str, tmp_path: Path) -> None:
    fields, layers = PUBLISHED[name]
    whole = {"num_experts": 16, "hidden_size": 64, "moe_intermediate_size": 24, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "vocab_size": 99, "num_experts_per_tok": 8, **fields}))
    facts = facts_of_checkpoint(tmp_path)
    assert (facts.layers, facts.intermediate, facts.top_k) == (layers, 24, 8)


def adapter(folder: Path, base: str | None = "Qwen/Qwen3-30B-A3B") -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (lambda folder: (adapter(folder), (folder / "config.json").unlink()),
                   "an adapter (of Qwen/Qwen3-30B-A3B), not a model; merge it into"),
    "an adapter of what": (lambda folder: (adapter(folder, None), (folder / "config.json").unlink()),
                           "an adapter (of a model that it does not name)"),
    "an adapter beside the model": (adapter, "has an adapter (adapter_config.json) beside the model, which is not"),
    "code": (lambda folder: edit_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "own.Own"}),
             "no model of the type 'kimi_k2', and Python code of a checkpoint is not run; pass a release"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_weights_are_read(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    checkpoint = save_tiny_checkpoint("deepseek_v3", tmp_path / "checkpoint")
    change(checkpoint)
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        prepare(locate(str(checkpoint)), tmp_path / "store", progress=False)


_NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)


@pytest.mark.parametrize("model_type", ["gemma4", "qwen3_vl_moe"])
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "NVFP4"])
def test_experts_apart_where_transformers_has_stacks(model_type: str, quantized: bool, tmp_path: Path) -> None:
    """As quantized releases of Gemma 4 and Qwen3-VL have them."""
    whole = tmp_path / "whole"
    tiny_model(model_type, hidden_size=64, moe_intermediate_size=32).save_pretrained(whole)
    apart = Path(shutil.copytree(whole, tmp_path / "apart"))
    stacked, single = load_file(whole / "model.safetensors"), Tensors()
    for name, tensor in list(stacked.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            single[name] = tensor
            continue
        path, _, which = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if "up" in which else [("down", matrix)]
            values = []
            for part, weight in parts:
                found, exact = _NVFP4[0](weight.contiguous()) if quantized else ({".weight": weight}, weight)
                single |= {f"{path}.{expert}.{part}_proj{suffix}": one.contiguous() for suffix, one in found.items()}
                values.append(exact)
            tensor[expert] = torch.cat(values)
    save_file(stacked, whole / "model.safetensors", {"format": "pt"})
    save_file(single, apart / "model.safetensors", {"format": "pt"})
    if quantized:
        edit_config(apart, quantization_config=_NVFP4[1])
    found = []
    for folder in (apart, whole):
        store = ExpertStore(prepare(folder, tmp_path / f"{folder.name}-store", progress=False))
        with serving(store, settings(0.5)) as worker:
            found.append(greedy(worker, PROMPTS, TOKENS))
    assert found[0] == found[1]
    assert facts_of_checkpoint(apart).form == ("nvfp4" if quantized else None)


def test_a_plan_of_targets_with_names_of_another_tree(tmp_path: Path) -> None:
    """As of releases that were quantized with other names of modules: the only scheme is that of quantized experts."""
    release = next(r for r in RELEASES if r.name.endswith("Qwen3-30B-A3B-quantized.w4a16"))
    published, _ = write(release, tmp_path)
    config = json.loads((published / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["targets"] = [r"re:.*block_sparse_moe\.experts.*"]
    edit_config(published, quantization_config=config)
    assert facts_of_checkpoint(published).form == "int4"
