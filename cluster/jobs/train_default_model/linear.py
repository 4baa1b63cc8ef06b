"""Products with low-precision copies of the weights; gradients go into the float32 weights' ``.grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """Sum of the cross entropy of ``hidden @ embedding.T``, without keeping float32 logits.

    ``hidden`` [N, D] and ``embedding_low`` [V, D] in the compute type, ``target`` [N]. The gradient of
    the embedding is accumulated into ``embedding.grad``, scaled by ``scale`` like that of ``hidden``.
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
