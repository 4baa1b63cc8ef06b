"""Compiles the expert kernels for GPUs that need not be there; prints a line of JSON for each.

    compile_expert_ffn.py ARCHITECTURE [CLASS CANDIDATE [DTYPE]]      e.g. 90 decode 0 bf16

Without a class: every candidate of every class. Each: which kernel, the bytes of shared memory, and what ptxas says of
registers and spills, where it is found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiermoe.kernels.expert_ffn import RowClass
from tiermoe.kernels.triton import attention, expert_ffn, tables
from tiermoe.kernels.triton.expert_ffn import PAD, Blocks, shapes_for

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ALIGNED = [["tt.divisibility", 16]]


def compiled(kernel: Any, types: dict[str, str], fixed: dict[str, Any], architecture: int, blocks: Blocks) -> Any:
    """As a launch compiles it, with aligned pointers and sizes that 16 divides."""
    names = kernel.arg_names
    aligned = {name for name, kind in types.items() if kind.startswith("*") or name in ("H", "STRIDE")}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): _ALIGNED for name in aligned},
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def ptxas(ptx: str) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills; empty where no assembler that comes with Triton takes it."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        for program in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"), reverse=True):
            command = [str(program), "-v", f"-arch={target[1]}", str(file), "-o", str(file.with_suffix(".bin"))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found = [re.search(p, done.stderr) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
                return {n: int(m[1]) for n, m in zip(("registers", "spilled"), found, strict=True) if m is not None}
    return {}


def compile_all(architecture: int) -> None:
    for name, shapes in shapes_for(torch.bfloat16).items():
        for candidate in range(len(shapes)):
            compile_one(architecture, name, candidate)
            compile_one(architecture, name, candidate, biased=True)


def compile_one(architecture: int, name: RowClass, candidate: int, dtype: str = "bf16", biased: bool = False) -> None:
    """biased: with gpt-oss's biases and activation."""
    shape = shapes_for(DTYPES[dtype])[name][candidate]
    x, ints = f"*{dtype}", {"first_tile": "i32", "H": "i32", "STRIDE": "i32"}
    types = {"hidden": x, "pairs": "*i64", "gate_up": x, "bias": x, "activations": x, "table": "*i32"}
    types |= {"top_k": "i32"} | ints
    alike = {"M": shape.M, "EVEN": True, "WIDEN": False}
    fixed = alike | {"BIAS": biased, "ACTIVATION": 4 if biased else 0, "PADDED": PAD}
    kernels = {
        "gate_up": (expert_ffn._gate_up, types, fixed, shape.gate_up),
        "down": (
            expert_ffn._down,
            {"activations": x, "pairs": "*i64", "down": x, "bias": x, "y": x, "table": "*i32"} | ints,
            alike | {"BIASED": 2880 if biased else 0}, shape.down,
        ),
    }  # fmt: skip
    for which, (kernel, kinds, values, blocks) in kernels.items():
        built = compiled(kernel, kinds, values | {"N": blocks.N, "K": blocks.K}, architecture, blocks)
        report(which, str(shape), built)
    if name == "decode" and candidate == 0 and not biased:
        one = Blocks(1, 1, 4, 3)
        types = {"y": x, "weights": "*fp32", "out": x, "top_k": "i32", "H": "i32"}
        report("combine", "", compiled(expert_ffn._combine, types, {"MOST": 8, "BLOCK": 1024}, architecture, one))
        types = {"source": "*i32", "target": "*i32", "count": "i32"}
        report("fetch", "", compiled(tables._copy, types, {"BLOCK": 1024}, architecture, one))
        types = dict.fromkeys(("target", "first", "second", "third"), "*i32") | dict.fromkeys(tables._COUNTS, "i32")
        types |= {"wide": x, "hidden": x, "router": x, "bias": "*i32", "next_router": "*fp32", "next_bias": "*fp32"}
        for products in range(3):
            values = {"PRODUCTS": products, "BLOCK": tables.BLOCK, "N": tables.SCORES, "K": tables._WIDTH}
            report("read", "", compiled(tables._read, types | {"H": "i32"}, values, architecture, one))
        arrays = dict.fromkeys(("query", "k_new", "v_new", "k_cache", "v_cache", "sinks"), x)
        types = arrays | {"index": "*i64"} | dict.fromkeys(("starts_q", "starts_k"), "*i32")
        types |= dict.fromkeys(("partial", "maxima", "sums"), "*fp32") | {"scale": "fp32"}
        types |= dict.fromkeys(("heads", "rows", "kv_heads", "window"), "i32")
        sizes = {"GROUP": 8, "M": 16, "N": attention._KEYS, "D": 128, "WIDTH": 128, "KEYS": attention.SPLIT}
        values = sizes | {"SINKS": False, "WIDEN": False}
        report("attend", "", compiled(attention._attend, types, values, architecture, Blocks(1, 1, 4, 2)))


def report(kernel: str, shape: str, built: Any) -> None:
    operations = sorted({w for w in ("wgmma.mma_async", "mma.sync", "cp.async.cg", "cp.async.ca", "ld.global.v4")
                         if w in built.asm["ptx"]})  # fmt: skip
    facts = {"kernel": kernel, "shape": shape, "shared": built.metadata.shared, "operations": operations}
    print(json.dumps(facts | ptxas(built.asm["ptx"])), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        compile_all(int(sys.argv[1]))
    else:
        compile_one(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])  # type: ignore[arg-type]
