"""llama.cpp as a reference: a GGUF of a Qwen3-MoE checkpoint, and greedy decoding through `llama-cpp-python`."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiermoe.cluster.jobs.bench.metrics import Measures
from tiermoe.errors import RuntimeFailure, UnsupportedModelError

if TYPE_CHECKING:
    import gguf

INSTALL = "pip install 'tiermoe[peers]' (compiles llama.cpp: ten minutes and more)"
_CONTEXT = 512  # tokens
_F32 = 0  # GGML's number of the type
_HEAD = "mtp."  # of the head for drafts, for which llama.cpp has no place in this architecture
_PLACES = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}  # GGUF's names


def missing() -> list[str]:
    """The packages that are not installed, of those that this module needs; `diskcache` is one of llama_cpp's own."""
    return [name for name in ("llama_cpp", "diskcache", "gguf") if importlib.util.find_spec(name) is None]


def write_gguf(model_dir: Path, file: Path) -> Path:
    """Write a Qwen3-MoE checkpoint as a GGUF of 32-bit floats without a tokenizer; the file.

    Holds one layer's experts in memory at a time.

    Raises:
        UnsupportedModelError: another architecture.
    """
    from safetensors import safe_open

    config = json.loads((model_dir / "config.json").read_text())
    if config["model_type"] != "qwen3_moe":
        what = f"no GGUF is written of {config['model_type']}"
        raise UnsupportedModelError(what, "use a Qwen3-MoE model, such as the default model")
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt")) for path in sorted(model_dir.glob("*.safetensors"))
        ]
        held = {name: opened for opened in files for name in opened.keys()}  # noqa: SIM118 (no mapping)

        def tensor(name: str) -> Any:
            return held[name].get_tensor(name)

        def experts() -> Iterator[tuple[int, Mapping[str, Any]]]:
            for number in itertools.count():
                layer, expert = divmod(number, _experts_of(config))
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                yield number, {name: tensor(f"{prefix}.{name}.weight") for name in _PLACES}

        dense = {n: tensor(n) for n in held if ".experts." not in n and not n.startswith(_HEAD)}
        save_gguf_blocks(config, dense, experts(), file, "F32")
    return file


def save_gguf_blocks(
    config: dict[str, Any], dense: Mapping[str, Any], experts: Iterator[tuple[int, Mapping[str, Any]]], file: Path,
    blocks: str = "Q8_0", dense_blocks: str = "F32",
) -> None:  # fmt: skip
    """Write a Qwen3-MoE model as one GGUF file: matrices in blocks of types, norms and routers in 32-bit floats.

    Args:
        dense: tensors by transformers' name. experts: as `random_model` makes them, for each layer in turn; one that
            comes again is quantized once. blocks: GGML's name of the experts' type. dense_blocks: of the others'.

    Raises:
        UnsupportedModelError: GGUF has no place for a tensor.
    """
    import gguf

    kind, count, layers = gguf.GGMLQuantizationType[blocks], _experts_of(config), config["num_hidden_layers"]
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, layers)
    places = {name: known.get_name(name, try_suffixes=(".weight",)) for name in sorted(dense)}
    if None in places.values():
        homeless = next(name for name, place in places.items() if place is None)
        raise UnsupportedModelError(f"GGUF has no place for the tensor {homeless}", "use the default model")
    plain, others = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[dense_blocks]
    parts = {}
    for name, place in places.items():
        array = dense[name].float().numpy()
        to = others if array.ndim == 2 and "ffn_gate_inp" not in place else plain
        parts[place] = (gguf.quantize(array, to), to)
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    sizes = dict.fromkeys(("gate_proj", "up_proj"), (width, hidden)) | {"down_proj": (hidden, width)}
    writer = gguf.GGUFWriter(file, "qwen3moe")
    _add_shape(writer, config)
    for name, (array, to) in parts.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, None if to == plain else to)
    for layer, (name, place) in itertools.product(range(layers), _PLACES.items()):
        shape = gguf.quant_shape_to_byte_shape((count, *sizes[name]), kind)
        writer.add_tensor_info(f"blk.{layer}.{place}.weight", shape, np.dtype(np.uint8), math.prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array, _ in parts.values():
        writer.write_tensor_data(array)
    quantized: dict[int, dict[str, Any]] = {}
    for _ in range(layers):
        chosen = [next(experts) for _ in range(count)]
        for key, matrices in chosen:
            if key not in quantized:
                quantized[key] = {name: gguf.quantize(m.float().numpy(), kind) for name, m in matrices.items()}
        for name in _PLACES:
            writer.write_tensor_data(np.stack([quantized[key][name] for key, _ in chosen]))
        if len(quantized) == count:  # none came again
            quantized.clear()
    writer.close()


def _silence(lib: Any) -> Any:
    """Drop llama.cpp's log, hundreds of lines; keep the result as long as the library is used."""
    log = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(log, ctypes.c_void_p(0))
    return log


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(_experts_of(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(0)  # all 32-bit floats


def _experts_of(config: dict[str, Any]) -> int:
    """Of a layer."""
    return int(config.get("num_experts") or config["num_local_experts"])


class LlamaCpp:
    """A model under llama.cpp on so many threads. Close it.

    Args:
        exact: keys and values are kept in 32 bits, not in llama.cpp's default of 16.

    Raises:
        RuntimeFailure: llama.cpp cannot load the file.
    """

    def __init__(self, file: Path, threads: int = 1, *, exact: bool = False) -> None:
        import llama_cpp

        self._lib = lib = llama_cpp
        self._log = _silence(lib)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _CONTEXT
        params.n_threads = params.n_threads_batch = threads
        if exact:
            params.type_k = params.type_v = _F32
            params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lib.llama_init_from_model(self._model, params) if self._model else None
        if not self._context:
            raise RuntimeFailure(f"llama.cpp cannot load '{file}'", "report it with the version of llama-cpp-python")
        self._greedy = lib.llama_sampler_init_greedy()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[Measures, list[int]]:
        """Greedy decoding of one request: `ttft_s`, `tpot_s` as of our own workers, and the tokens."""
        lib, context = self._lib, self._context
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        begin_s = time.perf_counter()
        tokens = [self._next(prompt)]
        first_s = time.perf_counter()
        while len(tokens) < max_tokens:
            tokens.append(self._next(tokens[-1:]))
        taken_s = time.perf_counter() - first_s
        return {"ttft_s": first_s - begin_s, "tpot_s": taken_s / (max_tokens - 1)}, tokens

    def _next(self, tokens: Sequence[int]) -> int:
        lib = self._lib
        given = (lib.llama_token * len(tokens))(*tokens)
        self._decoded(lib.llama_decode(self._context, lib.llama_batch_get_one(given, len(tokens))))
        return int(lib.llama_sampler_sample(self._greedy, self._context, -1))

    def _decoded(self, failed: int) -> None:
        if failed:
            raise RuntimeFailure("llama.cpp did not decode", f"give at most {_CONTEXT} tokens")

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        if self._context:
            self._lib.llama_sampler_free(self._greedy)
            self._lib.llama_free(self._context)
            self._lib.llama_model_free(self._model)
            self._context = None
