"""Tiny models as llama.cpp's own converter writes them, with the logits and tokens of transformers' model.

    PYTHONPATH=tests python -m gguf_converter LLAMA_CPP [NAME ...]

writes tests/golden/gguf/NAME.gguf.xz and golden/gguf_converted.json. LLAMA_CPP: its sources, of which `conversion` and
`gguf-py` are used. Weights are multiples of 1/8, so that the files are small.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "gguf_converted.json"
FILES = GOLDEN.parent / "gguf"
TOKENS = 8
Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A tiny model, and what its published checkpoint has that the one of `save_pretrained` has not.

    Attributes:
        model_type: of `tiny_models`.
        sizes: fields of its configuration.
        fields: of the published configuration, of that of transformers.
        names: patterns of tensors' names, and what they are as published.
        transposed: experts in one tensor are [inputs, outputs].
        packed: experts are MXFP4.
        beside: the metadata is not a whole configuration: config.json lies beside the file.
    """

    model_type: str
    sizes: Fields = field(default_factory=dict)
    fields: Callable[[Fields], Fields] = lambda config: {}
    names: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    packed: bool = False
    beside: bool = True


def _sliding(*kinds: str) -> Fields:
    of = {"s": "sliding_attention", "f": "full_attention"}
    return {"num_hidden_layers": len(kinds), "layer_types": [of[kind] for kind in kinds], "sliding_window": 16}


def _sigmoid(config: Fields) -> Fields:
    return {"scoring_func": "sigmoid"}


def _plain_attention(config: Fields) -> Fields:
    kinds = config["layer_types"]
    return {"layer_types": ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]}


def _mamba(config: Fields) -> Fields:
    return {"layer_types": ["attention" if kind == "full_attention" else "mamba" for kind in config["layer_types"]]}


def _kimi(config: Fields) -> Fields:
    kinds = list(enumerate(config["layer_types"], 1))
    linear = {
        "full_attn_layers": [i for i, kind in kinds if kind == "full_attention"],
        "kda_layers": [i for i, kind in kinds if kind != "full_attention"], "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"], "head_dim": config["linear_head_dim"],
        "gate_lower_bound": config.get("linear_lower_bound"),
    }  # fmt: skip
    return {"linear_attn_config": linear, "moe_router_activation_func": "sigmoid", "mla_use_nope": True,
            "first_k_dense_replace": config["mlp_layer_types"].count("dense")}  # fmt: skip


def _minimax(config: Fields) -> Fields:
    names = {"num_index_heads": "n_heads", "index_dim": "head_dim", "topk_blocks": "topk_blocks",
             "block_size": "block_size", "local_block": "local_blocks"}  # fmt: skip
    sparse = {f"sparse_{published}": config[f"index_{own}"] for published, own in names.items()}
    return {"sparse_attention_config": sparse, "n_shared_experts": 1, **_sigmoid(config),
            "moe_layer_freq": [int(kind != "dense") for kind in config["mlp_layer_types"]]}  # fmt: skip


def _hunyuan(config: Fields) -> Fields:
    layers = config["num_hidden_layers"]
    return {"moe_intermediate_size": [config["intermediate_size"]] * layers, "moe_topk": [config["moe_topk"]] * layers,
            "num_shared_expert": [1] * layers}  # fmt: skip


def _mimo(config: Fields) -> Fields:
    same = ("head_dim", "num_attention_heads", "v_head_dim", "num_key_value_heads")
    return {**{f"swa_{name}": config[name] for name in same}, "topk_method": "noaux_tc",
            "hybrid_layer_pattern": [int(kind != "full_attention") for kind in config["layer_types"]],
            "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.5}}  # fmt: skip


def _deepseek4(config: Fields) -> Fields:
    return {"num_hash_layers": config["mlp_layer_types"].count("hash_moe"),
            "compress_ratios": [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]]}  # fmt: skip


def _solar(config: Fields) -> Fields:
    return {"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 1.0}}


def _of_kinds(rope: Fields) -> Fields:
    return dict.fromkeys(("full_attention", "sliding_attention"), rope)


_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
_DENSE = {r"block_sparse_moe\.((gate|up|down)_proj)": r"mlp.\1"}
_ROOTS = {r"^model\.": "", "embed_tokens": "embed", r"attn\.norm\.": "attn.kv_norm.", r"hc_head\.hc_": "hc_head_"}
_QWEN4 = {
    "output_gate_type": "sigmoid", "hc_lowrank": 8, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {**_ROTARY, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}  # fmt: skip
_NGRAMS = {"ple_layer_ids": [2], "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "split_ngram_parts": 2,
           "make_ngram_vocab_size_divisible_by": 8, "ple_embed_dim": 32}  # fmt: skip
CASES: dict[str, Case] = {
    "qwen3next": Case("qwen3_next", beside=False),
    "qwen35moe": Case("qwen3_5_moe", beside=False),
    "qwen3vlmoe": Case("qwen3_vl_moe", transposed=True, beside=False),
    "qwen4exp": Case("qwen4_exp", _QWEN4, _plain_attention),
    "qwen4exp with a table of n-grams": Case("qwen4_exp", {**_QWEN4, **_NGRAMS}, _plain_attention),
    "glm4moe": Case("glm4_moe", beside=False),
    "glm4moe of GLM-4.5V": Case("glm4v_moe", beside=False),
    "glm4moe of Solar Open": Case("solar_open", fields=_solar, beside=False),
    "glm-dsa": Case("glm_moe_dsa", {"index_head_dim": 16}, _sigmoid),
    "glm5-next": Case("glm5_next", {"linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 4}, _kimi),
    "deepseek2 of V2": Case("deepseek_v2", beside=False),
    "deepseek2 of V3": Case("deepseek_v3", fields=_sigmoid, beside=False),
    "deepseek2 of GLM-4.7-Flash": Case(
        "glm4_moe_lite", fields=lambda config: {**_sigmoid(config), "first_k_dense_replace": 1}, beside=False
    ),
    "deepseek32": Case("deepseek_v32", {"index_head_dim": 16}, _sigmoid),
    "deepseek4": Case("deepseek_v4", fields=_deepseek4, names=_ROOTS, packed=True),
    "mistral4": Case("mistral3"),
    "gpt-oss": Case("gpt_oss", {"rope_parameters": _YARN, **_sliding("s", "f")}, beside=False),
    "gemma4": Case(
        "gemma4", {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                   "final_logit_softcapping": 30.0, **_sliding("s", "f", "f")}, beside=False,
    ),
    "minimax-m2": Case("minimax_m2", fields=_sigmoid, beside=False),
    "minimax-m3": Case(
        "minimax_m3_vl", {"dense_intermediate_size": 40, "shared_intermediate_size": 24, "rotary_dim": 4,
                          "rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5}, "num_hidden_layers": 3,
                          "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 2,
                          "mlp_layer_types": ["dense", "sparse", "sparse"]}, _minimax,
    ),
    "kimi-linear": Case("kimi_linear", fields=_kimi, names=_DENSE, beside=False),
    "nemotron_h_moe": Case("nemotron_h", beside=False),
    "lfm2moe": Case("lfm2_moe", {"tie_word_embeddings": True}, beside=False),
    "hunyuan-moe": Case("hunyuan_v1_moe", fields=_hunyuan, beside=False),
    "hy_v3": Case("hy_v3"),
    "ernie4_5-moe": Case("ernie4_5_moe"),
    "dots1": Case("dots1", {"num_key_value_heads": 4}, beside=False),
    "afmoe": Case(
        "afmoe", {**_sliding("s", "s", "s", "f", "s"), "mup_enabled": True, "route_scale": 1.5},
        lambda config: {"route_norm": True, "score_func": "sigmoid"},
    ),
    "exaone-moe": Case("exaone_moe", _sliding("s", "f", "s"), _sigmoid),
    "laguna": Case("laguna", {**_sliding("f", "s", "s", "s", "f"), "moe_routed_scaling_factor": 1.5}),
    "mellum": Case("mellum", {**_sliding("s", "f", "s"), "rope_parameters": _of_kinds(_ROTARY)}),
    "mimo2": Case(
        "mimo_v2_flash", {**_sliding("f", "s", "f"),
                          "rope_parameters": _of_kinds({**_ROTARY, "partial_rotary_factor": 0.5})}, _mimo,
    ),
    "cohere2moe": Case("cohere2_moe", _sliding("s", "f")),
    "granitemoe": Case("granitemoe", _GRANITE),
    "granitemoe with a shared expert": Case("granitemoeshared"),
    "granite_swa": Case("granitemoe_swa"),
    "granitehybrid": Case("granitemoehybrid", {**_GRANITE, "position_embedding_type": "nope"}, _mamba),
    "jamba": Case("jamba"),
}  # fmt: skip


def main() -> None:
    """Write the files, and what transformers makes of the models."""
    llama, *names = sys.argv[1:]
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or CASES:
            golden[name] = _made(CASES[name], Path(scratch) / name)
        child = [sys.executable, __file__, llama, *(str(Path(scratch) / name) for name in names or CASES)]
        subprocess.run(child, check=True)
        for name in names or CASES:
            data = (Path(scratch) / name / "model.gguf").read_bytes()
            (FILES / f"{name}.gguf.xz").write_bytes(lzma.compress(data, preset=9))
    rows = [f"  {json.dumps(name)}: {json.dumps(golden[name])}" for name in CASES]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def _made(case: Case, folder: Path) -> Fields:
    """Write the checkpoint as published; answers configuration, logits and tokens."""
    import torch
    from ggufs import PROMPT
    from published import mxfp4
    from safetensors.torch import load_file, save_file
    from serving import reference_greedy
    from tiny_models import tiny_model

    model = tiny_model(case.model_type, **case.sizes)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                steps = 8 if tensor.dim() > 1 else 32
                coarse = (tensor * steps).round() / steps
                if case.packed and ".experts." in name:
                    coarse = torch.stack([mxfp4(one.float())[1] for one in coarse])
                tensor.copy_(coarse)
        logits = model(torch.tensor([PROMPT])).logits[0].numpy()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    published = json.loads(json.dumps(config))
    text = published.get("text_config", published)
    text |= case.fields(text)
    tensors = {}
    for own, tensor in load_file(folder / "model.safetensors").items():
        name = own
        for pattern, to in case.names.items():
            name = re.sub(pattern, to, name)
        if case.transposed and ".experts." in name and tensor.dim() == 3:
            tensor = tensor.transpose(1, 2)
        if case.packed and ".experts." in name:
            parts = mxfp4(tensor.float())[0]
            tensors[name] = parts["_blocks"].reshape(len(tensor), -1).view(torch.int8)
            tensors[name.replace(".weight", ".scale")] = parts["_scales"].view(torch.float8_e8m0fnu)
        else:
            tensors[name] = tensor
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published))
    vocabulary = {str(token): token for token in range(text["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": vocabulary}}))
    return {
        "config": config, "best": logits.argmax(axis=1).tolist(), "last": [round(float(x), 4) for x in logits[-1]],
        "tokens": reference_greedy(model, [PROMPT[:12]], TOKENS)[0],
    }  # fmt: skip


def convert(llama: Path, folders: list[Path]) -> None:
    """Run the converter on each folder, with its own `gguf` and without a vocabulary; writes model.gguf there."""
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    from copy import deepcopy

    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from gguf.tensor_mapping import TensorNameMap

    def load(folder: Path, is_mistral_format: bool = False) -> Fields:  # as for a model that transformers does not know
        found: Fields = json.loads((Path(folder) / "config.json").read_text())
        return found

    ModelBase.load_hparams = staticmethod(load)
    mappings = deepcopy(TensorNameMap.block_mappings_cfg)  # an architecture changes it for those after
    for folder in folders:
        TensorNameMap.block_mappings_cfg = deepcopy(mappings)
        kind = get_model_class(get_model_architecture(load(folder), ModelType.TEXT))
        kind.set_vocab = lambda self: self._set_vocab_none()
        kind.no_mtp = True
        model = kind(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf")
        sizes, add = [], model.gguf_writer.add_vocab_size
        model.gguf_writer.add_vocab_size = lambda size, sizes=sizes, add=add: (sizes.append(size), add(size))
        write = model.set_gguf_parameters

        def with_size(write: Any = write, sizes: list[int] = sizes, add: Any = add, model: Any = model) -> None:
            write()
            if not sizes:  # llama.cpp needs it where there is no vocabulary
                add(model.hparams["vocab_size"])

        model.set_gguf_parameters = with_size
        model.write()


if __name__ == "__main__":
    if len(sys.argv) > 2 and Path(sys.argv[2]).is_absolute():
        convert(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
    else:
        main()
