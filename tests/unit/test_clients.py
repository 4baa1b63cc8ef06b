"""OpenAI's and Anthropic's clients, unmodified, before the server in this process: their models check every answer and
every event.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_api import CALLS_TEMPLATE, WAIT_S, FakeBackend, serving
from pydantic import BaseModel

from tiermoe.cluster.api.anthropic import (
    ClientTool,
    CountBody,
    MessagesBody,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tiermoe.cluster.api.messages import Body, ContentPart, Function, Message, Sent
from tiermoe.cluster.api.parameters import IGNORED, NEUTRAL
from tiermoe.cluster.api.responses import (
    EventOptions,
    FunctionCall,
    FunctionOutput,
    InputMessage,
    ReasoningItem,
    ResponsesBody,
    ResponseTool,
)
from tiermoe.cluster.api.schema import ChatBody, CompletionBody, StreamOptions
from tiermoe.cluster.api.thinking import Reasoning

openai = pytest.importorskip("openai")

_TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def with_client(call: Callable[[Any], Awaitable[Any]], answers: dict[str, bytes] | None = None) -> Any:
    """What a call on a client of a fresh server returns."""

    async def run() -> Any:
        backend = FakeBackend(answers, step=2)
        backend.plan["max_prompt_tokens"] = 500
        _, http = serving(backend, template=CALLS_TEMPLATE)
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http(), max_retries=0)
        async with client:
            return await asyncio.wait_for(call(client), WAIT_S)

    return asyncio.run(run())


def test_responses_whole_and_streamed() -> None:
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "h"}]}, {"role": "user", "content": "i"}]

    async def call(client: Any) -> tuple[Any, list[Any], Any]:
        whole = await client.responses.create(model="fake", input="hi", instructions="x", store=False)
        stream = await client.responses.create(model="fake", input=messages, stream=True)
        short = await client.responses.create(model="fake", input="hello", max_output_tokens=2)
        stopped = await client.responses.create(model="fake", input="hello", extra_body={"stop": "L"})
        assert (stopped.status, stopped.output_text) == ("completed", "HE")
        return whole, [event async for event in stream], short

    whole, events, short = with_client(call)
    assert (whole.output_text, whole.status, whole.usage.total_tokens) == ("XHI", "completed", 7)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "HI"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    last = events[-1].response
    assert (last.output_text, last.usage.input_tokens, last.usage.output_tokens) == ("HI", 2, 3)
    assert (short.status, short.output_text) == ("incomplete", "HE")
    assert short.incomplete_details.reason == "max_output_tokens"


def test_responses_call_tools() -> None:
    """Streamed by the client's helper, which checks each event; what came goes back as the client keeps it."""
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    called = '<tool_call>{"name": "f", "arguments": {"x": "a long text"}}</tool_call>'
    twice = f"so {called}{called}"
    answers = {"f;hi": twice.encode(), f"f;hi{twice.replace(' ', '', 1)}warmcold": b"done", "f;no": called.encode()}

    async def call(client: Any) -> None:
        whole = await client.responses.create(model="fake", input="hi", tools=tools)
        kinds, grown = [], ""
        async with client.responses.stream(model="fake", input="hi", tools=tools) as stream:
            async for event in stream:
                kinds.append(event.type.removeprefix("response."))
                if event.type == "response.function_call_arguments.delta" and event.output_index == 1:
                    grown += event.delta
                    assert event.snapshot == grown
            streamed = await stream.get_final_response()
        assert kinds.count("function_call_arguments.delta") > 8
        assert kinds.count("function_call_arguments.done") == 2
        for answer in (whole, streamed):
            said, first, second = answer.output
            assert (said.content[0].text, first.type, first.name, first.arguments) == (
                "so", "function_call", "f", '{"x": "a long text"}')  # fmt: skip
            assert first.call_id != second.call_id
        assert grown == streamed.output[1].arguments
        outputs = ("warm", [{"type": "input_text", "text": "cold"}])
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": output}
            for item, output in zip(streamed.output[1:], outputs, strict=True)
        ]
        turns = [{"role": "user", "content": "hi"}, *streamed.output, *results]
        assert (await client.responses.create(model="fake", input=turns, tools=tools)).output_text == "done"
        short = await client.responses.create(model="fake", input="no", tools=tools, max_output_tokens=50)
        assert (short.status, short.output[0].status) == ("incomplete", "incomplete")
        assert short.output[0].arguments == '{"x": "a lon'

    with_client(call, answers)


def test_tool_calls_and_parsed_answers() -> None:
    class Pet(BaseModel):
        age: int

    async def call(client: Any) -> tuple[Any, Any, Any]:
        chat = client.chat.completions
        ask: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
        tooled = await chat.create(**ask, tools=_TOOLS)
        async with chat.stream(**ask, tools=_TOOLS) as stream:
            streamed = await stream.get_final_completion()
        parsed = await chat.parse(model="fake", messages=[{"role": "user", "content": "pet"}], response_format=Pet)
        return tooled, streamed, parsed

    pytest.importorskip("llguidance")
    found = b'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    tooled, streamed, parsed = with_client(call, {"f;hi": found, "pet": b'{"age": 3}'})
    for answer in (tooled, streamed):
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so")
        (made,) = choice.message.tool_calls
        assert (made.function.name, made.function.arguments) == ("f", '{"x": 1}')
    assert parsed.choices[0].message.parsed == Pet(age=3)


def test_arguments_come_in_pieces() -> None:
    """The helpers join them, and show them at each step; `f` is called twice."""
    called = '<tool_call>{"name": "f", "arguments": {"x": "a long \\u00e9 text", "y": [1, {}]}}</tool_call>'
    arguments = '{"x": "a long é text", "y": [1, {}]}'
    answers = {"f;hi": f"so {called}\n{called}".encode(), "f;no": called.encode()}

    async def chats(client: Any) -> None:
        ask: dict[str, Any] = {"model": "fake", "tools": _TOOLS}
        shown, done = ["", ""], []
        async with client.chat.completions.stream(**ask, messages=[{"role": "user", "content": "hi"}]) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    shown[event.index] += event.arguments_delta
                    assert event.arguments == shown[event.index]
                elif event.type == "tool_calls.function.arguments.done":
                    done.append(event.arguments)
            made = (await stream.get_final_completion()).choices[0].message.tool_calls
        assert [call.function.arguments for call in made] == done == shown == [arguments] * 2
        assert len({call.id for call in made}) == 2
        cut = await client.chat.completions.create(**ask, messages=[{"role": "user", "content": "no"}], max_tokens=50)
        (call,) = cut.choices[0].message.tool_calls
        assert (cut.choices[0].finish_reason, call.function.arguments) == ("length", '{"x": "a lon')

    async def messages(client: Any) -> None:
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        ask: dict[str, Any] = {"model": "fake", "tools": tools, "max_tokens": 300}
        pieces, snapshots = "", []
        async with client.messages.stream(**ask, messages=[{"role": "user", "content": "hi"}]) as stream:
            async for event in stream:
                if event.type == "input_json":
                    pieces += event.partial_json
                    snapshots.append(event.snapshot)
            final = await stream.get_final_message()
        value = {"x": "a long é text", "y": [1, {}]}
        assert pieces == arguments * 2
        assert len(snapshots) > 20
        assert [block.input for block in final.content[1:]] == [value, value]
        no = ask | {"messages": [{"role": "user", "content": "no"}], "max_tokens": 70}
        async with client.messages.stream(**no) as stream:
            streamed = await stream.get_final_message()
        for cut in (await client.messages.create(**no), streamed):
            assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {"x": "a long é text"})

    with_client(chats, answers)
    with_anthropic(messages, answers)


def test_an_answer_comes_back_as_clients_keep_it() -> None:
    """Joined from a stream, with `index` in its calls and what wrappers add; the prompt is the same without."""

    async def call(client: Any) -> Any:
        ask: dict[str, Any] = {"model": "fake", "tools": _TOOLS}
        user = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        async with client.chat.completions.stream(**ask, messages=[user]) as stream:
            first = (await stream.get_final_completion()).choices[0].message
        kept = first.model_dump()
        kept["tool_calls"][0] |= {"index": 0, "provider_specific_fields": None}
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "warm", "name": "f"}
        return await client.chat.completions.create(**ask, messages=[user, kept, result])

    called = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    answers = {"f;hi": called.encode(), f"f;hi{called}warm": b"done"}
    assert with_client(call, answers).choices[0].message.content == "done"


def with_anthropic(call: Callable[[Any], Awaitable[Any]], answers: dict[str, bytes] | None = None) -> Any:
    """What a call on Anthropic's client of a fresh server returns."""
    anthropic, library = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")

    async def run() -> Any:
        backend = FakeBackend(answers, step=2)
        backend.plan["max_prompt_tokens"] = 500
        _, http = serving(backend, template=CALLS_TEMPLATE, library=library)
        client = anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http(), max_retries=0)
        async with client:
            return await asyncio.wait_for(call(client), WAIT_S)

    return asyncio.run(run())


def test_messages_whole_and_streamed() -> None:
    anthropic = pytest.importorskip("anthropic")
    ask: dict[str, Any] = {"model": "fake", "max_tokens": 90, "messages": [{"role": "user", "content": "hi"}]}
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    called = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'

    async def call(client: Any) -> None:
        messages = client.messages
        whole = await messages.create(**ask, system="x", stop_sequences=["!"], metadata={"user_id": "me"})
        assert (whole.content[0].text, whole.stop_reason, whole.usage.input_tokens) == ("XHI", "end_turn", 3)
        assert (await messages.count_tokens(model="fake", messages=ask["messages"], system="x")).input_tokens == 3
        async with messages.stream(**ask, tools=tools) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert {"message_start", "content_block_delta", "content_block_stop", "message_stop"} <= kinds
        said, made = final.content
        assert (said.text, made.name, made.input, final.stop_reason) == ("so", "f", {"x": 1}, "tool_use")
        assert final.usage.output_tokens > 0
        result = {"type": "tool_result", "tool_use_id": made.id, "content": "warm"}
        turns = [*ask["messages"], {"role": "assistant", "content": final.content},
                 {"role": "user", "content": [result]}]  # fmt: skip
        last = await client.beta.messages.create(**ask | {"messages": turns}, tools=tools, betas=["x-2026-01-01"])
        assert last.content[0].text == "done"
        with pytest.raises(anthropic.NotFoundError) as refused:
            await messages.create(**ask | {"model": "claude"})
        assert refused.value.body["error"]["type"] == "not_found_error"
        assert refused.value.request_id

    answers = {"f;hi": f"so {called}".encode(), f"f;hiso{called}warm": b"done"}
    with_anthropic(call, answers)


_OPENAI, _ANTHROPIC = "openai.resources", "anthropic.resources"
_OF_A_CALL = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # not of its body
_TYPES = "openai.types"
# whose parameters: a method, or a type of a part; the body here that takes them
KNOWN: list[tuple[str, type[Body]]] = [
    (f"{_OPENAI}.chat.completions.Completions.create", ChatBody), (f"{_OPENAI}.Completions.create", CompletionBody),
    (f"{_OPENAI}.responses.Responses.create", ResponsesBody),
    (f"{_ANTHROPIC}.Messages.create", MessagesBody), (f"{_ANTHROPIC}.Messages.count_tokens", CountBody),
    (f"{_ANTHROPIC}.beta.messages.Messages.create", MessagesBody),
    (f"{_ANTHROPIC}.beta.messages.Messages.count_tokens", CountBody),
    (f"{_TYPES}.chat.ChatCompletionContentPartTextParam", ContentPart),
    (f"{_TYPES}.chat.ChatCompletionAssistantMessageParam", Message),
    (f"{_TYPES}.chat.ChatCompletionStreamOptionsParam", StreamOptions),
    (f"{_TYPES}.shared_params.FunctionDefinition", Function), (f"{_TYPES}.shared_params.Reasoning", Reasoning),
    (f"{_TYPES}.responses.FunctionToolParam", ResponseTool),
    (f"{_TYPES}.responses.EasyInputMessageParam", InputMessage),
    (f"{_TYPES}.responses.ResponseOutputMessageParam", InputMessage),
    (f"{_TYPES}.responses.ResponseFunctionToolCallParam", FunctionCall),
    (f"{_TYPES}.responses.response_input_param.FunctionCallOutput", FunctionOutput),
    (f"{_TYPES}.responses.ResponseReasoningItemParam", ReasoningItem),
    (f"{_TYPES}.responses.response_create_params.StreamOptions", EventOptions),
    ("anthropic.types.TextBlockParam", TextBlock), ("anthropic.types.ToolUseBlockParam", ToolUseBlock),
    ("anthropic.types.ToolResultBlockParam", ToolResultBlock), ("anthropic.types.ThinkingBlockParam", ThinkingBlock),
    ("anthropic.types.ToolParam", ClientTool), ("anthropic.types.beta.BetaToolParam", ClientTool),
    ("anthropic.types.beta.BetaOutputConfigParam", OutputConfig),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body"), KNOWN, ids=[name.partition(".")[2] for name, _ in KNOWN])
def test_every_parameter_of_the_clients_is_known(name: str, body: type[Body]) -> None:
    """It is served, ignored by name or refused by name; what is not known at all was overlooked."""
    package, _, path = name.partition(".")
    place: Any = pytest.importorskip(package)
    for part in path.split("."):
        place = getattr(place, part, None) or importlib.import_module(f"{place.__name__}.{part}")
    wanted = place.__annotations__ if isinstance(place, type) else inspect.signature(place).parameters
    known = body.model_fields.keys() | (body.harmless if issubclass(body, Sent) else IGNORED | NEUTRAL.keys())
    assert wanted.keys() - _OF_A_CALL - known == set()
