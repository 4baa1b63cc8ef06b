"""A layer beside a GPU with native launches, against Python's kernels: same outputs, loads, victims and counters.

What is launched is carried out by torch, from the tables on the device; one test has Triton interpret it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, SHAPE
from native_rigs import CUTS, RATE_GBPS, SplitStack, Stack, active, forwards, replacing, routed, unhurried

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.slots import SlotPool
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.placer import Placer
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.engine.rerouting import Rerouter
from tiermoe.actors.policies.activeevict import BudgetAwareTopK
from tiermoe.actors.policies.moepic import SpeculativePrefetch
from tiermoe.actors.policies.prefetch import NextGatePrefetch, PopularityPrefetch, PrefetchPolicy
from tiermoe.errors import RuntimeFailure
from tiermoe.kernels.expert_ffn import SHORT_ROWS, ByRows, ExpertKernel, Operands, TorchKernel
from tiermoe.kernels.router import MOST_GPU_ROWS, LinearRouter

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/cuda/test_gpu_layer.py runs layers on the GPU", allow_module_level=True)

from tiermoe.kernels.triton.expert_ffn import DECODE_PAIRS, TritonKernel
from tiermoe.kernels.triton.launch import Launch


def gate(up: torch.Tensor) -> torch.Tensor:
    pairs = up.view(len(up), -1, 2)
    return torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]


def triton_of(pool: SlotPool) -> TritonKernel:
    operands = Operands(pool.gate_up, pool.down, None, None)
    return TritonKernel(operands, "silu", TorchKernel(operands, gate))


def launched(launch: Launch, grid: tuple[int, int, int], *args: Any) -> None:
    """A launch of the kernels of experts, in torch."""
    if launch.name == "_combine":
        y, weights, out, top_k, width = args
        for token in range(grid[0]):
            rows = y.view(-1, width)[token * top_k : (token + 1) * top_k]
            out[token] = weights.reshape(-1, top_k)[token].float() @ rows
        return
    up = launch.name == "_gate_up"
    source, pairs, weights, target, table, first = args[:6]
    for start, rows, neuron, neurons, row, added, *_ in table.view(-1, 8)[first : first + grid[0]].tolist():
        mine = pairs[start : start + rows]
        if up:
            width = source.shape[1]
            used = weights.view(-1, 2 * width)[neuron : neuron + neurons].view(-1, width)
            target[row : row + rows, :neurons] = gate(source[mine // args[6]] @ used.t())
        else:
            width = target.shape[1]
            found = source[row : row + rows, :neurons] @ weights.view(-1, width)[neuron : neuron + neurons]
            target[mine] = target[mine] + found if added else found


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def first(launch: Launch, *given: Any) -> Callable[..., None]:
        launched(launch, *given)
        return partial(launched, launch)

    if "interpreted" not in request.node.name:
        monkeypatch.setattr(Launch, "first", first)


class GpuStack(Stack):
    make_kernel: Callable[[SlotPool], ExpertKernel] = staticmethod(triton_of)


class SplitGpuStack(SplitStack):
    make_kernel: Callable[[SlotPool], ExpertKernel] = staticmethod(triton_of)


def both(slots: int, policy: str = "lru", **options: Any) -> tuple[GpuStack, GpuStack]:
    """The layers with native launches, and with Python's kernels."""
    return GpuStack(slots, policy, **options), GpuStack(slots, policy, native=False, **options)


def step(native: Stack, python: Stack, *inputs: torch.Tensor) -> None:
    for mine, reference in zip(native.layers, python.layers, strict=True):
        assert torch.equal(mine.forward(*inputs), reference.forward(*inputs))
        native.settle(), python.settle()
    assert native.known() == python.known()


@pytest.mark.parametrize("slots", [2, EXPERTS, KEYS - 2, KEYS])
def test_native_calls_are_the_step_in_python(slots: int) -> None:
    """On demand, in waves and all resident, with prefetches that have arrived: every decision is the same."""
    native, python = both(slots, min_useful=0.3)
    rng = np.random.default_rng(slots)
    for n in range(30):
        for stack in (native, python):
            stack.cache.core.decode_only = bool(n % 2)
            stack.ahead.wanted = rng.permutation(KEYS)[:2].tolist() if n % 3 == 0 and stack is native else []
        python.ahead.wanted = native.ahead.wanted
        step(native, python, *routed(rng, 24))
    native.cache.close(), python.cache.close()


def test_interpreted_kernels_give_what_they_give_the_page() -> None:
    native, python = both(2)
    inputs = torch.randn(1, SHAPE.hidden), torch.tensor([[2, 0, 1]]), torch.rand(1, 3)
    assert torch.equal(native.layers[0].forward(*inputs), python.layers[0].forward(*inputs))
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize("tokens", [DECODE_PAIRS // 2, DECODE_PAIRS // 2 + 1, 3 * SHORT_ROWS])
def test_as_many_pairs_as_are_kept_and_more(tokens: int) -> None:
    """Also a prompt, in waves: the order of its pairs is brought to the device once."""
    native, python = both(2)
    ids = torch.from_numpy(np.argsort(np.random.default_rng(3).random((tokens, EXPERTS)), axis=1)[:, :2].copy())
    step(native, python, torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, 2))
    native.cache.close(), python.cache.close()


def prefetch_by(
    router: Callable[[torch.Tensor], Any], policy: Callable[[], PrefetchPolicy]
) -> Callable[[ExpertCache], Hooks]:
    """A rule that drops experts, and a prefetch: both read the routing as it was fetched."""
    generator = torch.Generator().manual_seed(8)
    routers = [router(torch.randn(EXPERTS, SHAPE.hidden, generator=generator)) for _ in range(LAYERS)]
    blocks: list[Any] = [SimpleNamespace(router=router) for router in routers]

    def hooks(cache: ExpertCache) -> Hooks:
        ahead = RouterPrefetching(policy(), cache, blocks, EXPERTS)
        return Hooks((Rerouter(BudgetAwareTopK(), cache, blocks, 3),), (), (ahead,))

    return hooks


def linear(weight: torch.Tensor) -> LinearRouter:
    return LinearRouter(weight, None)


def plain(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A router that no kernel knows."""
    return lambda hidden: hidden @ weight.T


HOOKS = {
    "two layers": prefetch_by(linear, lambda: NextGatePrefetch(LAYERS, EXPERTS, 2, 2)),
    "another router": prefetch_by(plain, lambda: NextGatePrefetch(LAYERS, EXPERTS, 2)),
    "not announced": prefetch_by(linear, lambda: SpeculativePrefetch(LAYERS, EXPERTS, 2)),
    "in Python": prefetch_by(linear, lambda: PopularityPrefetch(LAYERS, EXPERTS, 2)),
    "activeevict": active(),
    "buddies": replacing("router"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
def test_rules_and_what_looks_ahead_decide_as_on_the_page(kind: str) -> None:
    """In native code, but for a policy in Python, which is called with the view: dropped pairs' weights, too."""
    options = {"top_k": 3} if kind == "activeevict" else {}
    order = "importance" if kind == "activeevict" else "lru"
    native, python = both(6, order, hooks=HOOKS[kind], **options)
    rng = np.random.default_rng(1)
    for n in range(24):
        tokens = 2 if n % 6 else MOST_GPU_ROWS + 4  # whose scores no kernel computes
        ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :3].copy())
        dtype = (torch.float32, torch.bfloat16, torch.float16)[n % 3]
        step(native, python, torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, 3).to(dtype))
    stats = native.stats
    assert stats.dropped + stats.substitutions > 0
    ahead = sum(source.queued for source in stats.prefetch_sources.values())
    assert ahead + sum(layer.vacated for layer in stats.layers) > 0
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize("cut", ["halves", "uneven"])
def test_split_experts(cut: str) -> None:
    native, python = SplitGpuStack(CUTS[cut], True), SplitGpuStack(CUTS[cut], False)
    for passes, spans in forwards(1, 12, 24):
        for mine, theirs in zip(native.forward(passes, spans), python.forward(passes, spans), strict=True):
            assert torch.equal(mine, theirs)
        assert native.known() == python.known()
    native.cache.close(), python.cache.close()


def test_arrivals_run_as_they_land() -> None:
    """A slow link: some loads are under way when the layer runs."""

    def compare(held_s: float) -> None:
        native, python = both(EXPERTS, gbps=RATE_GBPS)
        for stack in (native, python):
            stack.hold(held_s)
        ids = torch.tensor([[0, 1, 2]])
        hidden, weights = torch.randn(1, SHAPE.hidden), torch.rand(1, 3)
        step(native, python, hidden, ids, weights)
        assert native.stats.layers[0].blocked_io_s > 0
        native.cache.close(), python.cache.close()

    unhurried(compare)


def test_what_other_kernels_run_is_not_launched() -> None:
    """Weights of another type, and experts of more rows than Triton's classes: prompts by another kernel."""
    stack = GpuStack(KEYS, "lru", hooks=lambda _: Hooks())
    kernel, loop = triton_of(stack.pool), TorchKernel(Operands(stack.pool.gate_up, stack.pool.down, None, None), gate)
    mixed = ByRows({"decode": kernel, "short": kernel, "prefill": loop}, kernel)
    assert mixed.launches is not None
    assert mixed.launches.most_rows == SHORT_ROWS
    assert ByRows({"decode": loop, "short": kernel, "prefill": kernel}, kernel).launches is None
    assert ByRows(dict.fromkeys(("decode", "short", "prefill"), loop), loop).launches is None  # type: ignore[arg-type]
    layers = [stack.layers_of(stack.layers[0].backend, Placer(stack.cache), mixed, Hooks(), on) for on in (True, False)]
    for tokens in (1, SHORT_ROWS, SHORT_ROWS + 1):
        ids, hidden = torch.zeros(tokens, 1, dtype=torch.int64), torch.randn(tokens, SHAPE.hidden)
        for weights in (torch.rand(tokens, 1), torch.rand(tokens, 1).double()):
            found, expected = (some[0].forward(hidden, ids, weights) for some in layers)
            assert torch.equal(found, expected)
    before = stack.known()
    hidden, ids, weights = torch.randn(1, SHAPE.hidden), torch.tensor([[0, 1]]), torch.rand(1, 2)
    with pytest.raises(ValueError, match="there is no such expert: 4"):
        layers[0][0].forward(hidden, ids + 3, weights)
    with pytest.raises(ValueError, match=r"weights are \(1, 1\) for 1 tokens, top-2"):
        layers[0][0].forward(hidden, ids, weights[:, :1])
    assert stack.known() == before


@pytest.mark.parametrize("when", ["closed", "launch", "hook"])
def test_after_an_error_nothing_is_pinned(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = GpuStack(EXPERTS, "lru")
    inputs = torch.randn(1, SHAPE.hidden), torch.tensor([[0, 1]]), torch.rand(1, 2)

    def fails(*_: Any) -> None:
        raise OSError("the driver")

    if when == "closed":
        stack.cache.close()
    elif when == "launch":
        monkeypatch.setattr("tiermoe.kernels.triton.launch.Launch.first", fails)
        first = stack.layers[0]
        stack.layers = stack.layers_of(first.backend, first.placer, triton_of(stack.pool), first.hooks)
    else:
        monkeypatch.setattr(stack.ahead, "layer", fails)
        stack.ahead.wanted = [5]
    with pytest.raises(RuntimeFailure if when == "closed" else OSError):
        stack.layers[0].forward(*inputs)
    assert not stack.cache.core.pins.any()
    assert stack.cache.core.check() == ""


def test_threads_take_turns_while_a_pass_waits() -> None:
    """The interpreter's lock is given up while a copy is awaited."""

    def compare(held_s: float) -> None:
        stack, turns, done = GpuStack(EXPERTS, "lru", gbps=RATE_GBPS), 0, threading.Event()
        stack.layers[0].forward(torch.randn(1, SHAPE.hidden), torch.tensor([[3]]), torch.rand(1, 1))
        stack.hold(held_s)

        def run() -> None:
            stack.layers[0].forward(torch.randn(1, SHAPE.hidden), torch.tensor([[0, 1]]), torch.rand(1, 2))
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        while not done.wait(held_s / 20):
            turns += 1
        thread.join()
        assert turns > 3
        stack.cache.close()

    unhurried(compare)
