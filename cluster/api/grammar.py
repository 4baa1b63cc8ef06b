"""The grammar that a request gives, in the form that the runtime's llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .refusals import refused
from .schema import GenerationBody

_SPACE = r"[ \n\r\t]{0,32}"  # between the parts of a JSON text
_MAX_CHARS = 256 * 1024


def compiled(body: GenerationBody) -> str | None:
    """The body's grammar, checked; None: it gives none. May take a second for a large one.

    Raises:
        ApiError: 400, it is refused, or llguidance is not installed.
    """
    found = body.constraint
    if found is None:
        return None
    parameter, kind, text = found
    library = _library(parameter)
    if len(text) > _MAX_CHARS:
        raise refused(f"'{parameter}': the grammar has {len(text)} characters; give at most {_MAX_CHARS}", parameter)
    try:
        grammar = _json(library, text) if kind == "json_schema" else str(library.grammar_from(kind, text))
    except Exception as error:  # its converters are programs that meet a client's text
        raise refused(f"'{parameter}': {str(error)[:500]}", parameter) from error
    _check(library, grammar, parameter)
    return grammar


def forced_call(lark: str, functions: Mapping[str, Any]) -> str:
    """The grammar of a call of one of the functions.

    Args:
        lark: of the calls.
        functions: the JSON schema of each one's arguments.

    Raises:
        ApiError: 400, as in `compiled`.
    """
    library = _library("tool_choice")
    for schema in functions.values():
        _check(library, _json(library, json.dumps(schema)), "tools")
    return str(library.grammar_from("lark", lark))


def _json(library: Any, schema: str) -> str:
    # without a bound a model may write space until max_tokens
    return str(library.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _SPACE}))


def _library(parameter: str) -> Any:
    try:
        import llguidance
    except ImportError as error:
        message = f"'{parameter}' needs llguidance, which this server does not have: pip install llguidance"
        raise refused(message, parameter, "unsupported_parameter") from error
    return llguidance


def _check(library: Any, grammar: str, parameter: str) -> None:
    if wrong := library.LLMatcher.validate_grammar(grammar):
        raise refused(f"'{parameter}': {wrong[:500]}", parameter)
