"""Prompts that begin alike share the KV cache: what is run, what is evicted, and the same tokens as without sharing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from golden_rig import emulated
from serving import gathered, prepared, serving, settings
from tiny_models import VOCAB, save_tiny_checkpoint

from tiermoe.actors.engine.serving.scheduler import StepScheduler, salted
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings, NdpSettings
from tiermoe.cluster.config import load_hardware, load_policy

PAGE = 8
SAMPLED = {"temperature": 1.5, "seed": 7}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("prefix")
    return prepared(save_tiny_checkpoint("qwen3_moe", folder / "model"), folder / "store")


def kv(**more: Any) -> KvSettings:
    return KvSettings(**{"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 64, **more})


@pytest.fixture(scope="module", params=["native", pytest.param("off", marks=pytest.mark.slow)])
def worker(store: Any, request: pytest.FixtureRequest) -> Iterator[GpuWorker]:
    with serving(store, settings(0.5, "next-gate", kv=kv(), compile=request.param)) as worker:
        yield worker


@pytest.fixture(scope="module")
def plain(store: Any) -> Iterator[GpuWorker]:
    with serving(store, settings(0.5, "next-gate", kv=kv(prefix_cache=False), compile="off")) as worker:
        yield worker


def text(seed: int, tokens: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, VOCAB) for _ in range(tokens))


def asked(
    name: str, prompt: Sequence[int], reads: bool = True, salt: str = "", **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    return GenerationRequest(name, tuple(prompt), params, read_prefix_cache=reads, cache_salt=salt)


def generated(worker: GpuWorker, *requests: GenerationRequest) -> list[Generation]:
    """All in flight together."""
    found = [gathered(stream) for stream in [worker.submit(request) for request in requests]]
    check_blocks(worker)
    return found


def check_blocks(worker: GpuWorker) -> None:
    """No request is open: every block is free or cached, and none is both."""
    assert worker.load()["kv_usage"] == 0.0
    cache = worker.batcher._manager.batch_processor.cache
    for allocator in cache.cache_allocators.values():
        ledger, pool = allocator.ledger, cache.pool
        free = [block for tree in pool._free_blocks[allocator.index].trees.values() for block in tree]
        assert len(set(free)) == len(free)
        assert not set(free) & set(ledger.cached_blocks)
        assert not ledger.shared_ref_counts
        assert not allocator.block_table
        assert set(ledger.block_to_hash) == set(ledger.cached_blocks)
        assert {ledger.hash_to_block[found]: found for found in ledger.hash_to_block} == ledger.block_to_hash


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_a_second_turn_runs_what_is_new(worker: GpuWorker, plain: GpuWorker, sampling: dict[str, Any]) -> None:
    first = text(1 + len(sampling), 3 * PAGE + 3)
    (answer,) = generated(worker, asked("first", first, **sampling))
    assert answer.cached_tokens == 0
    second = (*first, *answer.token_ids, *text(9, 5))
    (found,) = generated(worker, asked("second", second, **sampling))
    # the last generated token was never fed
    assert found.cached_tokens == (len(first) + len(answer.token_ids) - 1) // PAGE * PAGE == 4 * PAGE
    expected = generated(plain, asked("first", first, **sampling))[0].token_ids
    assert answer.token_ids == expected
    expected = generated(plain, asked("second", second, **sampling))[0].token_ids
    assert found.token_ids == expected


def test_an_equal_prompt_still_runs_its_last_rows(worker: GpuWorker) -> None:
    prompt = text(20, 4 * PAGE)
    first, second = (generated(worker, asked(name, prompt))[0] for name in "ab")
    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * PAGE)  # one row at least gives the first token
    assert first.token_ids == second.token_ids


def test_requests_of_another_salt_share_nothing(worker: GpuWorker, plain: GpuWorker) -> None:
    """Guards `cached_tokens`, and the time to the first token, which told one key what another had sent.

    The keys are the same either way: an answer does not show a salt. The answer's own tokens are salted, too.
    """
    prompt = text(26, 4 * PAGE + 1)
    (expected,) = generated(plain, asked("plain", prompt))
    turns = [("one", 0), ("two", 0), ("", 0), ("one", 4 * PAGE), ("two", 4 * PAGE), ("\ud800", 0), ("", 4 * PAGE)]
    for i, (salt, cached) in enumerate(turns):
        (found,) = generated(worker, asked(f"r{i}", prompt, salt=salt))
        assert (found.cached_tokens, found.token_ids) == (cached, expected.token_ids), (i, salt)
    whole = (*prompt, *expected.token_ids)
    cached = [generated(worker, asked(f"w{salt}", whole, salt=salt))[0].cached_tokens for salt in ("one", "three")]
    assert cached == [(len(whole) - 1) // PAGE * PAGE, 0]
    together = generated(worker, *(asked(f"t{salt}", prompt, salt=salt) for salt in ("one", "four", "five")))
    assert [found.cached_tokens for found in together] == [4 * PAGE, 0, 0]


def test_a_salt_changes_every_hash_and_no_length() -> None:
    for tokens in (text(27, 3), text(27, 4), text(27, 40), ()):
        one, two = salted(tokens, "one"), salted(tokens, "two")
        assert len(one) == len(two) == len(tokens)
        assert one == salted(tokens, "one")
        assert tokens == () or one[:4] != two[:4]
        assert all(0 <= token < 1 << 31 for token in one + two)


def test_a_request_that_is_cancelled_while_it_is_looked_up_shares_nothing() -> None:
    """Guards a generation loop that died where a cancellation came between the look for the prompt and for the salt."""
    scheduler, seen = StepScheduler.__new__(StepScheduler), list[Any]()
    allocator = SimpleNamespace(tokens_per_page=2, mark_complete_blocks=lambda *args: seen.append(args))
    scheduler.cache = SimpleNamespace(use_prefix_sharing=True, cache_allocators={"full": allocator})
    lengths: Any = SimpleNamespace(keys=lambda tokens, prompt: tokens)
    scheduler.requests = cast(Any, SimpleNamespace(lengths=lengths))
    state = SimpleNamespace(request_id="r", initial_tokens=[1, 2, 3], generated_tokens=[], position_offset=3)
    for prompt, salt in ((None, None), (3, None), (None, "")):
        state.tiermoe_prompt, state.tiermoe_salt = prompt, salt
        scheduler.register(state)
    assert seen == []
    state.tiermoe_prompt, state.tiermoe_salt = 3, ""
    scheduler.register(state)
    assert seen == [("r", salted([1, 2, 3], ""), 1)]


def test_requests_share_blocks_while_they_run(worker: GpuWorker, plain: GpuWorker) -> None:
    shared = text(30, 5 * PAGE)
    requests = [asked(f"r{i}", (*shared, *text(31 + i, 2 + i)), **(SAMPLED if i % 2 else {})) for i in range(6)]
    generated(worker, asked("head", shared))
    found = generated(worker, *requests)
    assert [g.cached_tokens for g in found] == [5 * PAGE] * 6
    assert [g.token_ids for g in found] == [g.token_ids for g in generated(plain, *requests)]


@pytest.mark.parametrize(
    "own", [{"reads": False}, {"prompt_logprobs": 1}], ids=["asked for", "log-probabilities of the prompt"]
)
def test_a_request_that_needs_every_row_gets_it(worker: GpuWorker, own: dict[str, Any]) -> None:
    prompt = text(40, 3 * PAGE + 1)
    generated(worker, asked("first", prompt))
    stream = worker.submit(asked("again", prompt, **own))
    events = list(stream)
    assert sum(event.cached_tokens for event in events) == 0
    assert len(events[0].prompt_logprobs) == (len(prompt) - 1 if "prompt_logprobs" in own else 0)


def test_cached_blocks_give_way_the_oldest_first(store: Any) -> None:
    with serving(store, settings(1.0, kv=kv(num_blocks=16))) as worker:  # 14 of them without the scheduler's margin
        prompts = [text(50 + i, 4 * PAGE + 1) for i in range(4)]
        for i, prompt in enumerate(prompts[:3]):
            generated(worker, asked(f"r{i}", prompt, max_tokens=1))
        (recent,) = generated(worker, asked("recent", prompts[0], max_tokens=1))  # 12 blocks are cached
        assert recent.cached_tokens == 4 * PAGE
        (new,) = generated(worker, asked("new", prompts[3], max_tokens=1))
        assert new.cached_tokens == 0
        again = [generated(worker, asked(f"again-{i}", prompts[i], max_tokens=1))[0].cached_tokens for i in (0, 1)]
        assert again == [4 * PAGE, 0]
        (whole,) = generated(worker, asked("whole", text(60, 14 * PAGE), max_tokens=2 * PAGE))
        assert (whole.cached_tokens, len(whole.token_ids)) == (0, 2 * PAGE)


def test_a_new_request_does_not_wait_for_blocks_that_are_only_cached(store: Any) -> None:
    """Guards a prompt that waited for the end of all others, since transformers evicts only where nothing can run."""
    with serving(store, settings(1.0, kv=kv(num_blocks=16, max_batch_tokens=128))) as worker:
        for i in range(2):
            generated(worker, asked(f"old-{i}", text(70 + i, 4 * PAGE + 1), max_tokens=1))
        long = iter(worker.submit(asked("long", text(72, 9), max_tokens=40)))
        assert next(long).token_ids
        new = iter(worker.submit(asked("new", text(73, 6 * PAGE), max_tokens=1)))
        assert next(new).finish == "length"
        assert worker.load()["running"] == 1
        assert list(long)[-1].finish == "length"
        check_blocks(worker)


def test_tokens_do_not_depend_on_what_is_cached(store: Any, plain: GpuWorker) -> None:
    """Heads in common, requests together, too little room for all, and some cancelled."""
    draw, heads = random.Random(5), [text(80 + i, 2 * PAGE + 4 * i) for i in range(3)]
    with serving(store, settings(0.5, kv=kv(num_blocks=20, max_batch_tokens=24))) as worker:
        cached = 0
        for turn in range(8):
            requests = [
                asked(f"r{turn}-{i}", (*draw.choice(heads), *text(draw.randrange(4), draw.randrange(1, 30))),
                      **draw.choice([{}, SAMPLED]))
                for i in range(4)
            ]  # fmt: skip
            gone = worker.submit(asked(f"gone-{turn}", (*draw.choice(heads), *text(turn, 20)), max_tokens=30))
            next(iter(gone))
            worker.cancel(f"gone-{turn}")
            found = [(g.cached_tokens, g.token_ids) for g in generated(worker, *requests)]
            assert [tokens for _, tokens in found] == [g.token_ids for g in generated(plain, *requests)]
            cached += sum(tokens for tokens, _ in found)
        assert cached > 0


@pytest.mark.parametrize("own", [{"prefix_cache": False}, {"batching": "serial"}], ids=str)
def test_nothing_is_shared_where_it_is_off(store: Any, own: dict[str, Any]) -> None:
    with serving(store, settings(1.0, kv=kv(**own))) as worker:
        prompt = text(90, 3 * PAGE + 1)
        tokens = [list(worker.submit(asked(f"r{i}", prompt))) for i in range(2)]
        assert sum(event.cached_tokens for events in tokens for event in events) == 0


def test_blocks_of_a_sliding_window_are_not_shared(tmp_path: Path) -> None:
    store = prepared(save_tiny_checkpoint("gpt_oss", tmp_path / "model"), tmp_path / "store")
    with serving(store, settings(1.0, kv=kv())) as worker:
        found = [generated(worker, asked(f"r{i}", text(91, 3 * PAGE + 1)))[0] for i in range(2)]
        assert [g.cached_tokens for g in found] == [0, 0]
        assert found[0].token_ids == found[1].token_ids


# -- what a forward carries --------------------------------------------------------------------------------------------


class Forwards:
    """The rows of every forward."""

    def __init__(self, worker: GpuWorker) -> None:
        self.found: list[list[SequenceRows]] = []
        engine = worker.engine
        begin = engine.begin_forward

        def noted(rows: Sequence[SequenceRows]) -> None:
            self.found.append(list(rows))
            begin(rows)

        engine.begin_forward = noted

    def prompt_rows(self) -> list[int]:
        return [sum(row.stop - row.start for row in rows if not row.decode) for rows in self.found]


def test_a_long_prompt_comes_in_chunks_while_others_run(store: Any, plain: GpuWorker) -> None:
    long, others = text(100, 200), [text(101 + i, 5) for i in range(3)]
    with serving(store, settings(0.5, kv=kv(max_batch_tokens=256, prefill_chunk=16))) as worker:
        forwards = Forwards(worker)
        generated(worker, asked("alone", long, False, max_tokens=1))
        assert forwards.prompt_rows() == [200]  # nobody waits for its forward
        streams = [worker.submit(asked(f"r{i}", prompt, max_tokens=60)) for i, prompt in enumerate(others)]
        for stream in streams:
            next(stream.__iter__())
        forwards.found.clear()
        (found,) = generated_beside(worker, streams, asked("long", long, False, max_tokens=4))
        rows = [count for count in forwards.prompt_rows() if count]
        assert sum(rows) == 200
        assert max(rows) == 16
        assert all(sum(row.decode for row in rows) == 3 for rows in forwards.found if any(not r.decode for r in rows))
        assert found.token_ids == generated(plain, asked("long", long, max_tokens=4))[0].token_ids


def generated_beside(worker: GpuWorker, streams: Sequence[Any], request: GenerationRequest) -> list[Generation]:
    """One more request; then the open streams are read to their ends."""
    generation = gathered(worker.submit(request))
    for other in streams:
        assert list(other)[-1].finish == "length"
    check_blocks(worker)
    return [generation]


def test_the_engine_sees_the_rows_that_run(store: Any) -> None:
    with serving(store, settings(0.5, kv=kv())) as worker:
        forwards, prompt = Forwards(worker), text(110, 5 * PAGE + 3)
        generated(worker, asked("first", prompt, max_tokens=1))
        worker.reset_stats()
        generated(worker, asked("again", prompt, max_tokens=1))
        assert forwards.prompt_rows() == [5 * PAGE + 3, 3]
        total, plan = worker.stats().total(), worker.plan()
        assert 0 < total.hits + total.misses <= 3 * plan["top_k"] * plan["moe_layers"]  # experts of three rows


# -- policies that read the prompt's routing ---------------------------------------------------------------------------


def test_ndp_guidance_counts_the_rows_that_run(tmp_path: Path) -> None:
    """Prefill-guided placement of a prompt whose beginning is cached: by the routing of its other rows."""
    folder = save_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    store = prepared(folder, tmp_path / "store")
    ndp = NdpSettings(hardware=asdict(load_hardware("paper-ndp")))
    with emulated(store, settings(0.5, kv=kv(), policy=load_policy("context-ndp-full"), ndp=ndp)) as worker:
        placer, counted = worker.engine._placer, list[float]()
        admit = placer._hot.admit

        def noted(name: str, counts: Any) -> None:
            counted.append(float(counts.P[0].sum()))
            admit(name, counts)

        placer._hot.admit = noted
        prompt = text(120, 5 * PAGE + 3)
        first, again = (generated(worker, asked(name, prompt))[0] for name in ("first", "again"))
        top_k = worker.plan()["top_k"]
        assert counted == [(5 * PAGE + 3) * top_k, 3 * top_k]
        assert again.token_ids == first.token_ids


def test_expert_maps_describe_the_rows_that_run(tmp_path: Path) -> None:
    """fMoE's context of a prompt whose beginning is cached: the mean embedding of its other rows."""
    store = prepared(save_tiny_checkpoint("qwen3_moe", tmp_path / "model"), tmp_path / "store")
    with emulated(store, settings(0.5, kv=kv(), policy=load_policy("fmoe"))) as worker:
        link, begun = worker.engine.matcher, list[Any]()
        begin = link.begin

        def noted(iteration: int, sequences: Any, embeddings: Any) -> None:
            begun.append(embeddings[0].copy())
            begin(iteration, sequences, embeddings)

        link.begin = noted
        prompt = text(121, 4 * PAGE + 2)
        first, again = (generated(worker, asked(name, prompt, max_tokens=1))[0] for name in ("first", "again"))
        assert again.token_ids == first.token_ids
        with torch.no_grad():
            rows = worker.model.get_input_embeddings()(torch.tensor(prompt)).float()
        for found, expected in zip(begun, (rows.mean(0), rows[4 * PAGE :].mean(0)), strict=True):
            torch.testing.assert_close(torch.from_numpy(found).float(), expected, rtol=1e-3, atol=1e-4)
