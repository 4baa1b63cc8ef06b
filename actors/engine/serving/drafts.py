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

from ...policies.drafts import CountedExperts, DecodeCounts, DraftPricing, NgramIndex, Proposal, StepTime, Verified
from ...policies.routing import SequenceRows
from .head import HeadDrafts
from .scheduler import used_share
from .streams import Stream, Streams

_REPEATS = 8  # tokens
_REST = 3  # steps in which a head is not asked where its drafts promise too little
_MOST_REST = 127  # the same, after it was asked for nothing: 1, 3, 7, ..
_ALL_MEASURED, _MEASURED = 16, 4  # steps without drafts in a row that are all measured; then every so many
_FULL = 0.9  # share of the KV cache in use from which nothing is drafted: rejected rows would take others' room


class NoDrafts:
    """Nothing is drafted."""

    def begin(self) -> None:
        """A step begins."""

    def give(
        self, asked: Sequence[tuple[str, int]], room: int, full: Callable[[], bool] = lambda: False
    ) -> list[list[int]]:
        """The drafts that the step feeds, of each request; there may be none.

        Args:
            asked: requests of the step, by name, and how many drafts each may have.
            room: drafts of all together, at most.
            full: whether rejected rows would take others' room; asked where there might be drafts.
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
        experts: counted before and after a step.
        head: of the model; None: drafts are of the text alone.
        clock: seconds.
    """

    def __init__(
        self, streams: Streams, pricing: DraftPricing, experts: CountedExperts, head: HeadDrafts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._streams, self._pricing, self._experts, self._clock = streams, pricing, experts, clock
        self._head, self._asked_s = head, 0.0  # seconds of the head in the step under way
        self._head_ran = False  # in that step
        self._resting, self._rest = 0, 0  # steps in which the head is not asked: to come, and after the next vain one
        self._texts: dict[str, NgramIndex] = {}  # of each request's prompt and tokens
        self._fed: dict[str, tuple[int, list[int]]] = {}  # of the step under way, by request: match and drafts
        self._windows: tuple[Any, int | None] | None = None  # of the paged cache
        self._undrafted, self._requests = 0, 0  # steps without drafts in a row, of so many requests
        self._begun_s = 0.0  # of the step under way
        self._before: DecodeCounts | None = None  # counts as it began; None: it is not measured

    def begin(self) -> None:
        measured = self._undrafted < _ALL_MEASURED or self._undrafted % _MEASURED == 0
        self._begun_s, self._before = self._clock(), self._experts.decode_counts() if measured else None

    def give(
        self, asked: Sequence[tuple[str, int]], room: int, full: Callable[[], bool] = lambda: False
    ) -> list[list[int]]:
        self._fed, self._head_ran = {}, False
        unread, heads = 0, False
        if self._resting:
            self._resting -= 1
        elif self._head is not None and any(most > 0 for _, most in asked) and not full():
            self._look_at_prices()
            unread = sum(self._head.unread(name) for name, _ in asked)
            heads = self._pricing.promises(len(asked), unread)
            self._resting = 0 if heads or not self._pricing.knows(len(asked)) else _REST
        begun_s = self._clock() if heads else 0.0
        found = [self._proposal(name, most, heads) for name, most in asked]
        self._asked_s = self._clock() - begun_s if self._head_ran else 0.0
        if any(tokens for tokens, _ in found) and not full():
            self._look_at_prices()
            counts = self._pricing.choose([Proposal(len(tokens), match) for tokens, match in found], room)
            for (name, _), (tokens, match), count in zip(asked, found, counts, strict=True):
                if count:
                    self._fed[name] = match, tokens[:count]
        if self._fed and self._before is None:
            self._before = self._experts.decode_counts()  # nothing has run yet
        if self._head_ran:
            self._pricing.asked(self._asked_s, len(asked), unread, bool(self._fed))
            if not self._fed:
                self._rest_longer()
        return [self._fed.get(name, (0, []))[1] for name, _ in asked]

    def _rest_longer(self) -> None:
        """The head was asked for nothing."""
        self._resting = self._rest = min(2 * self._rest + 1, _MOST_REST)

    def _look_at_prices(self) -> None:
        self._pricing.miss_s, self._pricing.absent = self._experts.miss_price()

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
        if not heads:
            return [], 0
        self._head_ran = True
        return self._head.propose(name, [*prompt, *stream.generated], room)

    def choose(self, processor: Any) -> bool:
        scheduler, states = processor.scheduler, list(processor.scheduler.active_requests.values())
        self._fed, self._asked_s = {}, 0.0
        if not scheduler.only_decodes:
            return False
        for state in states:  # those of a step that had no room for it
            del state.tokens_to_process[1:]
        shortest = self._window_of(processor.cache)
        asked = [
            (state.request_id, self._pricing.most if shortest is None else shortest - 1 - state.position_offset)
            for state in states
        ]
        given = self.give(
            asked, processor.max_batch_tokens - len(states), lambda: used_share(processor.cache) > _FULL
        )  # fmt: skip
        for state, drafts in zip(states, given, strict=True):
            state.tokens_to_process += drafts
        return bool(self._fed)

    def _window_of(self, cache: Any) -> int | None:
        """The shortest sliding window of a paged cache; None: it has none."""
        if self._windows is None or self._windows[0] is not cache:
            windows = [getattr(each, "sliding_window", 0) for each in cache.cache_allocators.values()]
            self._windows = cache, min(filter(None, windows), default=None)
        return self._windows[1]

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
        drafted, same = bool(accepted), len(names) == self._requests
        steps = 1 if self._undrafted <= _ALL_MEASURED else _MEASURED  # with those before it
        self._undrafted, self._requests = 0 if drafted or not same else self._undrafted + 1, len(names)
        before = self._before
        if before is None:
            return
        now = self._experts.decode_counts()
        step = StepTime(
            self._clock() - self._begun_s, now.needed - before.needed, now.missed - before.missed,
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
        saved_s = self._pricing.stats.saved_s
        self._pricing.took(step, verified, self._asked_s, 1 if drafted else steps)
        if self._asked_s and accepted:
            if self._pricing.stats.saved_s > saved_s:
                self._rest = 0
            else:
                self._rest_longer()
        if len(self._texts) > len(names):
            for name in [name for name in self._texts if not self._streams.is_open(name)]:
                del self._texts[name]


def _last_of(stream: Stream) -> int:
    """The place of the last token in a request's text."""
    return len(stream.request.prompt_ids) + len(stream.generated) - 1
