"""Compiles kernels for a GPU that need not be there; prints how the driver has to launch them, as JSON by name.

Each: threads, how arguments are packed, and pointers to scratch memory behind them (`launch.address_of`).
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiermoe.kernels.triton import expert_ffn, tables
from tiermoe.kernels.triton.expert_ffn import PAD
from tiermoe.kernels.triton.launch import address_of


def found(
    kernel: Any, kinds: str, constants: dict[str, Any], warps: int = 4, compiled_in: dict[str, int] | None = None
) -> list[Any]:
    """kinds: of the arguments, in order. compiled_in: integers that Triton makes constants."""
    names, fixed = kernel.arg_names, constants | (compiled_in or {})
    given = dict(zip(names, kinds.split(), strict=False))
    source = ASTSource(
        fn=kernel, signature={name: "constexpr" if name in fixed else given[name] for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()}, attrs={},
    )  # fmt: skip
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3})
    address = address_of(compiled, len(names) - len(constants))
    assert address is not None, kernel.__name__
    return [address.threads, list(address.packed), address.nulls]


def main() -> None:
    x, blocks = "*bf16", {"M": 16, "N": 32, "K": 64, "EVEN": True, "WIDEN": False}
    sizes = {"BLOCK": tables.BLOCK, "N": tables.SCORES, "K": tables._WIDTH}
    ids, counts = "*i32 *i32 *i32 *i32", "i32 " * 17
    print(json.dumps({
        "_read": found(tables._read, f"{ids} {'*i32 ' * 6} {counts}", {"PRODUCTS": 0, **sizes}),
        "_read of one router": found(
            tables._read, f"{ids} {x} {x} {x} *i32 *i32 *i32 {counts}", {"PRODUCTS": 1, **sizes}
        ),
        "_copy": found(tables._copy, "*i32 *i32 i32", {"BLOCK": 1024}),
        "_copy of one": found(tables._copy, "*i32 *i32 i32", {"BLOCK": 1024}, 4, {"count": 1}),
        "_gate_up": found(
            expert_ffn._gate_up, f"{x} *i64 {x} {x} {x} *i32 i32 i32 i32 i32",
            {"BIAS": False, "ACTIVATION": 0, **blocks, "PADDED": PAD},
        ),
        "_down": found(expert_ffn._down, f"{x} *i64 {x} {x} {x} *i32 i32 i32 i32", {"BIASED": 0, **blocks}),
        "_combine": found(expert_ffn._combine, f"{x} *fp32 {x} i32 i32", {"MOST": 8, "BLOCK": 1024}),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
