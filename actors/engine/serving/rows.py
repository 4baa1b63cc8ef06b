"""Continuous batching on a model's own cache, for what a paged cache does not hold: running states, convolutions,
latent attention.

    prompt   a request's prompt runs alone, in one forward, which makes its cache
    join     its cache becomes a row of the others': keys and values are padded on the left, states are stacked
    step     the next token of every row, in one forward
    leave    rows of requests that ended go, with the padding that only they needed

The mask and the positions of each row are those of its own tokens, as in a batch of `generate` padded on the left. A
model whose cache has layers of another kind keeps a cache for each request, and they take turns: compressed keys have
no padding, and an index that chooses keys chooses others among padded ones, in transformers' own batches, too.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import cache_utils

from ....errors import NotServing, PolicyError, StoreError, TierMoeError, UnsupportedModelError
from ...policies.drafts import DecodeCounts, DraftPricing
from ...policies.routing import SequenceRows
from ...requests import GenerationRequest
from ...settings import Attention, KvSettings
from ..model.lengths import lengths_of
from .batcher import loop_died, open_streams, probed
from .sampling import PromptScorer, next_tokens, pick_of, prompt_rows
from .streams import Outbox, SequenceWatcher, Stream, Streams

_ROOM = 32  # tokens that a request is to have room for when it begins
# dimensions of the requests and of the tokens
_BY_TOKEN = {"keys": (0, -2), "values": (0, -2)}
_STATES = ("conv_states", "recurrent_states")
_KINDS = {
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    cache_utils.DummyLayer,
}


def joins(cache: Any) -> bool:
    """Whether requests may share this cache: it has no layers but those whose tensors are known here."""
    return type(cache) is cache_utils.DynamicCache and all(type(layer) in _KINDS for layer in cache.layers)


def join(cache: Any, other: Any) -> None:
    """Add the rows of another cache of the same model behind those of `cache`, aligned at their last tokens."""
    for layer, added in zip(cache.layers, other.layers, strict=True):
        for name, (batch, time) in _BY_TOKEN.items():
            one, two = getattr(layer, name, None), getattr(added, name, None)
            if one is not None and two is not None:
                length = max(one.shape[time], two.shape[time])
                setattr(layer, name, torch.cat([_padded(one, time, length), _padded(two, time, length)], batch))
        for states in _STATES:
            found = getattr(layer, states, {})
            for number, state in found.items():
                if state is not None:
                    found[number] = torch.cat([state, getattr(added, states)[number]])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = max(layer.cumulative_length, added.cumulative_length)


def leave(cache: Any, kept: Sequence[int], length: int) -> None:
    """Keep some rows of a cache. length: of the longest of them, in tokens."""
    for layer in cache.layers:
        for name, (batch, time) in _BY_TOKEN.items():
            tensor = getattr(layer, name, None)
            if tensor is not None:
                rows = tensor.index_select(batch, torch.tensor(kept, device=tensor.device))
                short = min(rows.shape[time], length)
                setattr(layer, name, rows.narrow(time, rows.shape[time] - short, short))
        for states in _STATES:
            found = getattr(layer, states, {})
            for number, state in found.items():
                if state is not None:
                    found[number] = state[torch.tensor(kept, device=state.device)]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


def _padded(tensor: torch.Tensor, time: int, length: int) -> torch.Tensor:
    """With zeros in front, which the mask hides."""
    missing = length - tensor.shape[time]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[time] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], time)


@dataclass(eq=False)
class Row:
    """A request under way.

    length: of its tokens in the cache. next: the token that is fed next. prompt: the length that its rotary embeddings
    go by (`SequenceLengths.prompt_of`).
    """

    stream: Stream
    length: int = 0
    next: int = 0
    prompt: int = 0

    @property
    def tokens(self) -> list[int]:
        """Of the prompt, and those generated so far."""
        return [*self.stream.request.prompt_ids, *self.stream.generated]


@dataclass(eq=False)
class Batch:
    """Requests of one cache, which came in this order. cache: None: it has none, and all tokens are fed again."""

    rows: list[Row]
    cache: Any = None

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
        kv: its tokens bound all rows together, each counted as long as the longest; `batching: serial` is one row.
        because: why the cache is not paged, for the plan's notes.
        watcher: gets the sequences of each forward pass before it runs.
        tokenizer: the text of tokenizer.json, for grammars.

    Attributes:
        attention, replays: nothing, as it has no paged cache.
        shares: whether requests share forward passes; else they take turns, or `kv.batching` is serial.
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
        self._tokens = kv.num_blocks * kv.page_size
        self._failed: dict[str, BaseException] = {}  # streams that fail in the step under way, and why
        self._scorer = PromptScorer(model, self.streams.note_prompt)
        self._scorer.failed = self._failed.__setitem__
        self._keeps = hasattr(model, "_supports_logits_to_keep") and bool(model._supports_logits_to_keep())
        self._places = "position_ids" in inspect.signature(model.forward).parameters
        self._batches: list[Batch] = []
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
        error = probed(self, [(0, 0, 0, 0, 0)] if self.max_requests > 1 else [])
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
        return min(1.0, sum(batch.takes(0) for batch in list(self._batches)) / self._tokens)

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while not self._ends:
                self._turn()
        except BaseException as error:  # its requests report it, and a lead that generates nothing is made again
            self._fail(error)
        while not self._ends:  # what was submitted meanwhile
            self._receive()
            self._refuse_others()

    def _turn(self) -> None:
        """A prompt, if one waits and has room, and a step of every request."""
        self._receive()
        for batch in self._batches:
            self._drop_ended(batch)
        self._batches = [batch for batch in self._batches if batch.rows]
        if (stream := self._admitted()) is not None:
            self._begin(stream)
        self._make_room()
        for batch in self._batches:
            self._try(batch)

    def _receive(self) -> None:
        """Requests that came; waits for one where there is nothing to do."""
        while not self._ends:
            try:
                stream = self._queue.get(block=not self._batches and not self._waiting)
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
        while sum(len(batch.rows) for batch in self._batches) > 1:
            if sum(batch.takes(1) for batch in self._batches) <= self._tokens:
                return
            batch = self._batches[-1]
            self._waiting.insert(0, batch.rows[-1].stream)
            batch.keep(range(len(batch.rows) - 1))
            self._batches = [batch for batch in self._batches if batch.rows]

    def _begin(self, stream: Stream) -> None:
        batch = Batch([Row(stream)])
        self._try(batch)
        if not batch.rows:
            return
        self.shares = self.shares and joins(batch.cache)
        first = self._batches[0] if self._batches else None
        if self.shares and first is not None:
            first.rows = first.rows + batch.rows  # before what may fail, which ends them all
            join(first.cache, batch.cache)
        else:
            self._batches.append(batch)

    def _try(self, batch: Batch) -> None:
        """A step of a batch. A missing expert ends its requests; anything else that it raises ends all."""
        try:
            self._step(batch)
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
        self.failure = loop_died(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        self._refuse_others()

    def _refuse_others(self) -> None:
        """End what the failed forward did not carry, so that another lead takes it."""
        failure = self.failure
        assert failure is not None
        why = failure if isinstance(failure, PolicyError) else NotServing(failure.what, failure.remedy)
        why.__cause__ = failure.__cause__  # an allocation that failed is found there
        for stream in [*(row.stream for batch in self._batches for row in batch.rows), *self._waiting]:
            self.streams.abort(stream.name, "error", str(why), why)
        self._batches, self._waiting = [], []

    def _step(self, batch: Batch) -> None:
        """One forward, and a token for each row."""
        rows, whole = batch.rows, self._anew(batch)
        if whole:
            batch.cache = None
            row, stream = rows[0], rows[0].stream
            row.length, ids = 0, torch.tensor([row.tokens], device=self._model.device)
            if not stream.request.generated and not stream.generated:
                self._expect_prompt(stream)
            self.streams.begin(stream.name)
        else:
            ids = torch.tensor([[row.next] for row in rows], device=self._model.device)
        fed = ids.shape[1]
        if self._watcher is not None:
            self._watcher.begin_forward(
                [SequenceRows(row.stream.name, i * fed, (i + 1) * fed, not whole) for i, row in enumerate(rows)]
            )
        with self._lengths.of([(fed, row.prompt) for row in rows]):
            out = self._model(input_ids=ids, past_key_values=batch.cache, use_cache=True, **self._inputs(rows, fed))
        batch.cache = out.past_key_values
        for row in rows:
            row.length += fed
        self._pick(batch, out.logits[:, -1][None])

    def _anew(self, batch: Batch) -> bool:
        """Whether all tokens of the batch's one request are fed: it begins, or its rotary embeddings are others now."""
        row = batch.rows[0]
        prompt = self._lengths.prompt_of(len(row.stream.request.prompt_ids), len(row.tokens))
        changed, row.prompt = prompt != row.prompt and self._lengths.any, prompt
        return batch.cache is None or changed

    def _expect_prompt(self, stream: Stream) -> None:
        request = stream.request
        length = len(request.prompt_ids)
        wanted = prompt_rows(stream.name, request.prompt_ids, request.scored_prompt, 0, length, 0)
        self._scorer.expect([wanted] if wanted is not None else [])

    def _inputs(self, rows: Sequence[Row], fed: int) -> dict[str, Any]:
        """The mask [B, T], positions [B, fed], and of which rows logits are wanted."""
        device = self._model.device
        lengths = torch.tensor([row.length + fed for row in rows], device=device)[:, None]
        longest = max(row.length for row in rows) + fed
        inputs: dict[str, Any] = {
            "attention_mask": (torch.arange(longest, device=device)[None] >= longest - lengths).long()
        }
        if self._places:
            inputs["position_ids"] = lengths - fed + torch.arange(fed, device=device)[None]
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
        for row, token in zip(batch.rows, tokens, strict=True):
            stream, row.next = row.stream, token
            if (error := failed.pop(stream.name, None)) is not None:
                if self._probing:
                    self._error = error
                cause = error if isinstance(error, TierMoeError) else None
                self.streams.abort(stream.name, "error", f"{type(error).__name__}: {error}", cause)
            elif token in stream.stops or len(stream.generated) + 1 >= stream.request.sampling.max_tokens:
                self.streams.finish(stream.name, (token,))
            else:
                self.streams.deliver(stream.name, (token,))
        self._drop_ended(batch)

    def _drop_ended(self, batch: Batch) -> None:
        kept = [i for i, row in enumerate(batch.rows) if self.streams.is_open(row.stream.name)]
        if len(kept) < len(batch.rows):
            batch.keep(kept)
