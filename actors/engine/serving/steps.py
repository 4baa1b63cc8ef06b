"""Steps of continuous batching: choose requests, run the model, pick tokens, deliver them.

    prepare    drafts, if they pay (`drafts`); else the requests of the step before again, one token further
               (`Repeat`), or as transformers schedules them
    announce   whose rows the forward carries                                                   SequenceWatcher
    compute    the model, and the next token of each request, behind the drafts that it accepts     sampling
    update     tokens to the requests and to their streams; rows of rejected drafts leave the KV cache; ended requests
               give theirs back

transformers' scheduler admits, splits prompts, and makes room in the KV cache. A step that only decodes, between two
such events, has the same inputs as the step before but for a few numbers, which `Repeat` changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, ContinuousBatchingManager

from ....errors import TierMoeError
from ...policies.routing import SequenceRows
from ..cuda.runtime import GpuRuntime
from ..model.lengths import lengths_of
from ..pinned_fetch import PinnedFetch
from .drafts import Drafter, NoDrafts
from .recorded import Recorded, Unrecorded
from .repeat import Kept, Repeat
from .sampling import PromptRows, PromptScorer, Read, prompt_rows, to_host, verified_tokens
from .streams import SequenceWatcher, Streams

if TYPE_CHECKING:
    from .shared_memory import SharedMemory

_IDLE_S = 0.1  # a loop without work looks at its stop status as often


class StepManager(ContinuousBatchingManager):
    """transformers' manager, with its thread, queues and errors, running `Steps`; `steps` is set before it starts."""

    steps: Steps
    prefill_chunk: int | None = None
    memory: SharedMemory | None = None
    died: BaseException | None = None  # what ended the loop, from before its requests end

    def start(self) -> None:
        """Start the loop; see transformers."""
        self.died = None
        super().start()

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        self.died = error
        super()._handle_critical_error(error, batch_processor)

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        if self.memory is not None:
            self.memory.adopt(processor.cache)
        self.steps.memory = self.memory
        processor.scheduler.serve(self.steps, self.memory, self.prefill_chunk)
        return processor

    def add_request(self, *args: Any, **kwargs: Any) -> str | None:
        """Queue a request; see transformers."""
        name = super().add_request(*args, **kwargs)
        self.steps.disturb()
        return name

    def cancel_request(self, request_id: str) -> None:
        """End a request at the next step."""
        super().cancel_request(request_id)
        self.steps.disturb()

    @torch.no_grad()  # of the loop's thread
    def _run_generation_loop(self) -> None:
        super()._run_generation_loop()

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        """One step, or a wait for work; False: the loop ends."""
        try:
            if self.steps.step(batch_processor):
                return True
        except Exception:
            raise
        except BaseException as error:  # a library's panic: transformers would leave the requests without an end
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if self.memory is not None:
            self.memory.stepped()
            self.memory.fit_idle(batch_processor.scheduler)
        if self.background_thread_status.tp_status == BackgroundThreadStatus.HARD_STOP:
            return False
        self._wake_up_loop.wait(_IDLE_S)
        self._wake_up_loop.clear()
        return True


@dataclass(eq=False, slots=True)
class Batch:
    """The requests of one forward.

    Attributes:
        requests: transformers' `FutureRequestState` of each.
        states: transformers' `RequestState` of those that get a token, in the order of the logits.
        sequences: of each request its rows and the tokens of its prompt, for `SequenceLengths.of`.
        inputs: the arguments of the model.
        decodes: it has no rows of a prompt.
        drafts: of each of `states`; once the tokens came, those that were accepted. Empty: none has any.
        rejected: how many of its drafts each of them rejected.
        repeats: the next step may be of the same requests, with its inputs from `repeat`.
        tokens: that came of it, one for each of `states`, behind its accepted drafts.
    """

    requests: Sequence[Any]
    states: Sequence[Any]
    rows: Sequence[SequenceRows]
    sequences: Sequence[tuple[int, int]]
    inputs: dict[str, Any]
    decodes: bool
    repeats: bool
    drafts: list[list[int]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    repeat: Repeat | None = None
    tokens: list[int] = field(default_factory=list)


class Steps:
    """The steps of one manager, on its thread.

    Args:
        model: a causal language model.
        watcher: gets the sequences of each forward before it runs.
        scorer: reads the log-probabilities of prompts.
        gpu: of the model; None: it runs on the host.

    Attributes:
        memory: that the KV cache shares with experts; None: it has its own.
        recorded: decode steps that are replayed; None: none are.
        drafts: drafted tokens of the next step.
        carried: rows of the step under way, or of the one that ended the loop.
    """

    carried: Sequence[SequenceRows] = ()
    memory: SharedMemory | None = None
    recorded: Recorded | None = None
    drafts: Drafter | NoDrafts = NoDrafts()

    def __init__(
        self, model: Any, streams: Streams, watcher: SequenceWatcher | None, scorer: PromptScorer,
        gpu: GpuRuntime | None = None,
    ) -> None:  # fmt: skip
        self._gpu, self._stream, self._kept = gpu, None, Kept(gpu)
        self._read: Read = to_host if gpu is None else PinnedFetch(gpu)  # which waits with the interpreter's lock
        self._model, self._streams, self._watcher, self._scorer = model, streams, watcher, scorer
        self._keeps = hasattr(model, "_supports_logits_to_keep") and bool(model._supports_logits_to_keep())
        self.lengths = lengths_of(model)
        self._last: Batch | None = None  # the next step may repeat it
        self._disturbed = self._ends = False
        self._failed: dict[str, BaseException] = {}  # streams that fail in the step under way, and why
        scorer.failed = self._failed.__setitem__

    def reads_prefix(self, name: str) -> bool:
        """See `scheduler.Requests.reads_prefix`."""
        return self._streams.reads_prefix(name)

    def salt_of(self, name: str) -> str | None:
        """See `scheduler.Requests.salt_of`."""
        stream = self._streams.get(name)
        return None if stream is None else stream.request.cache_salt

    def prompt_of(self, state: Any) -> int | None:
        """See `scheduler.Requests.prompt_of`."""
        stream = self._streams.get(state.request_id)
        if stream is None:
            return None
        tokens = len(state.initial_tokens) + len(state.generated_tokens)
        return self.lengths.prompt_of(len(stream.request.prompt_ids), tokens)

    def disturb(self) -> None:
        """A request was queued or cancelled: the manager is to look."""
        self._disturbed = True

    def end(self) -> None:
        """The manager is to look at its stop status from now on."""
        self._ends = self._disturbed = True

    def step(self, processor: Any) -> bool:
        """One step; False: there was nothing to run. On a GPU all of it goes to the manager's stream, in order."""
        stream = processor.inputs_and_outputs.compute_stream
        if self._gpu is None or stream is None:
            return self._step(processor)
        if stream != self._stream:  # behind what made the weights and the cache
            made = self._gpu.event(timing=False)
            self._gpu.record(made, self._gpu.current())
            self._gpu.wait_event(stream, made)
            self._stream = stream
        with self._gpu.on(stream):
            return self._step(processor)

    def _step(self, processor: Any) -> bool:
        self.carried, began_s = (), time.perf_counter()
        self.drafts.begin()
        batch = self.prepare(processor)
        if batch is None:
            return False
        self.carried = batch.rows
        self._failed.clear()
        if batch.repeat is None:
            for request, row in zip(batch.requests, batch.rows, strict=True):
                self._streams.begin(row.name, request.state.position_offset - request.query_length)
            self._scorer.expect(self._wanted(batch))
        if self._watcher is not None:
            self._watcher.begin_forward(batch.rows)
        self.drafts.carries(batch.rows, [r.state.position_offset - r.query_length for r in batch.requests])
        batch.tokens = self.compute(batch)
        scheduler, delivered = processor.scheduler, []
        if self.memory is not None:
            self.memory.stepped()
        for state, rejected in zip(batch.states, batch.rejected, strict=False):
            state.position_offset -= rejected  # their rows leave the KV cache: the next step writes there again
        if batch.repeat is None:
            for request in batch.requests:
                if request.complete_blocks and request.state.request_id not in self._failed:
                    scheduler.register(request.state)
        accepted = batch.drafts or [[]] * len(batch.states)
        for state, before, token in zip(batch.states, accepted, batch.tokens, strict=True):
            if state.request_id in self._failed:
                continue
            for draft in before:  # none of them ends it
                state.update_and_check_completion(draft, None)
            ended = state.update_and_check_completion(token, None)
            if ended:
                scheduler.register(state)
                scheduler.finish_request(state.request_id)
                scheduler.block_new_requests = batch.repeats = False
            delivered.append((state.request_id, (*before, token), ended))
        self.deliver(delivered)
        if batch.decodes and not self._failed:
            self.drafts.took([state.request_id for state in batch.states], batch.drafts)
        if self._failed:
            self._end_failed(batch, scheduler)
        self._last = batch if batch.repeats else None
        self._streams.stepped(began_s)
        return True

    def _end_failed(self, batch: Batch, scheduler: Any) -> None:
        """End the requests that failed in this step; the others go on."""
        for name, error in self._failed.items():
            # a row's allocation that failed is no reason to end the process
            cause = error if isinstance(error, TierMoeError) else None
            self._streams.abort(name, "error", f"{type(error).__name__}: {error}", cause)
            scheduler.finish_request(name)
        scheduler.block_new_requests = batch.repeats = False
        self._failed.clear()

    def prepare(self, processor: Any) -> Batch | None:
        """The next batch; None: there is none, or the loop is to end."""
        last, self._last = self._last, None
        scheduler = processor.scheduler
        anew = self.lengths.any and any(map(scheduler.is_anew, last.states)) if last is not None else False
        gives = self.memory is not None and self.memory.is_due
        drafting = not anew and self.drafts.choose(processor)
        if last is not None and not drafting and not self._disturbed and not anew and not gives:
            # What waits for admission goes on waiting: no request has ended, so the KV cache has no more room.
            if last.repeat is None:
                last.repeat = Repeat(
                    processor.cache, last.states, last.inputs, self._kept, self._gpu, self._stream
                )
            if last.repeat.advance(last.tokens):
                return last
        self._disturbed = self._ends  # before the manager looks at its queues
        if self.lengths.any:
            scheduler.feed_again()
        if not processor.prepare_next_batch():
            return None
        made = processor.inputs_and_outputs
        requests = made.requests_in_batch
        states = [request.state for request in requests if request.has_new_token]
        rows = _rows_of(requests)
        decodes = len(states) == len(rows) and all(row.decode for row in rows)
        # a prompt may have one row, too
        drafts = self.drafts.of(requests) if drafting else []
        inputs: dict[str, Any] = dict(made.get_model_kwargs())
        if drafts:
            inputs["logits_indices"] = _wanted_rows(requests, inputs["logits_indices"])
        if self._keeps:
            inputs["logits_to_keep"] = 0 if decodes else inputs["logits_indices"]  # 0: of all rows
        repeats = (
            decodes
            and not drafts
            and len(requests) == len(scheduler.active_requests)
            and inputs["block_table"] is None  # which flash-attn reads
        )
        for request in requests:
            request.state.tiermoe_prompt = self.prompt_of(request.state)
            request.state.tiermoe_salt = self.salt_of(request.state.request_id)
        sequences = [(request.query_length, request.state.tiermoe_prompt or 0) for request in requests]
        return Batch(requests, states, rows, sequences, inputs, decodes, repeats, drafts)

    def compute(self, batch: Batch) -> list[int]:
        """The next token of each of the batch's `states`."""
        logits = self._replayed(batch)
        if logits is None:
            with self.lengths.of(batch.sequences):
                logits = self._model(**batch.inputs).logits  # [1, rows, V]
        if not self._keeps:
            logits = logits[:, batch.inputs["logits_indices"]]

        def failed(row: int, error: BaseException) -> None:
            self._failed[batch.states[row].request_id] = error

        streams = self._streams
        asked = [streams.get(state.request_id) for state in batch.states]
        drafts = batch.drafts or [[] for _ in asked]
        # transformers asks for a row of every request, also of one whose prompt goes on
        tokens, lengths = verified_tokens(logits, asked, drafts, streams.eos, streams.note, failed, self._read)
        if batch.drafts:
            batch.rejected = [len(draft) - length for draft, length in zip(drafts, lengths, strict=True)]
            batch.drafts = [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]
        return tokens

    def _replayed(self, batch: Batch) -> torch.Tensor | None:
        """The logits of a recorded step; None: the model is to run."""
        if self.recorded is None or batch.repeat is None:
            return None
        try:
            return self.recorded.logits(batch.inputs | batch.repeat.fixed, self._kept.generation)
        except Unrecorded:
            if self._watcher is not None:
                self._watcher.begin_forward(batch.rows)
            return None

    def deliver(self, tokens: Sequence[tuple[str, tuple[int, ...], bool]]) -> None:
        """New tokens to their streams: (name, tokens, whether they are the last)."""
        for name, new, last in tokens:
            (self._streams.finish if last else self._streams.deliver)(name, new)

    def _wanted(self, batch: Batch) -> list[PromptRows]:
        """The rows that predict prompt tokens with wanted log-probabilities."""
        found = []
        for request, row in zip(batch.requests, batch.rows, strict=True):
            stream = self._streams.get(row.name)
            if stream is None or stream.request.scored_prompt is None:
                continue
            offset = request.state.position_offset - request.query_length  # scheduling has moved it on
            prompt, top = stream.request.prompt_ids, stream.request.scored_prompt
            wanted = prompt_rows(row.name, prompt, top, row.start, request.query_length, offset)
            found += [wanted] if wanted is not None else []
        return found


def _wanted_rows(requests: Sequence[Any], last: torch.Tensor) -> torch.Tensor:
    """Rows that predict a token: of each request that gets one, its last token's and those of its drafts.

    last: the last row of each of these requests.
    """
    wanted, start = list[int](), 0
    for request in requests:
        stop = start + request.query_length
        if request.has_new_token:
            first = start if request.state.generated_tokens else stop - 1
            wanted += range(first, stop)
        start = stop
    return torch.tensor(wanted, dtype=last.dtype, device=last.device)


def _rows_of(requests: Sequence[Any]) -> list[SequenceRows]:
    rows, start = [], 0
    for request in requests:
        stop = start + request.query_length
        # One that gave up its KV cache is fed again with what it had generated as part of its prompt.
        rows.append(SequenceRows(request.state.request_id, start, stop, decode=bool(request.state.generated_tokens)))
        start = stop
    return rows
