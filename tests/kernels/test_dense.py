"""Row operators against torch, alone and with each other; what is out of range is refused before it runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from form_cases import FORMS, form, random_parts
from torch.nn import functional

from tiermoe.actors.engine.serving.kv_rows import decode, encode, rounded
from tiermoe.kernels.dense import BINARY, TYPES, UNARY, Builder, Program, Value
from tiermoe.kernels.form_ffn import form_linear
from tiermoe.kernels.packed_ffn import Threads

Make = Callable[[Builder, list[Value]], Value]


def run(make: Make, *inputs: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """The value that `make` adds, for inputs [rows, ...]; in the type of the first."""
    builder, values = Builder(), []
    for i, tensor in enumerate(inputs):
        value = builder.new(tuple(tensor.shape[1:]))
        builder.step("load", TYPES[tensor.dtype], value, p=[i])
        values.append(value)
    made = make(builder, values)
    builder.step("store", TYPES[inputs[0].dtype], None, made, p=[len(inputs)])
    builder.end_segment()
    program, rows = builder.build(16, 0, {}, threads), inputs[0].shape[0]
    program.begin(rows, torch.tensor([0, rows], dtype=torch.int32), [])
    out = torch.empty((rows, *made.shape), dtype=inputs[0].dtype)
    program.run(0, *inputs, out)
    return out


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 4), (7, 3), (64, 9), (37, 1), (256, 130), (256, 1030)])
@pytest.mark.parametrize("threads", [1, 2])
def test_products(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs)
    for rows in (1, 2, 3, 4, 7):
        x = random(rows, inputs, dtype=dtype)

        def make(builder: Builder, values: list[Value]) -> Value:
            out = builder.new((outputs,))
            builder.linear(out, values[0], weight, builder.constant(bias), rounded=dtype == torch.bfloat16)
            return out

        expected = (x.double() @ weight.double().t() + bias.double()).to(dtype)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        found = run(make, x, threads=threads)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(found, run(make, x))  # threads change no bit


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_products_with_published_matrices(name: str, threads: int) -> None:
    """The bits of the kernel of that form; and a matrix of another width is refused."""
    of = form(name, 2100, 512)
    parts = random_parts(of, np.random.default_rng(0))
    for rows in (1, 2, 7):
        x = random(rows, 512)

        def make(builder: Builder, values: list[Value]) -> Value:
            out = builder.new((2100,))
            builder.form_linear(out, values[0], of, parts)
            return out

        expected = torch.from_numpy(form_linear(of, parts, x.numpy(), Threads()))
        assert torch.equal(run(make, x, threads=threads), expected)
    with pytest.raises(ValueError, match="a product of 512 numbers"):
        run(lambda b, v: b.form_linear(b.new((2101,)), v[0], of, parts), random(1, 512))  # type: ignore[arg-type, func-returns-value]


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "exp": torch.exp, "log": torch.log,
    "sigmoid": torch.sigmoid, "silu": functional.silu, "gelu": functional.gelu, "tanh": torch.tanh,
    "relu": torch.relu, "abs": torch.abs, "cos": torch.cos, "sin": torch.sin, "reciprocal": torch.reciprocal,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "square": torch.square,
    "logical_not": lambda x: (x == 0).float(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    x = random(3, 37).abs() + 0.1

    def make(builder: Builder, values: list[Value]) -> Value:
        out = builder.new((37,))
        builder.step("unary", UNARY.index(name), out, values[0])
        return out

    torch.testing.assert_close(run(make, x), FUNCTIONS[name](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("b", "spread"), [((6, 8), (1, 48)), ((8,), (1, 8)), ((6, 1), (8, 6)), ((1,), (1, 1))], ids=str
)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "gt"])
def test_pairs_spread_their_second_operand(name: str, b: tuple[int, ...], spread: tuple[int, int]) -> None:
    one, two = random(3, 6, 8), random(3, *b)

    def make(builder: Builder, values: list[Value]) -> Value:
        out = builder.new((6, 8))
        builder.step("binary", BINARY.index(name), out, *values, p=[1, 48, *spread])
        return out

    expected = getattr(torch, name)(one, two if len(b) == 2 else two[:, None]).float()
    torch.testing.assert_close(run(make, one, two), expected)


def test_results_are_rounded_as_bfloat16_is() -> None:
    x = random(4, 50, dtype=torch.bfloat16)

    def make(builder: Builder, values: list[Value]) -> Value:
        out = builder.new((50,))
        builder.step("binary", BINARY.index("mul"), out, values[0], values[0], p=[1, 50, 1, 50], rounded=True)
        return out

    assert torch.equal(run(make, x), x * x)


def test_norms_softmax_and_the_largest() -> None:
    x, weight = random(3, 4, 24), random(24)
    inputs = {"softmax": (lambda t: torch.softmax(t, -1)), "norm": (lambda t: functional.layer_norm(t, (24,), weight))}
    for code, expected in inputs.items():

        def make(builder: Builder, values: list[Value], code: str = code) -> Value:
            out = builder.new((4, 24))
            kept = builder.constant(weight) if code == "norm" else None
            builder.step(code, 0, out, values[0], kept, p=[24], f=[1e-5])
            return out

        torch.testing.assert_close(run(make, x), expected(x), rtol=1e-5, atol=1e-6)

    def largest(builder: Builder, values: list[Value]) -> Value:
        out, at, again = (builder.new((4, 5)) for _ in range(3))
        builder.step("topk", 0, out, values[0], at, p=[24, 5])
        builder.step("gather", 0, again, values[0], at, p=[24, 5])
        return again

    assert torch.equal(run(largest, x), x.topk(5).values)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, sinks: torch.Tensor | None,
              softcap: float) -> torch.Tensor:  # fmt: skip
    """q [rows, heads, D], the last rows of keys k [keys, kv, D] -> [rows, heads, Dv]."""
    rows, keys = q.shape[0], k.shape[0]
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,khd->hrk", q, k) * 0.3
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at, row = torch.arange(keys), torch.arange(rows)[:, None] + keys - rows
    hidden = (at > row) | ((row - at >= window) if window else torch.zeros(rows, keys, dtype=torch.bool))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, rows, 1)], -1)
    return torch.einsum("hrk,khd->rhd", torch.softmax(scores, -1)[..., :keys], v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("heads", "kv", "width"), [(4, 2, 16), (6, 1, 24), (2, 2, 7)])
@pytest.mark.parametrize("coded", [None, "int8", "fp8"])
def test_attention_over_scattered_slots(
    heads: int, kv: int, width: int, softcap: float, sinks: bool, window: int, dtype: torch.dtype, coded: Any
) -> None:
    """Sequences of several lengths and rows; keys in any slots; the new rows are written after the old were read.

    In 8 bits, all are as `kv_rows` stores and reads them.
    """
    past, new = (11, 0, 3, 30), (1, 2, 3, 1)
    if window:
        past = tuple(min(p, window - 1) for p in past)  # type: ignore[assignment]
    rows, slots = sum(new), 64
    cache_k, cache_v = random(slots, kv, width, dtype=dtype), random(slots + 1, kv, width, dtype=dtype)[:slots]
    q, k, v = (random(rows, n, width, dtype=dtype) * 0.5 for n in (heads, kv, kv))
    own_k, own_v, bound = k, v, list[Any]()
    if coded is not None:
        bound = [coded, dtype == torch.bfloat16]
        cache_k, cache_v = encode(cache_k, coded), encode(cache_v, coded)
        stored_k, stored_v, own_k, own_v = *(encode(x, coded) for x in (k, v)), *(rounded(x, coded) for x in (k, v))
    given = random(heads) if sinks else None
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(3))
    read, expected, used, row = [], [], 0, 0
    for length, own in zip(past, new, strict=True):
        there = order[used : used + length]
        used += length
        read.append(torch.cat([there, torch.full((own,), -1)]))
        past_k, past_v = cache_k[there], cache_v[there]
        if coded is not None:
            past_k, past_v = (decode(x, width, coded, dtype) for x in (past_k, past_v))
        keys = torch.cat([past_k, own_k[row : row + own]]).float()
        values = torch.cat([past_v, own_v[row : row + own]]).float()
        expected.append(reference(q[row : row + own].float(), keys, values, window, given, softcap))
        row += own
    write = order[:rows] if window else order[used : used + rows]  # a window's new rows replace old ones
    builder = Builder()
    parts = [builder.new(tuple(x.shape[1:])) for x in (q, k, v)]
    for i, part in enumerate(parts):
        builder.step("load", TYPES[dtype], part, p=[i])
    out = builder.new((heads, width))
    builder.attend(out, *parts, given, 7, 0.3, softcap, rounded=False)
    builder.step("store", TYPES[torch.float32], None, out, p=[3])
    builder.end_segment()
    program: Program = builder.build(16, 1, {7: 0}, 1)
    program.bind(0, cache_k, cache_v, *bound)
    lengths = torch.tensor([0, *(p + n for p, n in zip(past, new, strict=True))], dtype=torch.int32)
    cu_rows = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
    program.begin(rows, cu_rows, [(torch.cat(read), write, lengths.cumsum(0).int(), window)])
    found = torch.empty(rows, heads, width)
    program.run(0, q, k, v, found)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert torch.equal(cache_k[write], k if coded is None else stored_k)
    assert torch.equal(cache_v[write], v if coded is None else stored_v)


@pytest.mark.parametrize(
    ("code", "widths", "p", "what"),
    [
        ("unary", (4, 5), [], "another width"),
        ("reduce", (3, 8), [3], "does not divide"),
        ("topk", (9, 8, 9), [8, 9], "k is out of range"),
        ("copy", (4, 8), [0, 6, 1, 1, 4, 0, 0, 1, 4], "reads out of range"),
        ("copy", (4, 8), [2, 0, 1, 1, 4, 0, 0, 1, 4], "ends out of range"),
        ("binary", (8, 8, 2), [1, 8, 1, 4], "too narrow"),
        ("attend", (8, 8, 4, 4), [2, 1, 4, 4, 3, 0], "no such"),
    ],
)
def test_numbers_out_of_range_are_refused(code: str, widths: tuple[int, ...], p: list[int], what: str) -> None:
    builder = Builder()
    builder.step(code, 1, *(builder.new((width,)) for width in widths), p=p)
    builder.end_segment()
    with pytest.raises(ValueError, match=what):
        builder.build(4, 1, {3: 0}, 1)


def test_a_step_whose_tables_do_not_fit_is_refused() -> None:
    builder = Builder()
    builder.step("load", 0, builder.new((4,)), p=[0])
    builder.end_segment()
    program = builder.build(4, 1, {}, 1)
    cu, keys = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="fewer keys"):
        program.begin(2, cu, [(None, torch.zeros(2, dtype=torch.int64), keys, 0)])
    with pytest.raises(ValueError, match="rows are out of range"):
        program.begin(5, torch.tensor([0, 5], dtype=torch.int32), [(None, torch.zeros(5).long(), cu, 0)])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_large_tensors_ask_for_huge_pages() -> None:
    """In a process of its own: torch reads the switch when it first allocates."""
    program = """
import tiermoe, torch
tensor = torch.empty(16 << 20)
middle, found = tensor.data_ptr() + tensor.nbytes // 2, ""
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        begin, end = (int(part, 16) for part in first.split("-"))
        inside = begin <= middle < end
    elif inside and first == "VmFlags:":
        found = line
print(found)
"""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "hg" in done.stdout.split(), done.stderr
