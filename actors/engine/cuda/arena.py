"""Device memory at fixed addresses that comes and goes: CUDA's virtual memory management.

A range of addresses is reserved once. Pages of one size are created by the driver, mapped into a range, unmapped, and
kept for the next range that grows: what experts give back, the KV cache gets, and no other process in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch


class Pages:
    """The pages of one GPU that are in no range; shared by its arenas."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._spare: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """So many pages: spare ones, then new ones. Raises torch.OutOfMemoryError; then nothing has changed."""
        new = list[Any]()
        try:
            for _ in range(count - len(self._spare)):
                new.append(self.driver.create())
        except torch.OutOfMemoryError:
            self._spare += new
            raise
        taken, self._spare = [*self._spare[:count], *new], self._spare[count:]
        return taken

    def keep(self, pages: Sequence[Any]) -> None:
        """These are in no range any more."""
        self._spare += pages

    def close(self) -> None:
        """Give the spare pages back. Safe to call twice."""
        while self._spare:
            self.driver.destroy(self._spare.pop())


class CudaArena:
    """A range of device memory whose first bytes are there (`cache.device.Arena`).

    Args:
        nbytes: the most that it may have.

    Raises:
        torch.OutOfMemoryError: there is no room for its first page.
    """

    def __init__(self, pages: Pages, nbytes: int) -> None:
        self._pages, self._page = pages, pages.driver.granularity
        self._range = -(-max(1, nbytes) // self._page) * self._page
        self._address = pages.driver.reserve(self._range)
        self._mapped: list[Any] = []
        try:
            self.resize(1)  # torch asks the driver whose memory it is
        except torch.OutOfMemoryError:
            pages.driver.free(self._address, self._range)
            raise
        self.tensor = pages.driver.tensor(self._address, nbytes)

    def resize(self, nbytes: int) -> None:
        wanted = max(1, -(-nbytes // self._page))
        have, driver = len(self._mapped), self._pages.driver
        if wanted > have:
            pages = self._pages.take(wanted - have)
            try:
                driver.map(self._address + have * self._page, pages)
            except BaseException:
                self._pages.keep(pages)
                raise
            self._mapped += pages
        elif wanted < have:
            driver.unmap(self._address + wanted * self._page, have - wanted)
            self._pages.keep(self._mapped[wanted:])
            del self._mapped[wanted:]

    def close(self) -> None:
        if self._mapped:
            self._pages.driver.unmap(self._address, len(self._mapped))
            self._pages.keep(self._mapped)
            self._mapped = []
            self._pages.driver.free(self._address, self._range)
            self._pages.close()  # others, such as torch, may have the memory now


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32", ctypes.c_void_p), ("flags", _Flags),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED = _ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class CudaDriver:
    """Device memory page by page: calls of libcuda, which torch has loaded and given a context.

    Addresses and sizes are multiples of `granularity`.

    Raises:
        OSError: there is no libcuda. RuntimeError: the GPU has no virtual memory management, or a call failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # the context is there, and current on this thread
        self._cuda = ctypes.CDLL("libcuda.so.1")
        number, found = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(number))
        self._call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(_SUPPORTED), number)
        if not found.value:
            raise RuntimeError("the GPU has no virtual memory management")
        location = _Location(_ON_DEVICE, number.value)
        self._properties, self._access = _Properties(type=_PINNED, location=location), _Access(location, _READ_WRITE)
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), ctypes.c_int(_MINIMUM)
        )
        self.granularity = int(size.value)  # bytes of a page

    def reserve(self, nbytes: int) -> int:
        """An address range, without memory."""
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        return int(address.value)

    def create(self) -> int:
        """A page of device memory. Raises torch.OutOfMemoryError."""
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(self.granularity), ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )  # fmt: skip
        return int(handle.value)

    def map(self, address: int, pages: Sequence[int]) -> None:
        """Put pages at consecutive addresses, for reading and writing."""
        size, mapped = self.granularity, 0
        try:
            for page in pages:
                self._call(
                    "cuMemMap", ctypes.c_uint64(address + mapped * size), ctypes.c_size_t(size), ctypes.c_size_t(0),
                    ctypes.c_uint64(page), ctypes.c_uint64(0),
                )  # fmt: skip
                mapped += 1
            self._call(
                "cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(len(pages) * size),
                ctypes.byref(self._access), ctypes.c_size_t(1),
            )  # fmt: skip
        except BaseException:
            if mapped:
                self.unmap(address, mapped)
            raise

    def unmap(self, address: int, pages: int) -> None:
        """Undo `map` of so many pages; nothing enqueued uses them."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(pages * self.granularity))

    def destroy(self, page: int) -> None:
        """Give a page back."""
        self._call("cuMemRelease", ctypes.c_uint64(page))

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back, in which nothing is mapped."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """The range as uint8 [nbytes]; its first page is mapped."""
        described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        holder = type("DeviceRange", (), {"__cuda_array_interface__": described})()
        return torch.as_tensor(holder, device=self._device)

    def _call(self, name: str, *args: Any) -> None:
        code = int(getattr(self._cuda, name)(*args))
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the GPU has no memory left")
        if code:
            raise RuntimeError(f"{name} gave CUDA error {code}")
