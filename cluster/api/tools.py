"""Tool calls as models write them, into OpenAI's form: which way is a model's, and the grammar of calls that must come.

`TOOL_FORMATS` has a parser for each way (`tool_parsers.py`, `tool_xml.py`). Which one a model's is, its chat template
shows: calls are rendered with it, and the parser that gives them back is the right one (`calling`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .refusals import ApiError
from .scanning import Parser, ProgramParser
from .templates import CALL_IDS, ChatTemplate
from .tool_parsers import (
    PYTHON_TAG,
    TOOLS_BEGIN,
    deepseek_calls,
    gathered,
    gemma_call,
    harmony,
    json_call,
    json_calls,
    kimi_calls,
    kimi_channels,
    llama_calls,
    marked,
    mistral_calls,
    python_calls,
    several,
    whole_answer,
)
from .tool_xml import ELEMENT, Functions, element_calls, glm_call, invoke_calls, xml_call


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls.

    Attributes:
        special: it is written with special tokens, which are to be shown to the parser.
        parser: makes one for a choice, by the JSON schemas of the functions' arguments.
        always: it gives every answer its form, also without tools.
        reasons: its parser takes the reasoning out.
        call_ids: one of `CALL_IDS`, which it writes whatever it is given; results of tools name them.
        grammar: Lark, of one or more calls, by the schemas; None: calls cannot be forced.
    """

    special: bool
    parser: Callable[[Functions], Parser]
    always: bool = False
    reasons: bool = False
    call_ids: str | None = None
    grammar: Callable[[dict[str, Any], bool], str] | None = None


def _objects(functions: dict[str, Any], key: str) -> str:
    """Lark's `object`: a call of any of the functions. Arguments are a schema by themselves, at whose root its
    references begin.
    """
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write them
    rules = []
    for i, (name, schema) in enumerate(functions.items()):
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        given = json.dumps(schema | {"x-guidance": spaces})
        rules.append(f'object_{i}: {begin} args_{i} "}}"\nargs_{i}: %json {given}\n')
    return f"object: {' | '.join(f'object_{i}' for i in range(len(rules)))}\n" + "".join(rules)


def _hermes_grammar(functions: dict[str, Any], several: bool) -> str:
    calls = 'call ("\\n" call)*' if several else "call"
    marks = '"<tool_call>\\n" object "\\n</tool_call>"'
    return f"start: {calls}\ncall: {marks}\n{_objects(functions, 'arguments')}"


def _llama_grammar(functions: dict[str, Any], several: bool) -> str:
    calls = 'object ("; " object)*' if several else "object"
    return f"start: {calls}\n{_objects(functions, 'parameters')}"


def _harmony_grammar(functions: dict[str, Any], several: bool) -> str:
    """One call, in the channel of calls; special tokens are separate grammar symbols."""
    names = [f"call_{i}" for i in range(len(functions))]
    rules = [
        f'{rule}: <|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|> args_{i}\n'
        f"args_{i}: %json {json.dumps(schema)}\n"
        for i, (rule, (name, schema)) in enumerate(zip(names, functions.items(), strict=True))
    ]
    return f"start: {' | '.join(names)}\n" + "".join(rules)


_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_MINIMAX_3 = (f"{ELEMENT}<tool_call>", f"{ELEMENT}</tool_call>")
_SEED = ("<seed:tool_call>", "</seed:tool_call>")
_DSML, _GEMMA = "｜DSML｜", ("<|tool_call>", "<tool_call|>")
_INVOKES, _TOOLS = ((f"<{_DSML}{name}>", f"</{_DSML}{name}>") for name in ("function_calls", "tool_calls"))
_HUNYUAN, _HUNYUAN_CALL = (
    (f"<{name}:opensource>", f"</{name}:opensource>") for name in ("tool_calls", "tool_call")
)  # fmt: skip
_JSON_ANSWER = ("{", PYTHON_TAG)

# in the order in which they are tried
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(True, lambda _: ProgramParser(harmony), always=True, reasons=True, grammar=_harmony_grammar),
    "hermes": ToolFormat(False, lambda _: marked(*_CALL, json_call), grammar=_hermes_grammar),
    "qwen-xml": ToolFormat(False, lambda functions: marked(*_CALL, xml_call(functions))),
    "seed-xml": ToolFormat(False, lambda functions: marked(*_SEED, xml_call(functions))),
    "glm-xml": ToolFormat(False, lambda functions: marked(*_CALL, glm_call(functions))),
    "hunyuan": ToolFormat(
        True,
        lambda functions: marked(*_HUNYUAN, several(*_HUNYUAN_CALL, glm_call(functions, ":opensource"))),
    ),
    "json-list": ToolFormat(False, lambda _: marked("<tool_calls>", "</tool_calls>", json_calls)),
    "mistral": ToolFormat(True, lambda _: marked("[TOOL_CALLS]", None, mistral_calls)),
    "deepseek": ToolFormat(True, lambda _: marked(*_DEEPSEEK, deepseek_calls)),
    "deepseek-dsml": ToolFormat(True, lambda functions: marked(*_INVOKES, invoke_calls(functions, _DSML))),
    "deepseek-v4": ToolFormat(True, lambda functions: marked(*_TOOLS, invoke_calls(functions, _DSML))),
    "minimax": ToolFormat(True, lambda functions: marked(*_MINIMAX, invoke_calls(functions))),
    "minimax-m3": ToolFormat(True, lambda functions: marked(*_MINIMAX_3, element_calls(functions))),
    "gemma": ToolFormat(True, lambda _: marked(*_GEMMA, gathered(_GEMMA[1], gemma_call))),
    "kimi": ToolFormat(True, lambda _: marked(*_KIMI, kimi_calls), call_ids="functions"),
    "kimi-k3": ToolFormat(
        True, lambda functions: ProgramParser(kimi_channels(functions), TOOLS_BEGIN), always=True,
    ),
    "lfm": ToolFormat(True, lambda _: marked(*_LFM, gathered(_LFM[1], python_calls))),
    "pythonic": ToolFormat(False, lambda _: whole_answer(("[",), gathered(None, python_calls))),
    "llama-json": ToolFormat(True, lambda _: whole_answer(_JSON_ANSWER, llama_calls), grammar=_llama_grammar),
}  # fmt: skip


_PROBES: dict[str, dict[str, Any]] = {
    "get_probe_value": {"text": 'a "b"\n<c> é', "count": 2, "exact": True, "listed": [1, {"key": "value"}]},
    "get_other_value": {"text": "last"},
}  # by name, the arguments of a call
_PROPERTIES = {
    name: {"type": kind, "description": f"the {name}"}
    for name, kind in (("text", "string"), ("count", "integer"), ("exact", "boolean"))
} | {"listed": {"type": "array", "description": "the listed", "items": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}


@dataclass(frozen=True)
class Calling:
    """How a model calls tools.

    Attributes:
        format: None: in no known way, or not at all.
        several: whether an answer may have more than one call.
        refusal: why requests with tools are refused; None: they are not.
        unknown: why calls are left in the text; None: they are not.
        written: a call as the template writes it; empty: it writes none.
    """

    format: ToolFormat | None
    several: bool = True
    refusal: str | None = None
    unknown: str | None = None
    written: str = ""


def calling(template: ChatTemplate | None, name: str | None = None) -> Calling:
    """How the model of a template calls tools: the format whose parser gives back the calls that it renders.

    Args:
        name: of the format; None: found from the template.
    """
    named = None if name is None else TOOL_FORMATS[name]
    if template is None:
        return Calling(named)
    tools = [
        {"type": "function", "function": {"name": tool, "description": f"Gives {tool}.", "parameters": _SCHEMA}}
        for tool in _PROBES
    ]
    if not template.takes(tools):
        return Calling(named, refusal=template.problem or "the model's chat template takes no tools; leave 'tools' out")
    seen = []
    for ids, as_text in itertools.product(CALL_IDS, (False, True)):
        template.call_ids, template.text_arguments = ids, as_text
        try:
            one = template.call_text(tools, _probes(1))
        except ApiError as error:
            seen.append(error.message)
            continue
        for form in TOOL_FORMATS.values() if named is None else (named,):
            if _round_trips(form, one, 1):
                template.call_ids = form.call_ids or ids
                return Calling(form, _allows_two_calls(template, form, tools), written=one)
        seen.append(f"it writes {' '.join(one.split())[:60]!r}" if one.strip() else "it writes none")
    template.call_ids, template.text_arguments = "given", False
    if named is not None:
        return Calling(named)
    why = f"how the model writes tool calls is not known by its chat template ({seen[0]})"
    return Calling(None, unknown=f"{why}; calls stay text, see --tool-format")


def _allows_two_calls(template: ChatTemplate, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an answer may have two calls."""
    try:
        return _round_trips(form, template.call_text(tools, _probes(2)), 2)
    except ApiError:
        return False


def _probes(count: int) -> list[dict[str, Any]]:
    """Calls of the first ones, with ids as answers have them."""
    return [
        {"id": f"call_{i:024}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate([*_PROBES.items()][:count])
    ]


def _round_trips(form: ToolFormat, text: str, count: int) -> bool:
    """Whether a format's parser reads the rendered calls as they were."""
    parser = form.parser(dict.fromkeys(_PROBES, _SCHEMA))
    calls = parser.feed(text).then(parser.finish()).calls
    try:
        return [(call.name, json.loads(call.arguments)) for call in calls] == [*_PROBES.items()][:count]
    except ValueError:  # a call that has no end
        return False
