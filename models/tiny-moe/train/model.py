"""The default model: its architecture, its initial weights, and its forward and backward pass for training.

``TrainingForward`` equals ``Qwen3MoeForCausalLM`` (a test compares them) on the parameters of a transformers model,
with fewer passes over the activations and with low-precision copies of the weights, made once per step. Gradients of
large weights are accumulated in place into ``.grad``: autograd outputs would cost several passes over 25 M numbers for
each micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

MAX_CONTEXT_TOKENS = 2048
_ATTENTION_BLOCK = 128  # queries
_ROW_MULTIPLE = 64  # of an expert's rows
_BURST_DISTANCES = (1, 2, 4, 8, 16, 32, 64)  # tokens


def default_config(**changes: Any) -> Any:
    """The ``Qwen3MoeConfig`` of the default model, with ``changes`` for tests."""
    fields: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3MoeConfig(**{**fields, **changes})


def new_model(config: Any, seed: int) -> Any:
    """A float32 model with initial weights: variance by fan-in, residual outputs scaled by depth.

    The embedding is large beside the layers' outputs, and the last norm small, so that the logits are not. With a small
    embedding all tokens of a row look alike to the routers in the first hundred steps, and most experts get no token.
    """
    model = Qwen3MoeForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.2 if name == "model.norm.weight" else 1.0)
                continue
            std = 0.3 if name.endswith("embed_tokens.weight") else 0.6 / math.sqrt(parameter.shape[-1])
            if name.endswith("gate.weight"):  # logits of unit variance: a router that chooses from the first step
                std = 1 / math.sqrt(parameter.shape[-1])
            if name.endswith(("o_proj.weight", "down_proj")):
                std = residual / math.sqrt(parameter.shape[-1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


@dataclass(frozen=True)
class Losses:
    """Of one micro-batch: the sum of the cross entropy over its tokens, and each router's losses [layers].

    ``balance``: E times the dot product of the recent load's shares and the mean probabilities, 1 for even load.
    ``burst``: the autocorrelation of a row's router probabilities around their mean over the row, where it is positive;
    the mean over a few distances. Popularity in the row costs nothing; its coming in bursts does.
    ``z``: the mean squared log-sum-exp of the logits. ``load`` [layers, E] counts the tokens of each expert.
    """

    cross_entropy: Tensor
    balance: Tensor
    burst: Tensor
    z: Tensor
    load: Tensor

    def detached(self) -> Tensor:
        """The four losses [4] in the order of the fields, the routers' averaged over the layers."""
        return torch.stack([loss.detach().mean() for loss in (self.cross_entropy, self.balance, self.burst, self.z)])


class TrainingForward:
    """Computes losses of a ``Qwen3MoeForCausalLM`` with these ``named_parameters``.

    Each needs a ``.grad`` buffer before ``backward``.
    """

    def __init__(self, config: Any, parameters: dict[str, Tensor], compute_dtype: torch.dtype) -> None:
        self.config = config
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
        return self._parameters["model.embed_tokens.weight"].device

    def router(self, layer: int) -> Tensor:
        """The router's weight [E, D] of ``layer``."""
        return self._parameters[f"model.layers.{layer}.mlp.gate.weight"]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights into the compute type; call after every optimizer step."""
        for name, low in self._low.items():
            low.copy_(self._parameters[name])

    def __call__(
        self, tokens: Tensor, scale: float, recent: Tensor | None = None, routing: list[Tensor] | None = None
    ) -> Losses:
        """Losses of ``tokens`` [B, L + 1]; the cross entropy is summed and multiplied by ``scale``.

        ``recent`` [layers, E]: the shares of the load over the last steps, which the balance loss evens out; the
        micro-batch's own without it. Each layer's router input [N, D] is appended to ``routing``.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        config = self.config
        cos, sin = _rotary(inputs.shape[1], config, tokens.device)
        x = F.embedding(inputs.reshape(-1), self._parameters["model.embed_tokens.weight"])  # [N, D] float32
        losses, load = [], []
        for layer in range(config.num_hidden_layers):
            x = x + self._attention(x, f"model.layers.{layer}.", inputs.shape, cos, sin)
            prefix = f"model.layers.{layer}."
            h = _rms(x, self._parameters[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
            if routing is not None:
                routing.append(h)
            out, layer_losses, counts = self._experts(
                h, prefix, inputs.shape, None if recent is None else recent[layer]
            )
            x = x + out
            losses.append(layer_losses)
            load.append(counts)
        hidden = _rms(x, self._parameters["model.norm.weight"], config.rms_norm_eps).to(self._dtype)
        name = "model.embed_tokens.weight"
        loss = LinearCrossEntropy.apply(hidden, self._parameters[name], self._low[name], targets.reshape(-1), scale)
        return Losses(loss, *torch.stack(losses, 1), load=torch.stack(load))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return LowLinear.apply(x, self._parameters[name], self._low[name])

    def _attention(self, x: Tensor, prefix: str, shape: torch.Size, cos: Tensor, sin: Tensor) -> Tensor:
        config, p = self.config, self._parameters
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

    def _experts(
        self, h: Tensor, prefix: str, shape: torch.Size, recent: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, p = self.config, self._parameters
        logits = h @ p[prefix + "mlp.gate.weight"].t()  # [N, E] float32
        probabilities = logits.softmax(-1)
        weight, index = probabilities.topk(config.num_experts_per_tok, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        counts = torch.bincount(index.reshape(-1), minlength=config.num_experts)
        share = counts.float() / index.numel() if recent is None else recent
        balance = config.num_experts * (share * probabilities.mean(0)).sum()
        burst = burst_loss(probabilities.view(*shape, -1))
        z = logits.logsumexp(-1).square().mean()
        names = prefix + "mlp.experts.gate_up_proj", prefix + "mlp.experts.down_proj"
        out = ExpertsFunction.apply(
            h.to(self._dtype), index, weight, p[names[0]], p[names[1]], self._low[names[0]], self._low[names[1]]
        )
        return out, torch.stack((balance, burst, z)), counts


def burst_loss(probabilities: Tensor) -> Tensor:
    """Autocorrelation of router probabilities [B, L, E] around their row's mean: the positive part, over distances."""
    centred = probabilities - probabilities.mean(1, keepdim=True)
    variance = centred.square().mean((0, 1)).sum() + 1e-9
    products = [(centred[:, :-d] * centred[:, d:]).mean((0, 1)).sum() for d in _BURST_DISTANCES if d < centred.shape[1]]
    return (torch.stack(products) / variance).relu().mean()


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


class LowLinear(torch.autograd.Function):
    """``x @ weight.T`` with the low-precision copy; the gradient goes into ``weight.grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, low: Tensor) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.weight = weight
        return x @ low.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        grad = grads[0].reshape(-1, low.shape[0])
        ctx.weight.grad.add_(grad.t() @ x)
        return grad @ low, None, None


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropy of ``hidden @ embedding.T``, without float32 logits in memory afterwards.

    ``hidden`` [N, D] and ``embedding_low`` [V, D] in the compute type, ``target`` [N]. The gradient of the embedding is
    added to ``embedding.grad``, scaled by ``scale`` like that of ``hidden``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, embedding_low: Tensor, target: Tensor, scale: float
    ) -> Tensor:
        logits = (hidden @ embedding_low.t()).float()  # [N, V]
        picked = logits.gather(1, target.unsqueeze(1)).squeeze(1)
        top = logits.amax(1, keepdim=True)
        logits.sub_(top).exp_()
        total = logits.sum(1, keepdim=True)
        loss = (total.log() + top).squeeze(1).sub_(picked).sum()
        if ctx.needs_input_grad[0]:
            logits.mul_(scale / total)
            logits[torch.arange(len(target), device=target.device), target] -= scale
            low = logits.to(hidden.dtype)
            embedding.grad.add_(low.t() @ hidden)
            ctx.save_for_backward(low @ embedding_low)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dhidden,) = ctx.saved_tensors
        return dhidden * grads[0].to(dhidden.dtype), None, None, None, None


class CausalAttention(torch.autograd.Function):
    """Causal softmax attention of ``q``, ``k``, ``v`` [M, L, W].

    Plain batched products over blocks of queries: on a CPU with bfloat16 they take half the time of torch's fused
    attention for rows of a few hundred tokens. The probabilities are saved for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, scale = q.shape[1], q.shape[2] ** -0.5
        out = torch.empty_like(q)
        saved = []
        for start in range(0, length, _ATTENTION_BLOCK):
            end = min(start + _ATTENTION_BLOCK, length)
            scores = q[:, start:end] @ k[:, :end].mT  # [M, block, end]
            mask = scores.new_full((end - start, end - start), float("-inf")).triu_(1)
            scores.mul_(scale)[:, :, start:].add_(mask)
            probabilities = scores.softmax(-1)
            torch.bmm(probabilities, v[:, :end], out=out[:, start:end])
            saved.append(probabilities)
        ctx.save_for_backward(q, k, v, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *saved = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), q.shape[2] ** -0.5
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for block, probabilities in enumerate(saved):
            start, end = block * _ATTENTION_BLOCK, probabilities.shape[2]
            dv[:, :end] += probabilities.mT @ grad[:, start:end]
            dp = grad[:, start:end] @ v[:, :end].mT
            ds = torch._softmax_backward_data(dp, probabilities, -1, dp.dtype).mul_(scale)
            torch.bmm(ds, k[:, :end], out=dq[:, start:end])
            dk[:, :end] += ds.mT @ q[:, start:end]
        return dq, dk, dv


class ExpertsFunction(torch.autograd.Function):
    """Mixture of SwiGLU experts: tokens sorted by expert, one product per expert.

    Inputs: ``x`` [N, D] in the compute type, ``index`` [N, K], ``weight`` [N, K] in float32, ``gate_up`` [E, 2I, D] and
    ``down`` [E, D, I] (parameters with ``.grad``), and their copies in the compute type. Output [N, D].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_low: Tensor,
        down_low: Tensor,
    ) -> Tensor:
        experts, double, _ = gate_up.shape
        top_k = index.shape[1]
        spans, place = _padded_places(index.reshape(-1), experts)
        size = spans[-1][1]
        rows = place.new_zeros(size)
        rows[place] = torch.arange(len(place), device=place.device) // top_k
        # Padding carries weight 0: it repeats row 0 and adds nothing to any gradient.
        ws = weight.new_zeros(size)
        ws[place] = weight.reshape(-1)
        ws = ws.to(x.dtype).unsqueeze(1)
        xs = x.index_select(0, rows)  # [P, D]
        hidden = xs.new_empty(size, double)
        for expert, (start, end) in enumerate(spans):
            torch.mm(xs[start:end], gate_up_low[expert].t(), out=hidden[start:end])
        gate, up = hidden.chunk(2, dim=-1)
        weighted = (F.silu(gate) * up).mul_(ws)  # [P, I]
        ys = torch.empty_like(xs)
        for expert, (start, end) in enumerate(spans):
            torch.mm(weighted[start:end], down_low[expert].t(), out=ys[start:end])
        ctx.save_for_backward(xs, place, rows, hidden, ws, weighted, gate_up_low, down_low)
        ctx.spans, ctx.top_k, ctx.parameters = spans, top_k, (gate_up, down)
        return F.embedding_bag(place.view(-1, top_k), ys, mode="sum")  # gathers and sums in one pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        xs, place, rows, hidden, ws, weighted, gate_up_low, down_low = ctx.saved_tensors
        gate_up, down = ctx.parameters
        dys = grad.index_select(0, rows)  # [P, D]
        dweighted = torch.empty_like(weighted)
        for expert, (start, end) in enumerate(ctx.spans):
            torch.mm(dys[start:end], down_low[expert], out=dweighted[start:end])
            down.grad[expert].add_(dys[start:end].t() @ weighted[start:end])
        gate, up = hidden.chunk(2, dim=-1)
        silu = F.silu(gate)
        dws = (dweighted * (silu * up)).sum(-1, dtype=torch.float32)
        dact = dweighted.mul_(ws)
        dhidden = torch.empty_like(hidden)
        torch.ops.aten.silu_backward(dact * up, gate, grad_input=dhidden[:, : gate.shape[1]])
        torch.mul(dact, silu, out=dhidden[:, gate.shape[1] :])
        dxs = torch.empty_like(xs)
        for expert, (start, end) in enumerate(ctx.spans):
            torch.mm(dhidden[start:end], gate_up_low[expert], out=dxs[start:end])
            gate_up.grad[expert].add_(dhidden[start:end].t() @ xs[start:end])
        dx = F.embedding_bag(place.view(-1, ctx.top_k), dxs, mode="sum")
        return dx, None, dws[place].view(-1, ctx.top_k), None, None, None, None


def _padded_places(flat: Tensor, experts: int) -> tuple[list[tuple[int, int]], Tensor]:
    """Rows of each expert, padded to few distinct sizes, and the row of each entry of ``flat`` [NK].

    The matrix library compiles a kernel for each new shape; rounded sizes repeat.
    """
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + _ROW_MULTIPLE - 1) // _ROW_MULTIPLE * _ROW_MULTIPLE
    ends = padded.cumsum(0)
    order = torch.argsort(flat)
    shift = (ends - padded) - (counts.cumsum(0) - counts)  # padding before each expert
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    bounds = ends.tolist()
    return list(zip([0, *bounds[:-1]], bounds, strict=True)), place
