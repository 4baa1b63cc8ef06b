"""Random experts in pinned host memory: no file, no store, filled in seconds."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from dataclasses import dataclass, field
from typing import Any

import torch

from .....actors.engine.cache.low_bits import ReplicaWeights
from .....actors.engine.cache.slots import LayerWeights
from .....actors.store.format import ExpertShape
from .....errors import ConfigError
from .....kernels.pack import PackedShape
from .....kernels.packed_slots import packed_shapes
from ....host import usable_cores
from .ndp_child import DISTINCT_LAYERS

_HUGE = 2 << 20  # bytes of a huge page
_ALIGNED = 64  # bytes, of a tensor of replicas
_SCALE = 1e-3  # of all replicas, and their offsets


@dataclass
class HostExperts:
    """All experts of a model, layer by layer.

    Attributes:
        layers: as an engine takes them.
        how: how the memory was had, of each layer: "registered", "pinned" or "pageable".
    """

    layers: list[LayerWeights] = field(default_factory=list)
    how: list[str] = field(default_factory=list)
    _replicas: dict[tuple[int, int], ReplicaWeights] = field(default_factory=dict)  # by bits and group
    _kept: list[tuple[Any, int | None]] = field(default_factory=list)

    def add(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """One more layer, registered with the GPU where there is one, and filled from there.

        Raises:
            ConfigError: the memory is not to be had.
        """
        elements = shape.num_experts * shape.elements()
        flat, how, kept = _allocate(elements, dtype, device)
        _fill(flat, device, seed)
        size = shape.num_experts * shape.intermediate * shape.gates * shape.hidden
        gate_up = flat[:size].view(shape.num_experts, *shape.gate_up)
        down = flat[size:].view(shape.num_experts, *shape.down)
        self.layers.append(LayerWeights((gate_up, down)))
        self.how.append(how)
        self._kept.append(kept)

    def replicas(self, shape: ExpertShape, bits: int, group: int, device: torch.device) -> ReplicaWeights:
        """Replicas of one width with random codes, in the same kind of memory: a few layers' serve all in turn.

        Raises:
            ConfigError: the memory is not to be had.
        """
        found = self._replicas.get((bits, group))
        if found is None:
            packed = PackedShape(shape.hidden, shape.intermediate, bits, group)
            distinct = min(DISTINCT_LAYERS, len(self.layers))
            made = [self._replica_layer(packed, shape.num_experts, device, seed) for seed in range(distinct)]
            layers = [made[layer % distinct] for layer in range(len(self.layers))]
            found = self._replicas[bits, group] = ReplicaWeights(packed, layers)
        return found

    def _replica_layer(self, packed: PackedShape, experts: int, device: torch.device, seed: int) -> LayerWeights:
        kinds = [(dtype, (experts, *dims)) for dtype, dims in packed_shapes(packed)]
        sizes = [math.prod(dims) * dtype.itemsize for dtype, dims in kinds]
        places = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        flat, _, kept = _allocate(places[-1], torch.uint8, device)
        self._kept.append(kept)
        _fill(flat, device, seed)
        tensors = []
        for (dtype, dims), size, place in zip(kinds, sizes, places, strict=False):  # one place more: the end
            tensor = flat[place : place + size].view(dtype).view(dims)
            tensors.append(tensor if dtype == torch.uint8 else tensor.fill_(_SCALE))
        return LayerWeights(tuple(tensors))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def close(self) -> None:
        """Give the memory back. Nothing may use it any more."""
        self.layers.clear()
        self._replicas.clear()
        for _, address in self._kept:
            if address is not None:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._kept.clear()


def _allocate(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, str, tuple[Any, Any]]:
    """A flat tensor in host memory; how it was had; and what keeps it."""
    if device.type != "cuda":
        return torch.empty(elements, dtype=dtype), "pageable", (None, None)
    nbytes = elements * dtype.itemsize
    try:
        # private: shared memory has huge pages on few machines only
        block = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(f"{nbytes} bytes of host memory are not to be had: {error}", "run a smaller shape") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: registering takes longer
            block.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to register
    flat = torch.frombuffer(block, dtype=dtype, count=elements)
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    flat.zero_()  # by all cores: registering would touch the pages one by one
    torch.set_num_threads(threads)
    if int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), nbytes, 0)) == 0:
        return flat, "registered", (block, flat.data_ptr())
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # the failure is kept as the last error, which the next launch would raise
    try:
        return torch.empty(elements, dtype=dtype, pin_memory=True), "pinned", (None, None)
    except RuntimeError:
        return flat, "pageable", (block, None)


def _fill(flat: torch.Tensor, device: torch.device, seed: int) -> None:
    """Random numbers of an expert's scale, or bytes; one block over and over, since no time depends on the values."""
    generator = torch.Generator(device).manual_seed(seed)
    block = torch.empty(min(flat.numel(), 64 << 20), dtype=flat.dtype, device=device)
    if flat.dtype == torch.uint8:
        block.random_(0, 256, generator=generator)
    else:
        block.normal_(0, 0.02, generator=generator)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])
