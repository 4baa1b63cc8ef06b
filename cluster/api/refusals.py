"""Refusals and failures in OpenAI's form: {"error": {"message", "type", "param", "code"}}; on the routes of Anthropic's
protocol in its form: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError, RuntimeFailure, TierMoeError

_INVALID = "invalid_request_error"
_AGAIN_S = 2
_LONG_MESSAGE = 1000  # characters; a value that it quotes may be as long as a body
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
          503: "service_unavailable"}  # fmt: skip
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
                    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
# of a chat's parameters, as the routes call them whose requests become chats
_OWN_NAMES = {
    RESPONSES: {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input",
                "response_format": "text.format"},
    MESSAGES: {"max_completion_tokens": "max_tokens", "response_format": "output_config.format"},
}  # fmt: skip


class ApiError(Exception):
    """An error as a client receives it.

    Args:
        status: HTTP status code.
        message: what is wrong and what to do about it.
        param: the request's parameter that is wrong.
        code: OpenAI's word for it.
        headers: of the response.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        message = message if len(message) <= _LONG_MESSAGE else f"{message[: _LONG_MESSAGE // 2]} ... {message[-300:]}"
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = _TYPES.get(self.status, _INVALID if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """The same in the form, and with the names, of the protocol that a path belongs to."""
        own = _OWN_NAMES.get(path, {}).get(self.param or "")
        if own is not None:
            message = self.message.replace(f"'{self.param}'", f"'{own}'")
            return ApiError(self.status, message, own, self.code).body_for(path)
        if not speaks_anthropic(path):
            return self.body
        kind = _ANTHROPIC_TYPES.get(self.status, _INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def speaks_anthropic(path: str) -> bool:
    """Whether a route is one of Anthropic's protocol."""
    return f"{path}/".startswith(f"{MESSAGES}/")


def refused(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the client can correct it."""
    return ApiError(400, message, param, code)


def from_failure(error: TierMoeError) -> ApiError:
    """An error of the runtime: 400 if the request caused it, else 503."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(503 if isinstance(error, RuntimeFailure) else 500, str(error))


@dataclass(frozen=True)
class NotReady:
    """What the server waits for.

    left_s: seconds until it serves, by the runtime's first start; None: not known.
    """

    reason: str
    left_s: float | None = None

    def __str__(self) -> str:
        return self.reason + ("" if self.left_s is None else f", ready in about {max(1, round(self.left_s))} s")

    @property
    def retry_after_s(self) -> int:
        """When to ask again: once it should be ready, else in a moment."""
        return _AGAIN_S if self.left_s is None else min(60, max(1, math.ceil(self.left_s)))
