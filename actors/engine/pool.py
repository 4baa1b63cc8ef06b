"""The slot pool: the tensors that experts are copied into, and that kernels read in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..store.format import ExpertShape
from .promise import Promise

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SlotPool:
    """One contiguous allocation per tensor kind, made once; slot s of each is one whole expert.

    Shapes: gate_up [S, I, G, H], down [S, I, H], gate_up_bias [S, I, G] or None, down_bias [S, H] or None
    (neuron-major: neuron j of an expert is gate_up[s, j] and down[s, j]). So the same tensors are a row of S*I neurons,
    which slots of any other sizes can share (`neuron_range`).
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @staticmethod
    def allocate(shape: ExpertShape, slots: int, dtype: torch.dtype, device: torch.device) -> SlotPool:
        """Allocate `slots` slots of `shape` in `dtype` on `device`."""
        import torch

        def empty(*dims: int) -> torch.Tensor:
            return torch.empty((slots, *dims), dtype=dtype, device=device)

        i, g, h = shape.intermediate, shape.gates, shape.hidden
        return SlotPool(
            gate_up=empty(i, g, h),
            down=empty(i, h),
            gate_up_bias=empty(i, g) if shape.has_bias else None,
            down_bias=empty(h) if shape.has_bias else None,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if t is not None)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def neurons(self) -> int:
        """Of one slot: I."""
        return self.gate_up.shape[1]

    @property
    def total_neurons(self) -> int:
        """Of all slots: S*I."""
        return self.gate_up.shape[0] * self.gate_up.shape[1]

    def slot(self, index: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one slot, in the order of `tensors`."""
        return tuple(t[index] for t in self.tensors)

    def neuron_range(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Neurons of the pool, counted over all slots: gate_up [n, G, H], down [n, H]; of a pool without biases."""
        return tuple(t.flatten(0, 1)[first : first + count] for t in (self.gate_up, self.down))


class ExpertSource(Protocol):
    """Where the experts of one MoE layer come from."""

    def expert(self, index: int) -> tuple[torch.Tensor, ...] | Promise:
        """One expert: what a device copies, or a promise of it. Returns at once."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One MoE layer's experts in host memory, mapped read-only in the checkpoint's dtype.

    Shapes as in `SlotPool`, with experts in place of slots.
    """

    tensors: tuple[torch.Tensor, ...]

    def expert(self, index: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one expert, in the order of `SlotPool.tensors`."""
        return tuple(t[index] for t in self.tensors)
