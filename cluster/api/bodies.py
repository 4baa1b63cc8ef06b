"""A request's body into JSON: its type, its text, its shape; before any model looks at it.

A body of 4 MiB may hold two million values. Parsing them holds the interpreter's lock for seconds, and validation for
longer: what makes values is counted first, by a few passes over the bytes; the values, long names and token ids beyond
the limit after. Parsing and validation of a large body are done beside the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from .offload import LARGE_BYTES, Offload
from .refusals import ApiError, refused

_MANY = 20_000  # values in a body, token ids apart
_MANY_IDS = 2**19  # token ids in a body, or four times the limit of one prompt
_LONG_NAME = 512
_OTHERS = bytes(set(range(256)) - set(b'",:[{'))  # signs that separate no values


class _ParsedRequest(Request):
    """A request whose body has been read, parsed and validated."""

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"0"  # there is one; the bytes themselves are given back

    async def json(self) -> Any:
        return self._value


def body_route(offload: Offload, limit_tokens: int) -> type[APIRoute]:
    """A class of routes that parse and validate their bodies beside the event loop.

    Args:
        limit_tokens: ids that one prompt may have.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle, field = super().get_route_handler(), self.body_field
            if field is None:
                return handle

            def validated(data: bytes) -> Any:
                value, wrong = field.validate(parse(data, limit_tokens), loc=("body",))
                if wrong:
                    raise RequestValidationError(wrong)
                return value  # FastAPI's own validation takes a model as it is

            async def parsed(request: Request) -> Response:
                check_type(request.headers.get("content-type"))
                data = await request.body()
                size = len(data)
                try:
                    value = await offload.run(size, partial(validated, data))
                    del data, request._body  # the text stays once, in the value
                    return await handle(_ParsedRequest(request, value))
                finally:
                    if size > LARGE_BYTES:
                        offload.trim_soon()

            return parsed

    return BodyRoute


def check_type(given: str | None) -> None:
    """Refuse a body that is not announced as JSON.

    Raises:
        ApiError: 415.
    """
    kind = (given or "").split(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    said = f"the content type is '{kind[:100]}'" if kind else "the request has no content type"
    raise ApiError(415, f"{said}; send JSON, and 'Content-Type: application/json'", code="unsupported_media_type")


def parse(data: bytes, limit_tokens: int) -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: 400: it is missing or is not JSON (half of a surrogate pair is not), has too many values, or a number
            beyond all floats (1e999), which no JSON could say again.
    """
    if not data:
        raise refused("the body is missing", None)
    if bound := exceeded(data, _MANY, max(_MANY_IDS, 4 * limit_tokens)):
        raise refused(f"the body holds more than {bound} values; send less at a time", None)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise refused(f"the body is not valid JSON: {error}", None) from error
    _check_shape(value, limit_tokens)
    return value


def exceeded(data: bytes, values: int, ids: int = 0) -> int | None:
    """The bound that a JSON text exceeds, without a look at what its values are; None: none. Linear in its bytes.

    Args:
        values: that it may have.
        ids: members of lists, in addition to these.
    """
    bounds = {b":": values, b"[": values, b"{": values, b",": values + ids}
    if data.count(b'"') <= 4 * values and all(data.count(sign) <= most for sign, most in bounds.items()):
        return None
    if b"\\" in data:  # without escapes each quote begins or ends a string
        data = data.replace(rb"\\", b"").replace(rb'\"', b"")
    if data.count(b'"') > 4 * values:  # a value may be a string, and so is its name
        return values
    signs = b"".join(data.translate(None, _OTHERS).split(b'"')[::2])  # outside of strings
    return next((most for sign, most in bounds.items() if signs.count(sign) > most), None)


def _check_shape(value: Any, limit_tokens: int) -> None:
    """Refuse more than `_MANY` values, where a list of integers is one, and long lists beyond `limit_tokens`."""
    seen, containers = 0, [value]
    while containers:
        found = containers.pop()
        seen += 1
        if isinstance(found, list) and set(map(type, found)) == {int}:
            if len(found) > max(limit_tokens, _MANY):
                raise refused(
                    f"{len(found)} token ids exceed the limit of {limit_tokens}; give fewer", None,
                    "context_length_exceeded",
                )  # fmt: skip
            continue
        if isinstance(found, dict) and max(map(len, found), default=0) > _LONG_NAME:
            raise refused(f"a name in the body has more than {_LONG_NAME} characters; no parameter has", None)
        if isinstance(found, (list, dict)):
            members = found if isinstance(found, list) else found.values()
            if any(isinstance(member, float) and not math.isfinite(member) for member in members):
                raise refused("a number in the body is beyond all floats; give a smaller one", None)
            inner = [member for member in members if isinstance(member, (list, dict))]
            seen += len(found) - len(inner)
            containers.extend(inner)
        if seen + len(containers) > _MANY:
            raise refused(f"the body holds more than {_MANY} values; send less at a time", None)
