"""Drafted tokens: how many pay, where they are looked up, and that no token differs from a run without them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st
from safetensors.torch import load_file
from serving import gathered, policy, prepared, reference_greedy, serving, settings
from tiny_models import ALL_TYPES, VOCAB, add_head, save_tiny_checkpoint, tiny_model
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tiermoe.actors import gpu_worker
from tiermoe.actors.engine.model.mtp import build_head
from tiermoe.actors.engine.serving import drafts
from tiermoe.actors.engine.serving.drafts import Drafter
from tiermoe.actors.engine.serving.head import HeadDrafts
from tiermoe.actors.engine.serving.sampling import verified_tokens
from tiermoe.actors.engine.serving.streams import Stream, Streams
from tiermoe.actors.gpu_worker import GpuWorker, make_batcher
from tiermoe.actors.policies.drafts import (
    DecodeCounts,
    DraftPricing,
    MissPrice,
    NgramIndex,
    Proposal,
    StepTime,
    Verified,
)
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import DraftSettings, KvSettings, LinkSettings
from tiermoe.errors import ConfigError

PLAIN = StepTime(seconds=0.010, needed=64, missed=32, waited_s=0.006)


def known(requests: int = 1, plain: StepTime = PLAIN, most: int = 7) -> DraftPricing:
    """A pricing that has seen steps without drafts."""
    pricing = DraftPricing(most)
    pricing.absent = 0.2
    for _ in range(6):
        pricing.took(plain, [Verified(0, 0, 0)] * requests)
    return pricing


# -- the decision ------------------------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> tuple[DraftPricing, list[Proposal], int]:
    requests = draw(st.integers(1, 3))
    waited_s = draw(st.floats(0, 0.02))
    pricing = known(requests, StepTime(waited_s + draw(st.floats(0.001, 0.02)), 64, draw(st.integers(0, 60)), waited_s))
    pricing.absent, pricing.miss_s = draw(st.floats(0, 1)), draw(st.floats(0, 0.001))
    for _ in range(draw(st.integers(0, 6))):
        match, drafted = draw(st.integers(1, 40)), draw(st.integers(1, 4))
        seconds = draw(st.floats(0.001, 0.03))
        step = StepTime(seconds, 128, draw(st.integers(0, 120)), draw(st.floats(0, 1)) * seconds)
        right = Verified(match, drafted, draw(st.integers(0, drafted)))
        pricing.took(step, [right] + [Verified(0, 0, 0)] * (requests - 1))
    proposals = [Proposal(draw(st.integers(0, 4)), draw(st.integers(1, 40))) for _ in range(requests)]
    return pricing, proposals, draw(st.integers(0, 12))


@bounded(max_examples=80, deadline=None)
@given(situations())
def test_the_most_expected_tokens_a_second(situation: tuple[DraftPricing, list[Proposal], int]) -> None:
    pricing, proposals, room = situation
    requests = len(proposals)
    plain = requests / pricing.seconds(requests, 0, 0.0)

    def rate(counts: Sequence[int]) -> float:
        right = sum(
            pricing.odds(proposal.match) ** place
            for proposal, count in zip(proposals, counts, strict=True)
            for place in range(1, count + 1)
        )
        return (requests + right) / pricing.seconds(requests, sum(counts), right)

    def may(drafted: int) -> bool:
        within = drafted <= min(room, pricing._reach) and pricing.most_lost_s(requests, drafted) <= pricing._account
        return not drafted or within

    every = itertools.product(*(range(proposal.tokens + 1) for proposal in proposals))
    best = max((counts for counts in every if all(may(drafted) for drafted in range(sum(counts) + 1))), key=rate)
    chosen = pricing.choose(proposals, room)
    assert may(sum(chosen))
    assert all(count <= proposal.tokens for count, proposal in zip(chosen, proposals, strict=True))
    if rate(best) <= 1.1 * plain:
        assert not any(chosen)
    else:
        assert rate(chosen) == pytest.approx(rate(best))


def test_nothing_is_drafted_before_steps_without_are_known() -> None:
    pricing = DraftPricing(7)
    assert pricing.choose([Proposal(7, 32)], 100) == [0]
    assert known().choose([Proposal(7, 32)], 100) != [0]
    assert known(1).choose([Proposal(7, 32)] * 2, 100) == [0, 0]  # of another number of requests


RESIDENT = StepTime(0.010, 64, 0, 0.0)
WAITS = StepTime(0.100, 64, 32, 0.040)


@pytest.mark.parametrize(
    ("plain", "absent", "account_s", "measured", "match", "expected"),
    [
        (RESIDENT, 0.0, 1.0, 0, 32, 1),  # first one draft, then twice as many as ever
        (RESIDENT, 0.0, 1.0, 1, 32, 2),
        (RESIDENT, 0.0, 1.0, 4, 32, 7),
        (RESIDENT, 0.0, 1.0, 4, 1, 0),  # unlikely
        (RESIDENT, 0.0, 0.0014, 0, 32, 0),  # one wrong draft is thought to cost 15% of a step
        (RESIDENT, 0.0, 0.0016, 0, 32, 1),
        (WAITS, 0.75, 0.128, 0, 32, 0),  # and 48 experts, 1.25 ms each, and as many in whose places they come
        (WAITS, 0.75, 0.130, 0, 32, 1),
        (WAITS, 0.25, 0.048, 0, 32, 0),  # 16 experts
        (WAITS, 0.25, 0.050, 0, 32, 1),
        (WAITS, 0.75, 9.0, 4, 32, 6),  # right drafts miss what would be missed anyway
    ],
)  # fmt: skip
def test_as_many_as_the_account_has_for(
    plain: StepTime, absent: float, account_s: float, measured: int, match: int, expected: int
) -> None:
    pricing = known(plain=plain)
    if measured:
        right = StepTime(1.2 * plain.seconds, 256, plain.missed, plain.waited_s)
        pricing.took(right, [Verified(match, measured, measured if match > 1 else 0)])
    pricing.absent, pricing._account = absent, account_s
    assert pricing.choose([Proposal(7, match)], 100) == [expected]


def test_wrong_drafts_are_priced_by_what_they_missed() -> None:
    """They cost no more than right ones, it is thought; then each of their rows misses all of its experts."""
    pricing = known(plain=WAITS)
    pricing.absent, pricing._account = 0.75, 60.0
    before = pricing.choose([Proposal(7, 4)], 100)
    for _ in range(4):
        pricing.took(StepTime(0.350, 256, 32 + 200, 0.290), [Verified(4, 1, 0)])
    pricing._odds.clear()
    pricing._account = 60.0
    assert before == [1]
    assert pricing.choose([Proposal(7, 4)], 100) == [0]


@bounded(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_what_wrong_predictions_cost_is_bounded(seed: int) -> None:
    """Drafts that are always wrong, in steps that take any time: 1% of the rest, the start's step, one step."""
    draw, pricing, lost_s, plain_s, longest_s = random.Random(seed), known(), 0.0, 0.0, 0.0
    for _ in range(1200):
        (count,) = pricing.choose([Proposal(7, 32)], 100)
        if count:
            seconds = draw.uniform(0.010, 0.040)
            pricing.took(StepTime(seconds, 400, 300, 0.9 * seconds), [Verified(32, count, 0)])
            lost_s, longest_s = lost_s + seconds - PLAIN.seconds, max(longest_s, seconds)
        else:
            pricing.took(PLAIN, [Verified(0, 0, 0)])
            plain_s += PLAIN.seconds
    assert 0 < lost_s <= 0.01 * plain_s + PLAIN.seconds + longest_s
    assert pricing.stats.saved_s <= -lost_s


def test_no_step_loses_more_than_the_account_has() -> None:
    """As dear as predicted at worst, wrong drafts never overdraw it."""
    pricing = known(plain=WAITS)
    pricing.absent, tried = 0.75, 0
    for _ in range(2000):
        (count,) = pricing.choose([Proposal(7, 32)], 100)
        if count:
            missed, tried = WAITS.missed + 48 * count, tried + 1
            waited_s = WAITS.waited_s * missed / WAITS.missed
            seconds = waited_s + 0.060 * (1.1 + 0.05 * count)
            pricing.took(StepTime(seconds, 128, missed, waited_s), [Verified(32, count, 0)])
        else:
            pricing.took(WAITS, [Verified(0, 0, 0)])
        assert pricing._account > -1e-9
    assert tried


@pytest.mark.parametrize(
    ("unread", "account_s", "promised"),
    [(1, 0.0034, False), (1, 0.0036, True), (300, 0.0316, False), (300, 0.0336, True)],
)
def test_a_head_is_asked_where_the_account_has_its_time(unread: int, account_s: float, promised: bool) -> None:
    """A fifth of a step, and a hundredth for each token of a prompt; and what a wrong draft may cost."""
    pricing = known(plain=RESIDENT)
    pricing.absent, pricing._account = 0.0, account_s
    assert pricing.promises(1, unread) is promised
    for _ in range(8):
        pricing.asked(0.009, 1, 1, True)
    pricing._account = 0.1
    assert not pricing.promises(1, 1)  # it takes nearly a step
    assert pricing._account == 0.1
    pricing.asked(0.009, 1, 1, False)
    assert pricing._account == pytest.approx(0.091)


def test_steps_without_drafts_are_measured_again_and_again() -> None:
    pricing = known()
    found = []
    for _ in range(140):
        (count,) = pricing.choose([Proposal(7, 32)], 100)
        found.append(count > 0)
        right = Verified(32, count, count) if count else Verified(0, 0, 0)
        pricing.took(PLAIN, [right])
    rows = [False] * 2
    assert found == ([True] * 12 + rows + [True] * 24 + rows + [True] * 48 + rows + [True] * 48 + rows)[:140]
    assert pricing.stats.accepted == pricing.stats.drafted
    assert pricing.stats.saved_s > 0


# -- prompt lookup -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "most", "found", "match"),
    [
        ("abcdeXabc", 2, "de", 3),
        ("abcdeXabc", 9, "deXabcdeX", 3),  # its source reaches the end of the text
        ("abcdabceabc", 1, "e", 3),  # the latest of equals
        ("xabcdyabceZxabc", 1, "d", 4),  # the longest
        ("abcdefgh", 3, "", 0),
        ("ab", 3, "", 0),
        ("aaaa", 3, "aaa", 3),
    ],
)
def test_what_followed_before(text: str, most: int, found: str, match: int) -> None:
    index = NgramIndex()
    index.extend(map(ord, text[:4]))
    index.extend(map(ord, text[4:]))
    assert index.propose(most) == ([ord(letter) for letter in found], match)


# -- verification ------------------------------------------------------------------------------------------------------


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 16).float()[None]


@pytest.mark.parametrize(
    ("drafts", "best", "expected", "accepted"),
    [
        ([[5, 6]], [5, 6, 7], [7], [2]),
        ([[5, 6]], [5, 9, 7], [9], [1]),
        ([[5, 6]], [4, 6, 7], [4], [0]),
        ([[5, 2, 6]], [5, 2, 6, 7], [2], [1]),  # 2 ends the request
        ([[], [5]], [8, 5, 7], [8, 7], [0, 1]),
    ],
)
def test_a_draft_is_accepted_if_it_is_the_own_token(
    drafts: list[list[int]], best: list[int], expected: list[int], accepted: list[int]
) -> None:
    streams = Streams(64, [2], 16)
    held: list[Stream | None] = [
        streams.open(GenerationRequest(f"r{i}", (1,), SamplingParams(max_tokens=9))) for i in range(len(drafts))
    ]

    def failed(request: int, error: BaseException) -> None:
        raise error

    assert verified_tokens(one_hot(*best), held, drafts, (2,), lambda *note: None, failed) == (expected, accepted)


def test_a_request_fails_where_it_would_without_drafts() -> None:
    scores, failures = one_hot(5, 6, 7), dict[int, BaseException]()
    scores[0, 1] = float("nan")
    found = verified_tokens(scores, [None], [[5, 6]], (), lambda *note: None, failures.__setitem__)
    assert (found, failures) == (([5], [0]), {})  # its first token came; the next step has that row first
    scores[0, 0] = float("nan")
    verified_tokens(scores, [None], [[5, 6]], (), lambda *note: None, failures.__setitem__)
    assert list(failures) == [0]


class Now:
    """Seconds by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class RightHead:
    """Always right, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def unread(self, name: str) -> int:
        return 1

    def propose(self, name: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        self.asked += 1
        return list(range(most)), 4


@pytest.mark.parametrize(("room", "full"), [(0, False), (4, True)])
def test_a_head_rests_after_vain_drafts_alone(room: int, full: bool) -> None:
    """It is not asked where no draft could be fed, and asked at once when one can; behind a pause, too."""
    clock, head, tokens = Now(), RightHead(), itertools.count(1000)
    sampling = SimpleNamespace(max_tokens=10**9)
    stream = SimpleNamespace(request=SimpleNamespace(prompt_ids=(1, 2, 3), sampling=sampling), generated=[])
    streams = SimpleNamespace(get=lambda name: stream, is_open=lambda name: True)
    drafter = Drafter(cast(Any, streams), DraftPricing(4), Counted(10), cast(Any, head), clock)

    def drafted(room: int = 4, full: bool = False) -> bool:
        drafter.begin()
        (given,) = drafter.give([("a", room)], 100, lambda: full)
        clock.now_s += 1e-2 * (1 + 0.02 * len(given))
        stream.generated += [next(tokens) for _ in range(len(given) + 1)]
        drafter.took(["a"], [given] if given else [])
        return bool(given)

    runs = [(found, len(list(steps))) for found, steps in itertools.groupby([drafted() for _ in range(100)])]
    assert runs[:5] == [(False, 5), (True, 12), (False, 2), (True, 24), (False, 2)]
    before = head.asked
    assert not any(drafted(room, full) for _ in range(140))
    assert head.asked == before
    assert drafted()


# -- served ------------------------------------------------------------------------------------------------------------


class Always(DraftPricing):
    """Drafts as many as are proposed, and keeps what was measured."""

    def choose(self, proposals: Sequence[Proposal], room: int) -> list[int]:
        return [min(proposal.tokens, room // len(proposals)) for proposal in proposals]

    def promises(self, requests: int, unread: int) -> bool:
        return True

    def knows(self, requests: int) -> bool:
        return True

    def asked(self, seconds: float, requests: int, unread: int, chosen: bool) -> None:
        """No step without drafts is known."""


class Counted:
    """Experts that are always there; each count needs some more."""

    def __init__(self, more: int = 1) -> None:
        self._steps = itertools.count(1, more)

    def decode_counts(self) -> DecodeCounts:
        return DecodeCounts(next(self._steps), 0, 0.0)

    def miss_price(self) -> MissPrice:
        return MissPrice(0.0, 0.0)


class Guessing(NgramIndex):
    """Proposes the right next tokens (`known`, by prompt), each with a chance of three quarters, else another."""

    known: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    draw = random.Random(5)

    def propose(self, most: int) -> tuple[list[int], int]:
        text = self._text
        for prompt, tokens in self.known.items():
            if tuple(text[: len(prompt)]) == prompt:
                right = tokens[len(text) - len(prompt) :][: self.draw.randrange(most + 1)]
                return [token if self.draw.random() < 0.75 else 3 for token in right], 3
        return [], 0


SAMPLINGS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4, "top_p": 0.8, "logprobs": 2},
    {"presence_penalty": 1.0, "repetition_penalty": 1.3}, {"min_tokens": 4, "logprobs": 0},
    {"temperature": 1.3, "seed": 9, "min_p": 0.05, "ignore_eos": True},
]  # fmt: skip
KV = KvSettings(page_size=4, num_blocks=128, max_batch_tokens=64)


def asked(store_seed: int, **more: Any) -> list[GenerationRequest]:
    draw = random.Random(store_seed)
    return [
        GenerationRequest(
            f"r{i}", tuple(draw.randrange(3, VOCAB) for _ in range(5 + 3 * i)),
            SamplingParams(**{"max_tokens": 20 + i, **params, **more}),
        )
        for i, params in enumerate(SAMPLINGS)
    ]  # fmt: skip


def answers(worker: GpuWorker, requests: Sequence[GenerationRequest]) -> list[tuple[Any, ...]]:
    """Tokens, the end, and the tokens of log-probabilities with these, of requests in flight together."""
    found = []
    for events in [list(stream) for stream in [worker.submit(request) for request in requests]]:
        assert events[-1].error is None, events[-1].error
        scored = [one for event in events for one in event.logprobs]
        tokens = [token for event in events for token in event.token_ids]
        found.append((tokens, events[-1].finish, [(one.token_id, round(one.logprob, 3)) for one in scored]))
    return found


# full attention; windows of 8 tokens beside it; running states
@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "qwen3_next"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("drafts")
    return prepared(save_tiny_checkpoint(request.param, folder / "model"), folder / "store")


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Guessing]]:
    monkeypatch.setattr(gpu_worker, "DraftPricing", Always)
    monkeypatch.setattr(drafts, "NgramIndex", Guessing)
    yield Guessing
    Guessing.known = {}


@pytest.mark.parametrize("compiled", ["off", "native"])
def test_the_same_tokens(store: Any, guessing: type[Guessing], compiled: str) -> None:
    if compiled == "native" and store.describe().manifest.architecture == "Qwen3NextForCausalLM":
        pytest.skip("the native program runs steps on a paged cache")
    requests = asked(1)
    with serving(store, settings(0.5, "next-gate", kv=KV, compile=compiled)) as plain:
        expected = answers(plain, requests)
        assert plain.stats().drafts is None
    guessing.known = {request.prompt_ids: found[0] for request, found in zip(requests, expected, strict=True)}
    drafting = settings(0.5, "next-gate", kv=KV, compile=compiled, drafts=DraftSettings(kind="ngram", tokens=4))
    with serving(store, drafting) as worker:
        for _ in range(2):  # the second time on the blocks that the first left in the prefix cache
            assert answers(worker, requests) == expected
        for request, own in zip(requests, expected, strict=True):
            assert answers(worker, [request]) == [own]
        stats = worker.stats().drafts
        assert 0 < stats.accepted < stats.drafted
        assert worker.load()["kv_usage"] == 0


def test_drafts_give_way_where_the_cache_is_full(store: Any, guessing: type[Guessing]) -> None:
    """Requests that take each other's room are fed again, without a draft among their tokens."""
    small = KvSettings(page_size=4, num_blocks=28, max_batch_tokens=24, prefix_cache=False)
    requests = asked(2, max_tokens=24)[:5]
    with serving(store, settings(0.5, kv=small)) as plain:
        expected = answers(plain, requests)
    guessing.known = {request.prompt_ids: found[0] for request, found in zip(requests, expected, strict=True)}
    with serving(store, settings(0.5, kv=small, drafts=DraftSettings(kind="ngram", tokens=4))) as worker:
        assert answers(worker, requests) == expected


@pytest.mark.parametrize(
    ("kind", "more", "drafts_"),
    [
        ("off", {}, False),
        ("ngram", {}, True),
        ("auto", {}, True),
        ("auto", {"link": LinkSettings(gbps=1.0, layer_us=10.0)}, False),  # for runs that repeat exactly
        ("auto", {"policy": policy().model_copy(update={"lossless": False})}, False),
        ("ngram", {"policy": policy().model_copy(update={"lossless": False})}, True),
        ("auto", {"kv": KvSettings(batching="serial", page_size=16)}, True),
    ],
)
def test_who_is_drafted(tmp_path: Path, kind: Any, more: dict[str, Any], drafts_: bool) -> None:
    store = prepared(save_tiny_checkpoint("qwen3_moe", tmp_path / "model"), tmp_path / "store")
    with serving(store, settings(0.5, drafts=DraftSettings(kind=kind), **more)) as worker:
        assert (worker.stats().drafts is not None) is drafts_
        assert worker.plan()["drafts"] == ({"kind": kind, "tokens": 7, "head": False} if drafts_ else None)
        assert not any("no tokens are drafted" in note for note in worker.plan()["notes"])


_OWN = (
    "deepseek_v2", "qwen3_next", "lfm2_moe", "jamba", "nemotron_h", "mimo_v2_flash", "deepseek_v32", "qwen4_exp",
)  # fmt: skip
_KEPT = {"minimax", "deepseek_v4"}  # states beside the layers of a cache; compressed keys


@pytest.mark.parametrize(
    "name", [n if n in {*_OWN, *_KEPT} else pytest.param(n, marks=pytest.mark.slow) for n in ALL_TYPES]
)
def test_a_models_own_cache_gives_rejected_tokens_back(name: str, guessing: type[Guessing]) -> None:
    """Alone and in company, with arrivals and a cancellation; or it says that it does not."""
    model, draw = tiny_model(name), random.Random(2)
    prompts = [[draw.randrange(3, 120) for _ in range(length)] for length in (6, 1, 9, 30, 14)]
    expected = reference_greedy(model, prompts, 16, ignore_eos=True)
    guessing.known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    with closing(make_batcher(model, KvSettings(page_size=16, num_blocks=24, max_batch_tokens=24))) as batcher:
        pricing = Always(4)
        because = batcher.draft(pricing, Counted())

        def ask(i: int, turn: str, tokens: int = 16) -> Stream:
            request = GenerationRequest(f"{turn} {i}", tuple(prompts[i]), SamplingParams(tokens, ignore_eos=True))
            return batcher.submit(request)

        for i in (0, 1, 3):
            assert gathered(ask(i, "alone")).token_ids == expected[i]
        left = ask(3, "left", 100)
        assert next(iter(left)).token_ids
        streams = [ask(i, "beside") for i in range(5)]
        batcher.cancel(left)
        assert [gathered(stream).token_ids for stream in streams] == expected
    drafted = because is None
    assert drafted or because in (
        "its cache does not give the rows of rejected tokens back", "its positions depend on the length of the text"
    )  # fmt: skip
    assert not (drafted and name in _KEPT)
    assert drafted or name not in _OWN
    assert drafted == (0 < pricing.stats.accepted < pricing.stats.drafted)


# -- the model's own head ----------------------------------------------------------------------------------------------

HEADS = {"qwen3_moe": False, "qwen3_next": False, "deepseek_v3": True, "glm4_moe": True, "mellum": False}  # `behind`


@pytest.fixture(scope="module", params=[*HEADS, "qwen3_moe dense"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with a head for drafts, and its store."""
    name, _, dense = request.param.partition(" ")
    folder: Path = tmp_path_factory.mktemp("head")
    checkpoint = add_head(save_tiny_checkpoint(name, folder / "model"), HEADS[name], bool(dense))
    return checkpoint, prepared(checkpoint, folder / "store")


def loaded(headed: tuple[Path, Any]) -> tuple[Any, Any]:
    """transformers' model of the checkpoint, and the store's head on it."""
    checkpoint, store = headed
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model, build_head(Path(store.describe().path), model, torch.device("cpu"))


def test_a_head_is_loaded_as_transformers_loads_it(headed: tuple[Path, Any]) -> None:
    """Where transformers loads the type's head; it says less of a configuration than the tensors do."""
    model, head = loaded(headed)
    config, before = model.config, {name: one.clone() for name, one in model.named_buffers()}
    config.num_mtp_layers = 1
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None) is not None and getattr(config, f"mtp_{kinds}", None) is None:
            setattr(config, f"mtp_{kinds}", ["sparse" if kinds.startswith("mlp") else "full_attention"])
    if "mtp.layers.0.mlp.gate_proj.weight" in load_file(headed[0] / "model.safetensors"):
        config.mlp_only_layers = [0]
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\.", rf"model\.layers\.{config.num_hidden_layers}\."]
    expected = MtpModel.from_pretrained(model, device_map={"": "cpu"}).state_dict()
    found = head.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert all(torch.equal(one, before[name]) for name, one in model.named_buffers())


@torch.no_grad()
def test_drafts_are_what_the_head_gives_for_the_whole_text(headed: tuple[Path, Any]) -> None:
    """States come in pieces, with those of rejected drafts; the reference reads the text at once, with transformers."""
    model, head = loaded(headed)
    drafts_, draw = HeadDrafts(head, model), random.Random(3)
    text = [draw.randrange(3, 120) for _ in range(15)]

    def feed(begin: int, *tokens: int) -> None:
        drafts_.carries([SequenceRows("r", begin, begin + len(tokens), True)], [begin])
        model(torch.tensor([[*text[:begin], *tokens]]))

    feed(0, *text[:6])
    for length, following in [(7, 8), (8, 11), (11, 15), (15, 15)]:
        found, match = drafts_.propose("r", text[:length], 3)
        states = model.get_decoder()(torch.tensor([text[: length - 1]]))[0]
        for place, token in enumerate(found, start=length):
            ids, places = torch.tensor([[*text[:length], *found][1:place]]), torch.arange(1, place)[None]
            own = head.forward_layer(0, states, places, MtpCache(config=head.config), input_ids=ids)
            assert int(head._project_to_logits(own[:, -1:]).argmax()) == token
            states = torch.cat([states, own[:, -1:]], 1)
        assert found
        assert match in (1, 2, 4)
        feed(length - 1, *text[length - 1 : following - 1], 3, 4)  # two that are rejected
    assert drafts_.propose("other", text, 3) == ([], 0)
    drafts_.keep(lambda name: False)
    assert drafts_.propose("r", text, 3) == ([], 0)


def test_the_same_tokens_with_the_models_own_head(headed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker, "DraftPricing", Always)
    requests, kv = asked(1), KvSettings(page_size=4, num_blocks=128, max_batch_tokens=16)  # prompts in chunks
    with serving(headed[1], settings(0.5, "next-gate", kv=kv)) as plain:
        expected = answers(plain, requests)
    drafting = settings(0.5, "next-gate", kv=kv, drafts=DraftSettings(kind="mtp", tokens=4))
    with serving(headed[1], drafting) as worker:
        assert worker.plan()["drafts"] == {"kind": "mtp", "tokens": 4, "head": True}
        left = worker.submit(GenerationRequest("left", (5, 6, 7), SamplingParams(max_tokens=90, ignore_eos=True)))
        assert next(iter(left)).token_ids
        streams = [worker.submit(request) for request in requests]
        worker.cancel("left")
        assert [[t for event in stream for t in event.token_ids] for stream in streams] == [e[0] for e in expected]
        assert answers(worker, requests) == expected
        for request, own in zip(requests, expected, strict=True):
            assert answers(worker, [request]) == [own]
        assert worker.stats().drafts.steps > 0


def test_a_store_without_a_head(store: Any) -> None:
    with pytest.raises(ConfigError, match="its store has no head"), serving(
        store, settings(0.5, drafts=DraftSettings(kind="mtp"))
    ):
        pass
