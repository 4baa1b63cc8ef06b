"""What all batchers share: their protocol, the table of their requests, how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from ....errors import LoopDied, NotServing, PolicyError, StoreError, TierMoeError
from ...policies.drafts import CountedExperts, DraftPricing
from ...requests import GenerationRequest, SamplingParams
from ...settings import Attention, KvSettings
from ..model.lengths import lengths_of
from .grammar import Grammars
from .head import HeadDrafts
from .logits import processor_of
from .streams import Outbox, SequenceWatcher, Stream, Streams

AGAIN = "send the request again"


class Batcher(Protocol):
    """Runs requests; see `batching.ContinuousBatcher` and `rows.RowBatcher`."""

    streams: Streams
    unpaged_because: str | None  # why the KV cache is not paged; None: it is
    shares: bool  # whether requests share forward passes
    max_requests: int  # under way at once
    attention: Attention | None  # on the paged cache; None: there is none

    @property
    def note(self) -> str | None:
        """How requests run on a cache that is not paged, and why; None: it is paged."""
        ...

    @property
    def replays(self) -> bool:
        """Whether decode steps are recorded and replayed."""
        ...

    def draft(
        self, pricing: DraftPricing, experts: CountedExperts, head: HeadDrafts | None = None
    ) -> str | None:
        """Verify drafts from now on; the reason if that cannot be.

        Args:
            experts: counted before and after a step.
            head: of the model; None: drafts are of the text alone.
        """
        ...

    def submit(self, request: GenerationRequest, events: Outbox | None = None) -> Stream: ...
    def cancel(self, stream: Stream) -> bool: ...
    def close(self) -> None: ...

    @property
    def failure(self) -> TierMoeError | None:
        """Why generation died; None while it lives."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that open requests use."""
        ...


def open_streams(
    model: Any, kv: KvSettings, watcher: SequenceWatcher | None = None, tokenizer: str | None = None
) -> Streams:
    """The table of requests for a model, with its stop tokens, vocabulary and limits.

    Args:
        tokenizer: the text of tokenizer.json, for grammars.
    """
    text = model.config.get_text_config()
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = text.eos_token_id
    positions = lengths_of(model).positions
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ends = [eos] if isinstance(eos, int) else list(eos or [])
    grammars = Grammars(tokenizer, vocabulary, ends)
    return Streams(
        capacity_tokens=kv.request_tokens,
        eos=ends,
        vocabulary=vocabulary,
        positions=positions,
        ended=watcher.end_sequence if watcher is not None else None,
        processor_of=lambda request: processor_of(request, grammars),
    )


def loop_died(error: Exception) -> TierMoeError:
    """What ends requests with the loop: a missing expert or a policy's failure as it is, else the loop's death."""
    if isinstance(error, PolicyError | StoreError):
        return error
    failure = LoopDied(f"the generation loop died ({type(error).__name__}: {error})", AGAIN)
    failure.__cause__ = error  # an allocation that failed is found there
    return failure


def probed(batcher: Batcher, beside: Sequence[tuple[int, ...]] = ()) -> str | None:
    """Run a short request as any other, and others of these prompts beside it.

    Returns:
        The first error; None: the tokens of all came.

    Raises:
        As `Batcher.submit`, for the first.
    """
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    streams = [batcher.submit(GenerationRequest("probe", (0, 0, 0), sampling))]
    with suppress(NotServing):  # the first has failed by now
        for i, prompt in enumerate(beside, start=1):
            streams.append(batcher.submit(GenerationRequest(f"probe {i}", prompt, sampling)))
    return next((error for stream in streams if (error := list(stream)[-1].error) is not None), None)
