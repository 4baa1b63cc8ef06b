"""Requests: their events, ends and refusals, and requests that share a worker, batched or one after another."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from channel_peer import wait_until
from serving import prepared, reference_greedy, serving, serving_both, settings
from tiny_models import VOCAB, tiny_config
from transformers import AutoModelForCausalLM

from tiermoe.actors import gpu_worker
from tiermoe.actors.engine.serving.batcher import Batcher
from tiermoe.actors.engine.serving.streams import Streams
from tiermoe.actors.gpu_worker import GpuWorker, make_batcher
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.cluster.config import load_policy
from tiermoe.errors import (
    LoopDied,
    NotServing,
    PolicyError,
    RequestError,
    RuntimeFailure,
    StoreError,
    TierMoeError,
    UnsupportedModelError,
    rebuilt,
)

CAPACITY, EOS, VOCABULARY = 20, 2, 100


@pytest.fixture
def streams() -> Streams:
    return Streams(CAPACITY, [EOS], VOCABULARY)


def asked(name: str = "r", prompt: tuple[int, ...] = (5, 6), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 8, **sampling}))


def test_the_type_of_an_error_of_ours_goes_with_its_text(streams: Streams) -> None:
    lost = StoreError("layers 1, 2 are nowhere; tried store/0", "bring it back")
    ours, other = streams.open(asked("a")), streams.open(asked("b"))
    streams.abort(ours.name, "error", "what a manager says", lost)
    streams.abort(other.name, "error", "what a manager says", ValueError("odd"))
    (first,), (second,) = ours, other
    assert (first.error_type, first.error) == ("StoreError", str(lost))
    assert (second.error_type, second.error) == (None, "what a manager says")
    again = rebuilt(first.error_type, first.error)
    assert (type(again), again.what, again.remedy) == (StoreError, lost.what, lost.remedy)
    assert type(rebuilt("Unheard", "what; remedy")) is TierMoeError
    assert rebuilt("RequestError", "the grammar is too complex").what == "the grammar is too complex"


@pytest.mark.parametrize(
    ("generated", "ignore_eos", "finish"),
    [([10, 11], False, "length"), ([10, EOS], False, "stop"), ([10, EOS], True, "length"), ([], False, "length")],
)
def test_why_it_finished(streams: Streams, generated: list[int], ignore_eos: bool, finish: str) -> None:
    stream = streams.open(asked(ignore_eos=ignore_eos))
    streams.finish(stream.name, generated)
    (event,) = stream
    assert (event.token_ids, event.finish, event.error) == (tuple(generated), finish, None)
    assert event.ttft_s is not None
    assert (event.tpot_s is None) == (len(generated) < 2)


def test_names_cannot_be_forged(streams: Streams) -> None:
    first = streams.open(asked("r"))
    other = streams.open(asked(first.name))
    assert other.name != first.name


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (asked(prompt=()), "the prompt is empty"),
        (asked(prompt=(5,) * 13), "21 tokens, the KV cache holds 20"),
        (asked(prompt=(5,), max_tokens=20), "21 tokens"),
        (asked(max_tokens=0), "max_tokens is 0"),
        (asked(prompt=(5, VOCABULARY)), "no token 100"),
        (asked(prompt=(-1,)), "no token -1"),
        (asked(temperature=-0.1), "temperature is -0.1"),
        (asked(temperature=float("nan")), "temperature is nan"),
        (asked(temperature=float("inf")), "temperature is inf"),
        (asked(top_p=0.0), "top_p is 0.0"),
        (asked(top_p=1.1), "top_p is 1.1"),
        (asked(top_p=float("nan")), "top_p is nan"),
        (asked(top_k=-1), "top_k is -1"),
        (asked(seed=-1), "seed is -1"),
        (asked(seed=1 << 64), "seed is"),
        (asked(min_tokens=9), "min_tokens"),
        (asked(min_tokens=-1), "min_tokens"),
        (asked(logprobs=21), "logprobs"),
        (asked(logprobs=-1), "logprobs"),
        (asked(prompt_logprobs=99), "prompt_logprobs"),
        (asked(min_p=-0.1), "min_p"),
        (asked(min_p=float("nan")), "min_p"),
        (asked(repetition_penalty=0.0), "repetition_penalty"),
        (asked(presence_penalty=float("inf")), "presence_penalty"),
        (asked(logit_bias=((VOCABULARY, 1.0),)), "logit_bias"),
        (asked(logit_bias=((1, float("nan")),)), "logit_bias"),
        (asked(stop_token_ids=(-1,)), "stop_token_ids"),
        (asked(repetition_penalty=1e-39), "repetition_penalty is 1e-39"),
        (asked(repetition_penalty=1e39), "repetition_penalty"),
        (asked(repetition_penalty=float("nan")), "repetition_penalty"),
        (asked(frequency_penalty=1e308), "frequency_penalty"),
        (asked(presence_penalty=-1e38), "presence_penalty"),
        (asked(logit_bias=((1, 1e39),)), "logit_bias"),
        (asked(logit_bias=((1, float("-inf")),)), "logit_bias"),
        (asked(logit_bias=((1, 1.0), (1, 1.0))), "logit_bias names a token twice"),
        (asked(stop_token_ids=(10**30,)), "stop_token_ids"),
        (asked(stop_token_ids=tuple(range(VOCABULARY)), min_tokens=1), "stop_token_ids name every token"),
        (asked(stop_token_ids=tuple(set(range(VOCABULARY)) - {EOS}), min_tokens=1), "stop_token_ids name every token"),
        (asked(stop_token_ids=(1,) * 2000), "stop_token_ids are 2000"),
        (asked(temperature="hot"), "temperature is 'hot'"),
        (asked(temperature=1e30), "temperature"),
        (asked(seed=0.5), "seed is 0.5"),
        (asked(top_k=None), "top_k is None"),
        (replace(asked(), cache_salt="s" * 2000), "cache_salt"),
    ],
)
def test_refused(streams: Streams, request_: GenerationRequest, match: str) -> None:
    """What fails inside a batch takes the whole generation loop with it, so it must not get there."""
    with pytest.raises(RequestError, match=match):
        streams.open(request_)
    assert len(streams) == 0
    streams.open(asked())  # the id is still free


def test_the_models_positions_bound_a_request_as_well_as_the_kv_cache() -> None:
    """Guards prompts beyond the model's positions: they gave text without sense, or an index error in the batch."""
    model_is_tighter = Streams(CAPACITY, [EOS], VOCABULARY, positions=12)
    cache_is_tighter = Streams(CAPACITY, [EOS], VOCABULARY, positions=40)
    assert (model_is_tighter.limit_tokens, cache_is_tighter.limit_tokens) == (12, CAPACITY)
    with pytest.raises(RequestError, match="13 tokens, the model was made for 12 positions"):
        model_is_tighter.open(asked(prompt=(5,) * 5))
    model_is_tighter.open(asked(prompt=(5,) * 4))
    with pytest.raises(RequestError, match="21 tokens, the KV cache holds 20"):
        cache_is_tighter.open(asked(prompt=(5,) * 13))
    cache_is_tighter.open(asked(prompt=(5,) * 12))


def test_an_id_in_use_is_refused(streams: Streams) -> None:
    stream = streams.open(asked())
    with pytest.raises(RequestError, match="id r is in use"):
        streams.open(asked())
    streams.finish(stream.name, [10])  # the first is not disturbed
    assert [event.token_ids for event in stream] == [(10,)]
    streams.open(asked())


PROMPTS = [(5, 6, 7), tuple(range(10, 21)), tuple(range(30, 60)), (9,)]
TOKENS = 24
LONG = 9 * TOKENS  # nearly as many as the model has positions: not over before a busy machine cancels it
PAGE = 16
BOTH = pytest.mark.parametrize("batching", ["continuous", "serial"])


@pytest.fixture(scope="module")
def expected(mixtral: Path) -> list[list[int]]:
    """Greedy tokens of the unmodified model, far beyond any stop token."""
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return reference_greedy(model, PROMPTS, 4 * TOKENS)


@pytest.fixture(scope="module")
def workers(mixtral_store: Any) -> Iterator[dict[str, GpuWorker]]:
    with serving_both(mixtral_store, {"num_blocks": 32, "max_batch_tokens": 64}, "next-gate") as both:
        yield both


def kv(batching: str, num_blocks: int = 32) -> KvSettings:
    return KvSettings(batching=batching, page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=64)


def numbered(index: int, name: str | None = None, max_tokens: int = TOKENS, **sampling: Any) -> GenerationRequest:
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
    return 1.0 - worker.load()["kv_usage"]


@BOTH
def test_requests_in_flight_together(workers: dict[str, GpuWorker], expected: list[list[int]], batching: str) -> None:
    worker = workers[batching]
    assert (batcher_of(worker).unpaged_because is None) == (batching == "continuous")
    found = generate(worker, [numbered(i) for i in range(4)])
    assert [g.token_ids for g in found] == [tokens[:TOKENS] for tokens in expected]
    assert all((g.finish, g.error) == ("length", None) for g in found)
    assert all(g.ttft_s is not None and g.ttft_s > 0 and g.tpot_s is not None for g in found)
    assert worker.health() == {"state": "serving", "running": 0}


@BOTH
def test_each_request_has_its_own_sampling(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    worker = workers[batching]
    found = generate(
        worker,
        [
            numbered(0),
            numbered(0, "hot", temperature=3.0, seed=1),
            numbered(0, "one", temperature=3.0, top_k=1),
            numbered(0, "short", max_tokens=3),
            numbered(0, "seeded", temperature=3.0, seed=1),
        ],
    )
    greedy, hot, top_1, short, seeded = [generation.token_ids for generation in found]
    assert greedy == top_1 == expected[0][:TOKENS]
    assert short == greedy[:3]
    assert hot == seeded
    assert hot != greedy


@BOTH
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 3.0, "seed": 1}, {"logprobs": 2, "prompt_logprobs": 1}], ids=str
)
def test_a_request_resumes_after_the_tokens_of_an_earlier_lead(
    workers: dict[str, GpuWorker], batching: str, sampling: dict[str, Any]
) -> None:
    worker, request = workers[batching], numbered(1, min_tokens=4, **sampling)
    whole = list(worker.submit(request))
    tokens = tuple(token for event in whole for token in event.token_ids)
    for known in (1, 17, TOKENS):
        part = list(worker.submit(replace(request, request_id=f"r.{known}", generated=tokens[:known])))
        assert tuple(token for event in part for token in event.token_ids) == tokens[known:]
        assert part[-1].finish == "length"
        assert not any(event.prompt_logprobs for event in part)
        before, after = ([scored for event in events for scored in event.logprobs] for events in (whole, part))
        assert [s.token_id for s in after] == [s.token_id for s in before[known:]]
        assert [s.logprob for s in after] == pytest.approx([s.logprob for s in before[known:]], abs=1e-4)


@BOTH
def test_stop_tokens_end_a_request_unless_ignored(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers[batching]
    stop = expected[0][5]
    first = expected[0].index(stop)
    streams = batcher_of(worker).streams
    monkeypatch.setattr(streams, "eos", [stop])
    stopped, ignoring = generate(worker, [numbered(0, "stops", ignore_eos=False), numbered(0, "ignores")])
    assert (stopped.token_ids, stopped.finish) == (expected[0][: first + 1], "stop")
    assert (ignoring.token_ids, ignoring.finish) == (expected[0][:TOKENS], "length")


@BOTH
def test_cancelling_one_leaves_the_others(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    worker = workers[batching]
    streams = [worker.submit(numbered(0, "gone", max_tokens=LONG)), *(worker.submit(numbered(i)) for i in (1, 2))]
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
    stream = worker.submit(numbered(2, "gone", max_tokens=4 * TOKENS))
    assert next(iter(stream)).token_ids
    worker.cancel("gone")
    assert generate(worker, [numbered(0)])[0].token_ids == expected[0][:TOKENS]  # the cancellation came before it
    assert free_kv(worker) == 1.0


@BOTH
def test_an_id_may_be_used_again_at_once(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    """Guards two bugs: the manager dropped the new request with the old one (a stream without end), and the
    batcher of one row went on with the old request and gave its tokens to the new one."""
    worker = workers[batching]
    for _ in range(3):
        stream = worker.submit(numbered(1, "same", max_tokens=4 * TOKENS))
        assert next(iter(stream)).token_ids
        worker.cancel("same")
        (again,) = generate(worker, [numbered(0, "same")])
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
    stream = worker.submit(numbered(0))
    with pytest.raises(RequestError):
        worker.submit(bad)
    assert gathered(stream).token_ids == expected[0][:TOKENS]
    assert worker.health()["state"] == "serving"


@BOTH
def test_a_consumer_that_leaves_late_cancels_no_later_request(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str
) -> None:
    """Guards cancelling by id: a consumer that left after its request ended took the next of that id with it."""
    worker = workers[batching]
    events = worker.generate(numbered(1, "same", max_tokens=4 * TOKENS))
    assert next(events).token_ids
    worker.cancel("same")
    again = worker.submit(numbered(0, "same"))
    events.close()
    generation = gathered(again)
    assert (generation.token_ids, generation.finish) == (expected[0][:TOKENS], "length")


@BOTH
def test_clients_take_the_events_of_their_requests(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each its own; those of one that is silent are cancelled."""
    worker = workers[batching]
    life = worker.begin("one", numbered(0, "a"))
    assert worker.begin("one", numbered(1, "b")) == worker.begin("two", numbered(2, "c")) == life
    found = {name: Generation(name) for name in "abc"}
    for client, names in (("one", "ab"), ("two", "c")):
        while any(found[name].finish is None for name in names):
            alive, events = worker.take(client, 10.0)
            assert alive == life
            assert {event.request_id for event in events} <= set(names)
            for event in events:
                found[event.request_id].add(event)
    assert [generation.token_ids for generation in found.values()] == [tokens[:TOKENS] for tokens in expected[:3]]
    with pytest.raises(RequestError):
        worker.begin("one", GenerationRequest("empty", ()))

    worker.begin("one", numbered(0, "left", max_tokens=LONG))
    worker.load()
    assert worker.batcher.streams.find("left") is not None
    monkeypatch.setattr("tiermoe.actors.gpu_worker._CLIENT_GONE_S", 0.0)
    worker.load()
    assert worker.batcher.streams.find("left") is None
    assert worker.take("one", 0.0) == (life, [])


def test_prompts_together_attend_each_to_its_own_keys(mixtral_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in 32 choices took seconds a pass: its rows times the keys of all of them."""
    from transformers.integrations import sdpa_attention

    real, shapes = sdpa_attention.sdpa_attention_forward, list[tuple[int, int]]()

    def seen(module: Any, query: Any, key: Any, *rest: Any, **more: Any) -> Any:
        shapes.append((query.shape[2], key.shape[2]))
        return real(module, query, key, *rest, **more)

    count, length = 4, 40  # together more rows than native code takes
    prompts = [tuple((7 * i + j) % (VOCAB - 5) + 3 for j in range(length)) for i in range(count)]
    asked = [GenerationRequest(f"p{i}", prompt, SamplingParams(2, ignore_eos=True)) for i, prompt in enumerate(prompts)]
    pool = KvSettings(page_size=PAGE, num_blocks=32, max_batch_tokens=256, prefix_cache=False)
    with serving(mixtral_store, settings(1.0, kv=pool)) as worker:
        alone = [generate(worker, [one])[0].token_ids for one in asked]
        monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", seen)
        monkeypatch.setattr("tiermoe.actors.engine.model.attention._FOREIGN", 0)
        together = generate(worker, asked)
    assert [one.token_ids for one in together] == alone
    assert shapes
    assert max(keys for _, keys in shapes) <= length


@BOTH
@pytest.mark.parametrize(
    "own", [{"presence_penalty": 1.25}, {"prompt_logprobs": 17}, {"temperature": 1.0, "min_p": 0.125}], ids=str
)
def test_a_request_that_fails_in_a_step_fails_alone(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str, own: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Guards the others: any exception of one request's scores, draw or scoring ended the generation loop."""

    def failing(name: str, fails: Any) -> None:
        real = getattr(*name_of(name))

        def call(*args: Any) -> Any:
            if fails(args):
                raise ValueError("poison")
            return real(*args)

        monkeypatch.setattr(*name_of(name), call)

    failing("logits.LogitsProcessor.__call__", lambda args: args[0]._params.presence_penalty == 1.25)
    failing("sampling.token_logprobs", lambda args: args[2] == 17)
    failing("sampling._asked", lambda args: args[1].min_p == 0.125)
    worker = workers[batching]
    streams = [worker.submit(numbered(i)) for i in (0, 1)]
    bad = worker.submit(numbered(2, "bad", **own))
    last = list(bad)[-1]
    assert (last.finish, "poison" in (last.error or "")) == ("error", True)
    assert [gathered(stream).token_ids for stream in streams] == [tokens[:TOKENS] for tokens in expected[:2]]
    assert worker.health() == {"state": "serving", "running": 0}
    wait_until(lambda: free_kv(worker) == 1.0)  # behind the last event
    assert generate(worker, [numbered(3)])[0].token_ids == expected[3][:TOKENS]


def name_of(path: str) -> tuple[Any, str]:
    """What has an attribute of a module of `serving`, and its name."""
    module, *owners, name = path.split(".")
    found = import_module(f"tiermoe.actors.engine.serving.{module}")
    for owner in owners:
        found = getattr(found, owner)
    return found, name


@BOTH
@pytest.mark.parametrize("own", [{}, {"temperature": 1.0, "seed": 1}], ids=str)
def test_scores_that_are_no_numbers_end_their_request_only(
    workers: dict[str, GpuWorker], expected: list[list[int]], batching: str, own: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a broken checkpoint. Guards a greedy request that went on with token 0, and a drawn one that ended all."""
    path = f"{'steps' if batching == 'continuous' else 'rows'}.verified_tokens"
    (module, name), worker = name_of(path), workers[batching]
    together = 2 if batching == "continuous" else 1
    real, bad_steps = getattr(module, name), iter([False, False, True])

    def spoilt(logits: torch.Tensor, *rest: Any) -> Any:
        if logits.shape[1] == together and next(bad_steps, False):
            logits = logits.clone()
            logits[0, 0] = float("nan")
        return real(logits, *rest)

    monkeypatch.setattr(module, name, spoilt)
    bad, good = worker.submit(numbered(0, "bad", **own)), worker.submit(numbered(1))
    events = list(bad)
    assert events[-1].error_type == "CheckpointError"
    assert "no finite score" in (events[-1].error or "")
    assert gathered(good).token_ids == expected[1][:TOKENS]
    assert worker.health()["state"] == "serving"


def test_a_loop_that_dies_says_who_was_in_its_step(mixtral_store: Any) -> None:
    """Those resume by a trial, others as after any death; the lead says that it is to be started again."""
    with serving(mixtral_store, settings(1.0, kv=kv("continuous"))) as worker:
        begun, both = threading.Event(), threading.Event()

        def fail(rows: Any) -> None:
            begun.set()
            both.wait(30)
            raise KeyError("boom")

        worker.engine.begin_forward = fail
        carried = worker.submit(numbered(0))
        assert begun.wait(30)
        queued = worker.submit(numbered(1))
        both.set()
        assert [list(stream)[-1].error_type for stream in (carried, queued)] == ["LoopDied", "NotServing"]
        with pytest.raises(NotServing, match=r"the generation loop died \(KeyError: 'boom'\)") as refused:
            worker.submit(numbered(0))
        assert not isinstance(refused.value, LoopDied)  # it took no part
        with pytest.raises(LoopDied):
            worker.health()


EXTRAS = {"repetition_penalty": 5.0, "min_length": 200, "num_beams": 3, "no_repeat_ngram_size": 1, "top_k": 3}


@BOTH
def test_the_checkpoints_generation_extras_are_not_applied(
    mixtral: Path, expected: list[list[int]], tmp_path: Path, batching: str
) -> None:
    """Guards `generate`, which took penalties, beams and a minimal length from the checkpoint."""
    copy = shutil.copytree(mixtral, tmp_path / "checkpoint")
    extras = EXTRAS | {"eos_token_id": expected[0][5], "temperature": 0.1, "suppress_tokens": [expected[0][0]]}
    (copy / "generation_config.json").write_text(json.dumps(extras))
    with serving(prepared(copy, tmp_path / "store"), settings(1.0, kv=kv(batching))) as worker:
        stopped, whole = generate(worker, [numbered(0, "stops", ignore_eos=False), numbered(0, "whole")])
    assert whole.token_ids == expected[0][:TOKENS]
    assert stopped.token_ids == expected[0][: expected[0].index(expected[0][5]) + 1]


def tiermoe_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tiermoe"))


@pytest.mark.parametrize("architecture", ["deepseek_v4", "hy_v4", "mimo_v2_flash", "deepseek_v3"])
def test_what_continuous_batching_changed_is_put_back(architecture: str) -> None:
    """Guards the fall-back: it kept the paged attention, and every request failed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.float32).eval()
    prompts = [list(range(3, 3 + length)) for length in (4, 30)]
    expected, attention = reference_greedy(model, prompts, 6, ignore_eos=True), model.config._attn_implementation
    with closing(make_batcher(model, KvSettings(page_size=16, num_blocks=16))) as batcher:
        assert model.config._attn_implementation == attention
        assert "transformers" not in batcher.unpaged_because
        assert "tensor" not in batcher.unpaged_because.lower()
        requests = [asked(str(len(p)), tuple(p), max_tokens=6, ignore_eos=True) for p in prompts]
        assert [gathered(batcher.submit(request)).token_ids for request in requests] == expected


@pytest.mark.parametrize("batching", ["serial", "auto"])
def test_no_worker_is_ready_before_a_token_came(
    mixtral_store: Any, batching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails every request is refused at start, by its architecture's name."""
    model_class = import_module("transformers.models.mixtral.modeling_mixtral").MixtralModel

    def forward(*args: Any, **kwargs: Any) -> None:
        raise ValueError("a shape that does not fit")

    monkeypatch.setattr(model_class, "forward", forward)
    config = settings(0.5, kv=KvSettings(page_size=16, num_blocks=16, batching=batching), compile="off")
    worker, threads = GpuWorker(config, mixtral_store.describe()), tiermoe_threads()
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM does not generate here.*a shape that does"):
        worker.start()
    assert tiermoe_threads() == threads


@pytest.mark.parametrize("step", ["tiermoe.actors.gpu_worker.make_batcher", "tiermoe.actors.engine.describe.describe"])
def test_a_start_that_fails_leaves_no_thread(mixtral_store: Any, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeFailure("no", "nothing")

    before = tiermoe_threads()
    monkeypatch.setattr(step, fail)
    worker = GpuWorker(settings(1.0, kv=kv("serial")), mixtral_store.describe())
    with pytest.raises(RuntimeFailure, match="no"):
        worker.start()
    assert tiermoe_threads() == before
    worker.close()


@BOTH
def test_it_serves_once_the_start_is_over(mixtral_store: Any, batching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a lead that said "serving", and took requests, before the start's own forwards had given a token."""
    worker = GpuWorker(settings(1.0, kv=kv(batching)), mixtral_store.describe())
    states = list[str]()

    def look(*args: Any) -> list[str]:
        states.append(worker.health()["state"])
        for call in (lambda: worker.submit(numbered(0)), lambda: worker.begin("client", numbered(0)), worker.plan):
            with pytest.raises(NotServing, match="not started"):
                call()
        return []

    monkeypatch.setattr("tiermoe.actors.engine.dense.compile.CompiledDense.settle", look)
    worker.start()
    try:
        assert states == ["probing"]
        assert worker.health()["state"] == "serving"
        assert gathered(worker.submit(numbered(0))).finish == "length"
    finally:
        worker.close()


@BOTH
def test_close_during_generation(mixtral_store: Any, batching: str) -> None:
    """Guards the reason: the ends came as `error` or, one after another, as `length` with tokens missing."""
    with serving(mixtral_store, settings(1.0, kv=kv(batching))) as worker:
        streams = [worker.submit(numbered(i, max_tokens=LONG)) for i in (0, 1)]
        events = iter(streams[0])
        assert next(events).token_ids
        worker.close()
        worker.close()
        assert list(events)[-1].finish == "cancelled"
        assert gathered(streams[1]).finish == "cancelled"
        with pytest.raises(RuntimeFailure):
            worker.submit(numbered(0))


def test_one_request_may_fill_the_kv_cache(mixtral_store: Any, expected: list[list[int]]) -> None:
    with serving(mixtral_store, settings(1.0, kv=kv("continuous", num_blocks=4))) as worker:
        capacity = batcher_of(worker).streams.capacity_tokens
        assert capacity == 4 * PAGE
        (full,) = generate(worker, [numbered(0, max_tokens=capacity - len(PROMPTS[0]))])
        assert (full.error, full.token_ids) == (None, expected[0][: capacity - len(PROMPTS[0])])
        assert free_kv(worker) == 1.0


def test_requests_that_together_exceed_the_kv_cache_give_way_and_finish(
    mixtral_store: Any, expected: list[list[int]]
) -> None:
    """Preempted requests are prefilled again; neither their tokens nor the draws of a seed may show it."""
    sampled = {"temperature": 1.0, "seed": 3}
    with serving(mixtral_store, settings(1.0, kv=kv("continuous", num_blocks=32))) as worker:
        alone = [generate(worker, [numbered(i, max_tokens=40, **sampled)])[0].token_ids for i in (0, 1)]
    with serving(mixtral_store, settings(1.0, kv=kv("continuous", num_blocks=6))) as worker:
        requests = [numbered(i, max_tokens=40, **(sampled if i < 2 else {})) for i in range(4)]
        found = generate(worker, requests)
        assert [g.error for g in found] == [None] * 4
        assert [g.token_ids for g in found[2:]] == [tokens[:40] for tokens in expected[2:]]
        assert [g.token_ids for g in found[:2]] == alone
        assert free_kv(worker) == 1.0


@pytest.mark.usefixtures("copies_in_python")  # those of the link's thread cannot fail
@BOTH
def test_a_failing_engine_ends_every_stream_and_says_so(mixtral_store: Any, batching: str) -> None:
    both = threading.Event()  # are submitted: the first fails within microseconds, and then none is taken
    with serving(mixtral_store, settings(0.25, kv=kv(batching))) as worker:

        def fail(*args: Any) -> None:
            both.wait(30)
            raise OSError("the mapping is gone")

        worker._engine.device.copy = fail
        streams = [worker.submit(numbered(i)) for i in (0, 1)]
        both.set()
        ended = [gathered(stream) for stream in streams]
        assert [g.finish for g in ended] == ["error", "error"]
        assert all("the mapping is gone" in (g.error or "") for g in ended)
        if batching == "continuous":  # streams end before the loop records its error
            worker._batcher._manager._generation_thread.join(30)
        with pytest.raises(RuntimeFailure, match="mapping is gone"):
            worker.submit(numbered(0))
        with pytest.raises(RuntimeFailure, match="mapping is gone"):
            worker.health()


@pytest.mark.parametrize(
    ("error", "ends"),
    [(MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory"), True),
     (RuntimeError("std::bad_alloc"), True),
     (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
     (OSError("the mapping is gone"), False)],
)  # fmt: skip
def test_a_failed_allocation_is_reported_before_a_request_ends(error: Exception, ends: bool, streams: Streams) -> None:
    """Guards the requests of a lead at its memory's limit: all failed, and so did `serve`, though a new process could
    have gone on."""
    stream, told = streams.open(asked()), list[tuple[BaseException, int]]()
    streams.out_of_memory = lambda error: told.append((error, len(streams)))
    outer = ValueError("of a layer")
    outer.__cause__ = error
    streams.abort(stream.name, "error", "why", outer)
    assert told == ([(outer, 1)] if ends else [])


@pytest.mark.usefixtures("copies_in_python")
@BOTH
def test_a_lead_without_memory_ends_its_process(
    mixtral_store: Any, batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(gpu_worker, "os", SimpleNamespace(_exit=codes.append))
    with serving(mixtral_store, settings(0.25, kv=kv(batching))) as worker:

        def fail(*args: Any) -> None:
            raise MemoryError

        worker._engine.device.copy = fail
        gathered(worker.submit(numbered(0)))
        assert set(codes) == {1}


_LATE = """
from tiermoe.actors.policies.eviction import Lru

class Late(Lru):
    fails = False

    def used(self, keys):
        if Late.fails:
            raise KeyError("boom")
        super().used(keys)
"""


@BOTH
@pytest.mark.parametrize("at_start", [True, False])
def test_the_failure_of_a_policy_is_said_as_it_is(
    mixtral_store: Any, batching: str, at_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the reason: the probe called it a model that cannot be batched, and ran it on its own cache."""
    (tmp_path / "late_policy.py").write_text(_LATE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late.yaml").write_text("name: late\nlossless: true\neviction: late_policy:Late\n")
    said = r"policy late_policy:Late failed in used\(\), late_policy.py:9: KeyError: 'boom'"
    late = import_module("late_policy").Late
    late.fails = at_start
    try:
        policy = load_policy(str(tmp_path / "late.yaml"))
        chosen = settings(0.25, policy=policy, kv=kv("auto" if at_start else batching))
        if at_start:
            with pytest.raises(PolicyError, match=said):
                GpuWorker(chosen, mixtral_store.describe()).start()
            return
        with serving(mixtral_store, chosen) as worker:
            late.fails = True
            (event,) = list(worker.submit(numbered(0)))
            assert event.error_type == "PolicyError"
            assert re.match(said, event.error or "")
            if batching == "continuous":
                worker._batcher._manager._generation_thread.join(30)
            for call in (worker.health, lambda: worker.submit(numbered(0))):
                with pytest.raises(PolicyError, match=said):
                    call()
    finally:
        del sys.modules["late_policy"]
