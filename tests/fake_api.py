"""A server over canned events in this process, and calls on it: no Ray, no model, no network."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tiermoe.actors.engine.stats import EngineStats, LayerStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent, TokenLogprob
from tiermoe.cluster.api.keys import KeyRing
from tiermoe.cluster.api.lead import LeadState
from tiermoe.cluster.api.model import ServedModel
from tiermoe.cluster.api.origins import Access
from tiermoe.cluster.api.records import Sink
from tiermoe.cluster.api.routes import make_app
from tiermoe.cluster.api.runs import Runs
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.templates import ChatTemplate
from tiermoe.cluster.attach import Sample
from tiermoe.cluster.checkpoints.generation import NO_DEFAULTS, GenerationDefaults
from tiermoe.errors import RuntimeFailure

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token a byte: token i is byte i; 256 is a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = _byte_order(alphabet)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(by_byte)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """As `byte_tokenizer`, in the form of Mixtral's: tokens <0x00> to <0xFF>, and a decoder of byte fallback."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(names, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def _byte_order(alphabet: Sequence[str]) -> list[str]:
    printable = [letter for letter in alphabet if ord(letter) < 256]
    others = iter(sorted(letter for letter in alphabet if ord(letter) >= 256))
    return [chr(byte) if chr(byte) in printable else next(others) for byte in range(256)]


class FakeBackend:
    """Answers each prompt with bytes, `step` tokens an event.

    Attributes:
        answers: prompt text -> answer; others are answered with their own text in upper case.
        cached: prompt tokens of each request that it says were cached.
        hold: while set to an event, every answer waits for it after its first event.
        cancelled: ids of requests whose consumer left.
        requests: all that came.
    """

    def __init__(
        self, answers: dict[str, bytes] | None = None, *, step: int = 1, max_requests: int = 4, cached: int = 0
    ) -> None:
        self.plan: dict[str, Any] = {
            "model": "/models/fake", "max_requests": max_requests, "max_prompt_tokens": 64, "policy": "next-gate",
            "lossless": True, "shards": None,
        }  # fmt: skip
        self.answers, self.step, self.cached = answers or {}, step, cached
        self.last_event_s = time.monotonic()
        self.hold: asyncio.Event | None = None
        self.cancelled: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.failure: str | None = None
        self.asked = 0
        self.health: dict[str, Any] | None = None
        self.shard_stats: list[dict[str, Any]] = []
        self.samples: list[Sample] = []
        self.open = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        self.requests.append(request)
        self.open += 1
        name, params, ended = request.request_id, request.sampling, False
        prompt = bytes(token for token in request.prompt_ids if token < EOS).decode(errors="replace")
        tokens = [*self.answers.get(prompt, prompt.upper().encode())]
        finish = "stop" if len(tokens) < params.max_tokens and not params.ignore_eos else "length"
        tokens, last = tokens[: params.max_tokens], (EOS,) if finish == "stop" else ()
        try:
            for begin in range(0, len(tokens), self.step):
                part = tuple(tokens[begin : begin + self.step])
                prompt_scores = score(request.prompt_ids[1:], params.prompt_logprobs) if begin == 0 else ()
                yield TokenEvent(
                    name, part, logprobs=score(part, params.logprobs), prompt_logprobs=prompt_scores,
                    cached_tokens=self.cached if begin == 0 else 0,
                )  # fmt: skip
                if self.hold is not None:
                    await self.hold.wait()
                if self.failure is not None:
                    raise RuntimeFailure(self.failure, "send it again")
                await asyncio.sleep(0)
            ended = True
            yield TokenEvent(name, last, finish, ttft_s=0.01, queue_s=0.002, logprobs=score(last, params.logprobs))
        finally:
            self.open -= 1
            if not ended:
                self.cancelled.append(name)

    async def ask(self, method: str) -> Any:
        self.asked += 1
        if self.failure is not None:
            raise RuntimeFailure(self.failure, "start it again")
        return {
            "health": {"state": "serving", "running": self.open},
            "shard_stats": self.shard_stats,
            "samples": self.samples,
            "load": {"running": self.open, "waiting": 0, "kv_usage": 0.25, "slots_used": 3, "pins": 0},
            "stats": EngineStats(layers=[LayerStats(hits=5, misses=2, bytes_loaded_prefetch=64)]),
        }[method]

    def states(self) -> list[LeadState]:
        if self.failure is not None:
            return [LeadState(False, 1.0, {}, {}, self.failure)]
        if self.health is not None:
            return [LeadState(False, 0.5, self.health, {}, f"the runtime is {self.health['state']}")]
        return [LeadState(True, 0.5, {"state": "serving"}, {"running": self.open, "waiting": 0, "kv_usage": 0.25})]


def score(tokens: Sequence[int], top: int | None) -> tuple[TokenLogprob, ...]:
    """Token t has log-probability -t/100, and token 0 and its successors are the likeliest."""
    if top is None:
        return ()
    return tuple(TokenLogprob(t, -t / 100, tuple((i, -i / 100) for i in range(top))) for t in tokens)


def serving(
    backend: FakeBackend,
    *,
    template: str | None = "{% for m in messages %}{{ m.content }}{% endfor %}",
    keys: Path | None = None,
    limits: LimitSettings | None = None,
    sinks: Sequence[Sink] = (),
    tokenizer: Tokenizer | None = None,
    access: Access | None = None,
    share_prefix_cache: bool = False,
    defaults: GenerationDefaults = NO_DEFAULTS,
    library: Any = httpx,
) -> tuple[Runs, Callable[[], Any]]:
    """What runs, and clients of a server of it, which are of httpx or of its successor."""
    chats = None if template is None else ChatTemplate(template, {"eos_token": "<end>"})
    tokenizer, limits = tokenizer or byte_tokenizer(), limits or LimitSettings()
    model = ServedModel("fake", backend.plan, tokenizer, chats, limits, defaults=defaults)
    runs = Runs(backend, tokenizer, limits, share_prefix_cache)
    app = make_app(model, runs, None if keys is None else KeyRing(keys), sinks=sinks, access=access)

    def client() -> Any:
        return library.AsyncClient(transport=library.ASGITransport(app), base_url="http://test")

    return runs, client


def template_of(calls: str, several: str = "") -> str:
    """A template whose calls are written so; `c` is one, `json` its arguments. several: what is before all calls."""
    return (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% set calls = m.tool_calls or [] %}" + several + "{% for c in calls %}"
        "{% set f = c.function %}{% set json = f.arguments | tojson %}" + calls + "{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


CALLS_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
)
WAIT_S = 20.0
Call = Callable[[httpx.AsyncClient], Awaitable[Any]]


def ask(backend: FakeBackend, call: Call, **options: Any) -> Any:
    """What a call on a client of a fresh server returns."""

    async def run() -> Any:
        runs, client = serving(backend, **options)
        async with client() as http:
            result = await asyncio.wait_for(call(http), WAIT_S)
        assert runs.admission.waiting == runs.admission.inside == backend.open == 0
        return result

    return asyncio.run(run())


def post(path: str, body: Any, backend: FakeBackend | None = None, **options: Any) -> httpx.Response:
    headers = options.pop("headers", None)
    return ask(backend or FakeBackend(), lambda http: http.post(path, json=body, headers=headers), **options)


def complete(body: dict[str, Any], backend: FakeBackend | None = None, **options: Any) -> dict[str, Any]:
    response = post("/v1/completions", {"temperature": 0} | body, backend, **options)
    assert response.status_code == 200, response.text
    return response.json()


def chat(body: dict[str, Any], backend: FakeBackend | None = None, **options: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    response = post("/v1/chat/completions", messages | body, backend, **options)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of Anthropic's protocol."""
    *parts, end = response.text.split("\n\n")
    assert (response.headers["content-type"].partition(";")[0], end) == ("text/event-stream", "")
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error(response: httpx.Response) -> tuple[int, str | None, str]:
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return response.status_code, body["param"], body["message"]
