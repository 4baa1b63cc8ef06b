"""The lead worker as its callers see it: requests, and control calls with a deadline, through its actor handle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray

from ..actors.requests import GenerationRequest, TokenEvent
from ..errors import RuntimeFailure, told
from .failures import as_failure

CONTROL = "control"  # the concurrency group of calls that must get through while every request thread is busy
CONTROL_THREADS = 4
_CALL_DEADLINE_S = 30.0
_GOODBYE_DEADLINE_S = 2.0


class Lead:
    """Calls of a lead actor; usable from several threads.

    Args:
        handle: of an actor made of `GpuWorker`; None before there is one and after it has ended.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def generate(self, request: GenerationRequest, deadline_s: float) -> Iterator[TokenEvent]:
        """Stream the tokens of one request; leaving the iteration early cancels the request.

        Raises:
            RuntimeFailure: the worker died, reported an error, or the request took more than `deadline_s`.
            TierMoeError: what ended the request in the worker, such as StoreError: an expert is on no living node.
        """
        deadline = time.monotonic() + deadline_s
        stream = self.handle.generate.options(num_returns="streaming").remote(request)
        ended = False
        try:
            while not ended:
                event = _next_event(stream, deadline, deadline_s)
                if event.finish == "error":
                    ended = True
                    if event.error is not None and event.error_type is not None:
                        raise told(event.error_type, event.error)
                    raise RuntimeFailure(
                        f"the request failed in the worker: {event.error}", "run again; report it if it stays"
                    )
                ended = event.finish is not None
                yield event
        finally:
            if not ended:
                self.cancel(request.request_id)

    def cancel(self, request_id: str) -> None:
        """Stop a request; a worker that is dead or closed has nothing left to stop."""
        if self.handle is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self._control("cancel", request_id, deadline_s=_GOODBYE_DEADLINE_S)

    def ask(self, method: str, *args: Any, deadline_s: float = _CALL_DEADLINE_S) -> Any:
        """What a method of the worker returns.

        Raises:
            RuntimeFailure: it does not answer within `deadline_s`, or is dead.
        """
        try:
            return self._control(method, *args, deadline_s=deadline_s)
        except ray.exceptions.RayError as error:
            raise as_failure(error, f"the worker did not answer '{method}'", deadline_s) from error

    def alive(self) -> None:
        """Return while the worker lives, busy or not.

        Raises:
            RuntimeFailure: it is dead, or its loop is.
        """
        try:
            self._control("health", deadline_s=_CALL_DEADLINE_S)
        except ray.exceptions.GetTimeoutError:
            return  # a machine that is busy is not a death
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the worker failed") from error

    def _control(self, method: str, *args: Any, deadline_s: float) -> Any:
        call = getattr(self.handle, method).options(concurrency_group=CONTROL)
        return ray.get(call.remote(*args), timeout=deadline_s)


def _next_event(stream: Any, deadline: float, deadline_s: float) -> TokenEvent:
    try:
        ready, _ = ray.wait([stream], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeFailure(
                f"the request passed its deadline of {deadline_s:g} s",
                "raise request_deadline_s, or ask for fewer tokens",
            )
        return ray.get(next(stream))
    except StopIteration:
        raise RuntimeFailure(
            "the worker ended a request without saying why", "run again; report it if it stays"
        ) from None
    except ray.exceptions.RayError as error:
        raise as_failure(error, "the worker failed during a request") from error
