"""The expert kernels on a GPU: against the exact result, bit for bit against themselves, and without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import ACTIVATIONS, Forbidden, assert_near, exact, gate_for, groups_of, pool_of, rows_for
from torch import nn

from tiermoe.actors.engine.cache.slots import SlotPool
from tiermoe.actors.engine.cuda.runtime import GpuRuntime
from tiermoe.actors.engine.cuda.tables import TableRing
from tiermoe.actors.engine.model.kernels import Kernels, expert_kernel_times
from tiermoe.actors.engine.model.model import MoeBlock
from tiermoe.kernels.expert_ffn import (
    DECODE_ROWS,
    ROW_CLASSES,
    SHORT_ROWS,
    Group,
    Operands,
    RowClass,
    TorchKernel,
)

pytest.importorskip("triton")

from tiermoe.kernels.triton import launch
from tiermoe.kernels.triton import tables as triton_tables
from tiermoe.kernels.triton.expert_ffn import TritonKernel, shapes_for

HALF = [torch.bfloat16, torch.float16]
REAL = (2048, 1408)  # H and I of Qwen1.5-MoE-A2.7B and DeepSeek-V2-Lite
ROWS: dict[RowClass, int] = {"decode": 5, "short": 40, "prefill": 200}


def nans(pairs: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((len(pairs), width), float("nan"), dtype=dtype, device=pairs.device)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [*[(name, torch.bfloat16) for name in sorted(ACTIVATIONS)], ("silu", torch.float16), ("gelu", torch.float32)],
    ids=str,
)
def test_against_the_exact_result(gpu: torch.device, activation: str, dtype: torch.dtype) -> None:
    """Odd sizes, every class of rows, rows that no group writes. Each activation and type once: cases are compiled."""
    pool = pool_of(3, 37, 50, dtype, device=gpu)
    sizes = [1, 5, DECODE_ROWS + 1, SHORT_ROWS + 6]
    hidden, pairs = rows_for([*sizes, 3], 2, 50, dtype, device=gpu)
    groups = groups_of(sizes, [2, 0, 1, 2], 37)
    found = nans(pairs, 50, dtype)
    TritonKernel(pool, activation, Forbidden()).run(hidden, pairs, groups, 2, found)
    assert_near(found, exact(pool, activation, hidden, pairs, groups, 2))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ROW_CLASSES)
def test_every_shape_gives_the_same_bits_on_real_sizes(gpu: torch.device, name: RowClass, dtype: torch.dtype) -> None:
    width, neurons = REAL
    pool = pool_of(3, neurons, width, dtype, device=gpu)
    sizes = [ROWS[name], 1, ROWS[name] + 3]
    hidden, pairs = rows_for(sizes, 1, width, dtype, device=gpu)
    groups = groups_of(sizes, [1, 2, 0], neurons)
    results = []
    for shape in shapes_for(dtype)[name]:
        found = nans(pairs, width, dtype)
        TritonKernel(pool, "silu", Forbidden(), shapes={name: shape}).run(hidden, pairs, groups, 1, found)
        results.append(found)
    assert_near(results[0], exact(pool, "silu", hidden, pairs, groups, 1))
    for found in results[1:]:
        assert torch.equal(found, results[0])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_segments_in_either_order_and_in_one_call_or_two(gpu: torch.device, dtype: torch.dtype) -> None:
    width = 256
    pool = pool_of(2, 300, width, dtype, device=gpu)
    sizes = [3, 20]
    hidden, pairs = rows_for(sizes, 1, width, dtype, device=gpu)
    top: list[Group] = [(0, 3, 5, 110, False), (3, 23, 330, 7, False)]
    bottom: list[Group] = [(0, 3, 333, 190, False), (3, 23, 1, 293, False)]
    kernel = TritonKernel(pool, "silu", Forbidden())

    def added(groups: list[Group]) -> list[Group]:
        return [(*group[:4], True) for group in groups]

    together, apart, turned = (nans(pairs, width, dtype) for _ in range(3))
    kernel.run(hidden, pairs, [top[0], *added(bottom[:1]), top[1], *added(bottom[1:])], 1, together)
    for groups in (top, added(bottom)):
        kernel.run(hidden, pairs, groups, 1, apart)
    for groups in (bottom, added(top)):
        kernel.run(hidden, pairs, groups, 1, turned)
    assert_near(together, exact(pool, "silu", hidden, pairs, top + added(bottom), 1))
    assert torch.equal(together, apart)
    assert torch.equal(together, turned)


def test_neither_neighbours_nor_slot_nor_copies_change_a_bit(gpu: torch.device) -> None:
    """Alone and among others, in another slot, and while host memory is copied to the device on another stream."""
    width, neurons = REAL
    pool = pool_of(4, neurons, width, torch.bfloat16, device=gpu)
    pool.gate_up[3], pool.down[3] = pool.gate_up[0], pool.down[0]
    sizes = [DECODE_ROWS, 1, ROWS["short"], ROWS["prefill"]]
    hidden, pairs = rows_for(sizes, 1, width, torch.bfloat16, device=gpu)
    kernel = TritonKernel(pool, "silu", Forbidden())
    together, apart = (nans(pairs, width, torch.bfloat16) for _ in range(2))
    kernel.run(hidden, pairs, groups_of(sizes, [0, 0, 1, 2], neurons), 1, together)  # compiles, before the copies begin
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    there, stream = torch.empty_like(host, device=gpu), torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        for _ in range(20):
            there.copy_(host, non_blocking=True)
    for _ in range(5):
        kernel.run(hidden, pairs, groups_of(sizes, [0, 0, 1, 2], neurons), 1, together)
    stream.synchronize()
    for group in groups_of(sizes, [3, 3, 1, 2], neurons):
        kernel.run(hidden, pairs, [group], 1, apart)
    assert torch.equal(together, apart)


def test_native_launches_give_the_bits_of_tritons_own(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel of a layer, its table's copy included; all of them can be launched natively here."""
    width, neurons = REAL
    pool = pool_of(3, neurons, width, torch.bfloat16, device=gpu)
    sizes = [1, SHORT_ROWS, SHORT_ROWS + 1]
    hidden, pairs = rows_for(sizes, 1, width, torch.bfloat16, device=gpu)
    groups = groups_of(sizes, [1, 2, 0], neurons)
    weights = torch.rand(len(pairs), 1, device=gpu)
    address_of, found, results = launch.address_of, list[object](), []
    for natively in (True, False):

        def address(*args: Any, natively: bool = natively) -> Any:
            found.append(address_of(*args))
            return found[-1] if natively else None

        monkeypatch.setattr(launch, "address_of", address)
        triton_tables.copying.cache_clear()
        kernel = TritonKernel(pool, "silu", Forbidden(), TableRing(GpuRuntime(gpu.index or 0)))
        for _ in range(3):  # the first launch is Triton's
            y = nans(pairs, width, torch.bfloat16)
            kernel.run(hidden, pairs, groups, 1, y)
            out = kernel.combine(y, weights)
        results.append((y, out))
    triton_tables.copying.cache_clear()
    assert found
    assert None not in found
    assert_near(results[0][0], exact(pool, "silu", hidden, pairs, groups, 1))
    for native, own in zip(*results, strict=True):
        assert torch.equal(native, own)


def test_nothing_waits_for_the_gpu(gpu: torch.device, forbid_waits: Any) -> None:
    width, neurons = 512, 256
    pool = pool_of(4, neurons, width, torch.bfloat16, device=gpu)
    ring = TableRing(GpuRuntime(gpu.index or 0))
    kernel = TritonKernel(pool, "silu", Forbidden(), ring)
    sizes = [1, 2, 40, 100]
    hidden, pairs = rows_for(sizes, 1, width, torch.bfloat16, device=gpu)
    groups = groups_of(sizes, [0, 1, 2, 3], neurons)
    y, weights = nans(pairs, width, torch.bfloat16), torch.ones(len(pairs), 1, device=gpu)
    kernel.run(hidden, pairs, groups, 1, y)  # compiles
    kernel.combine(y, weights)
    torch.cuda.synchronize(gpu)
    with forbid_waits() as calls:
        for _ in range(20):
            kernel.run(hidden, pairs, groups, 1, y)
            out = kernel.combine(y, weights)
    assert calls == []
    assert ring.waits == 0
    assert_near(out, exact(pool, "silu", hidden, pairs, groups, 1)[: len(pairs)])


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_combine(gpu: torch.device, dtype: torch.dtype, weights: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(4 * 6, 2050, generator=generator).to(gpu, dtype)
    shares = torch.rand(4, 6, generator=generator).to(gpu, weights)
    kernel = TritonKernel(pool_of(1, 4, 2050, dtype, device=gpu), "silu", Forbidden())
    expected = (y.double().view(4, 6, 2050) * shares.double().unsqueeze(-1)).sum(dim=1).cpu()
    assert_near(kernel.combine(y, shares), expected)


@pytest.mark.parametrize("mapped", [True, False])
def test_tables_stay_what_they_were_while_the_ring_goes_round(gpu: torch.device, mapped: bool) -> None:
    """Many more than it has entries, behind work that keeps the GPU busy."""
    runtime = GpuRuntime(gpu.index or 0)
    assert runtime.mapped, "kernels cannot read host memory here: tables are copied"
    runtime.__dict__["mapped"] = mapped
    ring = TableRing(runtime, entries=4, nbytes=64)
    busy = torch.randn(2048, 2048, device=gpu)
    expected = [list(range(i, i + 5 + i % 5 * 1000)) for i in range(40)]
    tables = []
    for numbers in expected:
        busy = busy @ busy * 1e-3
        tables.append(ring.put(numbers))
    assert [table.tolist() for table in tables] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_choice_and_what_it_says(gpu: torch.device, dtype: torch.dtype) -> None:
    """What is chosen computes the exact result, whatever it is; a second engine of the process chooses alike."""
    width, neurons, slots = *REAL, 24
    pool = SlotPool(
        torch.zeros(slots, neurons, 2, width, dtype=dtype, device=gpu),
        torch.zeros(slots, neurons, width, dtype=dtype, device=gpu), None, None,
    )  # fmt: skip
    block = MoeBlock(nn.Module(), gate_for("silu"), "silu", None, None)
    kernels = Kernels(pool, "auto", [block])
    plan = kernels.plan
    assert set(plan.chosen) == set(ROW_CLASSES)
    assert any(time.kernel.startswith("triton ") for time in plan.times), plan.notes
    assert all(time.us > 0 and time.device_us > 0 for time in plan.times)
    assert Kernels(pool, "auto", [block]).plan is plan
    source = pool_of(slots, neurons, width, dtype, device=gpu)
    pool.gate_up.copy_(source.gate_up)
    pool.down.copy_(source.down)
    sizes = [1, 16, 40, 200]
    hidden, pairs = rows_for(sizes, 1, width, dtype, device=gpu)
    groups = groups_of(sizes, [5, 0, 3, 2], neurons)
    found = nans(pairs, width, dtype)
    kernels.of(block).run(hidden, pairs, groups, 1, found)
    assert_near(found, exact(source, "silu", hidden, pairs, groups, 1))
    loop = TorchKernel(Operands(pool.gate_up, pool.down, None, None), block.gate)
    times = expert_kernel_times(pool, {"loop": loop, "chosen": kernels.of(block)}, [1, 200])
    assert [(t.kernel, t.rows) for t in times] == [("loop", 1), ("chosen", 1), ("loop", 200), ("chosen", 200)]
