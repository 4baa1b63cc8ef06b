"""Continuous batching on a model's own cache, for what a paged cache does not hold: running states, convolutions,
latent attention, an index that chooses keys.

    resume   a request's prompt goes on from the longest checkpoint that it begins with (`states`)
    prompt   the rest runs alone, in chunks, between steps of the others
    join     its cache becomes a row of the others': keys and values are padded on the left, states are stacked
    step     the next token of every row, in one forward
    leave    rows of requests that ended go, with the padding that only they needed

A step may verify drafts (`drafts`): rows then get several tokens, as many each as the one with the most drafts, and the
cache gives those back that are not accepted (`rewinding`).

The mask and the positions of each row are those of its own tokens, as in a batch of `generate` padded on the left;
parts of a model that padding would shift run row by row (`block_index`, `compressed_keys`). A model whose cache has
layers of a kind that nobody knows keeps a cache for each request, and they take turns. Some models forget the past
when they are fed several tokens; a short prompt at the start shows it, and then prompts run whole and nothing is kept
of them.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ....errors import NotServing, PolicyError, StoreError, TierMoeError, UnsupportedModelError
from ...policies.drafts import CountedExperts, DraftPricing
from ...policies.routing import SequenceRows
from ...requests import GenerationRequest
from ...settings import Attention, KvSettings
from ..model.block_index import align_blocks
from ..model.compressed_keys import compress_apart
from ..model.lengths import lengths_of
from .batcher import loop_died, open_streams, probed
from .drafts import Drafter, NoDrafts
from .head import HeadDrafts
from .rewinding import Rewinding, rewinds
from .sampling import PromptScorer, prompt_rows, verified_tokens
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
        align_blocks(model)
        compress_apart(model)
        self.max_requests = 1 if kv.batching == "serial" or self._lengths.any else kv.max_num_seqs
        self.shares = self.max_requests > 1
        self.divides = kv.batching != "serial" and not self._lengths.any
        self.checkpoints = Checkpoints(kv.checkpoint_bytes if self.divides else 0, kv.page_size)
        self._tokens, self._page = kv.num_blocks * kv.page_size, kv.page_size
        self._chunk, self._chunk_beside = kv.max_batch_tokens, kv.prefill_chunk
        self._failed: dict[str, BaseException] = {}  # streams that fail in the step under way, and why
        self._scorer = PromptScorer(model, self.streams.note_prompt)
        self._scorer.failed = self._failed.__setitem__
        self._drafts: NoDrafts = NoDrafts()
        self._rewinding = Rewinding(model)
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

    @torch.no_grad()
    def draft(
        self, pricing: DraftPricing, experts: CountedExperts, head: HeadDrafts | None = None
    ) -> str | None:
        """Verify drafts from now on, while no request runs; the reason if that cannot be."""
        if self._lengths.any:
            return "its positions depend on the length of the text"
        if not self._rewinds():
            return "its cache does not give the rows of rejected tokens back"
        self._drafts = Drafter(self.streams, pricing, experts, head)
        return None

    def _rewinds(self) -> bool:
        """Whether a forward over drafts, one of them rejected, leaves the cache as it was without that one."""
        ids = torch.arange(_TRIED, device=self._model.device)[None] % self.streams.vocabulary
        name, logits = "probe#drafts", list[torch.Tensor]()

        def feed(first: int, last: int, cache: Any) -> Any:
            return self._feed([name], ids[:, first:last], [first], [_TRIED], cache, first > 0, last - first)

        plain, cache = (feed(0, _CUT, None).past_key_values for _ in range(2))
        if not rewinds(plain):
            return False
        for token in range(_CUT, _TRIED - 1):
            out = self._rewinding.learn(plain, partial(feed, token, token + 1, plain))
            logits.append(out.logits[0, -1])
        if not self._rewinding.takes(plain):
            return False
        ids[:, _TRIED - 1] = ids[:, 0]  # rejected
        with self._rewinding.recording(cache):
            out = feed(_CUT, _TRIED, cache)
        self._rewinding.rewind(cache, [2], _TRIED - 2)
        found = [*out.logits[0, -4:-2], feed(_TRIED - 2, _TRIED - 1, cache).logits[0, -1]]
        if self._watcher is not None:
            self._watcher.end_sequence(name)
        return all(
            bool((one.float() - own.float()).abs().max() <= _MOST_OFF * own.float().std())
            for one, own in zip(found, logits, strict=True)
        )

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
        """One forward, and the next tokens of each row, unless it carries a prompt that goes on."""
        rows, prompt = batch.rows, batch is self._prompt
        if not prompt:
            self._drafts.begin()
        tokens = self._fed(batch)
        first, decodes = rows[0], not prompt and rows[0].length > 0
        drafts = self._drafts_of(batch) if decodes else [list[int]() for _ in rows]
        most = max(map(len, drafts))
        if most:  # rows with fewer feed their last token again, whose experts are at hand
            tokens = [[*own, *more, *own * (most - len(more))] for own, more in zip(tokens, drafts, strict=True)]
        fed = len(tokens[0])
        ids = torch.tensor(tokens, device=self._model.device)
        if prompt:
            self._expect_prompt(first, fed)
        names, lengths = [row.stream.name for row in rows], [row.length for row in rows]
        with self._rewinding.recording(batch.cache) if most else nullcontext():
            out = self._feed(names, ids, lengths, [row.prompt for row in rows], batch.cache, decodes, most + 1)
        batch.cache = out.past_key_values
        for row in rows:
            row.length += fed
        ran = not prompt or first.length == first.total
        if prompt and (ran or first.length == first.border):
            self._keep(batch, 0)
        if ran:
            batch.ready = True
            self._pick(batch, out.logits[:, -most - 1 :], drafts)
            if decodes:
                self._drafts.took(names, drafts if most else [])

    def _drafts_of(self, batch: Batch) -> list[list[int]]:
        """Drafts of each row that pay, as far as the cache has room for as many of every row."""
        held = self._prompt.rows[0].total + 1 if self._prompt is not None else 0
        room = self._tokens - held - sum(each.takes(1) for each in self._batches)
        each = max(0, room // len(batch.rows))
        return self._drafts.give([(row.stream.name, each) for row in batch.rows], self._chunk - len(batch.rows))

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
        decode: bool, wanted: int = 1,
    ) -> Any:  # fmt: skip
        """One forward: tokens [B, fed] of these sequences, of which the cache has `lengths`.

        wanted: the last tokens of each that logits are wanted of; there may be more.
        """
        fed = ids.shape[1]
        carried = [SequenceRows(name, i * fed, (i + 1) * fed, decode) for i, name in enumerate(names)]
        if self._watcher is not None:
            self._watcher.begin_forward(carried)
        self._drafts.carries(carried, lengths)
        with self._lengths.of([(fed, prompt) for prompt in prompts]):
            inputs = self._inputs(lengths, fed, wanted)
            return self._model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)

    def _expect_prompt(self, row: Row, fed: int) -> None:
        """The log-probabilities that the next rows of a prompt are to give."""
        request, wanted = row.stream.request, None
        if not row.stream.generated:
            wanted = prompt_rows(row.stream.name, request.prompt_ids, request.scored_prompt, 0, fed, row.length)
        self._scorer.expect([wanted] if wanted is not None else [])

    def _inputs(self, lengths: Sequence[int], fed: int, wanted: int) -> dict[str, Any]:
        """The mask [B, T], positions [B, fed], and of how many tokens logits are wanted."""
        device = self._model.device
        totals = torch.tensor(lengths, device=device)[:, None] + fed
        longest = max(lengths) + fed
        inputs: dict[str, Any] = {
            "attention_mask": (torch.arange(longest, device=device)[None] >= longest - totals).long()
        }
        if self._places:
            inputs["position_ids"] = totals - fed + torch.arange(fed, device=device)[None]
        if self._keeps:
            inputs["logits_to_keep"] = wanted
        return inputs

    def _pick(self, batch: Batch, logits: torch.Tensor, drafts: list[list[int]]) -> None:
        """The next tokens of each row; a row that gets none fails alone.

        Args:
            logits: [B, tokens, V], of each row's last token and of its drafts.
            drafts: of each row; afterwards those that were accepted.
        """
        failed, fed = self._failed, logits.shape[1] - 1

        def fails(row: int, error: BaseException) -> None:
            failed[batch.rows[row].stream.name] = error

        rows = torch.cat([logits[i, : len(own) + 1] for i, own in enumerate(drafts)])[None]
        streams = [self.streams.get(row.stream.name) for row in batch.rows]
        tokens, accepted = verified_tokens(rows, streams, drafts, self.streams.eos, self.streams.note, fails)
        drafts[:] = [own[:count] for own, count in zip(drafts, accepted, strict=True)]
        if fed:
            for row, count in zip(batch.rows, accepted, strict=True):
                row.length -= fed - count
            longest = max(row.length for row in batch.rows)
            self._rewinding.rewind(batch.cache, [fed - count for count in accepted], longest)
        for i, (row, before, token) in enumerate(zip(batch.rows, drafts, tokens, strict=True)):
            stream = row.stream
            if (error := failed.pop(stream.name, None)) is not None:
                if self._probing:
                    self._error = error
                cause = error if isinstance(error, TierMoeError) else None
                self.streams.abort(stream.name, "error", f"{type(error).__name__}: {error}", cause)
                continue
            made = len(stream.generated) + len(before) + 1
            if token in stream.stops or made >= stream.request.sampling.max_tokens:
                if before:
                    self.streams.deliver(stream.name, before)
                self._keep(batch, i)
                self.streams.finish(stream.name, (token,))
            else:
                self.streams.deliver(stream.name, (*before, token))
        self._drop_ended(batch)

    def _drop_ended(self, batch: Batch) -> None:
        kept = [i for i, row in enumerate(batch.rows) if self.streams.is_open(row.stream.name)]
        if len(kept) < len(batch.rows):
            batch.keep(kept)
