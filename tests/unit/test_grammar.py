"""Structured output: text that follows its grammar, from a model with random weights; requests that give one."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from fake_api import EOS, FakeBackend, ask, byte_tokenizer, error, post
from serving import prepared, serving_both
from tiny_models import save_tiny_checkpoint
from tokenizers import Tokenizer, decoders, models

from tiermoe.actors.engine.serving import grammar_jobs
from tiermoe.actors.engine.serving.grammar import Grammars
from tiermoe.actors.engine.serving.streams import Streams
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams, TokenEvent
from tiermoe.cluster.api.grammar import compiled, forced_call
from tiermoe.cluster.api.offload import Turns
from tiermoe.cluster.api.refusals import ApiError
from tiermoe.cluster.api.schema import CompletionBody
from tiermoe.cluster.api.tools import TOOL_FORMATS
from tiermoe.errors import RequestError, RuntimeFailure
from tiermoe.proto.bounded import Workers

llguidance = pytest.importorskip("llguidance")

PROMPT = tuple(b"go: ")
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "fine": {"type": "boolean"},
                   "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "fine", "kind"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GpuWorker]]:
    folder = tmp_path_factory.mktemp("grammar")
    checkpoint = save_tiny_checkpoint("mixtral", folder / "checkpoint", vocab_size=264, eos_token_id=EOS)
    byte_tokenizer().save(str(checkpoint / "tokenizer.json"))
    store = prepared(checkpoint, folder / "store")
    with serving_both(store, {"num_blocks": 64, "max_batch_tokens": 16}) as both:
        yield both


def grammar_of(**parameters: Any) -> str:
    given = CompletionBody.model_validate({"prompt": "p"} | parameters).constraint
    assert given is not None
    return compiled(given)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def texts(worker: GpuWorker, *asked: SamplingParams) -> list[str]:
    streams = [worker.submit(GenerationRequest(f"r{i}", PROMPT, params)) for i, params in enumerate(asked)]
    out = []
    for events in [list(stream) for stream in streams]:
        assert events[-1].error is None
        tokens = tokens_of(events)
        out.append(bytes(token for token in tokens if token < 256).decode(errors="replace") + f" {events[-1].finish}")
    return out


@pytest.mark.parametrize("batching", ["continuous", "serial"])
def test_text_follows_its_grammar_beside_requests_without_one(workers: dict[str, GpuWorker], batching: str) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    asked = [
        SamplingParams(8, ignore_eos=True, temperature=1.0, seed=3),
        SamplingParams(240, grammar=grammar_of(response_format=wrapped)),
        SamplingParams(90, temperature=1.2, seed=1, grammar=grammar_of(guided_regex="[a-c]{3}-[0-9]{2}")),
        SamplingParams(90, temperature=1.0, seed=2, grammar=grammar_of(guided_choice=["yes", "no"])),
        SamplingParams(90, frequency_penalty=1.0, grammar=grammar_of(grammar='root ::= "x" [0-9] root?')),
    ]
    free, whole, pattern, choice, calls = texts(workers[batching], *asked)
    jsonschema.validate(json.loads(whole.removesuffix(" stop")), SCHEMA)
    assert re.fullmatch("[a-c]{3}-[0-9]{2} stop", pattern)
    assert choice in ("yes stop", "no stop")
    assert set(calls.split(" ")[0][::2]) == {"x"}
    assert texts(workers[batching], asked[0]) == [free]  # undisturbed
    assert texts(workers[batching], asked[2]) == [pattern]


def test_a_request_that_is_fed_again_goes_on_as_it_would_have(workers: dict[str, GpuWorker]) -> None:
    params = SamplingParams(60, temperature=1.0, seed=5, grammar=grammar_of(guided_json=SCHEMA), frequency_penalty=0.3)
    worker = workers["continuous"]
    whole = tokens_of(list(worker.submit(GenerationRequest("a", PROMPT, params))))
    rest = tokens_of(list(worker.submit(GenerationRequest("b", PROMPT, params, tuple(whole[:9])))))
    assert whole[:9] + rest == whole


_KINDS = {"kind": {"enum": ["cat", "dog"]}}
_CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize("form", ["hermes", "llama-json"])
@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        _CLOSED | {"$defs": _KINDS, "properties": {"a": {"$ref": "#/$defs/kind"}}, "required": ["a"]},
        _CLOSED | {"properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, "required": ["c"]},
    ],
    ids=["plain", "definitions", "recursive"],
)
def test_a_call_that_must_come_comes(workers: dict[str, GpuWorker], form: str, schema: dict[str, Any]) -> None:
    """References of a schema begin at its own root, wherever a call has it."""
    found = TOOL_FORMATS[form]
    assert found.grammar is not None
    lark = found.grammar({"f": schema, "g": schema}, False)
    grammar = llguidance.grammar_from("lark", lark)
    (text,) = texts(workers["continuous"], SamplingParams(240, temperature=1.0, seed=7, grammar=grammar))
    parser = found.parser({})
    (call,) = parser.feed(text.removesuffix(" stop")).then(parser.finish()).calls
    assert call.name in ("f", "g")
    jsonschema.validate(json.loads(call.arguments), schema)


def test_the_grammar_of_harmony_calls() -> None:
    """By their special tokens."""
    tokenizer = byte_tokenizer()
    names = ["<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"]
    tokenizer.add_special_tokens(names)
    places = [tokenizer.token_to_id(name) for name in names]
    grammar = TOOL_FORMATS["harmony"].grammar
    assert grammar is not None
    matcher = Grammars(tokenizer.to_str(), 270, [places[3]]).matcher(
        llguidance.grammar_from("lark", grammar({"f": SCHEMA, "g": {"type": "object"}}, True))
    )
    text = [places[0], *b"commentary to=functions.f ", places[1], *b"json", places[2]]
    matcher.consume([*text, *b'{"age": 1, "fine": true, "kind": "cat"}', places[3]])
    assert matcher.error is None
    matcher.consume(b"x")
    assert matcher.error is not None


@pytest.mark.parametrize(
    ("change", "match"),
    [({"grammar": "{"}, "refused"), ({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 2}, "min_tokens")],
    ids=str,
)
def test_what_the_lead_refuses(workers: dict[str, GpuWorker], change: dict[str, Any], match: str) -> None:
    params = SamplingParams(**({"max_tokens": 8, "grammar": grammar_of(guided_choice=["a"])} | change))
    with pytest.raises(RequestError, match=match):
        workers["serial"].submit(GenerationRequest("r", PROMPT, params))


@pytest.mark.parametrize("scored", [98, 257, 259, 400])
def test_a_tokenizer_of_another_size_than_the_model(scored: int) -> None:
    """Tokens that the model does not score never come, and what it scores beyond the tokenizer neither."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["ab", "zzz"])
    grammars = Grammars(tokenizer.to_str(), scored, [EOS])
    regex = llguidance.grammar_from("regex", "(a|b|zzz)+")
    allowed = torch.isfinite(grammars.matcher(regex).mask(torch.zeros(scored))).nonzero().flatten().tolist()
    assert allowed == [token for token in (ord("a"), ord("b"), ord("z"), 257, 258) if token < scored]


def test_a_grammar_that_needs_a_token_that_the_model_does_not_score() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["ab"])
    matcher = Grammars(tokenizer.to_str(), 60, [10, EOS, 999]).matcher(llguidance.grammar_from("regex", "ab"))
    assert torch.isfinite(matcher.mask(torch.zeros(60))).nonzero().flatten().tolist() == [10]
    assert "does not score" in (matcher.error or "")
    with pytest.raises(RequestError, match="stop token is not in its tokenizer"):
        Grammars(tokenizer.to_str(), 60, [999]).matcher("")


def test_a_model_without_a_tokenizer_is_held_to_no_grammar() -> None:
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        Grammars(None, 10, [2]).matcher("")
    with pytest.raises(RequestError, match="stop token"):
        Grammars("{}", 10, []).matcher("")


def test_a_text_that_leaves_its_grammar_is_an_error_of_its_request() -> None:
    """Not of the batch."""
    grammars = Grammars(byte_tokenizer().to_str(), 264, [EOS])
    processor = type("P", (), {"error": "too complex"})()
    streams = Streams(50, [EOS], 264, processor_of=lambda request: processor)
    stream = streams.open(GenerationRequest("r", PROMPT, SamplingParams(8)))
    streams.finish(stream.name, (EOS,))
    assert (event := stream.events.get()).finish == "error"
    assert (event.error, event.error_type) == ("too complex", "RequestError")
    assert grammars.matcher(grammar_of(guided_choice=["a"])).error is None


def _chain(rules: int, form: str) -> str:
    lines = "".join(form.format(f"r{i}", f"r{i + 1}") for i in range(rules))
    return form.format("root" if "::=" in form else "start", "r0") + lines + form.format(f"r{rules}", '"a"')


def _references(number: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(number)} | {f"d{number}": {"type": "integer"}}
    return {"$ref": "#/$defs/d0", "$defs": chain}


ATTACKS = {
    "a chain of rules": {"guided_grammar": _chain(10_000, "{}: {}\n")},
    "a chain of GBNF rules": {"grammar": _chain(5000, "{} ::= {}\n")},
    "a chain of references": {"guided_json": json.dumps(_references(6000))},
    "empty lines": {"grammar": 'root ::= "a"' + "\n" * 200_000},
    "brackets": {"grammar": "root ::= " + "(" * 50_000},
    "a regular expression of brackets": {"guided_regex": "(" * 60_000 + "a" + ")" * 60_000},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_grammar_costs_its_own_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of 40 to 190 KB overflowed the library's stack, which ended the server; empty lines held the interpreter's
    lock for minutes."""
    monkeypatch.setattr("tiermoe.cluster.api.grammar.CONVERT_S", 0.5)
    (param,) = ATTACKS[name]

    async def call(http: Any) -> None:
        hostile = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "p"} | ATTACKS[name]))
        longest_s, last_s = 0.0, time.thread_time()
        while not hostile.done():
            await asyncio.sleep(0.001)
            longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()
        assert error(hostile.result())[:2] == (400, param)
        assert longest_s < 0.25
        plain = await http.post("/v1/completions", json={"prompt": "p", "guided_regex": "a"})
        assert plain.status_code == 200

    ask(FakeBackend(), call)


def test_tools_whose_schemas_are_hostile_are_refused() -> None:
    functions = {"f": _references(6000)}
    with pytest.raises(ApiError, match="'tools': the grammar is too complex"):
        forced_call(lambda: pytest.fail("schemas are checked first"), functions)
    with pytest.raises(ApiError, match="'tools': the grammar has"):
        forced_call(lambda: "", {"f": {"description": "x" * 300_000}})


def test_a_key_has_one_grammar_at_a_time_and_others_have_their_turns() -> None:
    """Also where its clients leave: their grammars end before the next one begins."""

    async def run() -> None:
        turns, busy, free = Turns("grammars", 32), threading.Event(), threading.Event()
        started: list[int] = []

        def work(number: int) -> int:
            started.append(number)
            busy.set()
            free.wait(20)
            return number

        flood = [asyncio.create_task(turns.run("one", partial(work, i))) for i in range(32)]
        await asyncio.to_thread(busy.wait, 20)
        flood[0].cancel()
        with pytest.raises(ApiError, match="32 grammars wait already") as caught:
            await turns.run("one", partial(work, 99))
        assert caught.value.status == 429
        assert await turns.run("other", lambda: "done") == "done"
        assert started == [0]
        free.set()
        assert await asyncio.gather(*flood[1:]) == list(range(1, 32))
        assert turns.keys == 0
        turns.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "grammar",
    [_chain(10_000, "{}: {}\n"), json.dumps({"grammars": [{"json_schema": _references(6000)}]})],
    ids=["rules", "references"],
)
def test_the_lead_survives_what_overflows_the_library(grammar: str) -> None:
    """An edge of another version, or `LLM`, may send it."""
    grammars = Grammars(byte_tokenizer().to_str(), 264, [EOS])
    with pytest.raises(RequestError, match="the grammar is refused: the process that compiles it ended"):
        grammars.matcher(grammar)
    assert grammars.matcher(grammar_of(guided_choice=["a"])).error is None
    with pytest.raises(RequestError, match="5000000 characters"):
        grammars.matcher("x" * 5_000_000)


def following_of(text: bytes, **body: Any) -> tuple[dict[str, str], bool]:
    """What may come after a text that follows a grammar, and whether that is its end."""
    tokens = llguidance.LLTokenizer(byte_tokenizer().to_str(), n_vocab=264, eos_token=[EOS])
    following = grammar_jobs.Following(tokens)
    following.begin(grammar_of(**body))
    found = following.follow([])
    for byte in text:
        found = following.follow([byte])
        if "bits" not in found:
            break
    bits = base64.b64decode(found["bits"]) if "bits" in found else b""
    return found, not found or bool(bits and bits[EOS // 8] >> EOS % 8 & 1)


_WORDS = ["a", "ab", 'q"q', "c\\d\n", "é🙂", "[x]", "a/b", "\x00\x7f\u2028"]


@pytest.mark.parametrize("choices", [_WORDS, [*_WORDS, ""], [""], [f"number {i}" for i in range(9000)]], ids=len)
def test_a_text_is_one_of_its_choices(choices: list[str]) -> None:
    """Guards: with more than 2,000 a request ended with an error behind its first token, which blamed the text."""
    for choice in choices[-9:]:
        found, ends = following_of(choice.encode(), guided_choice=choices)
        assert ("error" not in found, ends) == (True, True), choice
        _, ends = following_of(choice.encode()[:-1], guided_choice=choices)
        assert ends == (choice[:-1] in choices)
    assert "error" in following_of(b"number z" if "number 1" in choices else b"z", guided_choice=choices)[0]


def test_a_grammar_with_too_many_alternatives_is_what_is_wrong() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    error = following_of(b"{", guided_json=schema)[0]["error"]
    assert error.startswith("the grammar is too complex: it has too many alternatives at one place (")


def test_a_grammar_whose_tokens_take_too_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "_FIRST_S", 0.02)
    monkeypatch.setattr(grammar_jobs, "_TOKEN_S", 0.0001)
    tokens = llguidance.LLTokenizer(byte_tokenizer().to_str(), n_vocab=264, eos_token=[EOS])
    following = grammar_jobs.Following(tokens)
    ambiguous = f'root ::= s\ns ::= {"s " * 12} | s s s s s s | "a" | ""'
    following.begin(grammar_of(grammar=ambiguous))
    found = next(found for _ in range(400) if "error" in (found := following.follow(b"a")))
    assert found["error"] == "the grammar is too complex: it takes more than 0.0001 s a token"
    grammars = Grammars(byte_tokenizer().to_str(), 264, [EOS])
    monkeypatch.setattr("tiermoe.actors.engine.serving.grammar.FOLLOW_S", 1e-6)
    late = grammars.matcher(grammar_of(guided_choice=["a"]))
    late.mask(torch.zeros(264))
    assert late.error == "the grammar is too complex: it takes longer than 1e-06 s"
    assert torch.isfinite(late.mask(torch.zeros(264))).nonzero().flatten().tolist() == [EOS]


@pytest.mark.parametrize("given", [{"grammar": "root ::= root"}, {"guided_json": {"$ref": "#"}}])
def test_a_grammar_without_a_text_says_so(given: dict[str, Any]) -> None:
    """Guards: the message was that it is too complex, by the library's word for it."""
    found = Grammars(byte_tokenizer().to_str(), 264, [EOS]).matcher(grammar_of(**given))
    found.mask(torch.zeros(264))
    assert found.error == "no text follows the grammar, such as a rule that always needs itself"


def test_a_process_that_ends_is_replaced_and_the_text_goes_on() -> None:
    grammars = Grammars(byte_tokenizer().to_str(), 264, [EOS])
    matcher = grammars.matcher(grammar_of(guided_regex="abc"))
    matcher.consume(b"a")
    os.kill(matcher._worker.pid, signal.SIGKILL)
    matcher.consume(b"b")
    assert torch.isfinite(matcher.mask(torch.zeros(264))).nonzero().flatten().tolist() == [ord("c")]
    matcher.rest()  # as those of requests that wait, where there are many
    assert torch.isfinite(matcher.mask(torch.zeros(264))).nonzero().flatten().tolist() == [ord("c")]
    matcher.consume(b"c")
    assert torch.isfinite(matcher.mask(torch.zeros(264))).nonzero().flatten().tolist() == [EOS]


def test_a_machine_that_starts_no_process_is_not_the_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("subprocess.Popen", fails)
    monkeypatch.setattr("tiermoe.cluster.api.grammar.WORKERS", Workers(grammar_jobs.MODULE))
    response = post("/v1/completions", {"prompt": "p", "guided_regex": "a"}, template=None)
    assert "does not start: no memory" in error(response)[2]
    with pytest.raises(RuntimeFailure, match="does not start: no memory"):
        Grammars(byte_tokenizer().to_str(), 264, [EOS]).matcher("start: /a/")


def test_more_grammars_than_processes_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.actors.engine.serving.grammar._MAX_HELD", 2)
    grammars = Grammars(byte_tokenizer().to_str(), 264, [EOS])
    matchers = [grammars.matcher(grammar_of(guided_regex=letter)) for letter in "abc"]
    helper = psutil.Process(grammars._workers.helper.pid)
    gone = [matcher._worker.pid for matcher in matchers if matcher._worker is not None]
    assert len(gone) == 2
    for matcher, letter in zip(matchers, "abc", strict=True):
        assert torch.isfinite(matcher.mask(torch.zeros(264))).nonzero().flatten().tolist() == [ord(letter)]
    del matcher, matchers
    psutil.wait_procs(helper.children(), timeout=20)
    assert helper.children() == []
    assert helper.num_threads() == 1  # it forks


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    """It came out as a bare ValueError."""
    words = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match=r"llguidance cannot read the model's tokenizer.*; ask without a grammar"):
        Grammars(words.to_str(), 2, [1]).matcher(grammar_of(guided_regex="a"))
