"""Load on a server of OpenAI's protocol: what is asked, when, and what came back.

    Load (conversations, and when each begins)  ->  `drive`: streamed over HTTP  ->  an `Answered` for each request

Open loop: arrivals do not wait for answers (a Poisson process, or a recorded schedule), so a slow server gets a queue.
Closed loop: each of N clients begins its next conversation when its last one is answered. The same `Load` gives the
same requests at the same times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from ....errors import ConfigError, RequestError, reason
from ....proto.options import is_loopback
from .metrics import Measures

if TYPE_CHECKING:
    import httpx
    from tokenizers import Tokenizer

REQUEST_S = 300.0  # of one request
NGRAM = 8  # tokens of a run that a made prompt repeats
PERCENTS = (50, 99)
UNANSWERED = "unanswered"  # when the measurement ended
_CUT = "disconnected"
_SAID = 200  # characters of what a server says of an error
_SHIFT = 11  # tokens by which a passage that is taken again begins later
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_FORM = 'JSON lines with "prompt" or "messages", or lines of text'


@dataclass(frozen=True)
class Conversation:
    """What one client asks, in one request or several.

    text: to be continued. messages: role and content of a chat; each of the user's is a request. The recorded answer
    stands between two of them, or where the record has none, the server's. max_tokens: None: those of the load.
    """

    text: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Load:
    """What a server is asked, and when.

    pool: conversations, of which repetition r takes `requests` from number `first + r * requests` on, and again from
    the beginning where there are too few. max_tokens: of each answer. clients, rate, schedule_s: one of them; clients
    of a closed loop; mean arrivals a second, of a Poisson process with the seed; seconds from the first arrival.
    warmup: requests before the first repetition, which are not counted. ignore_eos: answers are as long as they may be.

    Raises:
        ConfigError: not one of the three ways, a number out of range, or a schedule that is too short.
    """

    pool: tuple[Conversation, ...]
    requests: int
    max_tokens: int = 64
    clients: int | None = None
    rate: float | None = None
    schedule_s: tuple[float, ...] = ()
    warmup: int = 0
    first: int = 0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ways = [self.clients is not None, self.rate is not None, bool(self.schedule_s)]
        if sum(ways) != 1:
            raise ConfigError("a load has clients, a rate or a schedule", "give one of them")
        if not self.pool or min(self.requests, self.max_tokens, 1 if self.clients is None else self.clients) < 1:
            raise ConfigError("a load has no request, token or client", "give at least one of each")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate:g} requests a second", "give a number above 0")
        if self.schedule_s and len(self.schedule_s) < self.requests:
            what = f"the schedule has {len(self.schedule_s)} arrivals for {self.requests} requests"
            raise ConfigError(what, "ask for fewer requests")

    @property
    def name(self) -> str:
        """For people, such as `8 clients`."""
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return f"{self.rate:g} requests/s" if self.rate is not None else "recorded arrivals"

    def conversations(self, repetition: int = 0) -> list[Conversation]:
        """Those of a repetition, in their order."""
        begin = self.first + repetition * self.requests
        return [self.pool[(begin + number) % len(self.pool)] for number in range(self.requests)]

    def arrivals_s(self, repetition: int = 0) -> tuple[float, ...] | None:
        """Seconds from the first arrival, in order; None: a closed loop."""
        if self.clients is not None:
            return None
        if self.rate is None:
            return self.schedule_s[: self.requests]
        gaps = np.random.default_rng((self.seed, repetition)).exponential(1 / self.rate, self.requests - 1)
        return (0.0, *np.cumsum(gaps).tolist())


@dataclass
class Answered:
    """One request.

    arrived_s: when it was due, on the clock `time.perf_counter`; all other times are from then on. sent_s: until it was
    sent. times_s: when its pieces of text came. ended_s: its end. tokens: as the server counts them, or if it does not
    (`counted`), pieces of text. prompt_tokens, cached_tokens: as the server counts them; None: it does not. error: its
    kind; None: it was answered. said: what the server said of the error; empty: nothing.
    """

    arrived_s: float
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    tokens: int = 0
    counted: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = UNANSWERED
    said: str = ""
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """To the first piece of text."""
        return self.times_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each further token; None: there is none."""
        return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1) if self.tokens > 1 else None


async def drive(
    url: str, model: str, load: Load, repetition: int = 0, *, key: str | None = None,
    answered: list[Answered] | None = None, timeout_s: float = REQUEST_S,
) -> list[Answered]:  # fmt: skip
    """Send a repetition's requests and read their streams. A request that fails is one with an error.

    Args:
        url: of the server, without `/v1`. model: its name there. key: the server's bearer key.
        answered: the list to fill; it has what came also where this is cancelled.
        timeout_s: of one request.

    Returns:
        The requests in the order in which they were begun; without those of the warm-up.
    """
    import httpx

    found = [] if answered is None else answered
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # a kept connection that the server closes at that moment would count as a request that it lost
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    more: dict[str, Any] = {"timeout": None, "limits": limits, "headers": headers} | connecting(url)
    async with httpx.AsyncClient(base_url=url, **more) as http:
        client = _Client(http, model, load, timeout_s)
        if repetition == 0 and load.warmup:
            warm = itertools.islice(itertools.cycle(load.pool[::-1]), load.warmup)  # the last that are measured
            await _closed(client, warm, min(load.warmup, load.clients or load.warmup), [])
        chosen, arrivals_s = iter(load.conversations(repetition)), load.arrivals_s(repetition)
        if arrivals_s is None:
            await _closed(client, chosen, load.clients or 1, found)
        else:
            await _open(client, chosen, arrivals_s, found)
    return found


def connecting(url: str) -> dict[str, Any]:
    """Options of httpx for a server: one on this machine is not asked through the proxy that the environment names.

    Raises:
        httpx.InvalidURL: it is none. OSError: the environment names certificates that cannot be read.
    """
    import httpx

    parts = httpx.URL(url)
    if not is_loopback(parts.host):
        return {}
    return {"trust_env": False} | ({"verify": httpx.create_ssl_context()} if parts.scheme == "https" else {})


async def _closed(client: _Client, chosen: Iterator[Conversation], clients: int, found: list[Answered]) -> None:
    async def one() -> None:
        for conversation in chosen:  # shared: the next one that nobody has taken
            await client.converse(conversation, time.perf_counter(), found)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(one())


async def _open(
    client: _Client, chosen: Iterator[Conversation], arrivals_s: Sequence[float], found: list[Answered]
) -> None:
    begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for conversation, arrival_s in zip(chosen, arrivals_s, strict=True):
            await asyncio.sleep(begin_s + arrival_s - time.perf_counter())
            tasks.create_task(client.converse(conversation, begin_s + arrival_s, found))


@dataclass(frozen=True)
class _Client:
    http: httpx.AsyncClient
    model: str
    load: Load
    timeout_s: float

    async def converse(self, conversation: Conversation, arrived_s: float, found: list[Answered]) -> None:
        """The requests of a conversation, one after the other; the first that fails is the last."""
        if conversation.text is not None:
            await self._ask(_COMPLETIONS, {"prompt": conversation.text}, conversation, arrived_s, found)
            return
        said: list[dict[str, str]] = []
        answer: str | None = None  # of the server, until the record has one
        for role, content in conversation.messages:
            if role == "assistant":
                answer = None
            elif answer is not None:
                said.append({"role": "assistant", "content": answer})
                answer = None
            said.append({"role": role, "content": content})
            if role == "user":
                asked = await self._ask(_CHATS, {"messages": list(said)}, conversation, arrived_s, found)
                if asked.error is not None:
                    return
                answer, arrived_s = asked.text, time.perf_counter()

    async def _ask(
        self, path: str, body: dict[str, Any], of: Conversation, arrived_s: float, found: list[Answered]
    ) -> Answered:
        import httpx

        asked = Answered(arrived_s)
        found.append(asked)
        body |= {"model": self.model, "max_tokens": of.max_tokens or self.load.max_tokens, "temperature": 0.0,
                 "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        body |= {"ignore_eos": True} if self.load.ignore_eos else {}
        try:
            asked.sent_s = time.perf_counter() - arrived_s
            async with asyncio.timeout(self.timeout_s), self.http.stream("POST", path, json=body) as response:
                asked.error = await _read(response, asked)
        except TimeoutError:
            asked.error = "timeout"
        except httpx.ConnectError:
            asked.error = "no connection"
        except httpx.HTTPError:
            asked.error = _CUT
        except ValueError:
            asked.error = "malformed answer"
        finally:
            asked.ended_s = time.perf_counter() - arrived_s
        return asked


class _Delta(BaseModel):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(BaseModel):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def new(self) -> str:
        """The new text of a completion, or of a chat with what it reasons."""
        delta = self.delta or _Delta()
        return "".join(filter(None, (self.text, delta.reasoning_content, delta.reasoning, delta.content)))


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    completion_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Error(BaseModel):
    type: str | int | None = None
    code: str | int | None = None
    message: str | None = None


class _Event(BaseModel):
    """One event of a stream, or the body of a refusal."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Error | str | None = None


def _line(text: str) -> str:
    """The begin of a server's words, on one line."""
    return " ".join(text.split())[:_SAID]


async def _read(response: httpx.Response, asked: Answered) -> str | None:
    """Read a stream into `asked`; the kind of its error, or None.

    Raises:
        ValueError: an event is not of OpenAI's protocol.
    """
    if response.status_code != 200:
        asked.said = _said((await response.aread()).decode(errors="replace"))
        return f"HTTP {response.status_code}"
    whole = False
    async for data in _events(response):
        if data == "[DONE]":
            whole = True
            continue
        event = _Event.model_validate_json(data)
        if event.error is not None:
            asked.said = _said(data)
            kind = None if isinstance(event.error, str) else event.error.type or event.error.code
            return f"stream: {_line(str(kind or 'error'))}"
        choices = event.choices or ()
        whole = whole or any(choice.finish_reason for choice in choices)
        if text := "".join(choice.new for choice in choices):
            asked.times_s.append(time.perf_counter() - asked.arrived_s)
            asked.text += text
        if (usage := event.usage) is not None and usage.completion_tokens is not None:
            asked.tokens, asked.counted = usage.completion_tokens, True
            asked.prompt_tokens = usage.prompt_tokens
            asked.cached_tokens = (usage.prompt_tokens_details or _Details()).cached_tokens
    if not asked.counted:
        asked.tokens = len(asked.times_s)
    if not asked.times_s and asked.tokens:  # tokens without text
        asked.times_s.append(time.perf_counter() - asked.arrived_s)
    if not asked.tokens:
        return "no token"
    return None if whole else _CUT  # where the end of a connection is the end of an answer, nothing else tells


def _said(body: str) -> str:
    """What a server says of an error: its message, or all of a body that has none."""
    with contextlib.suppress(ValidationError):
        error = _Event.model_validate_json(body).error
        return _line((error if isinstance(error, str) else error and error.message) or body)
    return _line(body)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event. A line ends with a line feed; httpx's also end at a U+2028, which JSON may have."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode(errors="replace")
    if rest.startswith(b"data:"):
        yield rest.removeprefix(b"data:").strip().decode(errors="replace")


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What a good request keeps; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def kept(self, one: Answered) -> bool:
        """Whether a request was answered within them. An answer of one token has no TPOT to exceed."""
        if one.error is not None:
            return False
        slow = self.ttft_ms is not None and 1e3 * one.ttft_s > self.ttft_ms
        return not slow and (self.tpot_ms is None or 1e3 * (one.tpot_s or 0.0) <= self.tpot_ms)


def figures_of(requests: Sequence[Answered], limits: Limits) -> Measures:
    """Rates and percentiles of one repetition; rates are over the time from its first arrival to its last end.

    Percentiles are over answered requests; NaN where there is none. With limits `goodput` (requests a second that kept
    them) and `good_share` of all requests.
    """
    done = [one for one in requests if one.error is None]
    begin_s = min((one.arrived_s for one in requests), default=0.0)
    wall_s = max((one.arrived_s + one.ended_s for one in requests), default=0.0) - begin_s
    found = {"tokens_per_s": sum(one.tokens for one in done) / wall_s if wall_s else math.nan,
             "requests_per_s": len(done) / wall_s if wall_s else math.nan}  # fmt: skip
    times = {"ttft": [one.ttft_s for one in done], "e2e": [one.ended_s for one in done],
             "tpot": [one.tpot_s for one in done if one.tpot_s is not None]}  # fmt: skip
    for name, values in times.items():
        for percent in PERCENTS:
            found[f"{name}_p{percent}_ms"] = 1e3 * float(np.percentile(values, percent)) if values else math.nan
    if limits:
        good = sum(map(limits.kept, requests))
        found |= {"goodput": good / wall_s if wall_s else math.nan, "good_share": good / max(1, len(requests))}
    return found


def errors_of(requests: Sequence[Answered]) -> dict[str, int]:
    """How many requests failed, by kind."""
    return dict(Counter(one.error for one in requests if one.error is not None))


# -- prompts and schedules ---------------------------------------------------------------------------------------------


def read_conversations(file: Path) -> tuple[Conversation, ...]:
    """The conversations of a file; empty lines do not count.

    A line of a `.jsonl` file has `prompt` (or `text`), a text to be continued, or `messages` of a chat; and
    `max_tokens`, if it is to have its own. A line of another file is a text.

    Raises:
        RequestError: it cannot be read, is empty, or a line is malformed.
    """
    found = []
    for number, line in _lines(file):
        if file.suffix != ".jsonl":
            found.append(Conversation(line))
            continue
        entry = _entry(line, f"{file}:{number}")
        text, messages, most = entry.get("prompt", entry.get("text")), entry.get("messages"), entry.get("max_tokens")
        if not (most is None or (type(most) is int and most > 0)):
            raise RequestError(f"{file}:{number}: max_tokens is {most!r}", "give a whole number above 0")
        if isinstance(text, str) and text:
            found.append(Conversation(text, max_tokens=most))
            continue
        try:
            said = tuple((message["role"], message["content"]) for message in messages or ())
            if not all(isinstance(part, str) for pair in said for part in pair):
                raise TypeError
        except (KeyError, TypeError) as error:
            what = f"{file}:{number}: a message has no role or content that is text"
            raise RequestError(what, f"give {_FORM}") from error
        if "user" not in (role for role, _ in said):
            raise RequestError(f"{file}:{number} has no prompt", f"give {_FORM}")
        found.append(Conversation(messages=said, max_tokens=most))
    if not found:
        raise RequestError(f"'{file}' has no prompt", f"give {_FORM}")
    return tuple(found)


def read_schedule(file: Path) -> tuple[float, ...]:
    """Seconds from the first arrival, in order: a number in each line, or JSON lines with `at_s`, or with `timestamp`
    in milliseconds, as published traces have it.

    Raises:
        RequestError: it cannot be read, is empty, or a line is malformed.
    """
    found = []
    for number, line in _lines(file):
        entry: Any = _entry(line, f"{file}:{number}") if line.lstrip().startswith("{") else {"at_s": line}
        try:
            at_s = float(entry["at_s"] if "at_s" in entry else entry["timestamp"] * 1e-3)
        except (KeyError, TypeError, ValueError, OverflowError):
            at_s = math.nan
        if not math.isfinite(at_s):
            remedy = "give a number of seconds in each line, or JSON lines with at_s or timestamp"
            raise RequestError(f"{file}:{number} has no time", remedy)
        found.append(at_s)
    if not found:
        raise RequestError(f"'{file}' has no arrival", "give a number of seconds in each line")
    found.sort()
    return tuple(at_s - found[0] for at_s in found)


def _lines(file: Path) -> list[tuple[int, str]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"'{file}' cannot be read: {reason(error)}", "give a readable UTF-8 file") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()  # what is sent: half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}", f"give {_FORM}") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{where} is not a JSON object", f"give {_FORM}")
    return entry


def made_conversations(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, tokens: int, repeated: float = 0.0, seed: int = 0
) -> tuple[Conversation, ...]:
    """Prompts of a stated length, each from another place of some texts.

    Args:
        texts: what the prompts are made of, one text after the other.
        tokens: of each prompt, as this tokenizer counts them. Its text is sent, so that the server's count may differ
            by a few.
        repeated: share of a prompt's runs of `NGRAM` tokens that repeat an earlier run of it, in [0, 1).
        seed: of the order of the texts, and of what is repeated.
    """
    rng = np.random.default_rng(seed)
    encoded = [tokenizer.encode(texts[place], add_special_tokens=False).ids for place in rng.permutation(len(texts))]
    begins = list(itertools.accumulate((len(ids) for ids in encoded), initial=0))[:-1]
    fresh = [token for ids in encoded for token in ids]
    found = []
    for number in range(count):
        lap, place = divmod(number, len(begins))
        at, prompt = begins[place] + lap * _SHIFT, list[int]()
        while len(prompt) < tokens:
            if len(prompt) >= NGRAM and rng.random() < repeated:
                begin = int(rng.integers(len(prompt) - NGRAM + 1))
                prompt += prompt[begin : begin + NGRAM]
            else:
                prompt += [fresh[(at + step) % len(fresh)] for step in range(NGRAM)]
                at += NGRAM
        found.append(Conversation(tokenizer.decode(prompt[:tokens])))
    return tuple(found)
