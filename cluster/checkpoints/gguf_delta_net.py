"""The linear attention of Qwen3-Next and Qwen3.5 in GGUF files: what llama.cpp's converter changes of it, undone.

    ssm_a                -exp(A_log)
    ssm_conv1d           without the axis of one channel
    attn_qkv, attn_gate  of Qwen3-Next: rows of in_proj_qkvz, which has those of each key head together
    value heads          of Qwen3.5: the first of each key head, then the second; the model has a key head's together

Norms, but for that of the linear attention, are one more than the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

DELTA_NETS = ("qwen3next", "qwen35moe")
_Shapes = Mapping[str, tuple[int, ...]]
_Part = tuple[_Shapes, Callable[[Sequence[torch.Tensor]], torch.Tensor]]


def is_zero_centered(architecture: str, name: str) -> bool:
    """Whether a parameter is a norm that the model adds one to, and the file has with it."""
    return architecture in DELTA_NETS and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def linear_attention(architecture: str, config: Any) -> dict[str, _Part]:
    """By the parameter's name in its layer: names and shapes of the tensors that make it, and how."""
    hidden, keys, values = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    key, value, each = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    rows, first = values * value, 2 * keys * key
    width = config.linear_conv_kernel_dim

    def together(tensor: torch.Tensor, size: int, axis: int = 0) -> torch.Tensor:
        if architecture == "qwen3next":
            return tensor
        return tensor.unflatten(axis, (each, keys, size)).transpose(axis, axis + 1).reshape(tensor.shape)

    def after_keys(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:first], together(tensor[first:], value)])

    def by_key_head(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        q, k, v, z = *tensors[0].split((first // 2, first // 2, rows)), tensors[1]
        return torch.cat([part.unflatten(0, (keys, -1)) for part in (q, k, v, z)], dim=1).flatten(0, 1)

    found: dict[str, _Part] = {
        "dt_bias": ({"ssm_dt.bias": (values,)}, lambda t: together(t[0], 1)),
        "A_log": ({"ssm_a": (values,)}, lambda t: together(torch.log(-t[0]), 1)),
        "conv1d.weight": ({"ssm_conv1d.weight": (first + rows, width)}, lambda t: after_keys(t[0]).unsqueeze(1)),
        "norm.weight": ({"ssm_norm.weight": (value,)}, lambda t: t[0]),
        "out_proj.weight": ({"ssm_out.weight": (hidden, rows)}, lambda t: together(t[0], value, axis=1)),
    }
    both: _Shapes = {"attn_qkv.weight": (first + rows, hidden), "attn_gate.weight": (rows, hidden)}
    if architecture == "qwen3next":
        return found | {
            "in_proj_qkvz.weight": (both, by_key_head),
            "in_proj_ba.weight": ({"ssm_ba.weight": (2 * values, hidden)}, lambda t: t[0]),
        }
    qkv, gate = ({name: shape} for name, shape in both.items())
    return found | {
        "in_proj_qkv.weight": (qkv, lambda t: after_keys(t[0])),
        "in_proj_z.weight": (gate, lambda t: together(t[0], value)),
        "in_proj_b.weight": ({"ssm_beta.weight": (values, hidden)}, lambda t: together(t[0], 1)),
        "in_proj_a.weight": ({"ssm_alpha.weight": (values, hidden)}, lambda t: together(t[0], 1)),
    }
