"""Drafted tokens in the batched loop: where they come from, when they may be fed, and what a step with them took.

They are tokens that followed the text's last ones before, or those of the model's own head (`head`), which is asked
where the text does not repeat itself over `_REPEATS` tokens and drafts may pay.

A request's drafts are rows behind that of its last token, in the same forward. `sampling.verified_tokens` accepts them
in order; the first that is another token than the request's own is rejected, with all behind it. The paged KV cache
writes over the rows of rejected drafts; a model's own cache is rewound (`rewinding`). A window of sliding attention in
the paged cache is a ring whose old keys rejected rows would take, so a request is drafted there only while its text,
with the drafts, is shorter than the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ...policies.drafts import DecodeCounts, DraftPricing, NgramIndex, Proposal, StepTime, Verified
from ...policies.routing import SequenceRows
from .head import HeadDrafts
from .scheduler import used_share
from .streams import Stream, Streams

_REPEATS = 8  # tokens
_FULL = 0.9  # share of the KV cache in use from which nothing is drafted: rejected rows would take others' room


class NoDrafts:
    """Nothing is drafted."""

    def begin(self) -> None:
        """A step begins."""

    def give(self, asked: Sequence[tuple[str, int]], room: int) -> list[list[int]]:
        """The drafts that the step feeds, of each request; there may be none.

        Args:
            asked: requests of the step, by name, and how many drafts each may have.
            room: drafts of all together, at most.
        """
        return [[] for _ in asked]

    def choose(self, processor: Any) -> bool:
        """Give the requests of a paged cache drafts that pay; whether there are any."""
        return False

    def of(self, requests: Sequence[Any]) -> list[list[int]]:
        """The drafts that the step feeds, of each request of a paged cache that gets a token."""
        return []

    def carries(self, rows: Sequence[SequenceRows], places: Sequence[int]) -> None:
        """The next forward carries these rows; places: in its text, of the first of each request."""

    def took(self, names: Sequence[str], accepted: Sequence[Sequence[int]]) -> None:
        """A step that only decodes ended. accepted: drafts of each of its requests; empty: none had any."""


class Drafter(NoDrafts):
    """Drafts, priced (`policies.drafts`).

    Args:
        streams: the requests.
        pricing: decides.
        counts: of the experts, now.
        head: of the model; None: drafts are of the text alone.
        clock: seconds.
    """

    def __init__(
        self, streams: Streams, pricing: DraftPricing, counts: Callable[[], DecodeCounts],
        head: HeadDrafts | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._streams, self._pricing, self._counts, self._clock = streams, pricing, counts, clock
        self._head, self._asked_s = head, 0.0  # seconds of the head in the step under way
        self._texts: dict[str, NgramIndex] = {}  # of each request's prompt and tokens
        self._fed: dict[str, tuple[int, list[int]]] = {}  # of the step under way, by request: match and drafts
        self._begun = 0.0, counts()

    def begin(self) -> None:
        self._begun = self._clock(), self._counts()

    def give(self, asked: Sequence[tuple[str, int]], room: int) -> list[list[int]]:
        self._fed = {}
        unread = 0 if self._head is None else sum(self._head.unread(name) for name, _ in asked)
        heads = self._head is not None and self._pricing.promises(len(asked), unread)
        begun_s = self._clock()
        found = [self._proposal(name, most, heads) for name, most in asked]
        self._asked_s = self._clock() - begun_s if heads else 0.0
        if any(tokens for tokens, _ in found):
            self._pricing.miss_s, self._pricing.absent = self._begun[1].miss_s, self._begun[1].absent
            counts = self._pricing.choose([Proposal(len(tokens), match) for tokens, match in found], room)
            for (name, _), (tokens, match), count in zip(asked, found, counts, strict=True):
                if count:
                    self._fed[name] = match, tokens[:count]
        if heads:
            self._pricing.asked(self._asked_s, len(asked), unread, bool(self._fed))
        return [self._fed.get(name, (0, []))[1] for name, _ in asked]

    def _proposal(self, name: str, room: int, heads: bool) -> tuple[list[int], int]:
        """Tokens that may follow a request's last one, and the length of the match. heads: ask the head, too."""
        stream = self._streams.get(name)
        if stream is None:
            return [], 0
        room = min(room, self._pricing.most, stream.request.sampling.max_tokens - len(stream.generated) - 1)
        if room <= 0:
            return [], 0
        text = self._texts.setdefault(name, NgramIndex())
        prompt = stream.request.prompt_ids
        if not len(text):
            text.extend(prompt)
        text.extend(stream.generated[len(text) - len(prompt) :])
        tokens, match = text.propose(room)
        if self._head is None or match >= _REPEATS:
            return tokens, match
        return self._head.propose(name, [*prompt, *stream.generated], room) if heads else ([], 0)

    def choose(self, processor: Any) -> bool:
        scheduler, states = processor.scheduler, list(processor.scheduler.active_requests.values())
        self._fed, self._asked_s = {}, 0.0
        if not scheduler.only_decodes:
            return False
        for state in states:  # those of a step that had no room for it
            del state.tokens_to_process[1:]
        if used_share(processor.cache) > _FULL:
            return False
        windows = [getattr(each, "sliding_window", 0) for each in processor.cache.cache_allocators.values()]
        shortest = min(filter(None, windows), default=None)
        asked = [
            (state.request_id, self._pricing.most if shortest is None else shortest - 1 - state.position_offset)
            for state in states
        ]
        for state, drafts in zip(states, self.give(asked, processor.max_batch_tokens - len(states)), strict=True):
            state.tokens_to_process += drafts
        return bool(self._fed)

    def of(self, requests: Sequence[Any]) -> list[list[int]]:
        found = []
        for request in requests:
            _, tokens = self._fed.get(request.state.request_id, (0, []))
            fed = request.query_length == 1 + len(tokens) and request.state.generated_tokens
            if request.has_new_token:
                found.append(tokens if fed else [])  # one that is fed again from its begin has none
        return found

    def carries(self, rows: Sequence[SequenceRows], places: Sequence[int]) -> None:
        if self._head is None:
            return
        held = [self._streams.get(row.name) for row in rows]
        self._head.keep(self._streams.is_open)
        self._head.carries(
            rows,
            [
                place if stream is None or not row.decode else _last_of(stream)
                for row, stream, place in zip(rows, held, places, strict=True)
            ],
        )

    def took(self, names: Sequence[str], accepted: Sequence[Sequence[int]]) -> None:
        (begun_s, before), now = self._begun, self._counts()
        step = StepTime(
            self._clock() - begun_s, now.needed - before.needed, now.missed - before.missed,
            now.waited_s - before.waited_s,
        )  # fmt: skip
        if step.needed <= 0:  # the counters were reset meanwhile
            return
        if not accepted:
            verified = [Verified(0, 0, 0)] * len(names)
        else:
            fed = [self._fed.get(name, (0, [])) for name in names]
            verified = [
                Verified(match, len(tokens), len(right)) for (match, tokens), right in zip(fed, accepted, strict=True)
            ]
        if not accepted and self._asked_s:  # for nothing
            step = step._replace(seconds=max(step.seconds - self._asked_s, step.waited_s))
        self._pricing.took(step, verified, self._asked_s)
        for name in [name for name in self._texts if not self._streams.is_open(name)]:
            del self._texts[name]


def _last_of(stream: Stream) -> int:
    """The place of the last token in a request's text."""
    return len(stream.request.prompt_ids) + len(stream.generated) - 1
