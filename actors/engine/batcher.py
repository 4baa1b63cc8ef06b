"""Requests in, tokens out: continuous batching through transformers' own manager."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from ...errors import RuntimeFailure, StoreError, UnsupportedModelError
from ..quiet_logger import quiet_logger
from ..requests import GenerationRequest, SamplingParams
from ..settings import KvSettings
from .logprobs import PromptScorer
from .sampling import request_sampling, seed_of
from .sequences import SequenceRows, SequenceWatcher
from .streams import Stream, Streams

_END_S = 30.0  # seconds for a loop that failed to end


class Batcher(Protocol):
    """Runs requests; see `ContinuousBatcher` and `SerialBatcher`."""

    streams: Streams
    serial_because: str | None  # why requests are not batched; None when they are

    def submit(self, request: GenerationRequest) -> Stream: ...
    def cancel(self, stream: Stream) -> bool: ...
    def close(self) -> None: ...

    @property
    def failure(self) -> str | None:
        """Why generation died; None while it lives."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that open requests hold."""
        ...


class _Sink(OutputRouter):
    """Takes outputs from the manager's thread straight to the streams."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def deliver(self, output: Any) -> None:
        if output.error is not None:
            # the manager tells the text only, but it does so while it handles the error
            self._streams.abort(output.request_id, "error", output.error, sys.exception())
        elif output.is_finished():
            self._streams.finish(output.request_id, output.generated_tokens)
        else:
            self._streams.deliver(output.request_id, output.generated_tokens)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class ContinuousBatcher:
    """Many requests in one forward pass, with a bounded paged KV cache.

    Args:
        model: a transformers model on its device.
        kv: size of the cache and of a batch.
        watcher: told before each forward pass whose rows it carries; None: nobody.

    Raises:
        UnsupportedModelError: transformers cannot batch this model continuously; found by running one
            request through it. StoreError: an expert that it needs is on no node.

    An expert that is on no node ends the requests of its batch and transformers' loop; the next request starts the loop
    again. Any other error of a forward ends the loop for good.
    """

    serial_because: str | None = None

    def __init__(self, model: Any, kv: KvSettings, watcher: SequenceWatcher | None = None) -> None:
        self.streams = open_streams(model, kv, watcher)
        self._reviving = threading.Lock()
        config = GenerationConfig(do_sample=False, eos_token_id=self.streams.eos or -1, max_new_tokens=1)
        try:
            self._manager = model.init_continuous_batching(config, _batching_config(kv))
        except (ValueError, AttributeError, NotImplementedError) as error:
            raise _unsupported(model, str(error)) from error
        self._watcher = watcher
        self._scorer = PromptScorer(model, self.streams.note_prompt)
        self._manager.logit_processor = request_sampling(
            self._begin_forward, self.streams.eos, self.streams.note, self._scorer.expect
        )
        self._manager.output_router = _Sink(self.streams)
        try:
            with _quiet_manager():
                self._manager.start()
                self._probe(model)
        except BaseException:
            self.close()
            raise

    def _probe(self, model: Any) -> None:
        """One short request: what the cache cannot hold shows in its first steps."""
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        try:
            error = list(self.submit(GenerationRequest("probe", (0, 0, 0), sampling)))[-1].error
        except RuntimeFailure as failure:
            error = str(failure)
        if isinstance(missing := self._fatal_error(), StoreError):
            raise missing
        if error is not None:
            raise _unsupported(model, error)

    def submit(self, request: GenerationRequest) -> Stream:
        """Queue a request now.

        Raises:
            RequestError: malformed request. RuntimeFailure: the generation loop died.
        """
        stream = self.streams.open(request)
        self._revive()
        sampling = request.sampling
        accepted = self._manager.add_request(
            list(request.prompt_ids),
            request_id=stream.name,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=-1 if sampling.ignore_eos or not self.streams.eos else self.streams.eos,
            sampling=sampling,
            seed=seed_of(sampling),
        )
        # Asked again after queueing: a loop that dies in between would never look at the queue.
        if accepted is None or self._manager.background_thread_status.can_accept_new_requests() is not None:
            self.streams.abort(stream.name, "error", "the generation loop stopped")
            because = self.failure or "it is ending"
            raise RuntimeFailure(f"the generation loop stopped ({because})", "restart the worker")
        return stream

    def _begin_forward(self, rows: list[SequenceRows]) -> None:
        for row in rows:
            self.streams.begin(row.name)
        if self._watcher is not None:
            self._watcher.begin_forward(rows)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that open requests hold."""
        processor = self._manager.batch_processor
        if processor is None:
            return 0.0
        cache = processor.cache
        if not hasattr(cache, "compute_free_capacity"):  # transformers 5.17
            return 1.0 - float(cache.get_num_free_blocks()) / cache.num_blocks
        return 1.0 - float(cache.compute_free_capacity())

    def cancel(self, stream: Stream) -> bool:
        """End a request now with finish `cancelled`; False if it had ended."""
        if not self.streams.abort(stream.name, "cancelled"):
            return False
        self._manager.cancel_request(stream.name)
        return True

    @property
    def failure(self) -> str | None:
        """Why the generation loop died; None while it lives, or will again with the next request."""
        error = self._manager.background_thread_status.fatal_error
        return None if error is None or isinstance(error, StoreError) else f"{type(error).__name__}: {error}"

    def _fatal_error(self) -> Exception | None:
        """What ended the loop; one that is about to end, which fails its requests before it says why, is waited for."""
        status, thread = self._manager.background_thread_status, self._manager._generation_thread
        if status.can_accept_new_requests() is not None and thread is not None:
            thread.join(_END_S)
        return status.fatal_error

    def _revive(self) -> None:
        """Start a loop again that ended because an expert was on no node."""
        with self._reviving:
            if isinstance(self._fatal_error(), StoreError) and not self.streams.closed:
                with _quiet_manager():
                    self._manager.start()

    def close(self) -> None:
        """End what is open, stop the loop and join its thread. Safe to call twice."""
        self.streams.close()  # first: the manager fails what it still runs
        with _quiet_manager():
            if self._manager.is_running() or self._manager._generation_thread is not None:
                self._manager.stop(block=True, hard_stop=True)
        self._scorer.close()


def open_streams(model: Any, kv: KvSettings, watcher: SequenceWatcher | None = None) -> Streams:
    """The table of requests for a model: its stop tokens, its vocabulary and its limits."""
    text = model.config.get_text_config()
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = text.eos_token_id
    positions = getattr(text, "max_position_embeddings", None)
    return Streams(
        capacity_tokens=kv.num_blocks * kv.page_size,
        eos=[eos] if isinstance(eos, int) else list(eos or []),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        ended=watcher.end_sequence if watcher is not None else None,
    )


def _quiet_manager() -> AbstractContextManager[None]:
    """The manager logs what we report as a typed error, with its traceback."""
    return quiet_logger("ContinuousBatchingLogger", logging.CRITICAL)


def _batching_config(kv: KvSettings) -> ContinuousBatchingConfig:
    known = inspect.signature(ContinuousBatchingConfig).parameters
    # transformers 5.17 calls a page a block, and never switches attention by itself
    later = {"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}
    return ContinuousBatchingConfig(
        **{"page_size" if "page_size" in known else "block_size": kv.page_size},
        num_blocks=kv.num_blocks,
        max_batch_tokens=kv.max_batch_tokens,
        max_requests_per_batch=kv.max_requests,
        use_cuda_graph=False,  # routing is read on the host in every layer
        use_async_batching=False,
        per_request_processors=True,
        allow_block_sharing=False,
        **later,
    )


def _unsupported(model: Any, error: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be batched continuously: {error}",
        "serve it with kv.batching: serial",
    )
