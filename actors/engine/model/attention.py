"""Attention implementations by name, so that tokens do not depend on what is installed.

    auto     sdpa where the model has it, else eager; on a GPU triton, for which decode steps can be graphs
    flash    flash-attn, through transformers
    triton   our kernel, which reads transformers' paged cache in place (`kernels.triton.attention`)

sdpa gathers all keys and values of a layer in every step: at 16 sequences of 4096 tokens, 8 heads of 128 in bfloat16,
268 MB are read and written again. `triton` reads them once.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from ....errors import ConfigError
from ...settings import Attention, CompileMode
from .architecture import usual_attention

_OURS = "tiermoe-paged"
_FOREIGN = 1 << 18  # pairs of a row and another sequence's key in a pass, from which one call for each sequence pays
_PAGED_EAGER = "paged|eager"  # transformers' own on its paged cache


def steady_sdpa() -> None:
    """Keep sdpa from cuDNN in this process. torch prefers it on Hopper and Blackwell, and it plans anew for each length
    of the keys, in each decode step that is (docs/results/gpu.md, *The machine*).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def attention_for(config: Any, wanted: Attention, device: torch.device) -> str:
    """transformers' name of an implementation for an ordinary cache.

    Raises:
        ConfigError: this machine cannot do it.
    """
    from transformers.utils import is_flash_attn_2_available

    if wanted == "flash":
        if not is_flash_attn_2_available():
            raise ConfigError("attention: flash needs the package flash-attn and a GPU", "install it, or use triton")
        return "flash_attention_2"
    if wanted == "triton" and device.type == "cpu":
        raise ConfigError("attention: triton needs a GPU", "use attention: auto")
    if wanted in ("sdpa", "eager"):
        return wanted
    return usual_attention(config)


def attention_of_steps(
    wanted: Attention, compile: CompileMode, batching: str, device: torch.device
) -> tuple[Attention, bool]:
    """The attention on the paged cache, and whether decode steps are to be CUDA graphs (`serving.recorded`).

    `compile: auto` takes graphs, and for them our kernel, where a GPU, Triton and transformers' steps allow it, unless
    another attention is asked for.

    Raises:
        ConfigError: `compile: graphs` without a GPU, or with another attention.
    """
    ours = wanted in ("auto", "triton")
    if compile == "graphs":
        if device.type != "cuda":
            raise ConfigError(
                f"compile: graphs makes CUDA graphs, the model runs on {device}",
                "use compile: default or compile: off",
            )
        if not ours:
            raise ConfigError(
                f"compile: graphs needs attention that reads the KV cache in place, not {wanted}",
                "use attention: triton",
            )
        return "triton", True
    able = compile == "auto" and ours and batching != "serial" and device.type == "cuda"
    if able and find_spec("triton") is not None:
        return "triton", True
    return wanted, False


def use_paged(model: Any) -> None:
    """Have a model use our attention on the paged cache; transformers' managers run any implementation."""
    from transformers import AttentionInterface

    model.tiermoe_plain_attention = plain_attention_of(model)
    AttentionInterface.register(_OURS, paged_attention)
    model.set_attn_implementation(_OURS)


def use_sdpa_by_sequence() -> None:
    """Have transformers' sdpa go sequence by sequence through its paged cache, in this process."""
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", sdpa_by_sequence)


def sdpa_by_sequence(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' sdpa: query [1, heads, T, D] -> [1, T, heads, D]. In the paged cache the rows of a sequence see its
    own keys alone, not all keys and a mask: so a prompt in 32 choices took seconds a pass.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as plain

    cache, starts_q, starts_k = (kwargs.get(name) for name in ("cache", "cu_seq_lens_q", "cu_seq_lens_k"))
    if cache is None or attention_mask is None or starts_q is None or starts_k is None:
        return plain(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    del kwargs["cache"]
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    if isinstance(starts_k, dict):
        starts_k = starts_k[cache.layer_to_allocator[module.layer_idx].layer_type]
    rows, keys = starts_q.tolist(), starts_k.tolist()
    parts = [(slice(*q), slice(*k)) for q, k in zip(pairwise(rows), pairwise(keys), strict=True)]
    own = sum((q.stop - q.start) * (k.stop - k.start) for q, k in parts)
    whole = query.shape[2] * key.shape[2]
    if rows[-1] < query.shape[2] or keys[-1] < key.shape[2] or whole - own < _FOREIGN:
        return plain(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    found = [
        plain(
            module, query[:, :, q], key[:, :, k], value[:, :, k], attention_mask[..., q, k], dropout, scaling, **kwargs
        )[0]
        for q, k in parts
        if q.start < q.stop
    ]  # fmt: skip
    return torch.cat(found, dim=1), None


def plain_attention_of(model: Any) -> str:
    """The attention implementation of a served model without paging."""
    name = str(model.config._attn_implementation)
    if name == _OURS:
        return str(model.tiermoe_plain_attention)
    return "eager" if name == _PAGED_EAGER else name


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, cache: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An attention function of transformers on its paged cache: query [1, heads, T, D] -> [1, T, heads, D].

    Raises:
        ValueError: there is no paged cache, or the scores are capped.
    """
    from ....kernels.triton.attention import Packed, attend

    if cache is None or softcap is not None:
        raise ValueError("attention: triton takes the paged cache of continuous batching, and no soft cap")
    allocator = cache.layer_to_allocator[module.layer_idx]
    group, kind = allocator.index, allocator.layer_type
    k_cache, v_cache = allocator._kv_token_views[module.layer_idx]  # [places, kv_heads, D]
    starts_k, most_q, most_k = kwargs["cu_seq_lens_k"], kwargs["max_length_q"], kwargs["max_length_k"]
    if isinstance(starts_k, dict):
        starts_k = starts_k[kind]
    if isinstance(most_k, dict):
        most_k = most_k[kind]
    # [1, heads, T, D] -> [T, heads, D]
    query, key, value = (part.squeeze(0).transpose(0, 1).contiguous() for part in (query, key, value))
    packed = Packed(kwargs["cu_seq_lens_q"], starts_k, kwargs["read_index"][group], most_q, most_k)
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query, key, value, k_cache, v_cache, packed, scale, window, s_aux)
    written = kwargs["write_index"][group]  # after the reading: a rolling window writes over its oldest keys
    k_cache.index_copy_(0, written, key[: len(written)])
    v_cache.index_copy_(0, written, value[: len(written)])
    return out.unsqueeze(0), None
