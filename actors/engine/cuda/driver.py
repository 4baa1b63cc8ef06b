"""The calls of libcuda that a GPU's link makes (`core::Driver`), by address."""

from __future__ import annotations

import ctypes

from ...core import _core

# what `actors/core/driver.hpp` names them: the names of libcuda
CALLS = {
    "enter": "cuCtxSetCurrent", "up": "cuMemcpyHtoDAsync_v2", "down": "cuMemcpyDtoHAsync_v2", "create": "cuEventCreate",
    "destroy": "cuEventDestroy_v2", "record": "cuEventRecord", "wait": "cuStreamWaitEvent", "query": "cuEventQuery",
    "synchronize": "cuEventSynchronize", "elapsed": "cuEventElapsedTime", "describe": "cuGetErrorString",
}  # fmt: skip


def cuda_driver() -> _core.Driver:
    """The driver of the calling thread's current context, which torch has made.

    Raises:
        OSError: there is no libcuda. RuntimeError: there is no context. AttributeError: the driver lacks a call.
    """
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    code = int(cuda.cuCtxGetCurrent(ctypes.byref(context)))
    if code or not context.value:
        raise RuntimeError(f"the GPU has no context here (CUDA error {code})")
    return _core.Driver(context.value, addresses_of(cuda))


def addresses_of(library: ctypes.CDLL) -> dict[str, int]:
    """Where the calls lie. Raises AttributeError: the library lacks one."""
    return {name: ctypes.cast(getattr(library, call), ctypes.c_void_p).value or 0 for name, call in CALLS.items()}
