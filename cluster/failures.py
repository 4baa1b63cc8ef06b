"""Ray's exceptions into our typed errors: one line with the reason and a remedy."""

from __future__ import annotations

import re

import ray.exceptions as rex

from .. import errors
from ..errors import RuntimeFailure, TierMoeError

_MORE = "run `tiermoe doctor` to see memory and devices, and run again"


def as_failure(
    error: Exception, doing: str, deadline_s: float | None = None, setting: str | None = None
) -> TierMoeError:
    """What the user sees of an exception that came out of Ray.

    Args:
        error: what Ray raised.
        doing: what failed, in words that start the message.
        deadline_s: the deadline that applied, in seconds.
        setting: the configuration key that holds it; None where it is fixed.

    Returns:
        The actor's own TierMoeError where it raised one; otherwise a RuntimeFailure.
    """
    cause = error.cause if isinstance(error, rex.RayTaskError) else error
    if isinstance(cause, TierMoeError):
        return cause
    if isinstance(cause, rex.GetTimeoutError):
        within = f" within {deadline_s:g} s" if deadline_s is not None else ""
        remedy = "look for what keeps the machine busy, and run again"
        return RuntimeFailure(f"{doing}{within}", f"raise {setting}, or {remedy}" if setting else remedy)
    if isinstance(cause, rex.OutOfMemoryError) or "OutOfMemory" in type(cause).__name__:
        return RuntimeFailure(f"{doing}: out of memory", "lower --budget or the KV cache (kv.num_blocks)")
    if isinstance(cause, rex.RayActorError):
        if cause.actor_init_failed:
            return _constructor_error(str(cause)) or RuntimeFailure(f"{doing}: {_last_line(cause)}", _MORE)
        return RuntimeFailure(f"{doing}: its process ended ({_death(cause)})", _MORE)
    return RuntimeFailure(f"{doing}: {type(cause).__name__}: {_first_line(cause)}", _MORE)


def as_join_failure(error: Exception, address: str) -> RuntimeFailure:
    """Why a running cluster could not be joined."""
    text = f"{type(error).__name__}: {_first_line(error)}"
    return RuntimeFailure(
        f"cannot join the Ray at '{address}' ({text})",
        "check that both sides have the same token (~/.ray/auth_token) and the same versions of Ray and Python",
    )


def _constructor_error(report: str) -> TierMoeError | None:
    """The TierMoeError that an actor's constructor raised; Ray keeps it as the text of a traceback only."""
    found = re.findall(rf"^{re.escape(errors.__name__)}\.(\w+): (.*)$", report, re.MULTILINE)
    if not found:
        return None
    return errors.told(*found[-1])


def _death(error: rex.RayActorError) -> str:
    """The reason in Ray's report of a dead actor, which spreads over many lines."""
    text = " ".join(str(error).split())
    for pattern in (r"Worker exit detail: (.*?)(?: Some common causes| There are some|$)", r"because (.*)$"):
        match = re.search(pattern, text)
        if match:
            return match[1][:200].rstrip(". ")
    return text[:200]


def _first_line(error: BaseException) -> str:
    return (_lines(error) or ["no message"])[0][:300]


def _last_line(error: BaseException) -> str:
    return (_lines(error) or ["no message"])[-1][:300]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]
