"""Training forward and backward of the experts: tokens sorted by expert, one product per expert.

Gradients of the expert weights are accumulated in place into ``.grad``: as autograd outputs they
would cost several passes over 25 M numbers for each micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW_MULTIPLE = 64


class ExpertsFunction(torch.autograd.Function):
    """Mixture of SwiGLU experts.

    Inputs: ``x`` [N, D] in the compute type, ``index`` [N, K], ``weight`` [N, K] in float32,
    ``gate_up`` [E, 2I, D] and ``down`` [E, D, I] (parameters with ``.grad``), and their copies in
    the compute type. Output [N, D].
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

    The matrix library compiles a kernel for each new shape; sizes rounded up repeat and stay compiled.
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
