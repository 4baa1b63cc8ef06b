"""GGUF files: their header, their tensors as entries of a checkpoint, and a folder with what is beside a checkpoint.

    open_weights    header(s) of one file, or of all parts of a split one -> entries by GGUF's names
    folder_for      a folder in the cache with links to the files, and config.json and the tokenizer: those beside the
                    file, else what transformers makes of its metadata
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from ....actors.store.format import SourceFile, TensorSpec, first_problem
from ....actors.store.published import head_digest
from ....errors import CheckpointError, StoreError, UnsupportedModelError
from ....kernels.forms import BLOCKS, MatrixForm
from ...gguf_header import SPLIT, Header, parts_of, read_gguf_header
from .checkpoint import REFETCH, Entry, TensorEntry
from .published import QuantizedEntry, Raw

_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
_KINDS = {8: "q8_0", 2: "q4_0", 12: "q4_k", 13: "q5_k", 14: "q6_k", 39: "mxfp4_gguf"}
_Q5_0 = 6
TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class Gguf:
    """The weights of a model in GGUF files. source: the files. tensors: by GGUF's names."""

    metadata: dict[str, Any]
    architecture: str
    tensors: dict[str, Entry] = field(repr=False)
    source: tuple[SourceFile, ...] = ()


def open_weights(files: list[Path]) -> Gguf:
    """The tensors of a model's files; quantized ones as `QuantizedEntry`.

    Raises:
        CheckpointError: a file is unreadable, malformed, or has a tensor of another one.
        UnsupportedModelError: a tensor's type cannot be dequantized.
    """
    tensors: dict[str, Entry] = {}
    metadata: dict[str, Any] = {}
    source = []
    for path in files:
        header = read_gguf_header(path)
        metadata = {**header.metadata, **metadata}
        for name, (shape, kind, offset) in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path.name} has tensor {name!r}, which another part has", REFETCH)
            tensors[name] = _entry(path, name, shape, kind, offset)
        status = path.stat()
        try:
            digest = head_digest(path)
        except StoreError as error:
            raise CheckpointError(error.what, REFETCH) from error
        source.append(
            SourceFile(file=path.name, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)
        )
    return Gguf(metadata, str(metadata.get("general.architecture")), tensors, tuple(source))


def _entry(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Entry:
    if kind in _FLOATS:
        code, size = _FLOATS[kind]
        return TensorEntry(path, _spec(name, code, shape, offset, math.prod(shape) * size))
    if len(shape) not in (2, 3):
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} of {len(shape)} dimensions is of type {GGMLQuantizationType(kind).name}",
            "use another GGUF file of the model",
        )
    outputs, inputs = shape[-2:]
    stack = shape[0] if len(shape) == 3 else 0
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    bytes_shape = (*shape[:-1], inputs // block * size)
    raw = {"weight": TensorEntry(path, _spec(name, "U8", bytes_shape, offset, math.prod(bytes_shape)))}
    spec = _spec(name, "F32", shape, 0, 0)
    if kind in _KINDS:
        return QuantizedEntry(spec, MatrixForm(_KINDS[kind], outputs, inputs), raw, stack)
    if kind == _Q5_0:  # the values of a block are those of a block of Q8_0
        return QuantizedEntry(spec, MatrixForm("q8_0", outputs, inputs), raw, stack, repack=_q5_0_as_q8_0)
    return QuantizedEntry(spec, MatrixForm("float32", outputs, inputs), raw, stack, repack=_Dequantized(kind))


def _spec(name: str, code: str, shape: tuple[int, ...], offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=code, shape=shape, offset=offset, nbytes=nbytes)


def _q5_0_as_q8_0(form: MatrixForm, raw: Raw) -> Raw:
    """Q5_0 is a scale and 32 codes of five bits less 16; Q8_0 a scale and 32 codes of eight bits with sign."""
    blocks = raw["weight"].reshape(-1, 22)
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    codes = (low | fifth << 4).astype(np.int8) - np.int8(16)
    out = np.concatenate([blocks[:, :2], codes.view(np.uint8)], axis=1)
    weights, size, _ = BLOCKS["q8_0"]
    return {"weight": out.reshape(form.outputs, form.inputs // weights * size)}


@dataclass(frozen=True)
class _Dequantized:
    """The values of a type for which there is no form: for dense weights only. kind: GGML's number."""

    kind: int

    def __call__(self, form: MatrixForm, raw: Raw) -> Raw:
        kind = GGMLQuantizationType(self.kind)
        try:
            values = dequantize(raw["weight"], kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"GGUF tensors of type {kind.name} cannot be dequantized",
                "use another GGUF file of the model, such as Q4_K_M or Q8_0",
            ) from error
        return {"weight": np.ascontiguousarray(values, np.float32)}


def type_of(entry: QuantizedEntry) -> str:
    """GGML's name of an entry's type, where there is no form of it."""
    kind = entry.repack.kind if isinstance(entry.repack, _Dequantized) else None
    return entry.form.kind if kind is None else GGMLQuantizationType(kind).name


# --- what a checkpoint's folder has beside its weights --------------------------------------------------------------

_CONFIGS = {  # architecture of llama.cpp -> model type of transformers, and its names of what GGUF has for all
    "qwen2moe": ("qwen2_moe", {"expert_count": "num_experts"}),
    "qwen3moe": ("qwen3_moe", {"expert_count": "num_experts", "attention.key_length": "head_dim"}),
    "olmoe": ("olmoe", {"expert_count": "num_experts"}),
    "llama": ("mixtral", {"expert_count": "num_local_experts"}),
}
_COMMON = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of(path: Path, header: Header) -> dict[str, Any]:
    """A `config.json` from a file's metadata: of the architectures whose metadata is whole, also by transformers.

    Raises:
        UnsupportedModelError: there is no such mapping; the model's own config.json is needed.
    """
    known, meta = _CONFIGS.get(header.architecture), header.metadata
    tied = {"tie_word_embeddings": "output.weight" not in header.tensors}
    if known is None or not meta.get(f"{header.architecture}.expert_count"):
        raise UnsupportedModelError(
            f"{path.name} is of the architecture {header.architecture}, for which metadata is no whole configuration",
            "put the model's config.json and tokenizer.json beside it",
        )
    model_type, names = known
    config: dict[str, Any] = {"model_type": model_type, "dtype": _dtype(header), **tied}
    for key, name in {**_COMMON, **names}.items():
        value = meta.get(f"{header.architecture}.{key}")
        if value is not None:
            config[name] = value
    if (base := meta.get(f"{header.architecture}.rope.freq_base")) is not None:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    if model_type == "qwen3_moe":
        config["norm_topk_prob"] = True  # as llama.cpp computes it
    config["vocab_size"] = meta.get(f"{header.architecture}.vocab_size") or _vocabulary(header)
    for name, key in _SPECIAL.items():
        if (value := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = value
    return config


def _vocabulary(header: Header) -> int:
    return int(header.tensors["token_embd.weight"][0][0]) if "token_embd.weight" in header.tensors else 0


def _dtype(header: Header) -> str:
    """Of the dequantized model: the files' own type where they are plain numbers, else bfloat16."""
    kinds = {kind for name, (shape, kind, _) in header.tensors.items() if len(shape) > 1 and "gate_inp" not in name}
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(kinds), "bfloat16")


def folder_for(path: Path, cache: Path) -> Path:
    """A folder that stands for the checkpoint of a GGUF file: links to it, with config.json and the tokenizer.

    Args:
        cache: where such folders are made.

    Raises:
        CheckpointError: a file is malformed, or a part is missing. UnsupportedModelError: as `config_of`.
    """
    files = [file.resolve() for file in parts_of(path)]
    header = read_gguf_header(path)
    stamp = json.dumps([[str(file), (s := file.stat()).st_size, s.st_mtime_ns] for file in files])
    name = SPLIT.fullmatch(path.name)
    stem = path.stem if name is None else name["stem"]
    folder = cache / f"{stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}" / stem
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in parts_of(path):
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    beside = [file for file in path.parent.glob("*.json") if not file.name.endswith(".index.json")]
    for file in [*beside, *path.parent.glob("*.jinja")]:
        if file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    if not (folder / "tokenizer.json").exists() and TOKENS in header.metadata:
        _save_tokenizer(path, folder)
    own = path.parent / "config.json"
    config = own.read_bytes() if own.is_file() else json.dumps(config_of(path, header), indent=1).encode()
    (folder / "config.json").write_bytes(config)  # last: without it the folder is made again
    return folder


def _save_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    except Exception as error:  # transformers raises many kinds
        raise UnsupportedModelError(
            f"{path.name}: transformers cannot make a tokenizer of its metadata ({first_problem(error)})",
            "put the model's tokenizer.json and config.json beside it",
        ) from error


