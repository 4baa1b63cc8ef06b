"""The link of a device, from its settings."""

from __future__ import annotations

from collections.abc import Sequence

from ...core import _core
from ...settings import CopySettings
from ..cuda.device import CudaDevice
from ..cuda.stream_link import StreamLinking
from .device import CpuDevice, Device
from .form_slots import FormPool, FormWeights
from .links import Linking
from .loader import Loader
from .places import linkable
from .slots import ExpertSource, LayerWeights, SlotPool


def make_link(
    device: Device, pool: SlotPool | FormPool, weights: Sequence[ExpertSource], settings: CopySettings | None = None,
    replicas: Sequence[LayerWeights] = (),
) -> Loader | Linking | _core.Link:  # fmt: skip
    """A GPU's streams, the stand-in's link thread, or a Python thread for other sources.

    Args:
        weights: pinned before, where they are to be. settings: of copies to a GPU; None: the defaults.
        replicas: of the same layers, for slots of their own; empty: the cache has no such slots.
    """
    if isinstance(device, CpuDevice):
        if not linkable(pool, weights):
            return Loader(device)
        rate = 0.0 if device.link.gbps is None else device.link.gbps * 1e9
        return _core.ThreadLink(rate, device.link.latency_us * 1e-6)
    if not isinstance(device, CudaDevice):
        return Loader(device)
    settings = CopySettings() if settings is None else settings
    mapped = [layer.tensors if isinstance(layer, LayerWeights | FormWeights) else None for layer in weights]
    casts = isinstance(pool, SlotPool) and any(
        s.dtype != d.dtype for t in mapped if t is not None for s, d in zip(t, pool.tensors, strict=True)
    )
    # bytes are copied as they lie, so an expert with gaps is the loader's
    whole = [t is not None and all(one[0].is_contiguous() for one in t) for t in mapped]
    pinned = [plain and device.is_pinned(t) for t, plain in zip(mapped, whole, strict=True)]  # type: ignore[arg-type]
    if replicas:
        pinned = [all_in and device.is_pinned(r.tensors) for all_in, r in zip(pinned, replicas, strict=True)]
    return StreamLinking(device, pinned, settings.ahead_mib << 20, casts)
