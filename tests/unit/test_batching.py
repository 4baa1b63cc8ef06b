"""Requests that share a worker: batched or one after another, cancelled, failing, refused, short of KV cache."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import prepared, reference_greedy, serving, settings
from tiny_models import VOCAB, save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.cache.link_queue import LinkQueue
from tiermoe.actors.engine.serving.batching import Batcher
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.errors import RequestError, RuntimeFailure

PROMPTS = [(5, 6, 7), tuple(range(10, 21)), tuple(range(30, 60)), (9,)]
TOKENS = 24
PAGE = 16
BOTH = pytest.mark.parametrize("batching", ["continuous", "serial"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("mixtral", tmp_path_factory.mktemp("batching") / "checkpoint")


@pytest.fixture(scope="module")
def store(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prepared(checkpoint, tmp_path_factory.mktemp("batching") / "store")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Greedy tokens of the unmodified model, far beyond any stop token."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return reference_greedy(model, PROMPTS, 4 * TOKENS)


@pytest.fixture(scope="module")
def workers(store: Any) -> Iterator[dict[str, GpuWorker]]:
    with (
        serving(store, settings(0.5, "next-gate", kv=kv("continuous"))) as continuous,
        serving(store, settings(0.5, "next-gate", kv=kv("serial"))) as serial,
    ):
        yield {"continuous": continuous, "serial": serial}


def kv(batching: str, num_blocks: int = 32) -> KvSettings:
    return KvSettings(batching=batching, page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=64)


def asked(index: int, name: str | None = None, max_tokens: int = TOKENS, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling})
    return GenerationRequest(name or f"r{index}", PROMPTS[index], params)


def gathered(stream: Any) -> Generation:
    generation = Generation(stream.request.request_id)
    for event in stream:
        assert generation.finish is None
        generation.add(event)
    return generation


def generate(worker: GpuWorker, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return [gathered(stream) for stream in [worker.submit(request) for request in requests]]


def batcher_of(worker: GpuWorker) -> Batcher:
    return worker._batcher


def free_kv(worker: GpuWorker) -> float:
    return worker._batcher._manager.batch_processor.cache.compute_free_capacity()


@BOTH
def test_requests_in_flight_together(workers: dict[str, GpuWorker], expected: list[list[int]], batching: str) -> None:
    worker = workers[batching]
    assert (batcher_of(worker).serial_because is None) == (batching == "continuous")
    found = generate(worker, [asked(i) for i in range(4)])
    assert [g.token_ids for g in found] == [tokens[:TOKENS] for tokens in expected]
    assert all((g.finish, g.error) == ("length", None) for g in found)
    assert all(g.ttft_s is not None and g.ttft_s > 0 and g.tpot_s is not None for g in found)
    assert worker.health() == {"state": "serving", "running": 0}


@BOTH
def test_a_long_prompt_is_prefilled_in_pieces(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    prompt = tuple(3 + i % 100 for i in range(150))  # max_batch_tokens is 64
    request = GenerationRequest("long", prompt, SamplingParams(4, ignore_eos=True))
    long, short = generate(workers[batching], [request, asked(0)])
    assert len(long.token_ids) == 4
    assert short.token_ids == expected[0][:TOKENS]


@BOTH
def test_each_request_has_its_own_sampling(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    worker = workers[batching]
    found = generate(
        worker,
        [
            asked(0),
            asked(0, "hot", temperature=3.0, seed=1),
            asked(0, "one", temperature=3.0, top_k=1),
            asked(0, "short", max_tokens=3),
            asked(0, "seeded", temperature=3.0, seed=1),
        ],
    )
    greedy, hot, top_1, short, seeded = [generation.token_ids for generation in found]
    assert greedy == top_1 == expected[0][:TOKENS]
    assert short == greedy[:3]
    assert hot == seeded
    assert hot != greedy


@BOTH
def test_stop_tokens_end_a_request_unless_ignored(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers[batching]
    stop = expected[0][5]
    first = expected[0].index(stop)
    streams = batcher_of(worker).streams
    monkeypatch.setattr(streams, "eos", [stop])
    stopped, ignoring = generate(worker, [asked(0, "stops", ignore_eos=False), asked(0, "ignores")])
    assert (stopped.token_ids, stopped.finish) == (expected[0][: first + 1], "stop")
    assert (ignoring.token_ids, ignoring.finish) == (expected[0][:TOKENS], "length")


@BOTH
def test_cancelling_one_leaves_the_others(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    worker = workers[batching]
    streams = [worker.submit(asked(0, "gone", max_tokens=4 * TOKENS)), *(worker.submit(asked(i)) for i in (1, 2))]
    events = iter(streams[0])
    assert next(events).token_ids  # in mid-generation
    assert worker.cancel("gone") is True
    assert worker.cancel("gone") is False
    rest = list(events)
    assert [event.finish for event in rest[:-1]] == [None] * (len(rest) - 1)
    assert rest[-1].finish == "cancelled"
    assert [gathered(s).token_ids for s in streams[1:]] == [tokens[:TOKENS] for tokens in expected[1:3]]


def test_cancelling_frees_the_kv_cache(workers: dict[str, GpuWorker], expected: list[list[int]]) -> None:
    worker = workers["continuous"]
    stream = worker.submit(asked(2, "gone", max_tokens=4 * TOKENS))
    assert next(iter(stream)).token_ids
    worker.cancel("gone")
    assert generate(worker, [asked(0)])[0].token_ids == expected[0][:TOKENS]  # the cancellation came before it
    assert free_kv(worker) == 1.0


@BOTH
def test_an_id_may_be_used_again_at_once(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    """Guards two bugs: the manager dropped the new request with the old one (a stream without end), and the
    serial batcher went on with the old request and gave its tokens to the new one."""
    worker = workers[batching]
    for _ in range(3):
        stream = worker.submit(asked(1, "same", max_tokens=4 * TOKENS))
        assert next(iter(stream)).token_ids
        worker.cancel("same")
        (again,) = generate(worker, [asked(0, "same")])
        assert (again.token_ids, again.finish) == (expected[0][:TOKENS], "length")


@BOTH
@pytest.mark.parametrize(
    "bad",
    [
        GenerationRequest("bad", (5, VOCAB)),
        GenerationRequest("bad", (-1,)),
        GenerationRequest("bad", ()),
        GenerationRequest("bad", (5,), SamplingParams(temperature=1.0, seed=-1)),
        GenerationRequest("bad", (5,), SamplingParams(max_tokens=10_000)),
    ],
)
def test_a_bad_request_does_not_harm_others(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str, bad: GenerationRequest
) -> None:
    """Guards a denial of service: an unknown token or a negative seed killed the generation loop for good."""
    worker = workers[batching]
    stream = worker.submit(asked(0))
    with pytest.raises(RequestError):
        worker.submit(bad)
    assert gathered(stream).token_ids == expected[0][:TOKENS]
    assert worker.health()["state"] == "serving"


@BOTH
def test_generate_cancels_when_its_consumer_leaves(workers: dict[str, GpuWorker], batching: str) -> None:
    worker = workers[batching]
    events = worker.generate(asked(0, "left", max_tokens=4 * TOKENS))
    assert next(events).token_ids
    events.close()
    assert worker.cancel("left") is False


@BOTH
def test_a_consumer_that_leaves_late_cancels_no_later_request(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    """Guards cancelling by id: a consumer that left after its request ended took the next of that id with it."""
    worker = workers[batching]
    events = worker.generate(asked(1, "same", max_tokens=4 * TOKENS))
    assert next(events).token_ids
    worker.cancel("same")
    again = worker.submit(asked(0, "same"))
    events.close()
    generation = gathered(again)
    assert (generation.token_ids, generation.finish) == (expected[0][:TOKENS], "length")


@BOTH
def test_the_models_positions_bound_a_request(workers: dict[str, GpuWorker], batching: str) -> None:
    worker = workers[batching]
    with pytest.raises(RequestError, match="257 tokens, the model was made for 256 positions"):
        worker.submit(asked(0, max_tokens=254))
    assert batcher_of(worker).streams.limit_tokens == 256  # the KV cache holds 512


EXTRAS = {"repetition_penalty": 5.0, "min_length": 200, "num_beams": 3, "no_repeat_ngram_size": 1, "top_k": 3}


@BOTH
def test_the_checkpoints_generation_extras_are_not_applied(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, batching: str
) -> None:
    """Guards `generate`, which took penalties, beams and a minimal length from the checkpoint."""
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    extras = EXTRAS | {"eos_token_id": expected[0][5], "temperature": 0.1, "suppress_tokens": [expected[0][0]]}
    (copy / "generation_config.json").write_text(json.dumps(extras))
    with serving(prepared(copy, tmp_path / "store"), settings(1.0, kv=kv(batching))) as worker:
        stopped, whole = generate(worker, [asked(0, "stops", ignore_eos=False), asked(0, "whole")])
    assert whole.token_ids == expected[0][:TOKENS]
    assert stopped.token_ids == expected[0][: expected[0].index(expected[0][5]) + 1]


def tiermoe_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tiermoe"))


@pytest.mark.parametrize("step", ["tiermoe.actors.gpu_worker.make_batcher", "tiermoe.actors.engine.describe.describe"])
def test_a_start_that_fails_leaves_no_thread(store: Any, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeFailure("no", "nothing")

    before = tiermoe_threads()
    monkeypatch.setattr(step, fail)
    worker = GpuWorker(settings(1.0, kv=kv("serial")), store.describe())
    with pytest.raises(RuntimeFailure, match="no"):
        worker.start()
    assert tiermoe_threads() == before
    worker.close()


@BOTH
def test_close_during_generation(store: Any, batching: str) -> None:
    """Guards the reason: the ends came as `error` or, one after another, as `length` with tokens missing."""
    with serving(store, settings(1.0, kv=kv(batching))) as worker:
        streams = [worker.submit(asked(i, max_tokens=8 * TOKENS)) for i in (0, 1)]
        events = iter(streams[0])
        assert next(events).token_ids
        worker.close()
        worker.close()
        assert list(events)[-1].finish == "cancelled"
        assert gathered(streams[1]).finish == "cancelled"
        with pytest.raises(RuntimeFailure):
            worker.submit(asked(0))


def test_one_request_may_fill_the_kv_cache(store: Any, expected: list[list[int]]) -> None:
    with serving(store, settings(1.0, kv=kv("continuous", num_blocks=4))) as worker:
        capacity = batcher_of(worker).streams.capacity_tokens
        assert capacity == 4 * PAGE
        (full,) = generate(worker, [asked(0, max_tokens=capacity - len(PROMPTS[0]))])
        assert (full.error, full.token_ids) == (None, expected[0][: capacity - len(PROMPTS[0])])
        assert free_kv(worker) == 1.0


def test_requests_that_together_exceed_the_kv_cache_give_way_and_finish(store: Any, expected: list[list[int]]) -> None:
    """Preempted requests are prefilled again; neither their tokens nor the draws of a seed may show it."""
    sampled = {"temperature": 1.0, "seed": 3}
    with serving(store, settings(1.0, kv=kv("continuous", num_blocks=32))) as worker:
        alone = [generate(worker, [asked(i, max_tokens=40, **sampled)])[0].token_ids for i in (0, 1)]
    with serving(store, settings(1.0, kv=kv("continuous", num_blocks=6))) as worker:
        requests = [asked(i, max_tokens=40, **(sampled if i < 2 else {})) for i in range(4)]
        found = generate(worker, requests)
        assert [g.error for g in found] == [None] * 4
        assert [g.token_ids for g in found[2:]] == [tokens[:40] for tokens in expected[2:]]
        assert [g.token_ids for g in found[:2]] == alone
        assert free_kv(worker) == 1.0


@BOTH
def test_a_failing_engine_ends_every_stream_and_says_so(
    store: Any, batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinkQueue, "supports", lambda *args: False)  # whose copies cannot fail
    with serving(store, settings(0.25, kv=kv(batching))) as worker:

        def fail(*args: Any) -> None:
            raise OSError("the mapping is gone")

        worker._engine.device.copy = fail
        streams = [worker.submit(asked(i)) for i in (0, 1)]
        ended = [gathered(stream) for stream in streams]
        assert [g.finish for g in ended] == ["error", "error"]
        assert all("the mapping is gone" in (g.error or "") for g in ended)
        if batching == "continuous":  # streams end before the loop records its error
            worker._batcher._manager._generation_thread.join(30)
        with pytest.raises(RuntimeFailure, match="mapping is gone"):
            worker.submit(asked(0))
        with pytest.raises(RuntimeFailure, match="mapping is gone"):
            worker.health()
