"""How tokens are picked: which may come, how often, and that a seed fixes them whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import gathered, prepared, serving
from serving import settings as engine_settings
from tiny_models import VOCAB, save_tiny_checkpoint

from tiermoe.actors.engine.serving import sampling as sampling_module
from tiermoe.actors.engine.serving.sampling import (
    Pick,
    PromptRows,
    PromptScorer,
    _argmax_in_one_read,
    cut,
    draw,
    pick_of,
    verified_tokens,
)
from tiermoe.actors.engine.serving.streams import Streams
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.errors import CheckpointError, RequestError
from tiermoe.kernels import _cpu

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2]))


def support(logits: torch.Tensor = LOGITS, draws: int = 400, **params: Any) -> set[int]:
    """The tokens that come up."""
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    return {draw(logits, sampling, seed, 0) for seed in range(draws)}


def pick(seed: int, step: int = 0, **params: Any) -> Pick:
    return Pick(SamplingParams(**{"temperature": 1.0, **params}), seed, step, "r")


def stream_of(asked: Pick | None) -> Any:
    """A stream whose next token is picked so."""
    if asked is None:
        return None
    process = asked.process
    return SimpleNamespace(
        request=SimpleNamespace(sampling=asked.params), generated=[0] * asked.step, seed=asked.seed, name=asked.name,
        processor=None if process is None else lambda scores, generated: process(scores), stops=(),
    )  # fmt: skip


def sample(
    picks: Sequence[Pick | None], scores: torch.Tensor, failed: dict[int, BaseException] | None = None
) -> list[int]:
    """The next tokens, of which none may fail unless `failed` is given."""
    before, found = scores.clone(), dict[int, BaseException]() if failed is None else failed
    streams, drafts = [stream_of(asked) for asked in picks], [list[int]() for _ in picks]
    tokens, _ = verified_tokens(scores[None], streams, drafts, (), lambda *noted: None, found.__setitem__)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    assert failed is not None or not found
    return tokens


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_k": 10**30}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.84}, {1, 3, 4}),
        ({"top_p": 0.9501}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.4 of the 0.65 that top-k left is 0.615
        ({"top_k": 2, "top_p": 0.62}, {1, 3}),
        ({"min_p": 0.49}, {1, 3, 4}),  # of the likeliest token's 0.4
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.49, "top_p": 0.75}, {1, 3}),  # 0.65 of the 0.85 that min-p left is 0.765
        ({"min_p": 0.5, "temperature": 0.5}, {1}),
        ({"temperature": 0.01}, {1}),
        ({"temperature": 1e-300}, {1}),
        ({"temperature": 100.0}, {0, 1, 2, 3, 4}),
    ],
)
def test_which_tokens_may_come(params: dict[str, Any], expected: set[int]) -> None:
    assert support(**params) == expected


def by_sorting(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """What min-p, top-k and top-p leave, all tokens in one order: by probability, equal ones by number."""
    chances, tokens = torch.softmax(logits.double() / params.temperature, 0).sort(descending=True, stable=True)
    keep = min(params.top_k or len(tokens), int((chances >= params.min_p * chances[0]).sum()))
    mass = chances[:keep].cumsum(0)
    if params.top_p < 1.0:
        keep = int((mass < params.top_p * mass[-1]).sum()) + 1
    return set(tokens[:keep].tolist())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0.11, 0.53, 0.93, 1.0]),
    st.sampled_from([0.0, 0.07, 0.6, 1.0]),
)
def test_cuts_leave_what_sorting_leaves(scores: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits, params = torch.tensor(scores).float(), SamplingParams(1, 1.3, top_p, top_k, min_p=min_p)
    weights = torch.exp((logits.double() - logits.max()) / params.temperature)
    cut(weights, params)
    assert set(weights.nonzero()[:, 0].tolist()) == by_sorting(logits, params)


def test_temperature_comes_before_top_p() -> None:
    assert support(top_p=0.41, temperature=0.5) == {1}  # sharpened to 0.56 and 0.22
    assert support(top_p=0.41, temperature=5.0) == {1, 3}  # flattened to 0.24 and 0.22


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["seed", "step"])
def test_frequencies_follow_the_probabilities(temperature: float, vary: str) -> None:
    draws, logits = 4000, torch.randn(8, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=temperature)
    picked = [draw(logits, params, *((n, 3) if vary == "seed" else (3, n))) for n in range(draws)]
    found = torch.bincount(torch.tensor(picked), minlength=8).double()
    expected = draws * torch.softmax(logits.double() / temperature, 0)
    assert ((found - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees of freedom: p = 0.001


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 10_000),
    st.floats(1e-3, 50.0),
    st.floats(0.01, 1.0),
    st.integers(0, 40),
    st.integers(0, 1000),
)
def test_any_parameters_give_a_permitted_token(
    seed: int, step: int, temperature: float, top_p: float, top_k: int, logits_seed: int
) -> None:
    logits = 10 * torch.randn(32, generator=torch.Generator().manual_seed(logits_seed))
    token = draw(logits, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k), seed, step)
    rank = int((logits > logits[token]).sum())
    assert rank < (top_k or 32)
    probabilities = torch.softmax(logits.double() / temperature, 0)
    if not top_k:
        assert probabilities[logits > logits[token]].sum() < top_p + 1e-9
    assert token == draw(logits, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k), seed, step)


@pytest.mark.parametrize(
    "row",
    [
        [1.0, 3.0, 3.0],
        [-0.0, 0.0, -1.0],
        [float("-inf")] * 3,
        [float("inf"), 1.0, float("inf")],
        [2.0, float("nan"), 9.0],
    ],
)
def test_greedy_takes_the_first_of_equal_ones_as_torch_does(row: list[float]) -> None:
    wide = [[-1e9] * 130 + row, [float("-inf")] * 61 + row * 50, row + [-1e9] * 77]  # across lanes and after them
    for scores in (torch.tensor([row, row[::-1]]), *(torch.tensor([found]) for found in wide)):
        read = sampling_module.to_host
        for tokens, largest in (
            sampling_module._argmax(scores[None], len(scores), read), _argmax_in_one_read(scores, read)
        ):  # fmt: skip
            assert tokens == scores.argmax(-1).tolist()
            assert np.array_equal(largest, scores.max(-1).values.numpy(), equal_nan=True)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    scores = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    drawn = pick(4, 2)
    assert sample([None, drawn, pick(0, temperature=0.0)], scores) == [
        int(scores[0].argmax()), draw(scores[1], drawn.params, 4, 2), int(scores[2].argmax()),
    ]  # fmt: skip


def _broken(*_: Any) -> torch.Tensor:
    raise ValueError("a grammar's library fails")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "asked", "kind"),
    [
        (float("nan"), None, CheckpointError),
        (float("inf"), None, CheckpointError),
        (float("-inf"), None, CheckpointError),
        (float("nan"), pick(1), CheckpointError),
        (float("inf"), pick(1, top_p=0.5), CheckpointError),
        (1.0, Pick(SamplingParams(temperature=1.0), 1, 0, "r", lambda row: row * float("inf")), RequestError),
        (1.0, pick(1, min_tokens=4, stop_token_ids=tuple(range(9))), RequestError),
        (1.0, Pick(SamplingParams(), 1, 0, "r", _broken), ValueError),
    ],
)
def test_a_row_without_a_token_fails_alone(row: float, asked: Pick | None, kind: type, dtype: torch.dtype) -> None:
    """Guards the generation loop: NaN gave an index out of range in the draw, and every other stream failed."""
    scores = torch.randn(3, 9, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = sample([None, pick(3), pick(4)], scores)
    scores[1] = row
    failed: dict[int, BaseException] = {}
    found = sample([None, asked, pick(4)], scores, failed)
    assert {i: type(error) for i, error in failed.items()} == {1: kind}
    assert (found[0], found[2]) == (whole[0], whole[2])


@pytest.mark.parametrize("top", [0, 7])
def test_a_prompt_that_cannot_be_scored_fails_alone(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, noted, failed = torch.randn(1, 4, 9), list[str](), dict[str, BaseException]()
    scorer = PromptScorer(torch.nn.Identity(), lambda name, *found: noted.append(name))
    scorer.failed = failed.__setitem__
    scorer.expect([PromptRows("a", 0, (1, 2), 1, 99 if top else 1), PromptRows("b", 2, (3, 4), 1, 1)])
    real = sampling_module.token_logprobs
    monkeypatch.setattr(sampling_module, "token_logprobs", lambda *a: real(*a) if a[2] < 99 else [][0])
    scorer._after(None, (), SimpleNamespace(logits=logits))
    assert noted == (["b", "b"] if top else ["a", "a", "b", "b"])
    assert [type(error) for error in failed.values()] == ([IndexError] if top else [])


@pytest.mark.parametrize("params", [{"temperature": 1e-320}, {"top_p": 1e-320}, {"min_p": 1e-320, "top_k": 1}], ids=str)
@pytest.mark.parametrize("flush", [False, True])
def test_numbers_near_zero_draw_the_likeliest(params: dict[str, Any], flush: bool) -> None:
    """Also where the processor rounds them to zero."""
    torch.set_flush_denormal(flush)
    try:
        assert support(draws=20, **params) == {1}
    finally:
        torch.set_flush_denormal(False)


def test_a_row_is_drawn_alike_alone_and_in_any_batch() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    asked = [pick(7, n, temperature=1.5, top_p=0.9) for n in range(4)]
    together = sample(asked, scores)
    for order in ([3, 1, 0, 2], [2], [0, 3]):
        assert sample([asked[i] for i in order], scores[order]) == [together[i] for i in order]


def test_the_step_of_a_draw_is_the_number_of_tokens_sent() -> None:
    """Guards the count of draws: a preempted request carries its tokens in its prompt and began again at zero."""
    streams = Streams(20, [2], 100)
    stream = streams.open(GenerationRequest("r", (5,), SamplingParams(8, temperature=2.0, seed=7)))
    streams.deliver(stream.name, (10, 11))
    streams.deliver(stream.name, (12,))
    assert pick_of(stream) == Pick(stream.request.sampling, 7, 3, stream.name)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mixtral")
    return prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store")


def generate(worker: GpuWorker, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[list[int]]:
    """All in flight together."""
    streams = [worker.submit(GenerationRequest(f"r{i}", *item)) for i, item in enumerate(asked)]
    return [gathered(stream).token_ids for stream in streams]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(store: Any, tmp_path: Path) -> None:
    params = [
        SamplingParams(16, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True),
        SamplingParams(16, temperature=1.3, top_k=20, seed=12, ignore_eos=True),
        SamplingParams(16, temperature=1.0, seed=11, ignore_eos=True),
        SamplingParams(16, ignore_eos=True),
    ]
    prompts = [tuple(range(3 + i, 9 + 3 * i)) for i in range(4)]
    asked = list(zip(prompts, params, strict=True))
    with serving(store, engine_settings(1.0)) as worker:
        together = generate(worker, asked)
        assert len({tuple(tokens) for tokens in together}) == 4
        assert all(0 <= token < VOCAB for tokens in together for token in tokens)
    with serving(store, engine_settings(0.3, "next-gate")) as worker:
        assert [generate(worker, [item])[0] for item in asked] == together
        unseeded = SamplingParams(16, temperature=2.0, ignore_eos=True)
        first, second = generate(worker, [(prompts[0], unseeded), (prompts[0], unseeded)])
        assert first != second


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**64 - 1), width=st.sampled_from([1, 5, 511, 512, 513, 3000]), spread=st.floats(0.0, 20.0),
    temperature=st.floats(1e-3, 5.0), top_k=st.integers(0, 40), top_p=st.floats(0.01, 1.0), min_p=st.floats(0.0, 1.0),
    step=st.sampled_from([0, 1, 77, 2**64 - 1]), infinite=st.integers(0, 3),
)  # fmt: skip
def test_a_row_on_the_cpu_is_drawn_as_by_torch(
    seed: int, width: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, step: int,
    infinite: int,
) -> None:  # fmt: skip
    """The token is at most a rounding away from the one that torch's sums give."""
    draws = np.random.default_rng(seed)
    scores = torch.from_numpy((spread * draws.standard_normal(width)).astype(np.float32))
    scores[draws.integers(0, width, infinite)] = float("-inf")
    (token,) = _cpu.draw_rows(scores.data_ptr(), 1, width, [(0, temperature, min_p, top_k, top_p, seed, step)])
    uniform = 1.0 - np.random.Generator(np.random.Philox(key=seed, counter=step)).random()
    if not torch.isfinite(scores.max()):
        assert token == -1
        return
    weights = torch.exp((scores.double() - scores.max()) / temperature)
    if min_p > 0.0 or top_k or top_p < 1.0:
        cut(weights, SamplingParams(temperature=1.0, min_p=min_p, top_k=top_k or None, top_p=top_p))
    mass, rounding = weights.cumsum(0), 1e-12
    total = float(mass[-1])
    first = int(torch.searchsorted(mass, (uniform - rounding) * total))
    last = int(torch.searchsorted(mass, min(uniform + rounding, 1.0) * total))
    assert first <= token <= last
    assert weights[token] > 0


@pytest.mark.parametrize("scores", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], [1.0, math.nan]])
def test_a_row_without_a_finite_largest_score_has_no_token(scores: list[float]) -> None:
    row = torch.tensor(scores)
    asked = [(0, 1.0, 0.0, 0, 1.0, 3, 4), (0, 1.0, 0.1, 1, 0.5, 3, 4)]
    assert _cpu.draw_rows(row.data_ptr(), 1, len(row), asked) == [-1, -1]
