"""The Triton expert kernels, interpreted where there is no GPU, against the exact result; and what they compile to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import ACTIVATIONS, Forbidden, assert_near, exact, gate_for, groups_of, pool_of, rows_for

from tiermoe.kernels.expert_ffn import DECODE_ROWS, ROW_CLASSES, SHORT_ROWS, Group, Operands, TorchKernel, row_class

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/cuda runs these cases on the GPU", allow_module_level=True)

from tiermoe.kernels.triton.expert_ffn import PAD, TritonKernel, shapes_for
from tiermoe.kernels.triton.tables import TableRing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernel_of(pool: Operands, activation: str = "silu") -> TritonKernel:
    return TritonKernel(pool, activation, Forbidden())


def unwritten(pairs: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((len(pairs), width), float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_class_of_rows_against_the_exact_result(activation: str, dtype: torch.dtype) -> None:
    """Odd sizes: neither H nor I a multiple of a block; pairs that belong to no group stay as they are."""
    pool = pool_of(3, 37, 50, dtype)
    sizes = [1, 5, DECODE_ROWS + 1, SHORT_ROWS + 6]
    hidden, pairs = rows_for([*sizes, 3], 2, 50, dtype)
    groups = groups_of(sizes, [2, 0, 1, 2], 37)
    found = unwritten(pairs, 50, dtype)
    kernel_of(pool, activation).run(hidden, pairs, groups, 2, found)
    assert found[pairs[sum(sizes) :]].isnan().all()
    assert_near(found, exact(pool, activation, hidden, pairs, groups, 2))


@pytest.mark.parametrize("rows", range(1, DECODE_ROWS + 1))
def test_every_decode_row_count(rows: int) -> None:
    pool = pool_of(2, 16, 32)
    hidden, pairs = rows_for([rows], 1, 32, torch.float32)
    groups = groups_of([rows], [1], 16)
    found = unwritten(pairs, 32, torch.float32)
    kernel_of(pool).run(hidden, pairs, groups, 1, found)
    assert_near(found, exact(pool, "silu", hidden, pairs, groups, 1))


@pytest.mark.parametrize("neurons", [1, PAD - 1, PAD, PAD + 1])
@pytest.mark.parametrize("width", [1, 64, 130])
def test_sizes_around_blocks(neurons: int, width: int) -> None:
    pool = pool_of(2, neurons, width, torch.bfloat16)
    hidden, pairs = rows_for([2, 1], 1, width, torch.bfloat16)
    groups = groups_of([2, 1], [1, 0], neurons)
    found = unwritten(pairs, width, torch.bfloat16)
    kernel_of(pool).run(hidden, pairs, groups, 1, found)
    assert_near(found, exact(pool, "silu", hidden, pairs, groups, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_segments_give_the_whole_in_either_order_and_in_one_call_or_two(dtype: torch.dtype) -> None:
    """FFN = FFN(top) + FFN(bottom), wherever in the pool they begin; to the last bit the same however they run."""
    pool = pool_of(2, 24, 40, dtype)
    sizes = [3, 20]
    hidden, pairs = rows_for(sizes, 1, 40, dtype)
    top: list[Group] = [(0, 3, 5, 11, False), (3, 23, 30, 7, False)]
    bottom: list[Group] = [(0, 3, 33, 13, False), (3, 23, 1, 17, False)]
    kernel = kernel_of(pool)

    def added(groups: list[Group]) -> list[Group]:
        return [(*group[:4], True) for group in groups]

    together, apart, turned = (unwritten(pairs, 40, dtype) for _ in range(3))
    kernel.run(hidden, pairs, [top[0], *added(bottom[:1]), top[1], *added(bottom[1:])], 1, together)
    for groups in (top, added(bottom)):
        kernel.run(hidden, pairs, groups, 1, apart)
    for groups in (bottom, added(top)):
        kernel.run(hidden, pairs, groups, 1, turned)
    assert_near(together, exact(pool, "silu", hidden, pairs, top + added(bottom), 1))
    assert torch.equal(together, apart)
    assert torch.equal(together, turned)


def test_the_other_groups_of_a_call_and_the_slot_change_no_bit() -> None:
    pool = pool_of(3, 24, 32)
    pool.gate_up[2], pool.down[2] = pool.gate_up[0], pool.down[0]
    sizes = [SHORT_ROWS + 4, 1, DECODE_ROWS]
    hidden, pairs = rows_for(sizes, 1, 32, torch.float32)
    kernel = kernel_of(pool)
    together, apart = (unwritten(pairs, 32, torch.float32) for _ in range(2))
    kernel.run(hidden, pairs, groups_of(sizes, [0, 0, 1], 24), 1, together)
    for group in groups_of(sizes, [2, 2, 1], 24):
        kernel.run(hidden, pairs, [group], 1, apart)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", ROW_CLASSES)
def test_every_candidate_of_a_class_agrees(name: str) -> None:
    """Run on float16, since the interpreter multiplies it as it is."""
    rows = {"decode": 3, "short": DECODE_ROWS + 2, "prefill": SHORT_ROWS + 2}[name]
    pool = pool_of(2, 70, 96, torch.float16)
    hidden, pairs = rows_for([rows], 1, 96, torch.float16)
    groups = groups_of([rows], [1], 70)
    expected = exact(pool, "silu", hidden, pairs, groups, 1)
    for shape in shapes_for(torch.float16)[name]:  # type: ignore[index]
        found = unwritten(pairs, 96, torch.float16)
        TritonKernel(pool, "silu", Forbidden(), shapes={name: shape}).run(  # type: ignore[dict-item]
            hidden, pairs, groups, 1, found
        )
        assert_near(found, expected)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_extremes_are_what_torch_gives(activation: str) -> None:
    """Also beside padding, where zero times infinity must not get in."""
    pool = Operands(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 1), None, None)
    hidden = torch.tensor([0.0, -0.0, 1e-30, -1e4, 1e4, float("inf"), float("nan")]).unsqueeze(1)
    pairs, groups = torch.arange(7), [(0, 7, 0, 1, False)]
    expected, found = torch.empty(7, 1), torch.empty(7, 1)
    TorchKernel(pool, gate_for(activation)).run(hidden, pairs, groups, 1, expected)
    kernel_of(pool, activation).run(hidden, pairs, groups, 1, found)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_no_groups_empty_groups_and_no_neurons() -> None:
    kernel = kernel_of(pool_of(1, 4, 8))
    y = torch.full((2, 8), 7.0)
    kernel.run(torch.zeros(2, 8), torch.arange(2), [], 1, y)
    kernel.run(torch.zeros(2, 8), torch.arange(2), [(1, 1, 0, 2, False)], 1, y)
    kernel.run(torch.zeros(2, 8), torch.arange(2), [(0, 1, 0, 0, True)], 1, y)
    assert (y == 7.0).all()


def test_strided_hidden_states_and_another_dtype() -> None:
    pool = pool_of(1, 4, 8)
    hidden, pairs = torch.randn(3, 16)[:, ::2], torch.arange(3)
    groups = groups_of([3], [0], 4)
    found = unwritten(pairs, 8, torch.float32)
    kernel_of(pool).run(hidden, pairs, groups, 1, found)
    assert_near(found, exact(pool, "silu", hidden, pairs, groups, 1))
    with pytest.raises(AssertionError, match="the reference was called"):
        kernel_of(pool).run(hidden.double(), pairs, groups, 1, found.double())


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": torch.zeros(2, 7)},
        {"hidden": torch.zeros(1, 8)},
        {"pairs": torch.arange(4, dtype=torch.int32)},
        {"pairs": torch.arange(8)[::2]},
        {"y": torch.zeros(3, 8)},
        {"y": torch.zeros(8, 4).t()},
        {"groups": [(0, 5, 0, 4, False)]},
        {"groups": [(-1, 1, 0, 4, False)]},
        {"groups": [(0, 1, 5, 4, False)]},
        {"groups": [(0, 1, -1, 4, False)]},
        {"groups": [(0, 1, 0, 5, False)]},
    ],
)
def test_what_lies_outside_is_refused(wrong: dict[str, object]) -> None:
    given: dict[str, object] = {"hidden": torch.zeros(2, 8), "pairs": torch.arange(4), "groups": [(0, 4, 4, 4, False)]}
    given |= {"top_k": 2, "y": torch.zeros(4, 8)} | wrong
    with pytest.raises(ValueError, match=r"hidden is|pairs must|y must|out of range|more pairs or neurons"):
        kernel_of(pool_of(2, 4, 8)).run(**given)  # type: ignore[arg-type]


def test_what_is_supported() -> None:
    plain = pool_of(2, 4, 8)
    assert TritonKernel.supports(plain, "silu")
    assert not TritonKernel.supports(plain, "mish")
    assert not TritonKernel.supports(plain, None)
    assert not TritonKernel.supports(Operands(plain.gate_up, plain.down, None, torch.zeros(2, 8)), "silu")
    assert not TritonKernel.supports(Operands(plain.gate_up[:, :, :1], plain.down, None, None), "silu")
    assert not TritonKernel.supports(Operands(plain.gate_up, plain.down.double(), None, None), "silu")
    with pytest.raises(ValueError, match="does not support activation mish"):
        kernel_of(plain, "mish")


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
def test_combine(top_k: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    pool, generator = pool_of(1, 4, 1030, dtype), torch.Generator().manual_seed(0)
    y = torch.randn(4 * top_k, 1030, generator=generator).to(dtype)
    shares = torch.rand(4, top_k, generator=generator).to(weights)
    expected = (y.double().view(4, top_k, 1030) * shares.double().unsqueeze(-1)).sum(dim=1)
    found = kernel_of(pool).combine(y, shares)
    assert found.dtype == dtype
    assert_near(found, expected)
    assert kernel_of(pool).combine(y[:0], shares[:0]).shape == (0, 1030)
    with pytest.raises(ValueError, match="y is"):
        kernel_of(pool).combine(y[1:], shares)


def test_rows_decide_the_class() -> None:
    classes = [row_class(rows) for rows in (1, DECODE_ROWS, DECODE_ROWS + 1, SHORT_ROWS, SHORT_ROWS + 1, 4096)]
    assert classes == ["decode", "decode", "short", "short", "prefill", "prefill"]


def test_a_table_on_the_cpu_is_a_tensor() -> None:
    ring = TableRing(torch.device("cpu"))
    assert ring.put([1, 2, 3]).tolist() == [1, 2, 3]
    assert ring.waits == 0


def compile_one(architecture: int, name: str, candidate: int, folder: Path) -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    program = Path(__file__).with_name("compile_expert_ffn.py")
    command = [sys.executable, str(program), str(architecture), name, str(candidate)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_fits(kernels: list[dict]) -> None:
    """Within the shared memory that any GPU from Ampere on has, asynchronous copies, tensor cores, nothing spilled."""
    for kernel in kernels:
        assert kernel["shared"] <= 100 << 10, kernel
        assert kernel.get("spilled", 0) == 0, kernel
        if kernel["kernel"] in ("gate_up", "down"):
            assert "cp.async.cg" in kernel["operations"], kernel
            assert {"mma.sync", "wgmma.mma_async"} & set(kernel["operations"]), kernel


def test_decode_compiles_for_a_gpu(tmp_path: Path) -> None:
    """For which it takes none."""
    assert_fits(compile_one(90, "decode", 0, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("name", "candidate"),
    [(name, i) for name, shapes in shapes_for(torch.bfloat16).items() for i in range(len(shapes))],
)
def test_every_shape_compiles(name: str, candidate: int, architecture: int, tmp_path: Path) -> None:
    assert_fits(compile_one(architecture, name, candidate, tmp_path))
