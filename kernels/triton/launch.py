"""Launches of Triton kernels by handle: what Triton derives from the arguments of every launch is derived once.

`kernel[grid](...)` binds and specialises the arguments, looks the compiled kernel up and packs them, some 20 us of
Python. A `Launch` keeps the compiled kernel for each combination of what Triton specialises (types, pointers that 16
divides, integers), and calls the driver itself (`launch.hpp`). Triton's own launch is for the first of a combination,
and for kernels that are interpreted or need more than an address: clusters, cooperative grids, scratch memory.

Hooks of `triton.knobs.runtime` see the first launch only.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from triton.runtime.interpreter import InterpretedFunction

from .. import _launch
from ..device import stream_of

# how `launch.hpp` packs an argument, and the bytes of its parameter
_PACKED = {"i32": (2, 4), "u32": (2, 4), "i64": (1, 8), "u64": (1, 8), "fp32": (3, 4), "f32": (3, 4)}
_LEFT_OUT, _POINTER = (0, 0), (1, 8)
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+\.[a-z](\d+)\b[^,]*?[\w$]+(\[\d+\])?\s*(?:,|$)")


def ceil_div(count: int, size: int) -> int:
    """`triton.cdiv` of the host's integers, without its way through Triton's own interpreter of constants."""
    return -(-count // size)


class Address(NamedTuple):
    """How the driver launches a compiled kernel.

    packed: of each argument, as in `launch.hpp`. nulls: pointers after them to scratch memory that it does not use.
    """

    threads: int
    shared: int
    packed: bytes
    nulls: int


def address_of(compiled: Any, count: int) -> Address | None:
    """Of a `triton.compiler.CompiledKernel` with `count` arguments before its constants.

    None: Triton itself has to launch it. What Triton's signature says must agree with what was compiled: the parameters
    and the threads in the PTX, which a version of Triton may pass in another way.
    """
    facts = compiled.metadata
    if facts.target.backend != "cuda" or facts.num_ctas != 1 or facts.launch_cooperative_grid or facts.launch_pdl:
        return None
    if facts.global_scratch_size or facts.profile_scratch_size:
        return None
    found = [_packed(kind) for kind in compiled.src.signature.values()]
    if None in found[:count] or any(kind != _LEFT_OUT for kind in found[count:]):
        return None
    ways = [kind for kind in found[:count] if kind is not None]
    entries = _ENTRY.findall(compiled.asm["ptx"])
    if len(entries) != 1:
        return None
    inside, after = entries[0]
    parameters = [int(bits) // 8 if not array else 0 for bits, array in _PARAMETER.findall(inside)]
    expected = [nbytes for _, nbytes in ways if nbytes]
    nulls = len(parameters) - len(expected)
    if inside.count(".param") != len(parameters) or nulls < 0 or parameters != expected + [8] * nulls:
        return None
    threads = 32 * facts.num_warps
    if not re.search(rf"\.reqntid\s+{threads}\b", after):
        return None
    return Address(threads, facts.shared, bytes(way for way, _ in ways), nulls)


def _packed(kind: object) -> tuple[int, int] | None:
    if not isinstance(kind, str):
        return None
    if kind == "constexpr":  # also an integer that is 1
        return _LEFT_OUT
    return _POINTER if kind.startswith("*") else _PACKED.get(kind)


@cache
def _driver() -> tuple[_launch.Driver, ctypes.CDLL]:
    """Of this machine's GPUs. Raises OSError or AttributeError: there is none with these calls."""
    library = ctypes.CDLL("libcuda.so.1")
    names = ("cuLaunchKernel", "cuGetErrorString", "cuCtxSetCurrent")
    at = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    return _launch.Driver(*at), library


class Launch(_launch.Launch):
    """A kernel with fixed constants and options, for tensors of one device: `launch(grid, *args)`.

    Enqueues the kernel on the current stream of the current device. Arguments are tensors, integers and floats.

    Args:
        fixed: the constants, which are the kernel's last parameters in this order, then options such as `num_warps`.

    Attributes:
        kernel: of Triton. name: its name. fixed: its constants and options.
        known: combinations of arguments for which there is a compiled kernel.
    """

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        names = list(kernel.arg_names)
        constants = [name for name in fixed if name in names]
        if constants != names[len(names) - len(constants) :]:
            raise ValueError(f"the constants {constants} are not the last parameters of {names}")
        self.kernel, self.fixed, self.name = kernel, fixed, kernel.__name__
        self._constants = tuple(fixed[name] for name in constants)
        parameters = () if isinstance(kernel, InterpretedFunction) else kernel.params
        super().__init__([i for i, p in enumerate(parameters) if p.do_not_specialize])

    def first(self, grid: tuple[int, int, int], *args: Any) -> tuple[Any, ...] | Callable[..., object]:
        """The first launch of a combination. Returns what `launch.hpp` needs for others, or a function to call."""
        compiled = self.kernel[grid](*args, **self.fixed)
        if isinstance(self.kernel, InterpretedFunction):
            return self._interpreted
        found = address_of(compiled, len(args))
        if found is None or not isinstance(compiled.function, int):
            return partial(self._by_triton, compiled)
        driver, library = _driver()
        context = ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(context))
        return driver, compiled.function, context.value or 0, *found, stream_of(torch.device("cuda"))

    def _interpreted(self, grid: tuple[int, int, int], *args: Any) -> None:
        self.kernel[grid](*args, **self.fixed)

    def _by_triton(self, compiled: Any, grid: tuple[int, int, int], *args: Any) -> None:
        compiled[grid](*args, *self._constants)
