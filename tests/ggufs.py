"""GGUF files for tests: one is read, its keys and tensors are changed, and it is written again, whole or in parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFValueType
from transformers import AutoConfig

from tiermoe.actors.engine.model.architecture import from_config
from tiermoe.cluster.checkpoints.checkpoint import open_checkpoint
from tiermoe.cluster.checkpoints.experts import LayerExperts
from tiermoe.cluster.checkpoints.plan import ExpertsModule
from tiermoe.cluster.jobs.prepare.convert import plan_store

Data = tuple[np.ndarray, gguf.GGMLQuantizationType]


def rewrite(
    file: Path,
    out: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    parts: int = 1,
    place: Callable[[str], int] | None = None,
    no_tensor_first: bool = False,
) -> list[Path]:
    """A copy of a file, with other keys and tensors; None removes one. New tensors are of 32-bit floats.

    Args:
        out: the new file; of several parts their stem is its own.
        parts: files that it is split into, with the keys of llama.cpp's gguf-split.
        place: the part of a tensor, from 0; by default they take turns.
        no_tensor_first: the first part has no tensor.
    """
    reader = gguf.GGUFReader(file)
    values = {
        name: (found.contents(), found.types[0], found.types[-1])
        for name, found in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    data: dict[str, Data] = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    for name, array in (tensors or {}).items():
        data.pop(name, None)
        if array is not None:
            data[name] = (np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType.F32)
    for key, value in (keys or {}).items():
        values.pop(key, None)
        if value is not None:
            values[key] = (value, *_types(value))
    out.parent.mkdir(parents=True, exist_ok=True)
    files = [out.with_name(f"{out.stem}-{i:05d}-of-{parts:05d}.gguf") for i in range(1, parts + 1)]
    files = files if parts > 1 else [out]
    with_tensors = range(1, parts) if no_tensor_first else range(parts)
    where = place or dict(zip(data, (with_tensors[i % len(with_tensors)] for i in range(len(data))), strict=True)).get
    for number, path in enumerate(files):
        own = {name: found for name, found in data.items() if parts == 1 or where(name) == number}
        split = {"split.no": number, "split.count": parts, "split.tensors.count": len(data)} if parts > 1 else {}
        _write(path, values if number == 0 else {}, split, own, str(reader.fields["general.architecture"].contents()))
    return files


Keys = Mapping[str, tuple[Any, Any, Any]]


def _write(path: Path, values: Keys, split: Mapping[str, int], data: Mapping[str, Data], arch: str) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for name, (value, kind, inner) in values.items():
        if name != "general.architecture":
            writer.add_key_value(name, value, kind, sub_type=inner if kind == GGUFValueType.ARRAY else None)
    for name, number in split.items():
        writer.add_key_value(name, number, GGUFValueType.INT32 if "tensors" in name else GGUFValueType.UINT16)
    for name, (array, kind) in data.items():
        plain = kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(name, array, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _types(value: Any) -> tuple[GGUFValueType, GGUFValueType]:
    if isinstance(value, list):
        return GGUFValueType.ARRAY, _types(value[0])[0]
    names = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return GGUFValueType[names[type(value)]], GGUFValueType[names[type(value)]]


def vocabulary(
    file: Path, model: str, tokens: Sequence[str], types: Sequence[int], architecture: str = "qwen3moe", **keys: Any
) -> Path:
    """A file with a vocabulary alone. keys: more of `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for key, value in keys.items():
        kind, inner = _types(value)
        of_array = inner if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind, sub_type=of_array)
    writer.add_expert_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# --- tiny models whose weights are NumPy's, so that figures that were recorded once hold --------------------------

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 64, 96)]
_SIZES = {"vocab": 64, "hidden": 32, "layers": 2, "heads": 4, "kv": 2, "width": 24, "experts": 4, "used": 2}
HEAD = 8


def model(file: Path, architecture: str, head: int = HEAD) -> Path:
    """A model of an architecture in 32-bit floats, without a tokenizer; as llama.cpp's converter lays it out."""
    s, rng = dict(_SIZES), np.random.default_rng(len(architecture))
    if architecture == "olmoe":
        s["kv"] = s["heads"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(s["vocab"])
    writer.add_block_count(s["layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(s["hidden"])
    writer.add_feed_forward_length(s["width"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(s["experts"])
    writer.add_expert_used_count(s["used"])
    if architecture == "qwen3moe" or head != HEAD:
        writer.add_key_length(head)
        writer.add_value_length(head)
    if architecture in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(s["width"])
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(40)
    for name, shape in _tensors(architecture, s, head).items():
        around = 1.0 if "norm" in name else 0.0
        writer.add_tensor(name, (around + 0.3 * rng.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(architecture: str, s: Mapping[str, int], head: int) -> dict[str, tuple[int, ...]]:
    hidden, width, q, kv = s["hidden"], s["width"], s["heads"] * head, s["kv"] * head
    found = {"token_embd.weight": (s["vocab"], hidden), "output_norm.weight": (hidden,)}
    found["output.weight"] = found["token_embd.weight"]
    for i in range(s["layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,), "attn_q.weight": (q, hidden),
            "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden), "attn_output.weight": (hidden, q),
            "ffn_gate_inp.weight": (s["experts"], hidden), "ffn_gate_exps.weight": (s["experts"], width, hidden),
            "ffn_up_exps.weight": (s["experts"], width, hidden), "ffn_down_exps.weight": (s["experts"], hidden, width),
        }  # fmt: skip
        if architecture == "qwen3moe":
            layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        if architecture == "olmoe":
            layer |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
        if architecture == "qwen2moe":
            layer |= {f"attn_{part}.bias": (rows,) for part, rows in {"q": q, "k": kv, "v": kv}.items()}
            layer |= {"ffn_gate_inp_shexp.weight": (hidden,), "ffn_gate_shexp.weight": (40, hidden),
                      "ffn_up_shexp.weight": (40, hidden), "ffn_down_shexp.weight": (hidden, 40)}  # fmt: skip
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of plain numbers."""
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(file).tensors}


def _yarn(architecture: str, **more: Any) -> dict[str, Any]:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64, **more}
    return {f"{architecture}.rope.scaling.{name}": value for name, value in keys.items()}


def cases(folder: Path) -> dict[str, Path]:
    """Files by name that llama.cpp loads, and that are configured by their metadata alone."""
    found: dict[str, Path] = {}
    for architecture in ("qwen2moe", "qwen3moe", "olmoe", "llama"):
        base, a = model(_folder(folder, architecture) / "base.gguf", architecture), architecture
        freqs = {"rope_freqs.weight": np.array([1, 2, 5, 8])}
        changes: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
            "plain": ({}, {}, {}),
            "linear": ({f"{a}.rope.scaling.type": "linear", f"{a}.rope.scaling.factor": 4.0}, {}, {}),
            "scale_linear": ({f"{a}.rope.scale_linear": 2.0}, {}, {}),
            "yarn": (_yarn(a), {}, {}),
            "yarn and attn_factor": (_yarn(a, attn_factor=1.3), {}, {}),
            "attn_factor": ({f"{a}.rope.scaling.attn_factor": 1.3}, {}, {}),
            "none": ({f"{a}.rope.scaling.type": "none", f"{a}.rope.scaling.factor": 4.0}, {}, {}),
            "freq_base": ({f"{a}.rope.freq_base": 500.0}, {}, {}),
            "head in part 2": ({}, {}, {"parts": 2, "place": lambda name: int(name == "output.weight")}),
            "fused qkv": ({}, fused(base), {}),
        }
        if architecture in ("qwen3moe", "llama"):
            changes["tied"] = ({}, {"output.weight": None}, {})
        if architecture == "qwen2moe":
            parts = [f"blk.{i}.attn_{part}.bias" for i in range(2) for part in "qkv"]
            changes["no bias"] = ({}, dict.fromkeys(parts), {})
        if architecture == "llama":
            changes["rope_freqs"] = ({}, freqs, {})
            changes["rope_freqs and linear"] = ({f"{a}.rope.scaling.factor": 2.0}, freqs, {})
        for name, (keys, tensors, split) in changes.items():
            out = _folder(folder, f"{architecture} {name}") / "model.gguf"
            found[f"{architecture}: {name}"] = rewrite(base, out, keys, tensors, **split)[0]
    found["granitemoe: multipliers"] = _granite(folder)
    wide = model(_folder(folder, "wide") / "base.gguf", "llama", head=16)
    found["llama: heads of 16"] = wide
    yarn = _folder(folder, "wide yarn") / "model.gguf"
    found["llama: heads of 16, yarn"] = rewrite(wide, yarn, _yarn("llama"))[0]
    return found


GRANITE = {
    "attention.scale": ("attention_multiplier", 0.3), "logit_scale": ("logits_scaling", 2.0),
    "residual_scale": ("residual_multiplier", 0.7), "embedding_scale": ("embedding_multiplier", 3.0),
}  # fmt: skip


def _granite(folder: Path) -> Path:
    """A model of an architecture whose the metadata is not a whole configuration: config.json lies beside it."""
    base = model(_folder(folder, "granite") / "base.gguf", "granitemoe")
    file = _folder(folder, "granite multipliers") / "model.gguf"
    config = {
        "model_type": "granitemoe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "dtype": "float32",
        **dict(GRANITE.values()),
    }  # fmt: skip
    (file.parent / "config.json").write_text(json.dumps(config))
    return rewrite(base, file, {f"granitemoe.{key}": value for key, (_, value) in GRANITE.items()})[0]


def fused(file: Path) -> dict[str, np.ndarray | None]:
    """Queries, keys and values in one tensor, as `convert_hf_to_gguf.py --fuse-qkv` writes them."""
    found, out = tensors_of(file), dict[str, np.ndarray | None]()
    for i in range(2):
        for kind in ("weight", "bias"):
            names = [f"blk.{i}.attn_{part}.{kind}" for part in "qkv"]
            if names[0] in found:
                out[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate([found[name] for name in names])
                out |= dict.fromkeys(names)
    return out


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir(parents=True)
    return parent / name


def logits(folder: Path, prompt: Sequence[int]) -> np.ndarray:
    """[T, V] of transformers' own model, with the weights that a preparation of the checkpoint reads."""
    conversion = plan_store(open_checkpoint(folder))
    own = from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    own.set_experts_implementation("eager")
    experts = {path for module in conversion.experts for path in module.params.values()}
    state = {
        name: torch.cat(list(group.blocks(conversion.model, [name]))).to(own.state_dict()[name].dtype)
        for group in conversion.plan.groups
        for name in group.targets
        if name not in experts or conversion.published is None
    }
    for module, layer in zip(conversion.experts, conversion.published or (), strict=conversion.published is not None):
        state |= _experts(module, layer)
    missing, unexpected = own.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    own.tie_weights()
    with torch.no_grad():
        return own(torch.tensor([list(prompt)])).logits[0].numpy()


def _experts(module: ExpertsModule, layer: LayerExperts) -> dict[str, torch.Tensor]:
    """The parameters of a layer's experts, in the model's layout."""
    found: dict[str, torch.Tensor] = {}
    for name, form in layer.form.matrices.items():
        parts = list(layer.read(name))
        found[name] = torch.stack([torch.from_numpy(form.dequantize({"weight": each["weight"]})) for each in parts])
        if "bias" in parts[0]:
            found[f"{name}_bias"] = torch.stack([torch.from_numpy(np.array(each["bias"])) for each in parts])
    if "gate" in found:
        found["gate_up"] = torch.cat([found.pop("gate"), found.pop("up")], dim=1)
    for name in [name for name in found if name.startswith("gate_up") and not module.concatenated]:
        found[name] = found[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return {
        module.params[name]: tensor.transpose(1, 2) if module.transposed and tensor.dim() == 3 else tensor
        for name, tensor in found.items()
    }
