"""Refusals and failures in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RequestError, RuntimeFailure, TierMoeError

_INVALID = "invalid_request_error"
_TYPES = {400: _INVALID, 401: "authentication_error", 404: "not_found_error", 405: _INVALID, 413: _INVALID,
          429: "rate_limit_error", 503: "service_unavailable"}  # fmt: skip
_BUSY_RETRY_S = 1  # a hint: the queue moves with every request that ends


class ApiError(Exception):
    """What a client is told.

    Args:
        status: HTTP status code.
        message: what is wrong and what to do about it.
        param: the request's parameter that is wrong.
        code: OpenAI's word for it.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the client can mend it."""
    return ApiError(400, message, param, code)


def unsupported(param: str, remedy: str = "leave it out") -> ApiError:
    """400: a parameter that would have no effect."""
    return ApiError(400, f"'{param}' is not supported; {remedy}", param, "unsupported_parameter")


def busy(waiting: int) -> ApiError:
    """429: the queue is full."""
    message = f"{waiting} requests wait already; try again in a moment"
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(_BUSY_RETRY_S)})


def from_failure(error: TierMoeError) -> ApiError:
    """What the runtime raised: 400 where the request is at fault, 503 where the runtime is."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(503 if isinstance(error, RuntimeFailure) else 500, str(error))


def from_findings(findings: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first finding of pydantic, with the parameter's name."""
    finding = findings[0]
    places = [str(part) for part in finding["loc"] if part != "body"]
    if finding["type"] == "json_invalid":
        return refused(f"the body is not valid JSON: {finding.get('ctx', {}).get('error', finding['msg'])}", None)
    # a union's members are named after the field: they are of no use to a client
    field = places[0] if places else None
    if finding["type"] == "extra_forbidden":
        name = ".".join(places)
        return ApiError(400, f"'{name}' is not a parameter that this server knows; leave it out", name,
                        "unsupported_parameter")  # fmt: skip
    if finding["type"] == "missing":
        return refused(f"'{'.'.join(places)}' is missing" if places else "the body is missing", field)
    message = str(finding["msg"])
    return refused(f"'{field}': {message[:1].lower()}{message[1:]}", field)
