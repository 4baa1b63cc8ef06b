"""Muon for matrices, AdamW for embeddings, norms and routers; and the schedule of rates, row lengths and batches.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): momentum, then the nearest semi-orthogonal matrix by a
Newton-Schulz iteration, batched over a layer's experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
WARM_UP_STEPS = 40
DECAY_FROM = 0.35
FINAL_RATE = 0.01


@dataclass(frozen=True)
class Budget:
    """The end of training: a number of tokens, or of active CPU minutes of the first worker, which exclude pauses."""

    tokens: int | None = None
    minutes: float | None = None

    def progress(self, tokens: float, active_s: float) -> float:
        """The spent share of the nearer limit, 0 to 1."""
        by_tokens = tokens / self.tokens if self.tokens else 0.0
        by_time = active_s / (self.minutes * 60) if self.minutes else 0.0
        return min(1.0, max(by_tokens, by_time))


@dataclass(frozen=True)
class Phase:
    """Batch of one step up to a progress: tokens over all workers, in rows of ``length`` tokens."""

    until: float
    length: int
    batch_tokens: int


# Short rows and small batches first: more updates while gradients are large.
PHASES = (
    Phase(0.45, 256, 8192),
    Phase(0.80, 512, 8192),
    Phase(0.92, 1024, 16384),
    Phase(2.00, 2048, 16384),
)


def phase_at(progress: float, phases: tuple[Phase, ...] = PHASES) -> Phase:
    return next(phase for phase in phases if progress < phase.until)


def rate_at(progress: float, step: int) -> float:
    """Multiplier of the learning rates: warm-up, constant, then linear to 1 %."""
    warm = min(1.0, step / WARM_UP_STEPS)
    falling = (1 - progress) / (1 - DECAY_FROM)
    return warm * max(FINAL_RATE, min(1.0, falling))


@dataclass(frozen=True)
class OptimizerConfig:
    """Peak learning rates and decays; the schedule multiplies every rate."""

    muon_rate: float = 0.015
    adam_rate: float = 4e-3
    embedding_rate: float = 0.03  # its initial weights are larger than those of the layers
    router_rate: float = 4e-3
    muon_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)


class SharedOptimizer:
    """Updates shared parameters from the gradients of several workers.

    Each worker calls ``step`` for the parameters that it owns: it sums the workers' gradients, updates the parameter in
    place and clears the gradients. With a barrier before and after, this is an all-reduce without copies.

    Args:
        grads: the gradients of each worker, by parameter name.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], grads: Sequence[Mapping[str, Tensor]], config: OptimizerConfig
    ) -> None:
        self._parameters, self._grads, self._config = parameters, grads, config
        self._state: dict[str, Tensor] = {}  # first.NAME, and second.NAME where AdamW updates NAME
        for name, parameter in parameters.items():
            for moment in ("first",) if _by_muon(name, parameter) else ("first", "second"):
                state = torch.zeros_like(parameter, requires_grad=False)
                self._state[f"{moment}.{name}"] = state.share_memory_() if state.device.type == "cpu" else state

    def owners(self, workers: int) -> dict[str, int]:
        """The worker that updates each parameter: largest first to the least loaded."""
        load = [0] * workers
        owner = {}
        for name, parameter in sorted(self._parameters.items(), key=lambda item: -item[1].numel()):
            rank = load.index(min(load))
            load[rank] += parameter.numel() * (4 if _by_muon(name, parameter) else 1)
            owner[name] = rank
        return owner

    @torch.no_grad()
    def step(self, names: Sequence[str], step: int, rate: float, momentum: float) -> None:
        """Apply update number ``step`` (from 1) to the parameters ``names``; ``rate`` multiplies all rates."""
        for name in names:
            parameter, (grad, *others) = self._parameters[name], [grads[name] for grads in self._grads]
            for other in others:
                grad.add_(other)
            if _by_muon(name, parameter):
                self._muon(name, parameter, grad, rate, momentum)
            else:
                self._adam(name, parameter, grad, step, rate)
            for buffer in (grad, *others):
                buffer.zero_()

    def _muon(self, name: str, parameter: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        first = self._state[f"first.{name}"].lerp_(grad, 1 - momentum)
        update = grad.lerp_(first, momentum)
        if name.endswith("gate_up_proj"):  # two matrices stored as one
            update = update.unflatten(1, (2, -1))
        update = orthogonalise(update)
        gain = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
        lr = rate * self._config.muon_rate
        parameter.mul_(1 - lr * self._config.muon_decay)
        parameter.add_(update.reshape(parameter.shape), alpha=-lr * gain)

    def _adam(self, name: str, parameter: Tensor, grad: Tensor, step: int, rate: float) -> None:
        beta1, beta2 = self._config.betas
        first = self._state[f"first.{name}"].lerp_(grad, 1 - beta1)
        second = self._state[f"second.{name}"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(1e-10)
        peak = self._config.adam_rate
        if name.endswith("gate.weight"):
            peak = self._config.router_rate
        elif name.endswith("embed_tokens.weight"):
            peak = self._config.embedding_rate
        parameter.addcdiv_(first / (1 - beta1**step), denominator, value=-rate * peak)

    def state(self) -> dict[str, Tensor]:
        """The state's own tensors, for a checkpoint to write or to fill."""
        return self._state


def _by_muon(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not name.endswith(("embed_tokens.weight", "gate.weight"))


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The approximate semi-orthogonal factor of each of ``matrices`` [..., R, C], in bfloat16.

    Its singular values lie in about 0.7 to 1.2.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    x = x.contiguous()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)
