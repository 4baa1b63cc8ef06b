"""What llama.cpp's converter changes of a layer's tensors, undone, where layers are more than matrices.

A layout is, by a parameter's name in its layer, the names of the tensors that make it and how. Rules of the converter:

    A_log                -exp(A_log) is written, as ssm_a (`modify_tensors` of Qwen3-Next, Kimi-Linear, Jamba, Mamba-2)
    convolutions         lose the axis of one channel, or have further axes of one; Kimi's three are written apart
    in_proj_qkvz         of Qwen3-Next: written as attn_qkv and attn_gate, with all queries, keys and values together,
                         where the model has those of each key head (`Qwen3NextModel.modify_tensors`)
    value heads          of Qwen3.5: the first of each key head, then the second (`_LinearAttentionVReorderBase`)
    kv_b_proj            of DeepSeek: keys and values apart, keys transposed (`DeepseekV2Model.modify_tensors`)
    gate and up          apart, where the model has both in one matrix
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_Make = Callable[[Sequence[torch.Tensor]], torch.Tensor]
_Made = tuple[tuple[str, ...], _Make]
Layouts = Mapping[str, _Made]


def layouts(architecture: str, config: Any) -> Layouts:
    """By a parameter's name in its layer: names of the tensors in the layer that make it, and how.

    A file that lacks the tensors may have the parameter under its plain name.
    """
    found: dict[str, _Made] = {"self_attn.kv_b_proj.weight": (_KEYS_AND_VALUES, _keys_and_values)}
    for part in _PARTS.get(architecture, ()):
        found |= part(architecture, config)
    return found


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors))


def _decay(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.log(-tensors[0])


def _channel(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0].unsqueeze(1)  # [rows, width] -> [rows, 1, width]


_KEYS_AND_VALUES = ("attn_k_b.weight", "attn_v_b.weight")


def _keys_and_values(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    k, v = tensors  # [heads, rank, nope], [heads, value, rank]
    both = torch.cat([k.transpose(1, 2), v], dim=1)
    return both.reshape(-1, both.shape[-1])


def _delta_net(architecture: str, config: Any) -> Layouts:
    """The gated delta net of Qwen3-Next and its successors."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value, each = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    rows, first = values * value, 2 * keys * key

    def together(tensor: torch.Tensor, size: int, axis: int = 0) -> torch.Tensor:
        if architecture == "qwen3next":
            return tensor
        return tensor.unflatten(axis, (each, keys, size)).transpose(axis, axis + 1).reshape(tensor.shape)

    def after_keys(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:first], together(tensor[first:], value)])

    def by_key_head(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [*tensors[0].split((first // 2, first // 2, rows)), tensors[1]]  # queries, keys, values, gates
        return torch.cat([part.unflatten(0, (keys, -1)) for part in parts], dim=1).flatten(0, 1)

    found: dict[str, _Made] = {
        "linear_attn.dt_bias": (("ssm_dt.bias",), lambda t: together(t[0], 1)),
        "linear_attn.A_log": (("ssm_a",), lambda t: together(_decay(t), 1)),
        "linear_attn.conv1d.weight": (("ssm_conv1d.weight",), lambda t: after_keys(t[0]).unsqueeze(1)),
        "linear_attn.norm.weight": (("ssm_norm.weight",), lambda t: t[0]),
        "linear_attn.out_proj.weight": (("ssm_out.weight",), lambda t: together(t[0], value, axis=1)),
    }
    if architecture == "qwen3next":
        return found | {
            "linear_attn.in_proj_qkvz.weight": (("attn_qkv.weight", "attn_gate.weight"), by_key_head),
            "linear_attn.in_proj_ba.weight": (("ssm_ba.weight",), lambda t: t[0]),
        }
    return found | {
        "linear_attn.in_proj_qkv.weight": (("attn_qkv.weight",), lambda t: after_keys(t[0])),
        "linear_attn.in_proj_z.weight": (("attn_gate.weight",), lambda t: together(t[0], value)),
        "linear_attn.in_proj_b.weight": (("ssm_beta.weight",), lambda t: together(t[0], 1)),
        "linear_attn.in_proj_a.weight": (("ssm_alpha.weight",), lambda t: together(t[0], 1)),
    }


def _kimi_delta(architecture: str, config: Any) -> Layouts:
    """Kimi's delta attention; decays have the shape of the model's parameter."""
    shape = (-1,) if architecture == "glm5-next" else (1, 1, -1, 1)
    convolutions = tuple(f"ssm_conv1d_{part}.weight" for part in "qkv")
    return {
        "self_attn.conv1d.weight": (
            convolutions, lambda tensors: torch.cat([t.reshape(-1, 1, t.shape[-1]) for t in tensors]),
        ),
        "self_attn.forget_gate.A_log": (("ssm_a",), lambda t: _decay(t).reshape(shape)),
    }  # fmt: skip


def _mamba(architecture: str, config: Any) -> Layouts:
    """Mamba and Mamba-2. Decays and scales of a head have an axis of one more, its norm one of groups."""
    path = "mixer" if architecture == "nemotron_h_moe" else "mamba"
    decay: _Make = _decay if architecture == "jamba" else lambda t: _decay(t).flatten()
    return {
        f"{path}.A_log": (("ssm_a",), decay),
        f"{path}.D": (("ssm_d",), lambda t: t[0].flatten()),
        f"{path}.conv1d.weight": (("ssm_conv1d.weight",), _channel),
        f"{path}.norm.weight": (("ssm_norm.weight",), lambda t: t[0].flatten()),
    }


def _joined_ffn(architecture: str, config: Any) -> Layouts:
    """Dense feed-forwards with gate and up in one matrix."""
    paths = {"mlp.gate_up_proj.weight": "", "mlp.shared_experts.gate_up_proj.weight": "_shexp"}
    if architecture.startswith("granite"):
        paths = {"shared_mlp.input_linear.weight": "_shexp"}
    return {
        path: ((f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight"), _joined) for path, suffix in paths.items()
    }


def _sparse(architecture: str, config: Any) -> Layouts:
    """Of Qwen4: queries and keys of the index in one, and the convolution over n-grams."""
    return {
        "self_attn.indexer.index_qk_proj.weight": (("indexer.q_proj.weight", "indexer.k_proj.weight"), _joined),
        "ple.conv1d.weight": (("ple_conv1d.weight",), _channel),
    }


_PARTS: Mapping[str, tuple[Callable[[str, Any], Layouts], ...]] = {
    "qwen3next": (_delta_net,), "qwen35moe": (_delta_net,), "qwen4exp": (_delta_net, _sparse),
    "kimi-linear": (_kimi_delta,), "glm5-next": (_kimi_delta,),
    "jamba": (_mamba,), "nemotron_h_moe": (_mamba,), "granitehybrid": (_mamba, _joined_ffn),
    "granitemoe": (_joined_ffn,), "granite_swa": (_joined_ffn,), "minimax-m3": (_joined_ffn,),
}  # fmt: skip
