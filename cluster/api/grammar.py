"""The grammar that a request gives, in the form that the runtime's llguidance compiles.

Its conversion and check run in a process that can be killed (`rendering.py`), as the lead's compilation does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import RuntimeFailure
from ...proto.bounded import NotStarted
from .refusals import from_failure, refused
from .rendering import WORKERS

CONVERT_S = 3.0  # of one grammar; ordinary ones take milliseconds
_MAX_CHARS = 256 * 1024


def compiled(constraint: tuple[str, str, str]) -> str:
    """A body's grammar, checked. Waits for another process, for `CONVERT_S` at most.

    Args:
        constraint: the parameter, llguidance's name for the kind, the text.

    Raises:
        ApiError: 400, it is refused, or takes too long or too much memory; 503, no process starts.
    """
    parameter, kind, text = constraint
    _check_length(len(text), parameter)
    return str(_ask({"convert": {"kind": kind, "text": text}}, parameter))


def forced_call(lark: Callable[[], str], functions: Mapping[str, Any]) -> str:
    """The grammar of a call of one of the functions.

    Args:
        lark: writes that of the calls.
        functions: the JSON schema of each one's arguments.

    Raises:
        ApiError: 400, as in `compiled`.
    """
    schemas = [json.dumps(schema) for schema in functions.values()]
    _check_length(sum(map(len, schemas)), "tools")
    _ask({"check": {"schemas": schemas}}, "tools")
    # its special tokens are known with a vocabulary only
    return str(_ask({"convert": {"kind": "lark", "text": lark(), "checked": False}}, "tool_choice"))


def _check_length(count: int, parameter: str) -> None:
    if count > _MAX_CHARS:
        raise refused(f"'{parameter}': the grammar has {count} characters; give at most {_MAX_CHARS}", parameter)


def _ask(request: Mapping[str, Any], parameter: str) -> Any:
    try:
        return WORKERS.ask(request, CONVERT_S)
    except ValueError as error:
        raise refused(f"'{parameter}': {error}", parameter) from error
    except TimeoutError as error:
        message = f"'{parameter}': the grammar takes longer than {CONVERT_S:g} s; give a simpler one"
        raise refused(message, parameter) from error
    except NotStarted as error:
        failure = RuntimeFailure(f"the process that checks grammars does not start: {error}", "send it again later")
        raise from_failure(failure) from error
    except OSError as error:
        message = f"'{parameter}': the grammar is too complex: it exceeds the stack or the memory; give a simpler one"
        raise refused(message, parameter) from error
