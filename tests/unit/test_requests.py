"""Requests over HTTP, a table a question: what is refused and how, what the model is shown, what the runtime is asked.

No request that is refused reaches the runtime.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_api import CALLS_TEMPLATE, EOS, FakeBackend, ask, error, post, template_of

from tiermoe.actors.requests import SamplingParams
from tiermoe.cluster.api.refusals import ApiError
from tiermoe.cluster.checkpoints.generation import NO_DEFAULTS, GenerationDefaults

TEXT, CHAT, ANSWER, TOKENS = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"
_HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "p"}, CHAT: {"messages": _HI}, ANSWER: {"input": "hi"}, TOKENS: {}, "/detokenize": {},
}  # fmt: skip

# -- refused -----------------------------------------------------------------------------------------------------------

_DOCUMENTS = [{"title": "t", "text": "x"}]
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
_PYTHONIC = template_of(
    "{{ '[' if loop.first else ', ' }}{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ']' if loop.last }}"
)

# parameter -> values that a request refuses with 400 and that name
VALUES: dict[str, dict[str, list[Any]]] = {
    TEXT: {
        "prompt": ["", [], [[]], [257], [-1], 5, None, "x" * 64, ["a"] * 129, [True], [["5"]], [[5], [True]]],
        "max_tokens": [-1, "5"], "temperature": [-0.1, 2.1], "top_p": [0], "top_k": [-2], "n": [0, 129, True],
        "logprobs": [21], "min_tokens": [17], "seed": [2**64], "stop": [[""], ["a"] * 17], "best_of": [2],
        "stream_options": [{"include_usage": True}], "frequency_penalty": [2.5], "presence_penalty": [-3],
        "repetition_penalty": [0, 1e-39, 1e39], "min_p": [1.1], "cache_salt": ["", 5, "s" * 1025],
        "logit_bias": [{"5": 101}, {"x": 1}, {"-1": 1}, {"257": 1}, [1], {"9" * 30: 1}, {"5": 1, "05": 1}],
        "stop_token_ids": [[257], 5, [-1], [2**70], [1] * 1025], "typical_p": [0.5], "mirostat": [2],
        "use_beam_search": [True], "bad_words": [["x"]], "suffix": ["x"],
        # grammars
        "guided_json": [{"type": "foo"}, "{"], "guided_regex": ["((", "a" * 300_000], "guided_choice": [[]],
        "guided_grammar": ["root ::= ((("], "response_format": [{"type": "xml"}, {"type": "json_schema"}],
    },
    CHAT: {
        "messages": [[], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "assistant"}],
                     [{"role": "tool", "content": None}]],
        "top_logprobs": [2], "max_tokens": [0], "tools": [[{"type": "function"}]], "echo": [True],
        "response_format": [{"type": "xml"}], "chat_template_kwargs": [{"messages": []}, {"tokenize": True}],
        "documents": [_DOCUMENTS],  # which the template does not show
        # reasoning
        "reasoning_effort": ["hgih"], "reasoning": [{"effort": "lo"}, {"max_tokens": 1.5}],
        "thinking": [{"type": "on"}], "think": [5], "enable_thinking": ["yes"], "thinking_budget": [-2],
    },
    TOKENS: {"prompt": [""]}, "/detokenize": {"tokens": [[], [257], [-1], [2**70], ["5"], "x"]},
    ANSWER: {
        "input": [[], [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]],
        "tools": [[{"type": "web_search"}]], "previous_response_id": ["r"], "image": [{"detail": "low"}],
        "background_options": [{"completion_window": "2h"}], "include": [["message.output_text.logprobs"], ["x", 5]],
    },
}  # fmt: skip
_NO_INTEGERS = [64.5, 1e300, 2.0**60, -0.5, "64", True, [64]]
_NOT_TEXT = [
    ({"type": "image_url", "image_url": {"url": "data:"}}, "images"), ({"type": "input_image"}, "images"),
    ({"type": "input_audio", "input_audio": {}}, "audio"), ({"type": "video_url"}, "videos"),
    ({"type": "file", "file": {}}, "files"), ({"type": "input_file"}, "files"),
]  # fmt: skip

# path, what the body has, template, parameter, words of the message
REFUSED: list[tuple[str, dict[str, Any], str | None, str, str]] = [
    (TEXT, {"prompt": "x" * 60}, "", "max_tokens", ""),
    (TEXT, {"min_tokens": 1, "stop_token_ids": list(range(257))}, "", "stop_token_ids", ""),
    (TEXT, {"stream": True, "stream_options": {"x": 1}}, "", "stream_options.x", ""),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "", "max_completion_tokens", ""),
    # names that nobody knows, and the one that was meant
    *((TEXT, {written: 1}, "", written, f"did you mean '{meant}'?") for written, meant in (
        ("temprature", "temperature"), ("modell", "model"), ("strem", "stream"), ("max_token", "max_tokens"),
        ("Top_P", "top_p"))),
    (TEXT, {"qqq": 1}, "", "qqq", "leave it out"), (CHAT, {"enable_thinkin": True}, "", "enable_thinkin", ""),
    (ANSWER, {"inputs": 1}, "", "inputs", ""),
    (TEXT, {"max_completion_tokens": 1}, "", "max_completion_tokens",
     "not a parameter of this request; leave it out"),  # of another route: no misspelling
    (CHAT, {"reasoning": {"efort": "low"}}, "", "reasoning.efort", ""),
    (CHAT, {"thinking": {"budget": 5}}, "", "thinking.budget", ""),
    # within others, such as Ollama's
    *((TEXT, {name: {inner: 2}}, "", inner, "")
      for name in ("options", "extra_body") for inner in ("mirostat", "tempratur")),
    # what would change the answer, and what to use
    *((CHAT, {name: value}, "", name, words) for name, value, words in (
        ("n_predict", 5, "use 'max_tokens'"), ("repeat_penalty", 1.1, "use 'repetition_penalty'"),
        ("functions", [{"name": "f"}], "use 'tools'"), ("web_search_options", {}, "leave it out"),
        ("plugins", [{"id": "web"}], "leave it out"), ("modalities", ["text", "audio"], "leave it out"),
        ("mirostat", 1, "leave it out"), ("return_token_ids", True, "leave it out"))),
    *((TEXT, {name: value}, "", name, "valid integer")
      for name in ("max_tokens", "n", "seed", "top_k") for value in _NO_INTEGERS),
    # content
    *((path, {name: [{"role": "system", "content": "s"},
                     {"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]}, "", name,
       f"{kind} are not supported; this server takes text alone")
      for part, kind in _NOT_TEXT for path, name in ((CHAT, "messages"), (TOKENS, "messages"), (ANSWER, "input"))),
    *((CHAT, {"messages": [_HI[0] | more]}, "", param, words) for more, param, words in (
        ({"prefix": True}, "messages.0.prefix", ""), ({"colour": "red"}, "messages.0.colour", ""),
        ({"function_call": {"name": "f"}}, "messages", "function_call"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages", "messages.0.content.0"),
        ({"content": [{"type": "text", "text": "x", "colour": 1}]}, "messages.0.content.0.colour", ""))),
    # templates
    (CHAT, {}, None, "messages", "--chat-template"),
    (CHAT, {}, "{{ raise_exception('no such role') }}", "messages", "no such role"),
    (CHAT, {}, "{{ messages.__class__.__mro__ }}", "messages", "messages"),
    (CHAT, {}, "{% for i in range(10**9) %}{% endfor %}", "messages", "messages"),
    *((CHAT, {}, source, "messages", "does not compile")
      for source in ("{% for %}", "{% unknown %}", "{{ messages | nofilter }}")),
    (CHAT, {"tools": _TOOLS}, "{% for %}", "tools", "does not compile"),
    (CHAT, {"continue_final_message": True}, "", "continue_final_message", ""),
    (CHAT, {"documents": _DOCUMENTS, "chat_template_kwargs": {"documents": _DOCUMENTS}}, "{{ documents }}", "documents",
     ""),
    # tools
    (CHAT, {"tools": _TOOLS}, "{{ messages }}{# <tool_call> #}", "tools", ""),
    (TOKENS, {"prompt": None, "messages": _HI, "tools": _TOOLS}, "{{ messages }}{# <tool_call> #}", "tools", ""),
    (CHAT, {"tools": [{"type": "x"}]}, CALLS_TEMPLATE, "tools", ""),
    *((CHAT, {"tools": _TOOLS} | body, template, param, "") for body, template, param in (
        ({"tool_choice": "maybe"}, CALLS_TEMPLATE, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, CALLS_TEMPLATE, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, CALLS_TEMPLATE, "tool_choice"),
        ({"tool_choice": "required"}, _PYTHONIC, "tool_choice"),
        ({"tool_choice": "required", "guided_choice": ["a"]}, CALLS_TEMPLATE, "guided_choice"))),
    *((CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}} for schema in schemas]},
       CALLS_TEMPLATE, "tools", words) for schemas, words in (
        ([{"type": "array"}], "no object's"), ([{"type": ["string", "null"]}], "no object's"),
        ([{"enum": [1, 2]}], "no object's"), ([{"const": "x"}], "no object's"),
        ([{"type": "object"}, {"type": "object", "required": ["a"]}], "two of them are named 'f'"))),
    (ANSWER, {"tool_choice": {"type": "function", "name": "f"}}, "", "tool_choice", "no tool 'f'"),
    # grammars
    (TEXT, {"guided_regex": "a", "guided_choice": ["b"]}, "", "guided_choice", ""),
    (TEXT, {"guided_regex": "a", "ignore_eos": True}, "", "ignore_eos", ""),
    (TEXT, {"structured_outputs": {"regex": "(("}}, "", "structured_outputs.regex", ""),
    (ANSWER, {"text": {"format": {"type": "xml"}}}, "", "text.format", ""),
    # items
    *((ANSWER, {"input": [item]}, "", "input", words) for item, words in (
        ({"type": "item_reference", "id": "x"}, "'input.0': give items of type message, reasoning, function_call"),
        (5, "'input.0'"),
        ({"type": "function_call", "call_id": "c"}, "'input.0.function_call.name' is missing"),
        ({"role": "user", "content": "x", "type": ["message"]}, "give items of type"))),
    (ANSWER, {"tool_choice": "required"}, "", "tool_choice", "there are no tools"),
    (ANSWER, {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
     CALLS_TEMPLATE, "tool_choice", "no tool 'g'"),
    (ANSWER, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{no"}]}, "", "input",
     "not JSON"),
    *((path, {name: value}, "", name, "")
      for path, names in VALUES.items() for name, values in names.items() for value in values),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "template", "param", "words"), REFUSED,
    ids=[f"{path} {body!s:.60} {template or ''!s:.20}" for path, body, template, *_ in REFUSED],
)  # fmt: skip
def test_refused_with_the_parameters_name(
    path: str, body: dict[str, Any], template: str | None, param: str, words: str
) -> None:
    backend = FakeBackend()
    options = {} if template == "" else {"template": template}
    status, found, message = error(post(path, BODIES[path] | body, backend, **options))
    assert (status, found) == (400, param), message
    assert words in message
    assert backend.requests == []


# method, path, body, status, parameter, words
OTHER: list[tuple[str, str, Any, int, str | None, str]] = [
    ("POST", TEXT, {"prompt": "p", "model": "other"}, 404, "model", "no model 'other'"),
    ("POST", TEXT, {"prompt": "p", "model": "m" * 60_000}, 404, "model", "no model 'mm"),  # came back whole
    ("GET", "/v1/nothing", None, 404, None, ""), ("GET", TEXT, None, 405, None, ""),
    ("POST", TOKENS, {}, 400, None, ""), ("GET", "/v1/models/org/other", None, 404, "model", ""),
    ("POST", TEXT, b'{"prompt": ', 400, None, "JSON"),
    ("POST", "/v1/embeddings", {"input": "hi"}, 400, None, "embedding model"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "param", "words"), OTHER, ids=lambda it: str(it)[:40])
def test_other_refusals(method: str, path: str, body: Any, status: int, param: str | None, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    response = ask(FakeBackend(), lambda http: http.request(method, path, content=content, headers=kind))
    found, _, message = error(response)
    assert (found, words in message) == (status, True), message
    assert param is None or error(response)[1] == param
    assert len(message) < 1000


def test_the_type_of_an_error_says_whether_to_try_again() -> None:
    """Guards: 431 had the type of a failure of the server, at which clients try again."""
    types = {status: ApiError(status, "no").body["error"]["type"] for status in (400, 401, 422, 431, 500, 501, 503)}
    assert types == dict.fromkeys((400, 422, 431), "invalid_request_error") | {401: "authentication_error"} | {
        500: "server_error", 501: "server_error", 503: "service_unavailable",
    }  # fmt: skip


# -- what the model is shown -------------------------------------------------------------------------------------------


def assistant(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "u"}, {"role": "assistant"} | message,
                         {"role": "user", "content": "v"}]}  # fmt: skip


_DEVELOPER = {"messages": [{"role": "developer", "content": "be brief"}, *_HI]}
_ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
_ALL = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{{ mood }}"
)
_BEGUN = {"messages": [*_HI, {"role": "assistant", "content": "So"}], "add_generation_prompt": False,
          "continue_final_message": True}  # fmt: skip
_REASONED = "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
_THINKS = "{{ messages[0].content }}{{ '+' if enable_thinking | default(true) else '-' }}"

# what a chat has, template, what the model is shown, parameters that are ignored by name
SHOWN: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}a:", "u:hi<end>a:",
     ""),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "{% if enable_thinking %}think{% else %}do{% endif %}",
     "think", ""),
    ({}, _ALL, "hi>", ""), ({"documents": _DOCUMENTS}, _ALL, "hi[x]>", ""),
    ({"chat_template_kwargs": {"documents": _DOCUMENTS, "mood": "!"}}, _ALL, "hi[x]>!", ""),
    ({"add_generation_prompt": False}, _ALL, "hi", ""), (_BEGUN, _ALL, "hiSo", ""),
    # answers without text
    *((assistant(**message), "", f"u{shown}v", "") for message, shown in (
        ({"content": None, "reasoning_content": "hm"}, ""), ({"content": None}, ""), ({"refusal": "no"}, "no"),
        ({"content": None, "refusal": "no"}, "no"), ({"content": "x", "refusal": None, "function_call": None}, "x"),
        ({"content": None, "tool_calls": None, "audio": None, "reasoning": "hm"}, ""), ({"content": []}, ""),
        ({"content": None, "tool_calls": []}, ""), ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, ""))),
    # templates that do not know the role left the message out, or refused the chat
    (_DEVELOPER, _ROLES, "developer:be brief;user:hi;", ""),
    (_DEVELOPER, "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}:{{ m.content }};{% endif %}"
     "{% endfor %}", "system:be brief;user:hi;", ""),
    (_DEVELOPER, "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no such role') }}{% endif %}"
     "{{ m.role }}:{{ m.content }};{% endfor %}", "system:be brief;user:hi;", ""),
    *(({"messages": [{"role": "assistant", "content": "x", name: "r"}]}, _REASONED, "rr", "")
      for name in ("reasoning_content", "reasoning", "thinking")),
    # wishes about reasoning, which clients send unasked
    ({}, _THINKS, "hi+", ""), ({"reasoning_effort": "none"}, _THINKS, "hi-", ""),
    ({"enable_thinking": False}, _THINKS, "hi-", ""), ({"think": False, "store": True}, _THINKS, "hi-", "store"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, _THINKS, "hi-", "thinking.budget_tokens"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, _THINKS, "hi+", ""),
    *(({name: {"num_ctx": 4096}}, "", "hi", "num_ctx") for name in ("options", "extra_body")),
    # of the newest clients of OpenAI
    ({"prompt_cache_options": {"mode": "explicit"}}, "", "hi", "prompt_cache_options"),
    ({"reasoning": {"context": "all_turns", "mode": "pro", "summary": "auto"}}, "", "hi",
     "reasoning.context, reasoning.mode"),
    ({"messages": [_HI[0] | {"content": [{"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "x"}}]}]},
     "", "hi", "messages.prompt_cache_breakpoint"),
]  # fmt: skip

_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "z"}
# what a response has, what the model is shown, parameters that are ignored by name
ITEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"stream_options": {"include_obfuscation": False}}, "hi", "stream_options.include_obfuscation"),
    ({"include": ["reasoning.encrypted_content"]}, "hi", "include"),
    ({"include": [], "stream_options": None, "image": {}}, "hi", ""),
    ({"text": {"verbosity": "low"}}, "hi", "text.verbosity"),
    ({"access_programs": {"bio": "x"}}, "hi", "access_programs"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"a": 1}}]},
                {"type": "message", "role": "assistant", "content": "y", "phase": "final_answer", "id": "m"},
                _OUTPUT | {"namespace": "n"}]},
     "xyz", "input.id, input.namespace, input.phase, input.prompt_cache_breakpoint"),
]  # fmt: skip


def shown(tokens: Any) -> str:
    return "".join("<end>" if token == EOS else chr(token) for token in tokens)


@pytest.mark.parametrize(("body", "template", "text", "ignored"), SHOWN, ids=lambda value: str(value)[:40])
def test_what_a_chat_shows_the_model(body: dict[str, Any], template: str, text: str, ignored: str) -> None:
    """Of chats, of `/tokenize`, and of `/v1/responses` where it has these parameters."""
    options = {"template": template} if template else {}
    for path in (CHAT, ANSWER, TOKENS):
        if path == ANSWER and body.keys() & {"messages", "documents", "add_generation_prompt", "chat_template_kwargs"}:
            continue
        given = BODIES[ANSWER] if path == ANSWER else BODIES[CHAT]
        backend = FakeBackend()
        response = post(path, given | body, backend, **options)
        assert response.status_code == 200, response.text
        assert shown(response.json()["tokens"] if path == TOKENS else backend.requests[0].prompt_ids) == text
        if path != TOKENS:
            warning = f'299 tiermoe "ignored parameters: {ignored}"' if ignored else None
            assert response.headers.get("warning") == warning


@pytest.mark.parametrize(("body", "text", "ignored"), ITEMS, ids=lambda value: str(value)[:40])
def test_what_a_response_shows_the_model(body: dict[str, Any], text: str, ignored: str) -> None:
    backend = FakeBackend()
    response = post(ANSWER, BODIES[ANSWER] | body, backend)
    assert response.status_code == 200, response.text
    assert shown(backend.requests[0].prompt_ids) == text
    assert response.headers.get("warning") == (f'299 tiermoe "ignored parameters: {ignored}"' if ignored else None)


# -- what the runtime is asked -----------------------------------------------------------------------------------------

DEFAULTS = GenerationDefaults(
    temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.25, presence_penalty=0.5, max_new_tokens=3
)
_MANY = GenerationDefaults(max_new_tokens=100_000)
_SHAPED = {"min_p": 0.1, "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
_GIVEN = {
    "max_tokens": 5, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1,
    "presence_penalty": 0,
}  # fmt: skip
_WHOLE = {"max_tokens": 7.0, "n": 2.0, "top_k": 5.0, "seed": -1.0, "min_tokens": 3.0, "stop_token_ids": [7.0, 8]}

# path, what the body has, a model's defaults, the sampling of the first choice
ASKED: list[tuple[str, dict[str, Any], GenerationDefaults, SamplingParams]] = [
    (TEXT, {}, NO_DEFAULTS, SamplingParams(16, temperature=1.0)),
    (TEXT, {"temperature": None}, NO_DEFAULTS, SamplingParams(16, temperature=1.0)),
    (CHAT, {"temperature": 0}, NO_DEFAULTS, SamplingParams(62)),  # fills the context unless told otherwise
    (TEXT, {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": -1, "n": 2, "min_tokens": 3,
            "ignore_eos": True, "logprobs": 4, "user": "me"}, NO_DEFAULTS,
     SamplingParams(7, 0.5, 0.9, 0, seed=2**64 - 1, min_tokens=3, ignore_eos=True, logprobs=4)),
    (TEXT, {"temperature": 0, "logit_bias": {"5": -100, "6": 2.5}, "stop_token_ids": [7]} | _SHAPED, NO_DEFAULTS,
     SamplingParams(16, stop_token_ids=(7,), logit_bias=((5, -100.0), (6, 2.5)), **_SHAPED)),
    (TEXT, {"temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1}, _MANY,
     SamplingParams(1, logprobs=1, prompt_logprobs=1)),
    # JSON has one kind of number: JavaScript, Lua and R write 64 as 64.0 or 1e2
    (TEXT, {"temperature": 0, "logprobs": 1.0} | _WHOLE, NO_DEFAULTS,
     SamplingParams(7, top_k=5, seed=2**64 - 1, min_tokens=3, logprobs=1, stop_token_ids=(7, 8))),
    (CHAT, {"temperature": 0, "max_completion_tokens": 9.0, "logprobs": True, "top_logprobs": 2.0}, NO_DEFAULTS,
     SamplingParams(9, logprobs=2)),
    # Ollama's `options`, and `extra_body` where a client sends it as it is; what is beside them wins
    *((TEXT, {"temperature": 0, "seed": 3, name: {"seed": 4, "top_k": 5, "num_ctx": 4096}}, NO_DEFAULTS,
       SamplingParams(16, top_k=5, seed=3)) for name in ("options", "extra_body")),
    # guidellm sends `ignore_eos` and `stop` to this route too
    (ANSWER, {"max_output_tokens": 3.0, "temperature": 0.5, "ignore_eos": True, "stop": None, "top_k": 5, "seed": 3,
              "stop_token_ids": [65]}, NO_DEFAULTS,
     SamplingParams(3, 0.5, top_k=5, seed=3, ignore_eos=True, stop_token_ids=(65,))),
    *((path, {"temperature": None}, DEFAULTS, SamplingParams(3, 0.5, 0.9, 7, min_p=0.1, repetition_penalty=1.25,
                                                             presence_penalty=0.5)) for path in (TEXT, CHAT)),
    *((path, _GIVEN, DEFAULTS, SamplingParams(5)) for path in (TEXT, CHAT)),
    # a model's own number, which the client did not give, refuses no request
    (TEXT, {"temperature": 0}, _MANY, SamplingParams(63)), (CHAT, {"temperature": 0}, _MANY, SamplingParams(62)),
    # values that mean nothing are no reason to refuse
    (TEXT, {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1,
            "suffix": None, "options": None, "response_format": {"type": "text"}}, NO_DEFAULTS, SamplingParams(16)),
    (CHAT, {"temperature": 0, "tools": [], "response_format": {"type": "text"}, "parallel_tool_calls": True,
            "logprobs": False, "top_logprobs": 0}, NO_DEFAULTS, SamplingParams(62)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "defaults", "sampling"), ASKED, ids=lambda value: str(value)[:40])
def test_what_the_runtime_is_asked(
    path: str, body: dict[str, Any], defaults: GenerationDefaults, sampling: SamplingParams
) -> None:
    backend = FakeBackend()
    response = post(path, BODIES[path] | body, backend, defaults=defaults)
    assert response.status_code == 200, response.text
    first, *others = (request.sampling for request in backend.requests)
    if "seed" not in body:  # drawn
        first = first.__class__(**vars(first) | {"seed": sampling.seed})
    assert first == sampling
    assert all(type(value) is int for value in (first.max_tokens, first.top_k, *first.stop_token_ids))
    assert [other.seed for other in others] == [0] * (len(backend.requests) - 1)  # after -1: each draws for itself
    assert len({request.request_id for request in backend.requests}) == len(backend.requests)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}}, {"guided_json": {}}, {"guided_json": '{"type": "integer"}'},
        {"structured_outputs": {"choice": ["a"]}}, {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json_object": True}}, {"json_schema": {}}, {"guided_grammar": 'root ::= "a"'},
        {"tools": _TOOLS, "tool_choice": "required"},
        {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
    ids=str,
)  # fmt: skip
def test_every_way_to_give_a_grammar(body: dict[str, Any]) -> None:
    backend, path = FakeBackend(), CHAT if "tools" in body else TEXT
    assert post(path, BODIES[path] | body, backend, template=CALLS_TEMPLATE).status_code == 200
    assert ('"<tool_call>' in (backend.requests[0].sampling.grammar or "-")) == ("tools" in body)
    assert backend.requests[0].sampling.grammar is not None
