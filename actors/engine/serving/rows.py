"""Continuous batching on a model's own cache, for what a paged cache does not hold: running states, convolutions,
latent attention, an index that chooses keys.

    resume   a request's prompt goes on from the longest checkpoint that it begins with (`states`)
    prompt   the rest runs alone, in chunks, between steps of the others
    join     its cache becomes a row of the others': keys and values are padded on the left, states are stacked
    step     the next token of every row, in one forward
    leave    rows of requests that ended go, with the padding that only they needed

The mask and the positions of each row are those of its own tokens, as in a batch of `generate` padded on the left. A
model whose cache has layers of another kind keeps a cache for each request, and they take turns: compressed keys have
no padding. Some models forget the past when they are fed several tokens; a short prompt at the start shows it, and then
prompts run whole and nothing is kept of them.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ....errors import NotServing, PolicyError, StoreError, TierMoeError, UnsupportedModelError
from ...policies.drafts import DecodeCounts, DraftPricing
from ...policies.routing import SequenceRows
from ...requests import GenerationRequest
from ...settings import Attention, KvSettings
from ..model.lengths import lengths_of
from .batcher import loop_died, open_streams, probed
from .sampling import PromptScorer, next_tokens, pick_of, prompt_rows
from .states import Checkpoints, is_known, join, leave
from .streams import Outbox, SequenceWatcher, Stream, Streams

_ROOM = 32  # tokens that a request is to have room for when it begins
_TRIED, _CUT = 7, 3  # tokens of a prompt that is tried whole and in two parts
_MOST_OFF = 0.1  # of the logits' spread, by which the two may differ; a forgotten past is three times that and more


@dataclass(eq=False)
class Row:
    """A request under way.

    length: of its tokens in the cache. prompt: the length that its rotary embeddings go by
    (`SequenceLengths.prompt_of`). border: where a forward of its prompt ends for a checkpoint; 0: nowhere.
    """

    stream: Stream
    length: int = 0
    prompt: int = 0
    border: int = 0

    @property
    def tokens(self) -> list[int]:
        """Of the prompt, and those generated so far."""
        return [*self.stream.request.prompt_ids, *self.stream.generated]

    @property
    def total(self) -> int:
        """How many `tokens` there are."""
        return len(self.stream.request.prompt_ids) + len(self.stream.generated)


@dataclass(eq=False)
class Batch:
    """Requests of one cache, which came in this order.

    cache: None: it has none yet. ready: its prompt has run.
    """

    rows: list[Row]
    cache: Any = None
    ready: bool = False

    def takes(self, more: int) -> int:
        """Tokens of the cache once each row has `more`: all rows are as long as the longest."""
        return len(self.rows) * (max((row.length for row in self.rows), default=0) + more)

    def keep(self, kept: Sequence[int]) -> None:
        """Keep some rows."""
        self.rows = [self.rows[i] for i in kept]
        if not kept:
            self.cache = None
        elif self.cache is not None:
            leave(self.cache, kept, max(row.length for row in self.rows))


class RowBatcher:
    """Many requests in one forward pass, each a row of the model's own cache.

    Args:
        model: a transformers model on its device.
        kv: its tokens bound all rows together, each counted as long as the longest; `batching: serial` is one row, and
            prompts in one forward.
        because: why the cache is not paged, for the plan's notes.
        watcher: gets the sequences of each forward pass before it runs.
        tokenizer: the text of tokenizer.json, for grammars.

    Attributes:
        attention, replays: nothing, as it has no paged cache.
        shares: whether requests share forward passes; else they take turns, or `kv.batching` is serial.
        divides: whether prompts come in chunks.
        checkpoints: of earlier prompts and answers; with a limit of 0 where none is kept.
        max_requests: under way at once.

    Raises:
        UnsupportedModelError: the model generates nothing, as one request shows. TierMoeError: an expert or a policy
            failed meanwhile.

    A missing expert ends the requests of its forward. Any other error ends the loop: its requests may have caused it,
    the others go on at another lead. Where the cache is full, the youngest request comes again later.
    """

    attention: Attention | None = None
    replays = False

    def __init__(
        self, model: Any, kv: KvSettings, because: str, watcher: SequenceWatcher | None = None,
        tokenizer: str | None = None,
    ) -> None:  # fmt: skip
        self.unpaged_because: str | None = because
        self.streams: Streams = open_streams(model, kv, watcher, tokenizer)
        self._model, self._watcher = model, watcher
        self._lengths = lengths_of(model)
        self.max_requests = 1 if kv.batching == "serial" or self._lengths.any else kv.max_num_seqs
        self.shares = self.max_requests > 1
        self.divides = kv.batching != "serial" and not self._lengths.any
        self.checkpoints = Checkpoints(kv.checkpoint_bytes if self.divides else 0, kv.page_size)
        self._tokens, self._page = kv.num_blocks * kv.page_size, kv.page_size
        self._chunk, self._chunk_beside = kv.max_batch_tokens, kv.prefill_chunk
        self._failed: dict[str, BaseException] = {}  # streams that fail in the step under way, and why
        self._scorer = PromptScorer(model, self.streams.note_prompt)
        self._scorer.failed = self._failed.__setitem__
        self._keeps = hasattr(model, "_supports_logits_to_keep") and bool(model._supports_logits_to_keep())
        self._places = "position_ids" in inspect.signature(model.forward).parameters
        self._batches: list[Batch] = []
        self._prompt: Batch | None = None  # whose prompt is under way
        self.failure: TierMoeError | None = None
        self._probing, self._error = True, cast("BaseException | None", None)  # of the probe
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._waiting: list[Stream] = []
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="tiermoe-rows", daemon=True)
        self._thread.start()
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    def _probe(self) -> None:
        """Run short requests, side by side where they may be; the model serves only after they gave tokens."""
        try:
            error = probed(self, [(0, 0, 0, 0, 0)] if self.max_requests > 1 else [])
        except NotServing as failure:
            error = failure.what
        cause, self._error, self._probing = self._error, None, False  # later ones would hold what their frames hold
        if isinstance(cause, TierMoeError):
            raise cause
        if error is not None:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not generate here: {error}",
                "use another model or version of transformers",
            ) from cause

    def draft(self, pricing: DraftPricing, counts: Callable[[], DecodeCounts]) -> str | None:
        """Why requests are not drafted."""
        return "only the paged KV cache gives the rows of rejected tokens back"

    @property
    def note(self) -> str:
        """How requests run on the model's own cache, and why."""
        how = "share forward passes" if self.shares else "take turns" if self.max_requests > 1 else "run alone"
        prompts = "come in chunks" if self.divides else "run whole"
        kept = "are kept" if self.checkpoints.limit_bytes and self.shares else "are not kept"
        return f"requests {how}, prompts {prompts}, their states {kept}: {self.unpaged_because}"

    def submit(self, request: GenerationRequest, events: Outbox | None = None) -> Stream:
        """Queue a request. Raises as `ContinuousBatcher.submit`."""
        if (failure := self.failure) is not None:
            raise failure if isinstance(failure, PolicyError) else NotServing(failure.what, failure.remedy)
        stream = self.streams.open(request, events)
        self._queue.put(stream)
        return stream

    def cancel(self, stream: Stream) -> bool:
        """End a request at its next token; False if it had ended."""
        return self.streams.abort(stream.name, "cancelled")

    def close(self) -> None:
        """Stop after the step under way. Safe to call twice."""
        self.streams.close()
        self._ends = True
        self._queue.put(None)
        self._thread.join()
        self._scorer.close()

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that open requests use, with the padding of their rows."""
        return min(1.0, sum(batch.takes(0) for batch in self._under_way) / self._tokens)

    @property
    def _under_way(self) -> list[Batch]:
        prompt = self._prompt
        return [*self._batches, *([prompt] if prompt is not None else [])]

    @torch.no_grad()
    def _run(self) -> None:
        try:
            if self.divides and not self._remembers():
                self.divides, self.checkpoints.limit_bytes = False, 0
            while not self._ends:
                self._turn()
        except BaseException as error:  # its requests report it, and a lead that generates nothing is made again
            self._fail(error)
        while not self._ends:  # what was submitted meanwhile
            self._receive()
            self._refuse_others()

    def _remembers(self) -> bool:
        """Whether a prompt in two forwards has the logits of one: some models forget the past of several tokens."""
        ids = torch.arange(_TRIED, device=self._model.device)[None] % self.streams.vocabulary
        name = "probe#whole"
        whole = self._feed([name], ids, [0], [_TRIED], None, False).logits[0, -1].float()
        cache = self._feed([name], ids[:, :_CUT], [0], [_TRIED], None, False).past_key_values
        parts = self._feed([name], ids[:, _CUT:], [_CUT], [_TRIED], cache, False).logits[0, -1].float()
        if self._watcher is not None:
            self._watcher.end_sequence(name)
        return bool((parts - whole).abs().max() <= _MOST_OFF * whole.std())

    def _turn(self) -> None:
        """A chunk of a prompt, if one waits and has room, and a step of every request."""
        self._receive()
        for batch in self._under_way:
            self._drop_ended(batch)
        self._forget_empty()
        if self._prompt is None and (stream := self._admitted()) is not None:
            self._prompt = Batch([Row(stream)])
            self._resume(self._prompt)
        if self._prompt is not None:
            self._try(self._prompt)
            if self._prompt.ready and self._prompt.rows:  # its first token may be its last
                self._join(self._prompt)
        self._make_room()
        for batch in self._batches:
            self._try(batch)

    def _forget_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.rows]
        if self._prompt is not None and not self._prompt.rows:
            self._prompt = None

    def _receive(self) -> None:
        """Requests that came; waits for one where there is nothing to do."""
        while not self._ends:
            try:
                stream = self._queue.get(block=not self._under_way and not self._waiting)
            except queue.Empty:
                return
            if stream is not None:
                self._waiting.append(stream)

    def _admitted(self) -> Stream | None:
        """The request whose prompt runs next: the first that came, if it has room for a while."""
        self._waiting = [stream for stream in self._waiting if self.streams.is_open(stream.name)]
        rows = [row for batch in self._batches for row in batch.rows]
        if not self._waiting or len(rows) >= self.max_requests:
            return None
        own = len(Row(self._waiting[0]).tokens) + _ROOM
        if not rows:
            return self._waiting.pop(0)
        if self.shares:
            needed = (len(rows) + 1) * max(own, *(row.length + _ROOM for row in rows))
        else:
            needed = own + sum(row.length + _ROOM for row in rows)
        return self._waiting.pop(0) if needed <= self._tokens else None

    def _make_room(self) -> None:
        """Take the youngest requests out until the next token of each has room; they come again before others."""
        self._forget_empty()
        while len(batches := self._under_way) > 1 or (batches and len(batches[0].rows) > 1):
            held = self._prompt.rows[0].total + 1 if self._prompt is not None else 0
            if held + sum(batch.takes(1) for batch in self._batches) <= self._tokens:
                return
            batch = batches[-1]
            self._waiting.insert(0, batch.rows[-1].stream)
            batch.keep(range(len(batch.rows) - 1))
            self._forget_empty()

    def _resume(self, batch: Batch) -> None:
        """Begin a request at the longest checkpoint of its tokens, and decide where it makes one for others."""
        row = batch.rows[0]
        stream, tokens = row.stream, row.tokens
        if self.checkpoints.limit_bytes:
            salt = stream.request.cache_salt
            row.border = self.checkpoints.border(tokens, salt)
            if self.streams.reads_prefix(stream.name):
                found = self.checkpoints.find(tokens, salt, len(tokens) - 1)
                if found is not None:
                    batch.cache, row.length = found.cache(self._model.device), found.length
        self.streams.begin(stream.name, min(row.length, len(stream.request.prompt_ids)))

    def _keep(self, batch: Batch, index: int) -> None:
        """Keep the state of a row for requests that begin with its tokens."""
        row = batch.rows[index]
        if self.checkpoints.limit_bytes and row.length >= self._page and is_known(batch.cache):
            self.checkpoints.keep(batch.cache, index, row.tokens[: row.length], row.stream.request.cache_salt)

    def _join(self, batch: Batch) -> None:
        """The prompt of a request has run: it goes on with the others."""
        self.shares = self.shares and is_known(batch.cache)
        first = self._batches[0] if self._batches else None
        if self.shares and first is not None:
            first.rows = first.rows + batch.rows  # before what may fail, which ends them all
            self._prompt = None
            join(first.cache, batch.cache)
        else:
            self._batches.append(batch)
            self._prompt = None

    def _try(self, batch: Batch) -> None:
        """A step of a batch. A missing expert ends its requests; anything else that it raises ends all."""
        try:
            began_s = time.perf_counter()
            self._step(batch)
            self.streams.stepped(began_s)
        except StoreError as error:
            self._end(batch, error)
        except BaseException as error:
            self._end(batch, error)
            raise

    def _end(self, batch: Batch, error: BaseException) -> None:
        """The requests that a forward carried end with its error; they may have caused it."""
        if self._probing:
            self._error = error
        self._scorer.expect([])
        cause = loop_died(error) if isinstance(error, Exception) else error
        for row in batch.rows:
            self.streams.abort(row.stream.name, "error", f"{type(error).__name__}: {error}", cause)
        batch.keep(())

    def _fail(self, error: BaseException) -> None:
        """Nothing is generated from now on."""
        if self._probing and self._error is None:
            self._error = error
        self.failure = loop_died(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        self._refuse_others()

    def _refuse_others(self) -> None:
        """End what the failed forward did not carry, so that another lead takes it."""
        failure = self.failure
        assert failure is not None
        why = failure if isinstance(failure, PolicyError) else NotServing(failure.what, failure.remedy)
        why.__cause__ = failure.__cause__  # an allocation that failed is found there
        for stream in [*(row.stream for batch in self._under_way for row in batch.rows), *self._waiting]:
            self.streams.abort(stream.name, "error", str(why), why)
        self._batches, self._prompt, self._waiting = [], None, []
        self.checkpoints.clear()

    def _step(self, batch: Batch) -> None:
        """One forward, and a token for each row, unless it carries a prompt that goes on."""
        rows, prompt = batch.rows, batch is self._prompt
        tokens = self._fed(batch)
        fed, first = len(tokens[0]), rows[0]
        ids = torch.tensor(tokens, device=self._model.device)
        if prompt:
            self._expect_prompt(first, fed)
        names, lengths = [row.stream.name for row in rows], [row.length for row in rows]
        decode = not prompt and first.length > 0
        out = self._feed(names, ids, lengths, [row.prompt for row in rows], batch.cache, decode)
        batch.cache = out.past_key_values
        for row in rows:
            row.length += fed
        ran = not prompt or first.length == first.total
        if prompt and (ran or first.length == first.border):
            self._keep(batch, 0)
        if ran:
            batch.ready = True
            self._pick(batch, out.logits[:, -1][None])

    def _fed(self, batch: Batch) -> list[list[int]]:
        """The tokens that the next forward feeds, as many of each row: [B, fed]."""
        first = batch.rows[0]
        prompt = self._lengths.prompt_of(len(first.stream.request.prompt_ids), first.total)
        others, first.prompt = prompt != first.prompt and self._lengths.any, prompt
        if batch is self._prompt:
            end = first.total
            if self.divides:
                beside = self._chunk_beside if self._batches else None
                end = min(end, first.length + min(self._chunk, beside or self._chunk))
                if first.length < first.border < end:
                    end = first.border
            return [first.tokens[first.length : end]]
        if others:  # its rotary embeddings are others now, and all of its tokens are fed again
            batch.cache, first.length = None, 0
            return [first.tokens]
        return [row.stream.generated[-1:] for row in batch.rows]

    def _feed(
        self, names: Sequence[str], ids: torch.Tensor, lengths: Sequence[int], prompts: Sequence[int], cache: Any,
        decode: bool,
    ) -> Any:  # fmt: skip
        """One forward: tokens [B, fed] of these sequences, of which the cache has `lengths`."""
        fed = ids.shape[1]
        if self._watcher is not None:
            self._watcher.begin_forward(
                [SequenceRows(name, i * fed, (i + 1) * fed, decode) for i, name in enumerate(names)]
            )
        with self._lengths.of([(fed, prompt) for prompt in prompts]):
            return self._model(input_ids=ids, past_key_values=cache, use_cache=True, **self._inputs(lengths, fed))

    def _expect_prompt(self, row: Row, fed: int) -> None:
        """The log-probabilities that the next rows of a prompt are to give."""
        request, wanted = row.stream.request, None
        if not row.stream.generated:
            wanted = prompt_rows(row.stream.name, request.prompt_ids, request.scored_prompt, 0, fed, row.length)
        self._scorer.expect([wanted] if wanted is not None else [])

    def _inputs(self, lengths: Sequence[int], fed: int) -> dict[str, Any]:
        """The mask [B, T], positions [B, fed], and of which rows logits are wanted."""
        device = self._model.device
        totals = torch.tensor(lengths, device=device)[:, None] + fed
        longest = max(lengths) + fed
        inputs: dict[str, Any] = {
            "attention_mask": (torch.arange(longest, device=device)[None] >= longest - totals).long()
        }
        if self._places:
            inputs["position_ids"] = totals - fed + torch.arange(fed, device=device)[None]
        if self._keeps:
            inputs["logits_to_keep"] = 1
        return inputs

    def _pick(self, batch: Batch, logits: torch.Tensor) -> None:
        """The next token of each row, from logits [1, B, V]; a row that gets none fails alone."""
        failed = self._failed

        def fails(row: int, error: BaseException) -> None:
            failed[batch.rows[row].stream.name] = error

        picks = [pick_of(self.streams.get(row.stream.name)) for row in batch.rows]
        tokens = next_tokens(logits, len(batch.rows), picks, self.streams.eos, self.streams.note, fails)
        for i, (row, token) in enumerate(zip(batch.rows, tokens, strict=True)):
            stream = row.stream
            if (error := failed.pop(stream.name, None)) is not None:
                if self._probing:
                    self._error = error
                cause = error if isinstance(error, TierMoeError) else None
                self.streams.abort(stream.name, "error", f"{type(error).__name__}: {error}", cause)
            elif token in stream.stops or len(stream.generated) + 1 >= stream.request.sampling.max_tokens:
                self._keep(batch, i)
                self.streams.finish(stream.name, (token,))
            else:
                self.streams.deliver(stream.name, (token,))
        self._drop_ended(batch)

    def _drop_ended(self, batch: Batch) -> None:
        kept = [i for i, row in enumerate(batch.rows) if self.streams.is_open(row.stream.name)]
        if len(kept) < len(batch.rows):
            batch.keep(kept)
