"""Decode steps that are recorded and replayed: on a stand-in of CUDA graphs, which carries out torch's calls again."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from serving import greedy, prepared, serving, serving_group, settings
from tiny_models import save_tiny_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from tiermoe.actors.budget import GRAPH_ROWS, MARGIN_BYTES, MARGIN_SHARE, AutoBudget
from tiermoe.actors.engine import make_device as devices
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.model import attention
from tiermoe.actors.engine.peers import shard as shard_module
from tiermoe.actors.engine.serving import recorded as recorded_module
from tiermoe.actors.engine.serving.batching import ContinuousBatcher
from tiermoe.actors.engine.serving.recorded import Recorded, Unrecorded
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings, ShardSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.errors import ConfigError, StoreError

pytest.importorskip("triton")

KV = KvSettings(page_size=4, num_blocks=96, max_batch_tokens=32, prefix_cache=False)
MOST = 24
PROMPTS = [[5, 9, 17, 4, 33, 2, 7], [8, 8, 3]]


class Pool:
    """As torch's: of no use once all of its graphs are gone."""

    graphs, gone = 0, False


class Graph:
    """What was called between `capture_begin` and `capture_end`, carried out again by `replay`."""

    now: Graph | None = None  # that is captured
    pool: Pool | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.graphs -= 1
            self.pool.gone = self.pool.graphs == 0

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if pool.gone:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        Graph.now, self.pool = self, pool
        pool.graphs += 1

    def capture_end(self) -> None:
        assert Graph.now is self
        Graph.now = None

    def replay(self) -> None:
        assert Graph.now is None
        for call in self.calls:
            call()


class _Watch(TorchDispatchMode):
    """Adds torch's calls to the graph that is captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Graph.now is None or func.namespace == "tiermoe":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nmore words")
        found = func(*args, **kwargs)
        returns = func._schema.returns
        if func._schema.is_mutable:
            Graph.now.calls.append(lambda: func(*args, **kwargs))
        elif not any(one.alias_info is not None for one in returns):  # a view is there already
            Graph.now.calls.append(lambda: _again(found, func(*args, **kwargs)))
        return found


def _again(there: Any, values: Any) -> None:
    there, values = ((one if isinstance(one, tuple | list) else [one]) for one in (there, values))
    for target, value in zip(there, values, strict=True):
        if target.shape == value.shape:  # else it was made empty, and a later call has given it a size
            target.copy_(value)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls within `Recorded._record` are watched, interpreted kernels, too."""
    from tiermoe.kernels.triton import attention as kernels

    made = kernels.Launch

    def launch(*args: Any, **kwargs: Any) -> Any:
        kernel = made(*args, **kwargs)

        def run(*given: Any) -> None:
            kernel(*given)
            if Graph.now is not None:
                Graph.now.calls.append(lambda: kernel(*given))

        return run

    monkeypatch.setattr(kernels, "_launches", {})
    monkeypatch.setattr(kernels, "Launch", launch)
    record = Recorded._record

    def watched(self: Recorded, inputs: Any) -> Any:
        with _Watch():
            return record(self, inputs)

    monkeypatch.setattr(Recorded, "_record", watched)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    path = tmp_path_factory.mktemp("recorded")
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    return prepared(save_tiny_checkpoint("qwen3_moe", path / "model", **layers), path / "store")


@pytest.fixture
def worker(store: ExpertStore) -> Iterator[GpuWorker]:
    with serving(store, settings(0.5, kv=KV, compile="off")) as made:
        made.batcher.close()  # a model has one batcher at a time
        yield made


def tokens_of(batcher: ContinuousBatcher, prompts: Sequence[Sequence[int]], tokens: int, name: str) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    streams = [batcher.submit(GenerationRequest(f"{name}{i}", tuple(p), sampling)) for i, p in enumerate(prompts)]
    return [[token for event in stream for token in event.token_ids] for stream in streams]


@pytest.mark.slow
def test_replayed_steps_give_the_models_tokens(worker: GpuWorker, captured: None) -> None:
    """Of one request and of several, which come and go; the engine counts each layer of each step once."""
    runs: list[list[list[list[int]]]] = []
    counted = []
    for recorded in (None, Recorded(worker.model, MOST, Graph, Pool)):
        with closing(ContinuousBatcher(worker.model, KV, worker.engine, attention="triton")) as batcher:
            if recorded is not None:
                batcher.record(recorded)
            worker.engine.reset_stats()
            # one after the other, so that counters do not depend on when a request joins a batch
            runs.append([tokens_of(batcher, [prompt], 9, f"a{i}") for i, prompt in enumerate(PROMPTS)])
            counted.append([layer.hits + layer.misses for layer in worker.stats().layers])
            runs[-1].append(tokens_of(batcher, PROMPTS, 9, "b"))
    assert runs[0] == runs[1]
    assert counted[0] == counted[1]
    assert recorded is not None
    assert recorded.problem is None
    assert recorded.replays > 10
    assert {key[0] for key in recorded._recordings} == {1, 2}
    for made in recorded._recordings.values():
        assert len(made.pieces) == 2


def test_recordings_go_with_the_cache_that_they_write_to(
    worker: GpuWorker, captured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert on no node ends transformers' loop; the next request begins another one, be it with another cache."""
    recorded, layer = Recorded(worker.model, MOST, Graph, Pool), worker.engine.layers[1]
    with closing(ContinuousBatcher(worker.model, KV, worker.engine, attention="triton")) as batcher:
        expected = tokens_of(batcher, PROMPTS[:1], 8, "a")
        batcher.record(recorded)
        assert tokens_of(batcher, PROMPTS[:1], 8, "b") == expected
        replays = recorded.replays

        def lost(*given: Any) -> None:
            raise StoreError("an expert is on no node", "nothing")

        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", lost)
            events = list(batcher.submit(GenerationRequest("c", tuple(PROMPTS[0]), SamplingParams(max_tokens=8))))
            assert events[-1].error is not None
        worker.engine.begin_forward(())
        assert tokens_of(batcher, PROMPTS[:1], 8, "d") == expected
    assert recorded.replays > replays > 0
    assert recorded._recordings
    ids = torch.zeros((1, 1), dtype=torch.int32)
    inputs = {"input_ids": ids, "attention_mask": None, "max_length_k": {"full_attention": 3}, "cache": object()}
    assert recorded.logits(inputs, 0) is None
    assert recorded._recordings == {}


def test_recordings_give_way_to_others(worker: GpuWorker, captured: None) -> None:
    """To those at other addresses, in memory of their own, and at the limit to the ones used last."""
    recorded = Recorded(worker.model, 1, Graph, Pool)
    with closing(ContinuousBatcher(worker.model, KV, worker.engine, attention="triton")) as batcher:
        expected = tokens_of(batcher, PROMPTS[:1], 8, "a")
        batcher.record(recorded)
        for turn in range(2):
            before = recorded.replays
            assert tokens_of(batcher, PROMPTS[:1], 8, f"b{turn}") == expected
            assert recorded.replays > before
            batcher._manager.steps._kept.generation += 1
        tokens_of(batcher, PROMPTS, 8, "c")
        assert [key[0] for key in recorded._recordings] == [2]
        assert tokens_of(batcher, PROMPTS[:1], 8, "d") == expected
        assert [key[0] for key in recorded._recordings] == [1]
    assert recorded.problem is None


def test_a_model_that_cannot_be_recorded_runs_as_it_is(
    worker: GpuWorker, captured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step runs again, and the request does not notice."""
    with closing(ContinuousBatcher(worker.model, KV, worker.engine, attention="triton")) as batcher:
        expected = tokens_of(batcher, PROMPTS[:1], 6, "a")
    norm = worker.model.model.norm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda hidden: forward(hidden) * (1.0 if float(hidden.sum()) < 9e9 else 2.0))
    recorded = Recorded(worker.model, MOST, Graph, Pool)
    with closing(ContinuousBatcher(worker.model, KV, worker.engine, attention="triton")) as batcher:
        batcher.record(recorded)
        assert tokens_of(batcher, PROMPTS[:1], 6, "b") == expected
    assert recorded.problem == "operation not permitted when stream is capturing"
    assert recorded.replays == 0
    assert recorded._recordings == {}


@pytest.mark.parametrize(
    ("error", "of"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "norm"),
        (RuntimeError("CUDA error: out of memory"), "capture_end"),  # the driver, of a graph
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "norm"),
        (torch.OutOfMemoryError("CUDA out of memory."), "experts"),
    ],
)
def test_recording_is_tried_again_after_an_out_of_memory(
    error: RuntimeError, of: str, worker: GpuWorker, captured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once graphs were off until the next start. The step runs again, the next ones without graphs, then with them."""
    monkeypatch.setattr(recorded_module, "_REST", 4)
    recorded, layer, norm = Recorded(worker.model, MOST, Graph, Pool), worker.engine.layers[1], worker.model.model.norm
    calls = []

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            # of the first recording only; experts run while no capture is open
            if not calls and recorded._seen and max(recorded._seen.values()) > recorded_module._SEEN:
                calls.append(len(recorded._recordings))
                raise error
            return call(*given)

        return called

    with closing(ContinuousBatcher(worker.model, KV, worker.engine, attention="triton")) as batcher:
        expected = tokens_of(batcher, PROMPTS[:1], 16, "a")
        batcher.record(recorded)
        with monkeypatch.context() as patch:
            if of == "capture_end":
                patch.setattr(Graph, of, refusing(Graph.capture_end))
            else:
                target = norm if of == "norm" else layer
                patch.setattr(target, "forward", refusing(target.forward))
            assert tokens_of(batcher, PROMPTS[:1], 16, "b") == expected
    assert calls == [0]
    assert (recorded.problem, recorded.refused) == (None, 1)
    assert recorded.replays > 0
    assert list(recorded._recordings)


def test_an_out_of_memory_drops_the_recordings_used_first_and_rests_longer() -> None:
    model = torch.nn.Module()
    model.get_input_embeddings = torch.nn.Identity  # type: ignore[assignment]
    recorded = Recorded(model, MOST, Graph, Pool)

    def record(inputs: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    recorded._record = record  # type: ignore[method-assign]
    recorded._recordings = {key: recorded_module._Recording([], Graph(), torch.zeros(1)) for key in "abcde"}
    recorded._place = "cache", 0
    ids = torch.zeros((1, 1), dtype=torch.int32)
    inputs = {"input_ids": ids, "attention_mask": None, "max_length_k": {"full": 3}, "cache": "cache"}
    tried = []
    for step in range(500):
        try:
            recorded.logits(inputs, 0)
        except Unrecorded:
            tried.append((step, "".join(recorded._recordings)))
    assert tried == [(2, "de"), (2 + 64, "e"), (2 + 64 + 128, ""), (2 + 64 + 128 + 256, "")]
    assert recorded.problem is None


def test_what_is_not_recorded(worker: GpuWorker, captured: None) -> None:
    """Masks that grow, embeddings that a policy reads, more rows than are recorded."""
    with closing(ContinuousBatcher(worker.model, KV, worker.engine)) as batcher:
        recorded = Recorded(worker.model, MOST, Graph, Pool)
        batcher.record(recorded)
        tokens_of(batcher, PROMPTS[:1], 8, "a")
    assert recorded.problem == "its attention takes a mask that grows with the context"
    hook = worker.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    assert Recorded(worker.model, MOST, Graph, Pool).problem == "the policy reads each step's embeddings"
    hook.remove()
    assert Recorded(worker.model, MOST, Graph, Pool).logits({"input_ids": torch.zeros(1, GRAPH_ROWS + 1)}, 0) is None


def test_a_worker_replays_its_decode_steps(store: ExpertStore, captured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; and where our attention does not take the model, it runs with its own, step by step."""
    with serving(store, settings(0.5, kv=KV, compile="off")) as worker:
        expected = greedy(worker, PROMPTS[:1], 8)
        assert not worker.plan()["decode_graphs"]
    monkeypatch.setattr(attention, "attention_of_steps", lambda *_: ("triton", True))
    monkeypatch.setattr("tiermoe.actors.engine.model.model.attention_for", lambda *_: "sdpa")
    monkeypatch.setattr(recorded_module, "Recorded", partial(Recorded, graph=Graph, pool=Pool))
    with serving(store, settings(0.5, kv=KV, compile="off")) as worker:
        assert worker.plan()["decode_graphs"]
        assert greedy(worker, PROMPTS[:1], 8) == expected
        assert worker.plan()["notes"] == []

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("attention: triton takes no soft cap")

    monkeypatch.setattr(attention, "paged_attention", refuse)
    with serving(store, settings(0.5, kv=KV, compile="off")) as worker:
        assert not worker.plan()["decode_graphs"]
        assert greedy(worker, PROMPTS[:1], 8) == expected
        assert worker.plan()["notes"] == ["decode steps are no CUDA graphs: its attention takes another kernel"]


def test_when_steps_are_graphs(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for wanted, mode, batching, device, expected in (
        ("auto", "auto", "auto", gpu, ("triton", True)), ("triton", "auto", "auto", gpu, ("triton", True)),
        ("auto", "graphs", "continuous", gpu, ("triton", True)), ("sdpa", "auto", "auto", gpu, ("sdpa", False)),
        ("auto", "off", "auto", gpu, ("auto", False)), ("auto", "auto", "serial", gpu, ("auto", False)),
        ("auto", "auto", "auto", cpu, ("auto", False)),
    ):  # fmt: skip
        assert attention.attention_of_steps(wanted, mode, batching, device) == expected  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not sdpa"):
        attention.attention_of_steps("sdpa", "graphs", "auto", gpu)
    with pytest.raises(ConfigError, match="compile: default or compile: off"):
        GpuWorker(settings(0.5, compile="graphs"), store.describe()).start()
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert attention.attention_of_steps("auto", "auto", "auto", gpu) == ("auto", False)  # without Triton


# -- all at once, beside fake GPUs -------------------------------------------------------------------------------------


class _Lacking(Graph):
    """A graph for which there is no memory at times: of the first recording, and of later ones."""

    tried = 0

    def capture_end(self) -> None:
        _Lacking.tried += 1
        if _Lacking.tried % 7 == 1:
            raise RuntimeError("CUDA error: out of memory")
        super().capture_end()


def _gpus(monkeypatch: pytest.MonkeyPatch, memory: int) -> list[FakeGpu]:
    """Of the lead and of a shard; the lead's has so much memory."""
    gpus = [FakeGpu(seed, pin_all=False) for seed in range(2)]
    for gpu, module in zip(gpus, (devices, shard_module), strict=True):
        gpu.eager, gpu.pages.granularity = True, mmap.PAGESIZE
        monkeypatch.setattr(module, "make_device", lambda *_, gpu=gpu: CudaDevice(gpu, staging_bytes=1 << 16))
    gpus[0].memory = memory
    return gpus


def _together(worker: GpuWorker, turn: int) -> list[list[int]]:
    """Prompts in flight together, beside one that is cancelled in the middle; the tokens of the others."""
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    asked = [GenerationRequest(f"{turn}-{i}", tuple(prompt), sampling) for i, prompt in enumerate(_LONG)]
    gone = GenerationRequest(f"{turn}-gone", tuple(_LONG[0]), SamplingParams(max_tokens=40, ignore_eos=True))
    streams = [worker.submit(request) for request in (gone, *asked)]
    leaving = iter(streams[0])
    assert next(leaving).token_ids
    assert worker.cancel(gone.request_id)
    assert list(leaving)[-1].finish == "cancelled"
    return [[token for event in stream for token in event.token_ids] for stream in streams[1:]]


_TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # of the KV cache: keys and values, layers, heads, width, float32
_TOKENS = 8
_LONG = [[(7 * i + 3 * j) % 90 + 3 for j in range(14 + 12 * i)] for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_with_all_at_once_requests_have_their_tokens(
    shards: int, store: ExpertStore, captured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefetch, eviction, recorded steps whose captures fail at times, requests that are cancelled; on one GPU memory
    that goes between slots and KV cache, on two a shard. No use of memory is out of order.
    """
    plain = settings(0.5, "next-gate", kv=KV, compile="off")
    with serving(store, plain) as worker:
        expected = [greedy(worker, [prompt], _TOKENS)[0] for prompt in _LONG]
    monkeypatch.setattr(attention, "attention_of_steps", lambda *_: ("triton", True))
    monkeypatch.setattr("tiermoe.actors.engine.model.model.attention_for", lambda *_: "sdpa")
    monkeypatch.setattr(recorded_module, "Recorded", partial(Recorded, graph=_Lacking, pool=Pool))
    monkeypatch.setattr(recorded_module, "_REST", 2)
    monkeypatch.setattr(_Lacking, "tried", 0)
    slot = store.describe().manifest.experts.nbytes(4)
    kv = KvSettings(page_size=4, tokens=128, max_batch_tokens=32, max_num_seqs=6, prefix_cache=False)
    gpus = _gpus(monkeypatch, 80 << 30)
    budget: Any = 0.3
    if shards == 1:
        kv_bytes = 128 * _TOKEN_BYTES
        free = int((kv_bytes + MARGIN_BYTES + 3.5 * slot) / (1 - MARGIN_SHARE))
        experts = len(store.describe().manifest.layers) * store.describe().manifest.experts.num_experts
        budget = AutoBudget(free=free, final=True, kv=kv_bytes, slot=slot, most=experts * slot, tokens=128, chunk=32)
    config = settings(budget, "next-gate", kv=kv, compile="off", shards=ShardSettings(count=shards))
    with serving_group(store, config) as group:
        worker = group.lead
        for turn in range(2):
            assert _together(worker, turn) == expected
        stats, recorded = worker.stats(), worker.batcher._manager.steps.recorded
        total = stats.total()
        assert (recorded.problem, recorded.refused > 0, recorded.replays > 0) == (None, True, True)
        assert total.bytes_loaded_prefetch > 0
        assert total.bytes_loaded_demand > 0
        assert (total.shard_tokens > 0) == (shards == 2)
        assert shards == 2 or stats.shared.to_kv > 0
        worker.engine.cache.check_integrity()
    assert not any(gpu.hazards or gpu.registered for gpu in gpus)
