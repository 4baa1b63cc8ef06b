"""Inputs of decode steps that carry the same requests as the step before.

Each request has one row more in the KV cache. One native call writes the numbers on the host. Kernels copy them to a
GPU on the stream of its step, from pinned memory that is there twice: those of one step are written while those of the
step before may still be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....kernels import _cpu
from ..cuda.runtime import GpuRuntime

_HORIZON = 256  # steps; then transformers makes the inputs once more
_LEAST_BYTES = 512 << 10  # of the numbers of a name, so that they seldom get another address


class Kept:
    """Memory on the model's device for the numbers of one `Repeat` at a time, at the same addresses for all of them.

    Attributes:
        generation: changes whenever some have another address.
    """

    def __init__(self, gpu: GpuRuntime | None = None) -> None:
        self._gpu, self._buffers, self.generation = gpu, dict[str, torch.Tensor](), 0

    def tensor(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of a name: at least `size`, as many as ever were asked for."""
        nbytes = size * dtype.itemsize
        found = self._buffers.get(name)
        if found is None or found.nbytes < nbytes:
            nbytes = max(nbytes, _LEAST_BYTES if found is None else 2 * found.nbytes)
            found = torch.zeros(nbytes, dtype=torch.uint8) if self._gpu is None else self._gpu.buffer(nbytes).zero_()
            self._buffers[name] = found
            self.generation += 1
        return found.view(dtype)


class Repeat:
    """The inputs of the next steps of requests that decode.

    Args:
        cache: transformers' paged cache.
        states: transformers' `RequestState` of each request.
        inputs: of the model, in a step that decoded these requests; changed by `advance`.
        kept: where the numbers are that the model reads.
        gpu: of the model; None: it runs on the host.
        stream: of the step, which a GPU has entered whenever this is called.

    Attributes:
        fixed: inputs of the next steps whose lengths do not change, in place of those in `inputs` whose lengths do.
    """

    def __init__(
        self, cache: Any, states: Sequence[Any], inputs: dict[str, Any], kept: Kept, gpu: GpuRuntime | None = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        mask = inputs["attention_mask"]
        self._gpu, self._stream = gpu, stream
        self._copied: list[Any] = [None, None]  # events: the step's copies from one half of the memory are done
        self._half = 0
        self._cache, self._states, self._inputs = cache, states, inputs
        self._left = _HORIZON
        self._same_page = 0  # steps that begin no page
        self._ids = _Numbers("ids", len(states), torch.int32, kept, gpu)
        self._positions = _Numbers("positions", len(states), torch.int32, kept, gpu, counted=True)
        self._positions.host[:] = [state.position_offset - 1 for state in states]
        dtype = None if mask is None else (next(iter(mask.values())) if isinstance(mask, dict) else mask).dtype
        kinds = cache.cache_allocators.items()
        self._places = {kind: _Places(kind, allocator, states, dtype, kept, gpu) for kind, allocator in kinds}
        numbers = [len(states), self._ids.address, self._positions.address, len(self._places)]
        self._header = np.array(numbers + [word for p in self._places.values() for word in p.words], np.int64)
        self._address = self._header.ctypes.data
        size = len(next(iter(self._places.values())).words)
        self._addresses = [1, *(4 + size * i + _Places.FIRST for i in range(len(self._places)))]  # in the header
        inputs |= {
            "input_ids": self._ids.tensor[None],
            "position_ids": self._positions.tensor[None],
            "cu_seq_lens_k": {kind: places.starts.tensor for kind, places in self._places.items()},
            "write_index": [places.write.tensor for places in self._places.values()],
        }
        whole = [self._ids, self._positions, *(n for p in self._places.values() for n in (p.starts, p.write))]
        self._uploads = [] if gpu is None else whole
        self.fixed = {"read_index": [places.read.whole for places in self._places.values()]}

    def advance(self, tokens: list[int]) -> bool:
        """Set the inputs of the next step, which feeds `tokens` [requests]; False: transformers is to make them."""
        if self._gpu is not None:
            self._turn(self._gpu)
        if not self._same_page and not self._begin_page():
            return False
        self._same_page -= 1
        for state in self._states:
            state.position_offset += 1
        sizes = _cpu.decode_next(self._address, tokens)
        for numbers in self._uploads:
            numbers.upload(len(numbers.host))
        read, longest, masks = [], {}, {}
        for (kind, places), (size, most) in zip(self._places.items(), sizes, strict=True):
            read.append(places.read.upload(size))
            longest[kind] = most
            if places.mask is not None:
                masks[kind] = places.mask.upload(len(tokens) * size).view(places.dtype).view(1, 1, len(tokens), size)
        if self._gpu is not None:
            self._gpu.record(self._copied[self._half], self._stream)
        self._inputs["read_index"], self._inputs["max_length_k"] = read, longest
        if masks:
            self._inputs["attention_mask"] = masks if len(masks) > 1 else masks.popitem()[1]
        return True

    def _turn(self, gpu: GpuRuntime) -> None:
        """Write to the other half of the memory, once nothing is copied from it any more."""
        self._half = 1 - self._half
        if self._copied[self._half] is None:
            self._copied[self._half] = gpu.event(timing=False)
        else:
            gpu.wait(self._copied[self._half])
        kinds = [(self._ids, self._positions), *(places.numbers for places in self._places.values())]
        for first, kind in zip(self._addresses, kinds, strict=True):
            for i, numbers in enumerate(kind):
                numbers.turn(self._half)
                self._header[first + i] = numbers.address

    def _begin_page(self) -> bool:
        """Room for the next token of each request; False: the cache is full, or the horizon is reached."""
        if not self._left or not all(self._cache.can_store_request_tokens(state, 1) for state in self._states):
            return False
        self._same_page = min(self._left, *(places.begin_page() for places in self._places.values()))
        self._left -= self._same_page
        return True


class _Numbers:
    """Numbers that are written on the host and read by the model: `host` and `tensor`.

    Args:
        gpu: has a copy of them. counted: each step changes the numbers of the step before.

    Attributes:
        whole: `tensor` and what lies behind it, which has the same address and length in each `Repeat`.
    """

    def __init__(
        self, name: str, size: int, dtype: torch.dtype, kept: Kept, gpu: GpuRuntime | None, counted: bool = False
    ) -> None:
        self.whole = kept.tensor(name, size, dtype)
        self.tensor = self.whole.narrow(0, 0, size)
        if gpu is None:
            self._halves = [self.tensor.zero_()]
        else:
            self._halves = [gpu.pinned(size * dtype.itemsize).view(dtype).zero_() for _ in range(2)]
        self._gpu, self._counted = gpu, counted
        self._use(0)

    def _use(self, half: int) -> None:
        self._source = self._halves[half]
        self.host: np.ndarray[Any, Any] = self._source.numpy()
        self.address = self._source.data_ptr()

    def turn(self, half: int) -> None:
        """Write to this half from now on."""
        before = self.host
        self._use(half)
        if self._counted:
            self.host[:] = before

    def upload(self, size: int) -> torch.Tensor:
        """The first `size` of them, for the model."""
        there = self.tensor.narrow(0, 0, size)
        if self._gpu is not None:
            self._gpu.kernel_copy(there, self._source.narrow(0, 0, size))  # not behind prefetches
        return there


class _Places:
    """What requests read and write in the layers of one kind of attention.

    `_slots` [requests, past + _HORIZON]: cache slots of each request's tokens in order, the same step's new tokens in
    one column.

    Attributes:
        read: int64, the slots of the first request's tokens, then of the next's. With a window the cache is written
            after it is read, and a sentinel stands for the new token.
        write: int64 [requests].
        starts: int32 [requests + 1], where each request's tokens begin in `read`.
        mask: which keys of `read` a row sees, for attention without varlen kernels: 0 for those of its own request,
            the lowest number for others; None: it needs none.
        numbers: all of these, as their addresses are in `words`, from place FIRST on.
        words: what the native call reads (`kernels/cpu/decode_module.cpp`).
    """

    FIRST = 5  # address among the words

    def __init__(
        self, kind: str, allocator: Any, states: Sequence[Any], dtype: torch.dtype | None, kept: Kept,
        gpu: GpuRuntime | None,
    ) -> None:  # fmt: skip
        self._allocator, self._states, self.dtype = allocator, states, dtype
        self._window = getattr(allocator, "sliding_window", 0)
        past = []
        for state in states:
            last = state.request_id, state.position_offset - 1, 1
            past.append(allocator.get_read_indices(*last)[:-1] + allocator.get_write_indices(*last))
        at = max(map(len, past))
        self._slots = np.zeros((len(states), at + _HORIZON), np.int64)
        for row, found in zip(self._slots, past, strict=True):
            row[at - len(found) : at] = found
        self.read = _Numbers(f"read {kind}", self._slots.size, torch.int64, kept, gpu)
        self.write = _Numbers(f"write {kind}", len(states), torch.int64, kept, gpu, counted=True)
        self.starts = _Numbers(f"starts {kind}", len(states) + 1, torch.int32, kept, gpu)
        self.mask, bits, lowest = None, 0, 0
        if dtype is not None:
            integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
            self.mask = _Numbers(f"mask {kind}", len(states) * self._slots.size, integer, kept, gpu)
            bits, lowest = dtype.itemsize, int(torch.tensor(torch.finfo(dtype).min, dtype=dtype).view(integer))
        self.numbers = [self.read, self.write, self.starts, *([] if self.mask is None else [self.mask])]
        self.words = (
            self._window, getattr(allocator, "sentinel_index", 0), at, self._slots.shape[1], self._slots.ctypes.data,
            self.read.address, self.write.address, self.starts.address,
            0 if self.mask is None else self.mask.address, bits, lowest,
        )  # fmt: skip

    def begin_page(self) -> int:
        """Find the next tokens' slots anew; the number of steps in which a request's slots follow each other."""
        page, room = self._allocator.tokens_per_page, []
        for i, state in enumerate(self._states):
            past = state.position_offset
            self.write.host[i] = self._allocator.get_write_indices(state.request_id, past, 1)[0] - 1
            within = past % self._window if self._window else past
            room.append(page - within % page)
            if self._window:
                room.append(self._window - within)
        return min(room)
