"""The Triton expert kernels, interpreted where there is no GPU, against the exact result; and what they compile to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import Forbidden, assert_near, exact, groups_of, pool_of, rows_for

from tiermoe.kernels.expert_ffn import DECODE_ROWS, ROW_CLASSES, SHORT_ROWS, Operands
from tiermoe.kernels.packed_ffn import FullLayer, Threads

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/cuda runs these cases on the GPU", allow_module_level=True)

from tiermoe.kernels.triton.expert_ffn import PAD, TritonKernel, shapes_for
from tiermoe.kernels.triton.tables import kernel_copy

SUM = 2.0**-22  # unit roundoff of float32 sums in docs/auto-notes.md: two bits to spare for tensor cores, which cut off


def kernel_of(pool: Operands, activation: str = "silu") -> TritonKernel:
    return TritonKernel(pool, activation, Forbidden())


def assert_exact(
    kernel: TritonKernel, pool: Operands, rows: list[int], slots: list[int], activation: str = "silu"
) -> None:
    """For so many rows of each expert, in these slots of the pool."""
    _, neurons, _, width = pool.gate_up.shape
    hidden, pairs = rows_for(rows, 1, width, pool.gate_up.dtype)
    groups = groups_of(rows, slots, neurons)
    found = torch.full((len(pairs), width), float("nan"), dtype=hidden.dtype)
    kernel.run(hidden, pairs, groups, 1, found)
    assert_near(found, exact(pool, activation, hidden, pairs, groups, 1))


@pytest.mark.parametrize("neurons", [1, PAD - 1, PAD, PAD + 1])
@pytest.mark.parametrize("width", [1, 64, 130])
def test_sizes_around_blocks(neurons: int, width: int) -> None:
    pool = pool_of(2, neurons, width, torch.bfloat16)
    assert_exact(kernel_of(pool), pool, [2, 1], [1, 0])


@pytest.mark.parametrize("activation", ["gpt_oss", "silu"])
@pytest.mark.parametrize("rows", [3, DECODE_ROWS + 2])
def test_biases(activation: str, rows: int) -> None:
    """gpt-oss dequantized: a width that no block divides; the slots beside the expert's are none of its."""
    pool = pool_of(3, 90, 144, torch.float32, biased=True)
    for tensor in (pool.gate_up, pool.down, pool.gate_up_bias, pool.down_bias):
        assert tensor is not None
        tensor[::2] = float("nan")
    assert TritonKernel.supports(pool, activation)
    assert_exact(kernel_of(pool, activation), pool, [rows], [1], activation)


@pytest.mark.parametrize("name", ROW_CLASSES)
def test_every_candidate_of_a_class_agrees(name: str) -> None:
    """Run on float16, since the interpreter multiplies it as it is."""
    rows = {"decode": 3, "short": DECODE_ROWS + 2, "prefill": SHORT_ROWS + 2}[name]
    pool = pool_of(2, 70, 96, torch.float16)
    for shape in shapes_for(torch.float16)[name]:  # type: ignore[index]
        kernel = TritonKernel(pool, "silu", Forbidden(), shapes={name: shape})  # type: ignore[dict-item]
        assert_exact(kernel, pool, [rows], [1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_a_kernel_copies_tables_of_any_type(dtype: torch.dtype) -> None:
    source = torch.arange(1500).to(dtype)
    target = torch.full((1510,), -1, dtype=dtype)
    kernel_copy(target[3:1503], source)
    assert target[3:1503].equal(source)
    assert (target[:3] == -1).all()
    assert (target[1503:] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_shape_compiles_for_a_gpu(architecture: int, tmp_path: Path) -> None:
    """For which it takes none.

    Within the shared memory that any GPU from Ampere on has, asynchronous copies, tensor cores, nothing spilled.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).with_name("compile_expert_ffn.py")), str(architecture)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["shape"] for kernel in kernels} >= {str(s) for of in shapes_for(torch.bfloat16).values() for s in of}
    for kernel in kernels:
        assert kernel["shared"] <= 100 << 10, kernel
        assert kernel.get("spilled", 0) == 0, kernel
        if kernel["kernel"] in ("gate_up", "down", "attend"):
            assert "cp.async.cg" in kernel["operations"], kernel
            assert {"mma.sync", "wgmma.mma_async"} & set(kernel["operations"]), kernel


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("unit", [2.0**-7, 2.0**-8])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_gpu_and_a_cpu_agree_within_the_stated_bound(rows: int, unit: float) -> None:
    """The bound of docs/auto-notes.md, at each component: a slot's kernel in bfloat16, the near-data one in float32.

    The interpreter cuts numbers off to bfloat16, which is twice the unit of a GPU, which rounds them: with that unit
    torch takes Triton's steps. One neuron that is left out exceeds the bound.
    """
    width, neurons = 256, 64
    pool = pool_of(1, neurons, width, torch.bfloat16)
    hidden, pairs = rows_for([rows], 1, width, torch.bfloat16)
    gate_up, down = pool.gate_up[0].float(), pool.down[0].float()
    here = torch.zeros_like(hidden)
    if unit == 2.0**-7:
        kernel_of(pool).run(hidden, pairs, groups_of([rows], [0], neurons), 1, here)
    else:
        gate, up = (hidden.float() @ gate_up[:, i].T for i in range(2))
        here = ((torch.nn.functional.silu(gate) * up).bfloat16().float() @ down).bfloat16()
    near = np.zeros((rows, width), np.float32)
    layer = FullLayer(_bits(pool.gate_up), _bits(pool.down), "bfloat16", "silu", Threads(1))
    order = np.arange(rows, dtype=np.int32)
    layer.run([(0, 0, rows)], order, np.ones(rows, np.float32), hidden.float().numpy(), near)

    def gamma(n: int) -> float:
        return n * SUM / (1 - n * SUM)

    x, gate_up, down = hidden.double(), gate_up.double(), down.double()
    gate, up = (x @ gate_up[:, i].T for i in range(2))
    off_gate, off_up = (2 * gamma(width) * (x.abs() @ gate_up[:, i].abs().T) for i in range(2))
    silu = gate * gate.sigmoid()
    a, y = (silu * up).abs(), (silu * up) @ down
    off = 1.1 * off_gate * (up.abs() + off_up) + silu.abs() * off_up + 8 * SUM * a
    sums = a @ down.abs()
    before = (off + unit * (a + off)) @ down.abs() + 2 * gamma(neurons) * sums
    bound = before * (1 + unit) + unit * y.abs()
    seen = (here.double() - torch.from_numpy(near).double()).abs()
    assert (seen <= bound).all()
    assert float((seen / bound).max()) > 0.1
    without = (silu * up)[:, 1:] @ down[1:]  # one neuron of 64 is missing
    assert ((without - y).abs() > bound).any()
