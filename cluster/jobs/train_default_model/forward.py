"""Training forward of Qwen3-MoE on the parameters of a transformers model.

The same mathematics as ``Qwen3MoeForCausalLM`` (a test holds them together), with fewer passes
over the activations and with low-precision copies of the weights that are made once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import CausalAttention
from .experts import ExpertsFunction
from .linear import LinearCrossEntropy, LowLinear


@dataclass(frozen=True)
class Losses:
    """Sums and means of one micro-batch; ``load`` [layers, E] counts the tokens of each expert."""

    cross_entropy: Tensor
    balance: Tensor
    z: Tensor
    load: Tensor


class TrainingForward:
    """Computes losses of a ``Qwen3MoeForCausalLM``.

    ``parameters`` are its ``named_parameters``, each with a ``.grad`` buffer before ``backward``.
    """

    def __init__(self, config: Any, parameters: dict[str, Tensor], compute_dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = compute_dtype
        self._parameters = parameters
        self._low = {
            name: torch.empty_like(p, dtype=compute_dtype)
            for name, p in self._parameters.items()
            if p.dim() >= 2 and not name.endswith("mlp.gate.weight")
        }
        self.refresh()

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self._parameters["model.embed_tokens.weight"].device

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights into the compute type; call after every optimizer step."""
        for name, low in self._low.items():
            low.copy_(self._parameters[name])

    def __call__(self, tokens: Tensor, scale: float) -> Losses:
        """Losses of ``tokens`` [B, L + 1]; the cross entropy is summed and multiplied by ``scale``."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        config = self._config
        cos, sin = _rotary(inputs.shape[1], config, tokens.device)
        x = F.embedding(inputs.reshape(-1), self._parameters["model.embed_tokens.weight"])  # [N, D] float32
        balance, z, load = x.new_zeros(()), x.new_zeros(()), []
        for layer in range(config.num_hidden_layers):
            x = x + self._attention(x, f"model.layers.{layer}.", inputs.shape, cos, sin)
            out, layer_balance, layer_z, counts = self._experts(x, f"model.layers.{layer}.")
            x = x + out
            balance, z = balance + layer_balance, z + layer_z
            load.append(counts)
        hidden = _rms(x, self._parameters["model.norm.weight"], config.rms_norm_eps).to(self._dtype)
        name = "model.embed_tokens.weight"
        loss = LinearCrossEntropy.apply(hidden, self._parameters[name], self._low[name], targets.reshape(-1), scale)
        layers = config.num_hidden_layers
        return Losses(loss, balance / layers, z / layers, torch.stack(load))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return LowLinear.apply(x, self._parameters[name], self._low[name])

    def _attention(self, x: Tensor, prefix: str, shape: torch.Size, cos: Tensor, sin: Tensor) -> Tensor:
        config, p = self._config, self._parameters
        batch, length = shape
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        h = _rms(x, p[prefix + "input_layernorm.weight"], config.rms_norm_eps).to(self._dtype)
        attention = prefix + "self_attn."
        q = self._linear(h, attention + "q_proj.weight").view(batch, length, heads, width)
        k = self._linear(h, attention + "k_proj.weight").view(batch, length, groups, width)
        v = self._linear(h, attention + "v_proj.weight").view(batch, length, groups, width)
        q = _rotate(_rms(q, p[attention + "q_norm.weight"], config.rms_norm_eps), cos, sin)
        k = _rotate(_rms(k, p[attention + "k_norm.weight"], config.rms_norm_eps), cos, sin)
        q, k, v = (
            x.to(self._dtype).repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2).reshape(-1, length, width)
            for x in (q, k, v)
        )
        out = CausalAttention.apply(q, k, v).view(batch, heads, length, width)
        return self._linear(out.transpose(1, 2).reshape(batch * length, -1), attention + "o_proj.weight")

    def _experts(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        config, p = self._config, self._parameters
        h = _rms(x, p[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        logits = h @ p[prefix + "mlp.gate.weight"].t()  # [N, E] float32
        probabilities = logits.softmax(-1)
        weight, index = probabilities.topk(config.num_experts_per_tok, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        counts = torch.bincount(index.reshape(-1), minlength=config.num_experts)
        share = counts.float() / index.numel()
        balance = config.num_experts * (share * probabilities.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        names = prefix + "mlp.experts.gate_up_proj", prefix + "mlp.experts.down_proj"
        out = ExpertsFunction.apply(
            h.to(self._dtype), index, weight, p[names[0]], p[names[1]], self._low[names[0]], self._low[names[1]]
        )
        return out, balance, z, counts


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotary(length: int, config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.arange(length, device=device)[:, None] / config.rope_parameters["rope_theta"] ** half
    angles = torch.cat((angles, angles), -1)[:, None]  # [L, 1, head_dim]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), -1) * sin
