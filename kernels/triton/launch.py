"""Launches of Triton kernels by handle: what Triton derives from the arguments of every launch is derived once.

`kernel[grid](...)` binds and specialises the arguments and looks the compiled kernel up, some 20 us of Python. A
`Launch` keeps the compiled kernel for each combination of what Triton specialises: types, pointers that 16 divides,
integers. Interpreted kernels have no handle.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction


def ceil_div(count: int, size: int) -> int:
    """`triton.cdiv` of the host's integers, without its way through Triton's own interpreter of constants."""
    return -(-count // size)


class Launch:
    """A kernel with fixed constants and options, for tensors of one device.

    Args:
        fixed: the constants, which are the kernel's last parameters in this order, then options such as `num_warps`.

    Attributes:
        handles: compiled kernels by what Triton specialises.
    """

    __slots__ = ("_constants", "_fixed", "_kernel", "_loose", "handles")

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        names = list(kernel.arg_names)
        constants = [name for name in fixed if name in names]
        if constants != names[len(names) - len(constants) :]:
            raise ValueError(f"the constants {constants} are not the last parameters of {names}")
        self._kernel, self._fixed = kernel, fixed
        self._constants = tuple(fixed[name] for name in constants)
        self._loose: frozenset[int] | None = None  # integers that Triton does not specialise
        if not isinstance(kernel, InterpretedFunction):
            self._loose = frozenset(i for i, p in enumerate(kernel.params) if p.do_not_specialize)
        self.handles: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Enqueue the kernel on the current stream of the current device."""
        loose = self._loose
        if loose is None:
            self._kernel[grid](*args, **self._fixed)
            return
        key = tuple([
            (arg.dtype, arg.data_ptr() & 15 == 0) if isinstance(arg, torch.Tensor) else None if i in loose else arg
            for i, arg in enumerate(args)
        ])  # fmt: skip
        handle = self.handles.get(key)
        if handle is None:
            self.handles[key] = self._kernel[grid](*args, **self._fixed)
        else:
            handle[grid](*args, *self._constants)
