"""Requests in, tokens out: continuous batching through transformers' own manager."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from ...errors import RequestError, RuntimeFailure, UnsupportedModelError
from ..requests import GenerationRequest, TokenEvent
from ..settings import KvSettings
from .sampling import request_sampling


@dataclass
class _Open:
    """A request that has not ended."""

    request: GenerationRequest
    submitted_s: float
    events: queue.SimpleQueue[TokenEvent] = field(default_factory=queue.SimpleQueue)
    sent: int = 0
    first_s: float | None = None


class _Sink(OutputRouter):
    """Takes outputs from the manager's thread straight to the batcher."""

    def __init__(self, batcher: Batcher) -> None:
        super().__init__()
        self._batcher = batcher

    def deliver(self, output: Any) -> None:
        self._batcher._deliver(output)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self._batcher._deliver(output)


class Batcher:
    """Many requests in one forward pass, with a bounded KV cache.

    Args:
        model: a transformers model on its device.
        kv: size of the paged KV cache and of a batch.

    Raises:
        UnsupportedModelError: the model's attention cannot be batched continuously.
    """

    def __init__(self, model: Any, kv: KvSettings) -> None:
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        eos = model.generation_config.eos_token_id
        if eos is None:
            eos = model.config.get_text_config().eos_token_id
        self._eos = [eos] if isinstance(eos, int) else list(eos or [])
        self.max_tokens = kv.num_blocks * kv.page_size
        config = GenerationConfig(do_sample=False, eos_token_id=self._eos or -1, max_new_tokens=1)
        try:
            self._manager = model.init_continuous_batching(config, _batching_config(kv))
        except (ValueError, AttributeError, NotImplementedError) as error:
            raise _unsupported(model, error) from error
        self._manager.logit_processor = request_sampling()
        self._manager.output_router = _Sink(self)
        self._manager.start()

    def submit(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Queue a request now; the iterator gives its tokens as they come, until the event with `finish`.

        Raises:
            RequestError: empty prompt, or more tokens than the KV cache holds, or an id in use.
            RuntimeFailure: the generation loop died.
        """
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", "give at least one token")
        if total > self.max_tokens:
            raise RequestError(
                f"prompt and max_tokens are {total} tokens, the KV cache holds {self.max_tokens}",
                "shorten the prompt, lower max_tokens or raise kv.num_blocks",
            )
        with self._lock:
            if request.request_id in self._open:
                raise RequestError(f"request id {request.request_id} is in use", "choose another")
            opened = self._open[request.request_id] = _Open(request, time.perf_counter())
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        accepted = self._manager.add_request(
            list(request.prompt_ids),
            request_id=request.request_id,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=-1 if sampling.ignore_eos or not self._eos else self._eos,
            sampling=sampling,
            seed=seed,
        )
        if accepted is None:
            with self._lock:
                del self._open[request.request_id]
            raise RuntimeFailure(f"the generation loop stopped: {self.failure}", "restart the worker")
        return self._events(opened)

    @staticmethod
    def _events(opened: _Open) -> Iterator[TokenEvent]:
        while True:
            event = opened.events.get()
            yield event
            if event.finish is not None:
                return

    def cancel(self, request_id: str) -> bool:
        """End a request now with finish `cancelled`; False if it had ended."""
        with self._lock:
            opened = self._open.pop(request_id, None)
        if opened is None:
            return False
        self._manager.cancel_request(request_id)
        opened.events.put(TokenEvent(request_id, (), finish="cancelled"))
        return True

    @property
    def failure(self) -> str | None:
        """Why the generation loop died; None while it lives."""
        error = self._manager.background_thread_status.fatal_error
        return None if error is None else f"{type(error).__name__}: {error}"

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def close(self) -> None:
        """Fail what is open, stop the loop and join its thread. Safe to call twice."""
        if self._manager.is_running():
            self._manager.stop(block=True, hard_stop=True)
        with self._lock:
            left, self._open = list(self._open.values()), {}
        for opened in left:
            opened.events.put(TokenEvent(opened.request.request_id, (), finish="cancelled"))

    def _deliver(self, output: Any) -> None:
        now_s = time.perf_counter()
        with self._lock:
            opened = self._open.get(output.request_id)
            if opened is None:
                return  # cancelled
            if output.is_finished():
                del self._open[output.request_id]
        tokens = tuple(output.generated_tokens[opened.sent :])
        opened.sent += len(tokens)
        if tokens and opened.first_s is None:
            opened.first_s = now_s
        if output.is_finished():
            opened.events.put(self._last(opened, output, tokens, now_s))
        elif tokens:
            opened.events.put(TokenEvent(output.request_id, tokens))

    def _last(self, opened: _Open, output: Any, tokens: tuple[int, ...], now_s: float) -> TokenEvent:
        if output.error is not None:
            return TokenEvent(output.request_id, tokens, finish="error", error=output.error)
        stopped = not opened.request.sampling.ignore_eos and output.generated_tokens[-1] in self._eos
        first_s = opened.first_s if opened.first_s is not None else now_s
        tpot_s = (now_s - first_s) / (opened.sent - 1) if opened.sent > 1 else None
        return TokenEvent(
            output.request_id,
            tokens,
            finish="stop" if stopped else "length",
            ttft_s=first_s - opened.submitted_s,
            tpot_s=tpot_s,
        )


def _batching_config(kv: KvSettings) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=kv.page_size,
        num_blocks=kv.num_blocks,
        max_batch_tokens=kv.max_batch_tokens,
        max_requests_per_batch=kv.max_requests,
        use_cuda_graph=False,  # routing is read on the host in every layer
        use_async_batching=False,
        auto_switch_to_flash=False,
        per_request_processors=True,
        allow_block_sharing=False,
    )


def _unsupported(model: Any, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be batched continuously: {error}",
        "choose a model with paged attention support in transformers",
    )
