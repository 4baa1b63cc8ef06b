"""Muon for matrices, AdamW for embeddings, norms and routers; state in shared memory.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): momentum, then the nearest
semi-orthogonal matrix by a Newton-Schulz iteration. Experts are a batch of matrices, so one layer's
experts take one batched product per iteration step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the semi-orthogonal factor of each matrix of ``matrices`` [..., R, C].

    The singular values of the result lie in about 0.7 to 1.2; computed in bfloat16.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    x = x.contiguous()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


@dataclass(frozen=True)
class OptimizerConfig:
    """Peak learning rates and decays; the caller's schedule multiplies every rate."""

    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    router_rate: float = 2e-3
    muon_decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)


@dataclass
class _Slot:
    name: str
    parameter: Tensor
    grads: list[Tensor]
    muon: bool
    first: Tensor
    second: Tensor | None


class SharedOptimizer:
    """Updates shared parameters from the gradients of several workers.

    Each worker calls ``step`` for the slots it owns (``owner == rank``): it sums the workers'
    gradients of these slots, updates the shared parameter in place and clears the gradients. A
    barrier before and after makes this an all-reduce without copies.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Tensor]], grads: Sequence[dict[str, Tensor]], config: OptimizerConfig
    ) -> None:
        self._config = config
        self._steps = torch.zeros((), dtype=torch.int64).share_memory_()
        self._slots = []
        for name, parameter in parameters:
            muon = parameter.dim() >= 2 and not name.endswith(("embed_tokens.weight", "gate.weight"))
            first = torch.zeros_like(parameter, requires_grad=False)
            second = None if muon else torch.zeros_like(first)
            if parameter.device.type == "cpu":
                first.share_memory_()
                second = None if second is None else second.share_memory_()
            self._slots.append(_Slot(name, parameter, [g[name] for g in grads], muon, first, second))

    def owners(self, workers: int) -> dict[str, int]:
        """Which worker updates which parameter: largest first to the least loaded."""
        load = [0] * workers
        owner = {}
        for slot in sorted(self._slots, key=lambda slot: -slot.parameter.numel()):
            rank = load.index(min(load))
            load[rank] += slot.parameter.numel() * (4 if slot.muon else 1)
            owner[slot.name] = rank
        return owner

    @torch.no_grad()
    def step(self, rank: int, owners: dict[str, int], step: int, rate: float, momentum: float) -> None:
        """Apply update number ``step`` (from 1) to the slots of ``rank``; ``rate`` multiplies all rates."""
        for slot in self._slots:
            if owners[slot.name] != rank:
                continue
            grad = slot.grads[0]
            for other in slot.grads[1:]:
                grad.add_(other)
            if slot.muon:
                self._muon(slot, grad, rate, momentum)
            else:
                self._adam(slot, grad, step, rate)
            for buffer in slot.grads:
                buffer.zero_()

    def _muon(self, slot: _Slot, grad: Tensor, rate: float, momentum: float) -> None:
        slot.first.lerp_(grad, 1 - momentum)
        update = grad.lerp_(slot.first, momentum)
        if slot.name.endswith("gate_up_proj"):  # two matrices stored as one
            update = update.unflatten(1, (2, -1))
        update = orthogonalise(update)
        gain = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
        lr = rate * self._config.muon_rate
        slot.parameter.mul_(1 - lr * self._config.muon_decay)
        slot.parameter.add_(update.reshape(slot.parameter.shape), alpha=-lr * gain)

    def _adam(self, slot: _Slot, grad: Tensor, step: int, rate: float) -> None:
        assert slot.second is not None
        beta1, beta2 = self._config.betas
        slot.first.lerp_(grad, 1 - beta1)
        slot.second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (slot.second / (1 - beta2**step)).sqrt_().add_(1e-10)
        peak = self._config.router_rate if slot.name.endswith("gate.weight") else self._config.adam_rate
        slot.parameter.addcdiv_(slot.first / (1 - beta1**step), denominator, value=-rate * peak)

    def state(self) -> dict[str, Tensor]:
        """Flat state for a checkpoint."""
        state = {f"first.{slot.name}": slot.first for slot in self._slots}
        state |= {f"second.{slot.name}": slot.second for slot in self._slots if slot.second is not None}
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Inverse of ``state``."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
