"""Where the bytes of experts lie, on the host and in slots: for a link that copies by addresses (`core::Places`)."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from ...core import _core
from ...store.disk import MEASURED_BYTES, READERS
from ...store.pages import files_at
from .form_slots import FormPool, FormWeights
from .links import CacheLink
from .slots import ExpertSource, LayerWeights, MappedPool, SlotPool

if TYPE_CHECKING:
    from .device import Tensors
    from .slot_map import SlotMap
    from .slots import PendingExpert

_Home = list[tuple[int, int]]  # of each tensor: its address, and the bytes from a slot to the next
# address (0: another link copies it); bytes, or elements that are cast; whether they are; bytes of one, here and there
_Source = tuple[int, int, bool, int, int]
_NONE: _Source = (0, 0, False, 1, 1)


def linkable(pool: SlotPool | FormPool, weights: Sequence[ExpertSource]) -> bool:
    """Whether the experts lie in this host's memory, in the slots' dtype or as bfloat16 for float32 slots."""
    return all(
        isinstance(layer, FormWeights)
        or (isinstance(layer, LayerWeights)
        and all(_copies(target, source) for target, source in zip(pool.tensors, layer.tensors, strict=True)))
        for layer in weights
    )


def thread_link(where: SlotMap, rate: float, latency_s: float) -> CacheLink:
    """The link thread of experts in this host's memory. rate: bytes per second; 0.0: as fast as memory."""
    core = _core.ThreadLink(rate, latency_s)
    return CacheLink(core, time.perf_counter, partial(place, core, where))


def mapped_link(where: SlotMap) -> CacheLink:
    """The link of a `MappedPool`: each expert is in its slot, and nothing is copied."""
    core, keys = _core.ThreadLink(0.0, 0.0), where.keys
    address = cast("Tensors", where.weights[0].expert(0))[0].data_ptr()  # mapped
    core.place([[(address, 0)]], [0] * keys, range(keys), [(address, 0, False, 1, 1)] * keys, 1)
    return CacheLink(core)


def disk_link(where: SlotMap) -> CacheLink:
    """Reads whole experts past the page cache from the files in which the store maps them, into slots of their type.

    Raises:
        StoreError: a file cannot be opened, or read.
    """
    addresses = [tensor.data_ptr() for key in range(where.keys) for tensor in cast("Tensors", where.source(key))]
    core = _core.DiskLink(files_at(addresses), READERS)
    gbps = core.measure(MEASURED_BYTES) / 1e9
    return CacheLink(core, time.perf_counter, partial(place, core, where), gbps)


def place(
    link: _core.ThreadLink | _core.StreamLink | _core.DiskLink, where: SlotMap, elsewhere: Collection[int] = ()
) -> None:
    """Tell a link of the sources and slots of all segments; no copy is under way.

    elsewhere: layers whose experts another link copies.
    """
    pool, segments, keys, part = where.pool, where.segments, where.keys, where.low_bit
    home_of, dtype = [0] * keys, None if isinstance(pool, FormPool | MappedPool) else pool.gate_up.dtype
    if isinstance(pool, FormPool):
        forms = list(pool.published.forms)
        homes = [_home(pool.parts(form), 0) for form in forms]
        home_of = [forms.index(pool.published.of(key // where.experts)) for key in range(keys)]
    else:
        assert not isinstance(pool, MappedPool)  # `mapped_link` has its places
        homes = [_home(pool.tensors, 0 if segments is None else 1)]  # slots of segments are rows: neurons
    position = list(range(where.most_slots)) if segments is None else list(segments.first)

    def source(segment: int, kept: torch.dtype | None) -> list[_Source]:
        return [] if where.layer_of(segment) in elsewhere else _source(where.source(segment), kept)

    sources = [source(key, dtype) for key in range(keys) if segments is None]
    if segments is not None:
        home_of *= 2
        sources = [source(s, dtype) if n else [] for s, n in enumerate(segments.neurons)]
    elif part is not None:
        homes.append(_home(part.pool.tensors, 0))
        home_of += [len(homes) - 1] * keys
        position += range(part.slots)
        sources += [source(keys + key, None) for key in range(keys)]
    tensors = max(1, *map(len, sources))  # one at least: it says that another link has the segment
    flat = [one for found in sources for one in (*found, *[_NONE] * (tensors - len(found)))]
    link.place(homes, home_of, position, flat, tensors)


def _home(tensors: Sequence[torch.Tensor], axis: int) -> _Home:
    return [(t.data_ptr(), t.stride(axis) * t.itemsize) for t in tensors]


def _source(found: Tensors | PendingExpert, dtype: torch.dtype | None) -> list[_Source]:
    """dtype: of the slots; None: that of the expert."""
    assert isinstance(found, tuple)  # `linkable`
    return [
        (s.data_ptr(), s.nbytes, False, 1, 1) if dtype is None or s.dtype == dtype
        else (s.data_ptr(), s.numel(), True, s.itemsize, dtype.itemsize)
        for s in found
    ]  # fmt: skip


def _copies(target: torch.Tensor, source: torch.Tensor) -> bool:
    alike = target.dtype == source.dtype
    widened = target.dtype == torch.float32 and source.dtype == torch.bfloat16
    return (alike or widened) and target[0].is_contiguous() and source[0].is_contiguous()
