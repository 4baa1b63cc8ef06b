"""Requests in, tokens out: continuous batching through transformers' own manager, on its paged cache.

It holds keys and values of one width of every token: no running states, no compressed or chosen keys, no latent
attention. Models with such layers are batched on their own caches (`rows`; `docs/checkpoints.md` lists them).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from ....errors import (
    LoopDied,
    NotServing,
    PolicyError,
    RuntimeFailure,
    StoreError,
    TierMoeError,
    UnsupportedModelError,
)
from ...policies.drafts import CountedExperts, DraftPricing
from ...requests import GenerationRequest
from ...settings import Attention, KvSettings
from ..cuda.runtime import runtime_of
from ..model.attention import plain_attention_of, use_paged, use_sdpa_by_sequence
from ..model.model import quiet_logger
from .batcher import AGAIN, loop_died, open_streams, probed
from .drafts import Drafter
from .head import HeadDrafts
from .kv_rows import coded_blocks, mark
from .sampling import PromptScorer
from .scheduler import NAME, used_share
from .steps import StepManager, Steps
from .streams import Outbox, SequenceWatcher, Stream, Streams

if TYPE_CHECKING:
    from .recorded import Recorded
    from .shared_memory import SharedMemory

_LOGGER = "ContinuousBatchingLogger"  # of transformers
_END_S = 30.0  # seconds for a loop that failed to end


class _Failures(OutputRouter):
    """Gives the requests that the manager fails to their streams.

    Of a loop that died, `LoopDied` says that the request was in its last step, and `NotServing` that it was not: either
    resumes once the lead is started again.
    """

    def __init__(self, streams: Streams, steps: Steps) -> None:
        super().__init__()
        self._streams, self._steps = streams, steps

    def deliver(self, output: Any) -> None:
        # the manager gives the text only, while it handles the error
        name, error = output.request_id, sys.exception()
        cause = loop_died(error) if isinstance(error, Exception) else error
        if isinstance(cause, LoopDied) and all(row.name != name for row in self._steps.carried):
            cause = NotServing(cause.what, cause.remedy)
            cause.__cause__ = error
        self._streams.abort(name, "error", output.error, cause)


class ContinuousBatcher:
    """Many requests in one forward pass, with a bounded paged KV cache.

    Args:
        model: a transformers model on its device.
        kv: size of the cache and of a batch.
        watcher: gets the sequences of each forward pass before it runs.
        attention: the implementation on the paged cache.
        tokenizer: the text of tokenizer.json, for grammars.
        memory: that the paged cache shares with experts; None: it has its own.

    Attributes:
        attention: as given.

    Raises:
        UnsupportedModelError: transformers cannot batch this model continuously, as one request shows.
        TierMoeError: what ended that request, where it is one of ours: an expert is on no node, a policy failed.

    A missing expert ends the requests of its batch and transformers' loop; the next request restarts the loop. Any
    other error of a forward ends the loop for good.
    """

    unpaged_because: str | None = None
    note: str | None = None
    shares = True

    def __init__(
        self, model: Any, kv: KvSettings, watcher: SequenceWatcher | None = None, attention: Attention = "auto",
        tokenizer: str | None = None, memory: SharedMemory | None = None,
    ) -> None:  # fmt: skip
        self.streams = open_streams(model, kv, watcher, tokenizer)
        self.attention: Attention | None = attention
        self.max_requests = kv.max_num_seqs
        self._reviving = threading.Lock()
        self._model, self._plain = model, plain_attention_of(model)
        mark(model, kv.coded)
        config = GenerationConfig(do_sample=False, eos_token_id=self.streams.eos or -1, max_new_tokens=1)
        try:
            self._manager = StepManager(
                model=model, generation_config=config, continuous_batching_config=_batching_config(model, kv)
            )
        except (ValueError, AttributeError, NotImplementedError) as error:
            self._put_back()
            raise _unsupported(model, str(error)) from error
        if attention == "triton":
            use_paged(model)
        elif model.device.type == "cpu":
            use_sdpa_by_sequence()
        self._scorer = PromptScorer(model, self.streams.note_prompt)
        self._manager.prefill_chunk, self._manager.memory = kv.prefill_chunk, memory
        gpu = runtime_of(model.device) if model.device.type == "cuda" else None
        self._manager.steps = Steps(model, self.streams, watcher, self._scorer, gpu)
        self._manager.output_router = _Failures(self.streams, self._manager.steps)
        try:
            logging.getLogger(_LOGGER).addFilter(_is_unreported)  # once, however often
            with _quiet_manager():
                self._manager.start()
                self._probe(model)
        except BaseException:
            self.close()
            raise

    def _probe(self, model: Any) -> None:
        """One short request: what the cache does not support fails in its first steps."""
        try:
            error = probed(self)
        except RuntimeFailure as failure:
            error = failure.what
        if isinstance(ours := self._fatal_error(), TierMoeError):
            raise ours  # a missing expert, a policy that failed: not for want of batching
        if error is not None:
            raise _unsupported(model, str(ours or error))

    def submit(self, request: GenerationRequest, events: Outbox | None = None) -> Stream:
        """Queue a request; `events` as in `Streams.open`.

        Raises:
            RequestError: malformed request. NotServing: the generation loop died. PolicyError: of a policy.
        """
        stream = self.streams.open(request, events)
        if not self.streams.is_open(stream.name):
            return stream
        self._revive()
        sampling = request.sampling
        accepted = self._manager.add_request(
            list(request.fed_ids),
            request_id=stream.name,
            max_new_tokens=sampling.max_tokens - len(request.generated),
            eos_token_id=list(stream.stops) or -1,
        )
        # Asked again after queueing: a loop that dies in between would never look at the queue.
        if accepted is None or self._manager.background_thread_status.can_accept_new_requests() is not None:
            self.streams.abort(stream.name, "error", "the generation loop stopped")
            failure = self.failure or RuntimeFailure("the generation loop stopped (it is ending)", AGAIN)
            raise failure if isinstance(failure, PolicyError) else NotServing(failure.what, failure.remedy)
        return stream

    def record(self, recorded: Recorded) -> None:
        """Replay decode steps from now on, if they can be."""
        if self._manager.steps.lengths.any:
            recorded.problem = "its positions depend on the length of the text"
        self._manager.steps.recorded = recorded

    def draft(
        self, pricing: DraftPricing, experts: CountedExperts, head: HeadDrafts | None = None
    ) -> str | None:
        """Verify drafts from now on; the reason if that cannot be."""
        if self._manager.steps.lengths.any:
            return "its positions depend on the length of the text"
        self._manager.steps.drafts = Drafter(self.streams, pricing, experts, head)
        return None

    @property
    def replays(self) -> bool:
        """Whether decode steps are recorded and replayed."""
        recorded = self._manager.steps.recorded
        return recorded is not None and recorded.problem is None

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that open requests use."""
        processor = self._manager.batch_processor
        return 0.0 if processor is None else used_share(processor.cache)

    def parts(self) -> Iterator[tuple[str, Any, str]]:
        """The methods of a step by part, as (part, owner, method), for `host_times`; "manager" is the whole step."""
        steps = self._manager.steps
        yield "manager", self._manager, "_generation_loop_body"
        if steps.recorded is not None:
            yield "dense", steps.recorded, "logits"
        yield "schedule", steps, "prepare"
        yield "sample", steps, "compute"  # the model's forward is in it
        yield "deliver", steps, "deliver"

    def cancel(self, stream: Stream) -> bool:
        """End a request now with finish `cancelled`; False if it had ended."""
        if not self.streams.abort(stream.name, "cancelled"):
            return False
        self._manager.cancel_request(stream.name)
        return True

    @property
    def failure(self) -> TierMoeError | None:
        """Why the generation loop died; None while it lives, or restarts with the next request."""
        error = self._manager.died or self._manager.background_thread_status.fatal_error
        if not isinstance(error, Exception) or isinstance(error, StoreError):
            return None
        return loop_died(error)

    def _fatal_error(self) -> Exception | None:
        """The error that ended the loop; waits for a loop that is ending."""
        status, thread = self._manager.background_thread_status, self._manager._generation_thread
        if status.can_accept_new_requests() is not None and thread is not None:
            thread.join(_END_S)
        return status.fatal_error

    def _revive(self) -> None:
        """Restart a loop that ended because an expert was on no node."""
        with self._reviving:
            if isinstance(self._fatal_error(), StoreError) and not self.streams.closed:
                with _quiet_manager():
                    self._manager.start()

    def close(self) -> None:
        """End open requests, stop the loop and join its thread. Safe to call twice."""
        self.streams.close()  # first: the manager fails what it still runs
        self._manager.steps.end()
        with _quiet_manager():
            if self._manager.is_running() or self._manager._generation_thread is not None:
                self._manager.stop(block=True, hard_stop=True)
        self._scorer.close()
        self._put_back()

    def _put_back(self) -> None:
        """The model's own attention, also where the manager has changed it and failed then."""
        if self._model.config._attn_implementation != self._plain:
            self._model.set_attn_implementation(self._plain)


def _quiet_manager() -> AbstractContextManager[None]:
    """The manager logs errors with a traceback that we report as typed errors."""
    return quiet_logger(_LOGGER, logging.CRITICAL)


def _is_unreported(record: logging.LogRecord) -> bool:
    """Whether a line of the manager's log says what we do not: a typed error ends the request with a line of ours."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, TierMoeError)


def _batching_config(model: Any, kv: KvSettings) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=kv.page_size,
        num_blocks=coded_blocks(model, kv.num_blocks),
        max_batch_tokens=kv.max_batch_tokens,
        max_requests_per_batch=kv.max_num_seqs,
        use_cuda_graph=False,  # routing is read on the host in every layer
        use_async_batching=False,
        allow_block_sharing=kv.prefix_cache,
        scheduler_type=NAME,
        auto_switch_to_flash=False,
    )


# what transformers' paged cache does not hold, by the kind of a layer; of several kinds the first here is said
_NOT_PAGED = {
    "indexed_attention": "its layers attend to keys that an index of their own chooses",
    "minimax_m3_sparse": "its layers attend to keys that an index of their own chooses",
    "compressed_sparse_attention": "its layers attend to compressed keys",
    "heavily_compressed_attention": "its layers attend to compressed keys",
    "linear_attention": "it has layers with a running state in place of keys (linear attention or a state space)",
    "conv": "it has convolution layers, which keep the last tokens' inputs in place of keys",
    "hybrid": "its attention layers keep a convolution's state beside their keys",
    "hybrid_sliding": "its attention layers keep a convolution's state beside their keys",
    "chunked_attention": "it has layers that attend within chunks of the text",
}


def _unsupported(model: Any, error: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be batched continuously: {_in_words(model) or error}",
        "serve it with kv.batching: auto",
    )


def _in_words(model: Any) -> str | None:
    """What of a model transformers' paged attention does not take; None: not known."""
    text = model.config.get_text_config()
    kinds = [kind for kind in getattr(text, "layer_types", None) or () if kind in _NOT_PAGED]
    if kinds:
        return f"{_NOT_PAGED[min(kinds, key=list(_NOT_PAGED).index)]}, which the paged KV cache does not hold"
    if getattr(text, "kv_lora_rank", None) is not None:
        widths = f"keys of {text.qk_nope_head_dim + text.qk_rope_head_dim} and values of {text.v_head_dim}"
        return f"its latent attention (MLA) has {widths} numbers a head, and the paged KV cache has one width"
    sinks = [vars(module).get("sinks", module._parameters.get("sinks", 0)) for module in model.modules()]
    if any(one is None for one in sinks):
        return "some of its attention layers have sinks and others have none, which paged attention does not take"
    return None
