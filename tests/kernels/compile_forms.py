"""Compiles the kernels of published forms for GPUs that need not be there; prints a line of JSON for each.

    compile_forms.py ARCHITECTURE [CASE ..]       e.g. 90 mxfp4
    compile_forms.py page FILE                    writes the table of a page from such lines on its standard input

Each: the case, the kernel, the row class, registers and spilled bytes as ptxas says, bytes of shared memory, and of a
pass of the loop the load instructions and the asynchronous copies by their bytes, and the weights of a thread. Sizes
are those of published models.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from compile_expert_ffn import _ALIGNED, ptxas
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiermoe.kernels.expert_ffn import RowClass
from tiermoe.kernels.forms import BLOCKS, ExpertForm, MatrixForm, layout_bytes
from tiermoe.kernels.pack import BITS, PackedShape
from tiermoe.kernels.packed_slots import packed_shapes
from tiermoe.kernels.triton.form_linear import TritonMatrix
from tiermoe.kernels.triton.forms import DecodingKernel, TritonFormKernel, TritonPackedKernel
from tiermoe.kernels.triton.launch import Launch

_TYPES = {
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
}  # fmt: skip
_QWEN3_30B, _GPT_OSS, _DEEPSEEK_V3 = (2048, 768), (2880, 2880), (7168, 2048)


def _plain(kind: str, sizes: tuple[int, int], **options: Any) -> ExpertForm:
    hidden, neurons = sizes
    of = MatrixForm(kind, neurons, hidden, **options)
    return ExpertForm(down=replace(of, outputs=hidden, inputs=neurons, order=False), gate=of, up=of)


def _gpt_oss(kind: str) -> ExpertForm:
    hidden, neurons = _GPT_OSS
    gate_up = MatrixForm(kind, 2 * neurons, hidden)
    return ExpertForm(down=MatrixForm(kind, hidden, neurons), gate_up=gate_up, interleaved=True, bias="BF16")


# label -> the form, the activation
CASES: dict[str, tuple[ExpertForm, str]] = {
    "bfloat16": (_plain("bfloat16", _QWEN3_30B), "silu"),
    "gpt-oss bfloat16": (_gpt_oss("bfloat16"), "gpt_oss"),
    "fp8_block": (_plain("fp8_block", _QWEN3_30B, scale="BF16"), "silu"),
    "fp8_block DeepSeek": (_plain("fp8_block", _DEEPSEEK_V3), "silu"),
    "fp8_channel": (_plain("fp8_channel", _QWEN3_30B, scale="BF16"), "silu"),
    "fp8_tensor": (_plain("fp8_tensor", _QWEN3_30B), "silu"),
    "mxfp4": (_gpt_oss("mxfp4"), "gpt_oss"),
    "nvfp4": (_plain("nvfp4", _QWEN3_30B), "silu"),
    "int4": (_plain("int", _QWEN3_30B, bits=4, group=128), "silu"),
    "int4 zeros": (_plain("int", _QWEN3_30B, bits=4, group=128, zeros=True), "silu"),
    "int4 order": (_plain("int", _QWEN3_30B, bits=4, group=128, zeros=True, order=True), "silu"),
    "int8": (_plain("int", _QWEN3_30B, bits=8, group=128), "silu"),
    **{kind: (_plain(kind, _QWEN3_30B), "silu") for kind in BLOCKS},
    "mxfp8": (_plain("fp8_block", _QWEN3_30B, block=1, group=32, scale="F8_E8M0"), "silu"),
}
_SQUARE = 2048, 2048
# matrices of the dense part
LINEAR = {
    "linear fp8_block": MatrixForm("fp8_block", *_SQUARE, scale="BF16"),
    "linear fp8_channel": MatrixForm("fp8_channel", *_SQUARE, scale="BF16"),
    "linear int4": MatrixForm("int", *_SQUARE, bits=4, group=128, zeros=True),
    **{f"linear {kind}": MatrixForm(kind, *_SQUARE) for kind in ("mxfp4", "q8_0", "q4_k", "q5_k", "q6_k")},
}
# replicas by bits
PACKED = {f"replica, {bits} bit{'s' if bits > 1 else ''}": PackedShape(*_QWEN3_30B, bits, 64) for bits in BITS}


@cache
def kernel_of(case: str) -> DecodingKernel:
    if case in PACKED:
        packed = [torch.empty((1, *shape), dtype=dtype) for dtype, shape in packed_shapes(PACKED[case])]
        return TritonPackedKernel(packed, PACKED[case], "silu", torch.bfloat16)
    form, activation = CASES[case]
    slots = [torch.empty((1, layout_bytes({name: what})), dtype=torch.uint8) for name, what in form.parts().items()]
    return TritonFormKernel(slots, form, activation, torch.nn.functional.silu, torch.bfloat16)


def compiled(launch: Launch, operands: tuple[torch.Tensor, ...], architecture: int) -> Any:
    """As a launch compiles it, with aligned pointers and sizes that 16 divides. operands: of the slots, or a matrix."""
    kernel, fixed = launch.kernel, {**launch.fixed, "WIDEN": False}
    names = kernel.arg_names
    slots = [_TYPES[tensor.dtype] for tensor in operands]
    first = {"_form_linear": ["*bf16"], "_form_rows": ["*i64"]}.get(launch.name, ["*bf16", "*i64"])
    given = [*first, *slots, "*bf16", *(["*i32"] if "table" in names else [])]
    counts = len(names) - len(given) - sum(name in fixed for name in names)
    types = dict(zip(names, [*given, *["i32"] * counts], strict=False))
    aligned = {name for name, kind in types.items() if kind.startswith("*") or name in ("H", "STRIDE")}
    source = ASTSource(
        fn=kernel, signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items() if name in names},
        attrs={(names.index(name),): _ALIGNED for name in aligned},
    )  # fmt: skip
    options = {name: value for name, value in fixed.items() if name not in names}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def launches_of(case: str, name: RowClass) -> list[tuple[Launch, tuple[torch.Tensor, ...]]]:
    """The kernels of a case, and what each gets of the slots."""
    if case not in LINEAR:
        kernel = kernel_of(case)
        return list(zip(kernel.products[name], kernel.operands, strict=True))
    form = LINEAR[case]
    octets = {part: torch.zeros(layout_bytes({part: what}), dtype=torch.uint8) for part, what in form.parts().items()}
    matrix = TritonMatrix(form, octets)
    few, more, rows, _ = matrix.launches
    return [(launch, matrix.operands) for launch in ([few, rows] if name == "decode" else [more])]


def facts_of(case: str, name: RowClass, architecture: int) -> list[dict[str, Any]]:
    found = []
    for launch, operands in launches_of(case, name):
        built = compiled(launch, operands, architecture)
        ptx, fixed = built.asm["ptx"], launch.fixed
        loop = loop_of(ptx)
        matrices = 2 if "GATE" in launch.kernel.arg_names else 1
        weights = matrices * fixed["N"] * fixed["K"] // (32 * fixed["num_warps"])
        found.append({
            "case": case, "kernel": launch.name, "class": name, "sm": architecture, "shared": built.metadata.shared,
            "weights": weights, "loads": dict(Counter(loads_of(loop))), "copies": dict(Counter(copies_of(loop))),
            "by": sorted({w for w in ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "fma.rn.f32") if w in ptx}),
            "flushes": ".ftz" in ptx, **ptxas(ptx),
        })  # fmt: skip
    return found


def loop_of(ptx: str) -> str:
    """The longest piece from a label to a branch back to it."""
    pieces = [""]
    for label in re.finditer(r"^(\$L__BB\w+):", ptx, re.MULTILINE):
        ends = [found.end() for found in re.finditer(rf"bra(?:\.uni)?\s+{re.escape(label[1])};", ptx)]
        pieces += [ptx[label.start() : end] for end in ends if end > label.start()]
    return max(pieces, key=len)


def loads_of(ptx: str) -> list[int]:
    """The bytes of each load instruction."""
    return [
        int(vector or 1) * int(bits) // 8 for vector, bits in re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bu](\d+)", ptx)
    ]


def copies_of(ptx: str) -> list[int]:
    """The bytes of each asynchronous copy to shared memory."""
    return [int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\S* \[[^,]*, \[[^,]*, (0x[0-9a-f]+)", ptx)]


def page(file: Path, lines: Iterable[str]) -> None:
    """Write the table `forms` of a page: the most of all architectures; copies and loads as on sm_86."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        facts = json.loads(line)
        found.setdefault((facts["case"], facts["kernel"].removeprefix("_form_"), facts["class"]), []).append(facts)
    rows = ["| form | kernel | rows | sm | registers | spilled, B | shared, KiB | copies and loads, B: times |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for key, all_of in found.items():
        sms = " ".join(str(facts["sm"]) for facts in sorted(all_of, key=lambda facts: facts["sm"]))
        registers, spilled, shared = (max(facts.get(n, 0) for facts in all_of)
                                      for n in ("registers", "spilled", "shared"))  # fmt: skip
        sample = min(all_of, key=lambda facts: abs(facts["sm"] - 86))
        times = ", ".join(f"{n}: {count}" for n, count in sorted(sample["copies"].items(), key=lambda x: -int(x[0])))
        plain = ", ".join(f"{n}: {count}" for n, count in sorted(sample["loads"].items(), key=lambda x: -int(x[0])))
        rows.append(f"| {' | '.join(key)} | {sms} | {registers} | {spilled} | {shared / 1024:.0f} | {times}; {plain} |")
    before, rest = file.read_text().split("<!-- table: forms -->")
    after = rest.split("<!-- end -->", 1)[1]
    file.write_text(before + "<!-- table: forms -->\n" + "\n".join(rows) + "\n<!-- end -->" + after)


if __name__ == "__main__" and sys.argv[1] == "page":
    page(Path(sys.argv[2]), sys.stdin)
elif __name__ == "__main__":
    for case in sys.argv[2:] or [*CASES, *PACKED, *LINEAR]:
        for row_class in ("decode", "prefill"):
            for facts in facts_of(case, row_class, int(sys.argv[1])):  # type: ignore[arg-type]
                print(json.dumps(facts), flush=True)
