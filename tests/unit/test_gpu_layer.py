"""A layer beside a GPU with native launches, against Python's kernels: same outputs, loads, victims and counters.

What is launched is carried out by torch, from the tables on the device; one test has Triton interpret it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, SHAPE, with_replicas
from form_cases import FORMS, expert_form, random_expert
from kernel_cases import experts_of, stacked
from native_rigs import CUTS, SplitStack, Stack, forwards, routed

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import PlainActivations
from tiermoe.actors.engine.cache.form_slots import FormPool, FormWeights
from tiermoe.actors.engine.cache.low_bits import ReplicaWeights, make_part
from tiermoe.actors.engine.cache.places import thread_link
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.cuda.tables import TableRing
from tiermoe.actors.engine.dispatch import DeviceBackend
from tiermoe.actors.engine.executors import GpuExecutor
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.host_view import HostViews
from tiermoe.actors.engine.pinned_fetch import PinnedFetch
from tiermoe.actors.engine.placer import Placer
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.store.format import Published
from tiermoe.benchmarks.instant_gpu import InstantGpu, instant_gpu
from tiermoe.errors import RuntimeFailure
from tiermoe.kernels.expert_ffn import SHORT_ROWS, ExpertKernel, Operands, TorchKernel
from tiermoe.kernels.form_slots import TorchFormKernel
from tiermoe.kernels.forms import BLOCKS, ExpertForm
from tiermoe.kernels.pack import PackedShape
from tiermoe.kernels.packed_slots import TorchPackedKernel

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/cuda/test_gpu_layer.py runs layers on the GPU", allow_module_level=True)

from tiermoe.kernels.triton.expert_ffn import DECODE_PAIRS, TritonKernel
from tiermoe.kernels.triton.forms import TritonFormKernel, TritonPackedKernel
from tiermoe.kernels.triton.launch import Launch


def launches_seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of Triton's launches from now on."""
    found = list[str]()
    first = Launch.first

    def counted(launch: Launch, *given: Any) -> Callable[..., None]:
        found.append(launch.name)
        known: Any = first(launch, *given)
        return lambda *more: (found.append(launch.name), known(*more))[0]

    monkeypatch.setattr(Launch, "first", counted)
    return found


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
    source, pairs, weights, _, target, table, first = args[:7]
    for start, rows, neuron, neurons, row, added, *_ in table.view(-1, 8)[first : first + grid[0]].tolist():
        mine = pairs[start : start + rows]
        if up:
            width = source.shape[1]
            used = weights.view(-1, 2 * width)[neuron : neuron + neurons].view(-1, width)
            target[row : row + rows, :neurons] = gate(source[mine // args[7]] @ used.t())
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


@pytest.mark.parametrize("slots", [2, KEYS])
def test_parts_of_a_pass_add_up(slots: int) -> None:
    """As of shards: ids are on the host, and pairs that others run have none."""
    stack, rng = GpuStack(slots, "lru", hooks=lambda _: Hooks()), np.random.default_rng(slots)
    for layer in stack.layers:
        layer.executor.core.partial = True
    for _ in range(10):
        hidden, ids, weights = routed(rng, 24)
        mine = rng.random(ids.shape) < 0.5
        for layer in stack.layers:
            sides = [np.where(side, ids.numpy(), -1) for side in (mine, ~mine, mine | ~mine)]
            first, second, whole = (layer.forward(hidden, side, weights) for side in sides)
            torch.testing.assert_close(first + second, whole)
            stack.cache.check_integrity()
    with pytest.raises(ValueError, match="no such expert"):
        stack.layers[0].forward(hidden, np.full_like(ids, -2), weights)
    stack.layers[0].executor.core.partial = False
    with pytest.raises(ValueError, match="no such expert"):
        stack.layers[0].forward(hidden, np.full_like(ids, -1), weights)
    stack.cache.close()


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


def test_the_sums_go_where_the_next_graph_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they were copied there, a launch and some 10 us of the host for each layer of a recorded step."""
    native, python = both(KEYS)
    copied = list[torch.Tensor]()
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of: (copied.append(to), copy(to, of))[1])
    for tokens in (1, 5):
        inputs = torch.randn(tokens, SHAPE.hidden), torch.tensor([[2, 0]] * tokens), torch.rand(tokens, 2)
        for stack, copies in ((native, 0), (python, 1)):  # Python's kernels make a tensor of their own
            out = torch.full((tokens, SHAPE.hidden), float("nan"))
            stack.layers[0].forward_into(out, *inputs)
            assert sum(one is out for one in copied) == copies
            assert torch.equal(out, stack.layers[0].forward(*inputs))
    native.cache.close(), python.cache.close()


def test_interpreted_kernels_give_what_they_give_the_page() -> None:
    native, python = both(2)
    inputs = torch.randn(1, SHAPE.hidden), torch.tensor([[2, 0, 1]]), torch.rand(1, 3)
    assert torch.equal(native.layers[0].forward(*inputs), python.layers[0].forward(*inputs))
    native.cache.close(), python.cache.close()


K_QUANTS = {kind for kind, (weights, *_) in BLOCKS.items() if weights == 256}
FAST = ("fp8_block", "mxfp4", "q8_0", "int, 4 bits, zeros")


class FormStack(Stack):
    """Experts in a published form; Python's passes run torch's reference."""

    def __init__(self, form: ExpertForm, slots: int, native: bool) -> None:
        self.form, self.in_triton = form, native
        super().__init__(slots, "lru", native=native)

    def _memory(self, slots: int) -> int:
        rng, published = np.random.default_rng(5), Published(forms=(self.form,), layers=(0,) * LAYERS, checkpoint=None)

        def expert() -> tuple[torch.Tensor, ...]:
            parts = random_expert(self.form, rng).values()
            return tuple(torch.from_numpy(part.reshape(-1).view(np.uint8)) for part in parts)

        self.weights = [FormWeights(tuple(expert() for _ in range(EXPERTS))) for _ in range(LAYERS)]
        self.pool = FormPool.allocate(published, slots, torch.float32, torch.device("cpu"))
        return published.slot_bytes

    def make_kernel(self, pool: FormPool) -> ExpertKernel:  # type: ignore[override]
        parts = pool.parts(self.form)
        if self.in_triton:
            return TritonFormKernel(parts, self.form, "silu", gate, torch.float32)
        return TorchFormKernel(parts, self.form, gate)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        *((name, slots) for name in FAST for slots in (3, KEYS)),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in FORMS if name not in {*FAST, *K_QUANTS} - {"q4_k"}),
    ],
)
def test_interpreted_forms_run_in_the_native_pass(name: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded on demand and then resident: two launches for experts that are there together, and one that sums."""
    hidden_size = 256 if name in K_QUANTS else 64
    form = expert_form(name, hidden_size, hidden_size if name in K_QUANTS else 32)
    native, python = FormStack(form, slots, True), FormStack(form, slots, False)
    assert isinstance(native.layers[0].executor, GpuExecutor)
    rng, found = np.random.default_rng(slots), launches_seen(monkeypatch)
    for n in range(4):
        # the last pass runs experts that are in their slots, where all have one
        ids = torch.tensor([[1, 2]]) if n > 1 else torch.from_numpy(rng.permutation(EXPERTS)[None, :2].copy())
        hidden, weights = torch.randn(1, hidden_size), torch.rand(1, 2)
        for mine, theirs in zip(native.layers, python.layers, strict=True):
            found.clear()
            out, wanted = mine.forward(hidden, ids, weights), theirs.forward(hidden, ids, weights)
            rounds = found.count("_form_gate_up")
            assert found == ["_form_gate_up", "_form_down"] * rounds + ["_combine"]
            assert rounds == 1 if n == 3 and slots == KEYS else rounds <= 2
            assert float((out - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
            native.settle(), python.settle()
    native.cache.close(), python.cache.close()


# -- launches of a layer -----------------------------------------------------------------------------------------------


class InstantStack(FormStack):
    """All experts resident, on `InstantGpu`; form: None: neurons."""

    def __init__(self, form: ExpertForm | None, gpu: InstantGpu) -> None:
        self.gpu, self.plain = gpu, form is None
        super().__init__(form or expert_form("float32", 256, 256), KEYS, True)
        self.cache.core.preload(range(KEYS))

    def _memory(self, slots: int) -> int:
        return Stack._memory(self, slots) if self.plain else super()._memory(slots)

    def _attach(self, hooks: Hooks, native: bool) -> None:
        ring = TableRing(self.gpu)
        if self.plain:
            operands = Operands(self.pool.gate_up, self.pool.down, None, None)
            kernel: ExpertKernel = TritonKernel(operands, "silu", TorchKernel(operands, gate), ring)
        else:
            kernel = TritonFormKernel(self.pool.parts(self.form), self.form, "silu", gate, torch.float32, ring)
        views = HostViews(PinnedFetch(self.gpu), True)
        backend = DeviceBackend(self.cache, views, PlainActivations(torch.device("cpu")))
        self.layers = self.layers_of(backend, Placer(self.cache), kernel, hooks, native)


@pytest.mark.parametrize("name", ["neurons", *FORMS])
def test_a_decode_layer_takes_at_most_six_launches(name: str) -> None:
    """Of the driver, by native code: the routing to the host, the table of experts, gate and up, down, the sum."""
    with instant_gpu() as gpu:
        form = None if name == "neurons" else expert_form(name, 256, 256)
        stack = InstantStack(form, gpu)
        width = SHAPE.hidden if form is None else 256
        counted = list[float]()
        for experts in ([1, 2], [0, 3], [2, 1]):
            inputs = torch.zeros(1, width), torch.tensor([experts]), torch.full((1, 2), 0.5)
            gpu.launches()
            for layer in stack.layers:
                layer.forward(*inputs)
            counted.append(gpu.launches() / LAYERS)
        assert counted[1:] == [5.0, 5.0]  # the first are Triton's own
        stack.cache.close()


class LowBits:
    """A rule that runs some experts of each pass on their replicas."""

    low: frozenset[int] = frozenset()

    def native(self, index: int, to: Any) -> None:
        return None

    def layer(self, index: int, view: Any) -> frozenset[int]:
        return frozenset(index * EXPERTS + expert for expert in self.low)


class ReplicaStack(Stack):
    """Slots for experts in full, and for replicas of three bits; Python's passes run torch's references."""

    packed = PackedShape(SHAPE.hidden, SHAPE.intermediate, 3, 32)

    def __init__(self, slots: int, replicas: int, native: bool) -> None:
        nbytes = self._memory(slots)
        rng = np.random.default_rng(6)
        arrays = [stacked(experts_of(EXPERTS, self.packed, rng)) for _ in range(LAYERS)]
        layers = [
            LayerWeights(tuple(torch.from_numpy(layer[name]) for name in self.packed.tensors())) for layer in arrays
        ]
        part = make_part(ReplicaWeights(self.packed, layers), replicas, torch.device("cpu"))
        where = SlotMap(self.pool, self.weights, EXPERTS, slots, nbytes, low_bit=part)
        link = thread_link(where, 0.0, 0.0)
        self.link, self.rule, self.ahead = link.core, LowBits(), None
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        self.cache = ExpertCache(where, link, with_replicas(LAYERS, EXPERTS), self.stats, Timeline(False))
        memory = part.pool.tensors  # type: ignore[attr-defined]
        low = (
            TritonPackedKernel(memory, self.packed, "silu", torch.float32) if native
            else TorchPackedKernel(memory, self.packed, "silu")
        )  # fmt: skip
        backend = DeviceBackend(self.cache, HostViews(), PlainActivations(torch.device("cpu")), None, low)
        hooks = Hooks(reroute=(self.rule,))  # type: ignore[arg-type]
        self.layers = self.layers_of(backend, Placer(self.cache), triton_of(self.pool), hooks, native)

    def known(self) -> dict[str, Any]:
        return {name: value for name, value in super().known().items() if name != "order"}


@pytest.mark.parametrize("tokens", [1, 5])
def test_interpreted_replicas_run_in_the_native_pass(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside experts in full, alone, and none: two launches for those that are there together, of any number."""
    native, python = ReplicaStack(3, 4, True), ReplicaStack(3, 4, False)
    assert isinstance(native.layers[0].executor, GpuExecutor)
    rng, found = np.random.default_rng(tokens), launches_seen(monkeypatch)
    for low in ({0, 2}, {0, 1, 2}, {0, 1, 2}, set(), {1}):
        ids = torch.from_numpy(np.argsort(rng.random((tokens, 3)), axis=1).copy())  # the experts 0 to 2, all of them
        hidden, weights = torch.randn(tokens, SHAPE.hidden), torch.rand(tokens, 3)
        native.rule.low = python.rule.low = frozenset(low)
        for mine, theirs in zip(native.layers, python.layers, strict=True):
            found.clear()
            out, wanted = mine.forward(hidden, ids, weights), theirs.forward(hidden, ids, weights)
            assert float((out - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
            native.settle(), python.settle()
            assert ("_form_gate_up" in found, "_gate_up" in found) == (bool(low), len(low) < 3)
            assert found.count("_form_gate_up") == found.count("_form_down") <= 2
        assert native.known() == python.known()
    assert native.cache.live_stats().total().low_bit_misses > 0
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize("tokens", [DECODE_PAIRS // 2, DECODE_PAIRS // 2 + 1, 3 * SHORT_ROWS])
def test_as_many_pairs_as_are_kept_and_more(tokens: int) -> None:
    """Also a prompt, in waves: the order of its pairs is brought to the device once."""
    native, python = both(2)
    ids = torch.from_numpy(np.argsort(np.random.default_rng(3).random((tokens, EXPERTS)), axis=1)[:, :2].copy())
    step(native, python, torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, 2))
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize("cut", ["halves", "uneven"])
def test_split_experts(cut: str) -> None:
    native, python = SplitGpuStack(CUTS[cut], True), SplitGpuStack(CUTS[cut], False)
    for passes, spans in forwards(1, 12, 24):
        for mine, theirs in zip(native.forward(passes, spans), python.forward(passes, spans), strict=True):
            assert torch.equal(mine, theirs)
        assert native.known() == python.known()
    native.cache.close(), python.cache.close()


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
