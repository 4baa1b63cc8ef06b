"""Tiny random checkpoints in the forms in which MoE models are published, and their dequantized selves.

Each matrix is quantized by the code of the form's own library where there is one (transformers, compressed-tensors,
gguf), and dequantized by the same: the oracle is a plain checkpoint of those values.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from form_cases import random_parts
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from quantizers import (
    FP8_CONFIG,
    Quantize,
    Tensors,
    codes_of,
    compressed,
    fp8_block,
    gptq,
    gptq_config,
    words_of,
)
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tiermoe.kernels.forms import BLOCKS, MatrixForm

PROMPTS = [[3, 17, 50, 9, 81, 22, 7, 64, 90, 11, 45, 3], [99, 4, 4, 76, 31], [8, 120, 33, 60, 60, 2, 71]]
TOKENS = 10
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
_KEPT = re.compile(r"(embed_tokens|lm_head|norm|\.gate|gate\.wg|router|shared_expert_gate|conv1d|sinks)\b")


def reference(oracle: Path) -> list[list[int]]:
    """The greedy tokens of transformers' own model in float32."""
    model = AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32).eval()
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
        out.append(found[0, len(prompt) :].tolist())
    return out


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As gpt-oss lays it out: blocks of 16 bytes."""
    parts, values = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)[0](
        weight
    )
    blocks = parts[".weight_packed"].reshape(len(weight), -1, 16)
    return {"_blocks": blocks, "_scales": parts[".weight_scale"]}, values


def modelopt_nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """ModelOpt's names; its global scale multiplies."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    parts, _ = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)[0](
        weight
    )
    whole = (1 / parts[".weight_global_scale"]).reshape(())
    scale, packed = parts[".weight_scale"], parts[".weight_packed"]
    codes = unpack_fp4_from_uint8(packed, *weight.shape, dtype=torch.float32)
    values = codes * (scale.float() * whole).repeat_interleave(16, dim=1)
    more = {".weight_scale_2": whole, ".input_scale": torch.tensor(1.0)}
    return {".weight": packed, ".weight_scale": scale, **more}, values


def _powers(weight: torch.Tensor, rows: int, columns: int, largest: int) -> torch.Tensor:
    """DeepSeek-V4's scales of blocks, as float8 e8m0."""
    o, i = weight.shape
    most = weight.reshape(o // rows, rows, i // columns, columns).abs().amax(dim=(1, 3))
    return torch.exp2(torch.ceil(torch.log2(most / largest))).to(torch.float8_e8m0fnu)


def v4_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """DeepSeek-V4's dense matrices, decoded by transformers."""
    scale = _powers(weight, 128, 128, 448)
    codes = (weight / scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    return {".weight": codes, ".scale": scale}, Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)


def v4_fp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """DeepSeek-V4's experts: two weights a byte, a scale for 32; decoded by transformers."""
    scale = _powers(weight, 1, 32, 6)
    values = torch.tensor(Fp8Dequantize._FP4_E2M1_LUT)
    exact = weight / scale.float().repeat_interleave(32, 1)
    codes = (exact[:, :, None] - values).abs().argmin(dim=2).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return {".weight": packed, ".scale": scale}, Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)


def modelopt_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale a matrix."""
    scale = (weight.abs().amax() / 448).reshape(())
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(1.0)}, codes.float() * scale


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map: the output of each nibble


def awq(weight: torch.Tensor, group: int = 64) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero = codes_of(weight, group, 4)
    spread = scale.float().repeat_interleave(group, 1), zero.repeat_interleave(group, 1)
    parts = {
        ".qweight": words_of(codes.t().numpy(), AWQ_ORDER, 4), ".qzeros": words_of(zero.t().numpy(), AWQ_ORDER, 4),
        ".scales": scale.t().contiguous(),
    }  # fmt: skip
    return parts, (codes - spread[1]) * spread[0]


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
MODELOPT_MIXED = {  # forms of modules, by names with a prefix of their own
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        "model.language_model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    },
}  # fmt: skip
V4_CONFIG = {**FP8_CONFIG, "scale_fmt": "ue8m0"}
MODELOPT_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


@dataclass(frozen=True)
class Release:
    """A published model by name, and how its tiny self is made.

    Attributes:
        quantize: one matrix; None: the model is published in plain numbers.
        config: the quantization_config.
        kept: modules that stay as they are.
        stacked: experts are stacked in one tensor, as gpt-oss has them.
        experts: a routed expert's matrix, where those have a form of their own.
    """

    name: str
    model_type: str
    quantize: Quantize | None
    config: dict[str, Any] | None
    dtype: torch.dtype = torch.bfloat16
    kept: str = "^$"
    stacked: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)  # further JSON files
    experts: Quantize | None = None


def write(release: Release, folder: Path) -> tuple[Path, Path]:
    """The checkpoint as published, and the plain one of its dequantized values in float32."""
    head = {} if release.model_type.startswith("deepseek") else {"head_dim": 64}
    plain = save_tiny_checkpoint(release.model_type, folder / "plain", **{**SIZES, **head, **release.sizes})
    tensors = {name: t.to(release.dtype) for name, t in load_file(plain / "model.safetensors").items()}
    published: Tensors = {}
    oracle: Tensors = {}
    for name, tensor in tensors.items():
        if release.quantize is None or not _is_quantized(name, tensor, release):
            published[name], oracle[name] = tensor, tensor.float()
        elif release.stacked:
            published |= _stacked(name, tensor, release.quantize, oracle)
        else:
            of_expert = release.experts is not None and ".experts." in name
            parts, values = (release.experts if of_expert else release.quantize)(tensor.float())
            module = name.removesuffix(".weight")
            published |= {module + suffix: part for suffix, part in parts.items()}
            oracle[name] = values
    config = json.loads((plain / "config.json").read_text())
    config["dtype"] = str(release.dtype).removeprefix("torch.")
    _save(plain, folder / "published", published, config, release)
    _save(plain, folder / "oracle", oracle, config | {"dtype": "float32"}, None)
    return folder / "published", folder / "oracle"


def _is_quantized(name: str, tensor: torch.Tensor, release: Release) -> bool:
    if release.stacked:
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    matrix = name.endswith(".weight") and tensor.dim() == 2
    return matrix and not _KEPT.search(name) and not re.search(release.kept, name)


def _stacked(name: str, tensor: torch.Tensor, quantize: Quantize, oracle: Tensors) -> Tensors:
    """[E, in, out] of gpt-oss -> blocks and scales [E, out, in / 32, ..]."""
    found = [quantize(matrix.t().contiguous().float()) for matrix in tensor]
    blocks = torch.stack([parts["_blocks"] for parts, _ in found])
    scales = torch.stack([parts["_scales"] for parts, _ in found])
    oracle[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _save(plain: Path, folder: Path, tensors: Tensors, config: dict[str, Any], release: Release | None) -> None:
    shutil.copytree(plain, folder)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    quantization = {} if release is None or release.config is None else {"quantization_config": release.config}
    (folder / "config.json").write_text(json.dumps({**config, **quantization}))
    for name, content in ({} if release is None else release.files).items():
        (folder / name).write_text(json.dumps(content))


_W4A16 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
_W4A16_ASYM = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=False)
_W8A8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
_FP8_CHANNEL = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
_FP8_TENSOR = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
_MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
_NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)

RELEASES = (
    Release("deepseek-ai/DeepSeek-V3", "deepseek_v3", fp8_block, FP8_CONFIG, kept="self_attn",
            sizes={"num_hidden_layers": 2}),
    Release("deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4", v4_fp8, V4_CONFIG, kept=r"attn|hc_|^(embed|head)\b",
            sizes={"expert_dtype": "fp4"}, experts=v4_fp4),
    Release("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3_moe", fp8_block, FP8_CONFIG, kept="self_attn"),
    Release("MiniMaxAI/MiniMax-M2", "minimax_m2", fp8_block, FP8_CONFIG, kept="self_attn"),
    Release("openai/gpt-oss-20b", "gpt_oss", mxfp4, {"quant_method": "mxfp4"}, stacked=True),
    Release("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "qwen3_moe", gptq(4, 128, False, True), gptq_config(4, 128, False, True)),
    Release("TheBloke/Mixtral-8x7B-v0.1-GPTQ", "mixtral", gptq(4, 64, True, False), gptq_config(4, 64, True, False),
            dtype=torch.float16),
    Release("TheBloke/Mixtral-8x7B-v0.1-GPTQ:gptq-8bit-128g-actorder", "mixtral", gptq(8, 128, True, True),
            gptq_config(8, 128, True, True), dtype=torch.float16),
    Release("casperhansen/mixtral-instruct-awq", "mixtral", awq, AWQ_CONFIG, dtype=torch.float16),
    Release("QuantTrio/Qwen3-30B-A3B-AWQ", "qwen3_moe", awq, AWQ_CONFIG, kept="layers.0.self_attn"),
    Release("RedHatAI/Qwen3-30B-A3B-quantized.w4a16", "qwen3_moe", *_W4A16),
    Release("RedHatAI/Mixtral-8x7B-Instruct-v0.1-quantized.w4a16-asym", "mixtral", *_W4A16_ASYM),
    Release("RedHatAI/Mixtral-8x7B-Instruct-v0.1-quantized.w8a8", "mixtral", *_W8A8),
    Release("RedHatAI/Qwen3-30B-A3B-FP8-dynamic", "qwen3_moe", *_FP8_CHANNEL),
    Release("neuralmagic/DeepSeek-Coder-V2-Lite-Instruct-FP8", "deepseek_v2", *_FP8_TENSOR,
            sizes={"num_hidden_layers": 2}),
    Release("nvidia/Qwen3-30B-A3B-NVFP4", "qwen3_moe", modelopt_nvfp4, MODELOPT_CONFIG,
            files={"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": MODELOPT_CONFIG}}),
    Release("nvidia/Qwen3.6-35B-A3B-NVFP4", "qwen3_moe", modelopt_fp8, MODELOPT_MIXED, experts=modelopt_nvfp4),
    Release("RedHatAI/Qwen3-30B-A3B-NVFP4", "qwen3_moe", *_NVFP4),
    Release("RedHatAI/Qwen3-30B-A3B-MXFP4", "qwen3_moe", *_MXFP4),
    Release("allenai/OLMoE-1B-7B-0924", "olmoe", None, None),
)  # fmt: skip




# --- GGUF ----------------------------------------------------------------------------------------------------------

def q4_k_m(name: str) -> str:
    """As in published files of the mix: some layers' down projections and values are wider than the others'."""
    if "ffn_gate_inp" in name:
        return "F32"
    if "ffn_down_exps" in name or "attn_v" in name:
        return "Q6_K" if "blk.0." in name or "blk.1." in name else "Q4_K"
    return "Q6_K" if name.startswith("output") else "Q4_K"


def all_forms(name: str) -> str:
    """Each matrix of the experts of each layer in a form of its own, as in mixed files; eight layers have all forms."""
    kinds = [kind.removesuffix("_gguf").upper() for kind in BLOCKS]
    kinds = ["Q5_K", "BF16", "MXFP4", "Q4_0", "Q8_0", "F16", *sorted(set(kinds) - {"Q5_K", "MXFP4", "Q4_0", "Q8_0"})]
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", name)
    if match is not None:
        return kinds[3 * int(match[1]) + ("gate", "up", "down").index(match[2])]
    return "F32" if "ffn_gate_inp" in name else "F16"


def random_blocks(kind: GGMLQuantizationType, rows: tuple[int, ...], inputs: int, seed: int) -> np.ndarray:
    """Blocks of random codes with small finite scales: [*rows, bytes]. The package quantizes few types itself."""
    name = {"MXFP4": "mxfp4_gguf"}.get(kind.name, kind.name.lower())
    parts = random_parts(MatrixForm(name, math.prod(rows), inputs), np.random.default_rng(seed))
    return parts["weight"].reshape(*rows, -1)


def write_gguf(
    plain: Path, folder: Path, architecture: str, kind_of: Callable[[str], str], parts: int = 1,
    tokenizer: bool = False, split_kv: bool = False,
) -> tuple[Path, Path]:  # fmt: skip
    """A plain checkpoint as a GGUF file, laid out as llama.cpp's converter does; and the plain one of its values.

    Args:
        kind_of: type by GGUF's name of a matrix, such as "Q8_0".
        split_kv: DeepSeek's kv_b_proj in two, as newer converters write it.
    """
    config = json.loads((plain / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(plain / "model.safetensors").items()}
    names = get_tensor_name_map(next(a for a, n in MODEL_ARCH_NAMES.items() if n == architecture), 64)
    if architecture == "gpt-oss":
        tensors = _gate_and_up_apart(tensors)
    stacks: dict[str, dict[int, str]] = {}
    flat: dict[str, list[str]] = {}
    for name in tensors:
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match:
            layer = re.search(r"layers\.(\d+)", name)
            which = {"w1": "gate", "w2": "down", "w3": "up"}.get(match[3], match[3].removesuffix("_proj"))
            stacks.setdefault(f"blk.{layer[1]}.ffn_{which}_exps.weight", {})[int(match[2])] = name
            continue
        if architecture == "gpt-oss" and ".experts." in name:
            layer, which, suffix = re.fullmatch(r".*layers\.(\d+)\..*\.(\w+)_proj(_bias)?", name).groups()
            flat[f"blk.{layer}.ffn_{which}_exps.{'bias' if suffix else 'weight'}"] = [name]
            continue
        base, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            base, suffix = name.removesuffix("_bias"), "bias"
        found = names.get_name(base) or names.get_name(f"{base}.{suffix}") or names.get_name(name)
        assert found is not None, name
        flat[f"{found}.{suffix}"] = [name]
    sources = flat | {name: [members[i] for i in range(len(members))] for name, members in stacks.items()}
    oracle: Tensors = dict(tensors)
    folder.mkdir(parents=True)
    stem = folder.name if parts == 1 else None
    written: list[tuple[str, np.ndarray, GGMLQuantizationType]] = []
    for seed, (name, members) in enumerate(sources.items()):
        arrays = [_as_converted(name, tensors[m].numpy(), architecture, config) for m in members]
        array = np.stack(arrays) if name in stacks else arrays[0]
        kind = GGMLQuantizationType[kind_of(name)] if array.ndim > 1 else GGMLQuantizationType.F32
        if name.endswith("bias"):
            kind = GGMLQuantizationType.F32
        data, values = _quantized(array, kind, seed)
        if split_kv and "attn_kv_b" in name:
            written += [(name.replace("kv_b", f"{one}_b"), part, kind) for one, part in _split_kv(data, config)]
        else:
            written.append((name, data, kind))
        for i, member in enumerate(members):
            back = _as_loaded(name, values[i] if name in stacks else values, architecture, config)
            exact = torch.from_numpy(np.ascontiguousarray(back, np.float32)).reshape(tensors[member].shape)
            plain_numbers = kind.name in ("F32", "F16", "BF16") and not (name in stacks or "_exps" in name)
            kept = not plain_numbers or config.get("dtype") == "float32"
            oracle[member] = exact if kept else exact.bfloat16().float()
    if architecture == "gpt-oss":
        oracle = _gate_and_up_together(oracle)
    files = _write_parts(folder, stem or "model", architecture, config, written, parts, plain if tokenizer else None)
    _save(plain, folder.with_name(folder.name + "-oracle"), oracle, config | {"dtype": "float32"}, None)
    return files[0], folder.with_name(folder.name + "-oracle")


def _split_kv(array: np.ndarray, config: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """As `DeepseekV2Model.modify_tensors` of the converter."""
    heads, nope = config["num_key_value_heads"], config["qk_nope_head_dim"]
    both = array.reshape(heads, -1, array.shape[-1])
    return [("k", np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))), ("v", np.ascontiguousarray(both[:, nope:]))]


def _gate_and_up_apart(tensors: Tensors) -> Tensors:
    """gpt-oss: [E, in, out] -> [E, out, in], and the rows of gate and up apart."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        turned = tensor.transpose(1, 2) if ".experts." in name and tensor.dim() == 3 else tensor
        if "gate_up_proj" in name:
            for i, which in enumerate(("gate", "up")):
                out[name.replace("gate_up", which)] = turned[:, i::2].contiguous()
        else:
            out[name] = turned.contiguous()
    return out


def _gate_and_up_together(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if ".experts.gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            both = torch.stack([tensor, up], dim=2).flatten(1, 2)
            name, tensor = name.replace("gate_proj", "gate_up_proj"), both
        elif ".experts.up_proj" in name:
            continue
        out[name] = tensor.transpose(1, 2).contiguous() if ".experts." in name and tensor.dim() == 3 else tensor
    return out


def _quantized(array: np.ndarray, kind: GGMLQuantizationType, seed: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        data = gguf.quantize(array, kind)
    except NotImplementedError:
        data = random_blocks(kind, array.shape[:-1], array.shape[-1], seed)
    return data, gguf.dequantize(data, kind)


def _as_converted(name: str, array: np.ndarray, architecture: str, config: Mapping[str, Any]) -> np.ndarray:
    """What llama.cpp's converter does to a tensor: `LlamaModel.permute`, and axes of one."""
    if "shortconv" in name or "exp_probs_b" in name:
        return array.squeeze()
    heads = _permuted_heads(name, architecture, config)
    if heads is None:
        return array
    return array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def _as_loaded(name: str, array: np.ndarray, architecture: str, config: Mapping[str, Any]) -> np.ndarray:
    heads = _permuted_heads(name, architecture, config)
    if heads is None:
        return array
    return array.reshape(heads, len(array) // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _permuted_heads(name: str, architecture: str, config: Mapping[str, Any]) -> int | None:
    if architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return None
    return config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]


def _write_parts(
    folder: Path, stem: str, architecture: str, config: Mapping[str, Any],
    tensors: list[tuple[str, np.ndarray, GGMLQuantizationType]], parts: int, tokenizer: Path | None,
) -> list[Path]:  # fmt: skip
    files = []
    for part in range(parts):
        name = f"{stem}.gguf" if parts == 1 else f"{stem}-{part + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(folder / name, architecture)
        if part == 0:
            _metadata(writer, config, tokenizer)
        for tensor, data, kind in tensors[part::parts]:
            if kind == GGMLQuantizationType.BF16:
                data = data.view(np.uint8)
            plain = kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
            writer.add_tensor(tensor, data, raw_dtype=None if plain else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(folder / name)
    return files


def _metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any], tokenizer: Path | None) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kinds = config.get("layer_types") or []
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads * (kind != "conv") for kind in kinds] if "conv" in kinds else heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(config[key] for key in counts if config.get(key)))
    writer.add_expert_used_count(next(config[k] for k in ("num_experts_per_tok", "moe_topk", "moe_k") if config.get(k)))
    if writer.arch == "qwen3vlmoe":
        writer.add_rope_dimension_sections([config["head_dim"] // 2 - 2, 1, 1, 0])
        writer.add_num_deepstack_layers(3)
    if config.get("conv_L_cache"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config["head_dim"] * part))
    if tokenizer is None:
        return
    body = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = sorted(body["model"]["vocab"].items(), key=lambda item: item[1])
    added = {token["id"]: token["content"] for token in body["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = {i: t for t, i in vocabulary} | added
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types([3 if i in added else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in body["model"]["merges"]])
    for name in ("bos", "eos", "pad"):
        if config.get(f"{name}_token_id") is not None:
            getattr(writer, f"add_{name}_token_id")(config[f"{name}_token_id"])
