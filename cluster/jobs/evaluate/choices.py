"""Four-way multiple choice: which of four texts goes on where a held-out passage stops?

One is the true continuation, three are taken from passages of the same kind and other documents. All four have the
same number of tokens and begin where a line begins, so neither length nor a word cut in half gives the answer away.
Everything is drawn by hashes of names: the same text and tokenizer give the same set on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....errors import CheckpointError
from .text import HeldOut, Passage
from .windows import spread

CONTEXT, TOKENS = 128, 16  # tokens before the choice, and of each choice
PER_PASSAGE = 3
WAYS = 4


@dataclass(frozen=True)
class Place:
    """A token position in a passage."""

    passage: str
    start: int


@dataclass(frozen=True)
class Item:
    """The context ends at `true`; `wrong` are three other places, and `answer` is where `true` stands among them."""

    true: Place
    wrong: tuple[Place, ...]
    answer: int

    @property
    def candidates(self) -> tuple[Place, ...]:
        return (*self.wrong[: self.answer], self.true, *self.wrong[self.answer :])


@dataclass(frozen=True)
class ChoiceTokens:
    """An item in tokens. document: index of the true passage's document."""

    document: int
    context: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    answer: int


def build_choices(heldout: HeldOut) -> list[Item]:
    """At most `PER_PASSAGE` items of each passage, in the passages' order.

    Raises:
        CheckpointError: no kind has passages of four documents that are long enough.
    """
    passages = heldout.passages
    head = CONTEXT - len(heldout.leading)
    begins = {passage.id: line_starts(passage) for passage in passages}
    items = []
    for passage in passages:
        others = [p for p in passages if p.kind == passage.kind and p.source != passage.source and begins[p.id]]
        for start in spread([s for s in begins[passage.id] if s >= head], PER_PASSAGE):
            wrong = _distractors(passage, start, others, begins)
            if len(wrong) == WAYS - 1:
                items.append(Item(Place(passage.id, start), wrong, _draw(f"{passage.id}/{start}") % WAYS))
    if not items:
        raise CheckpointError(
            "the held-out text gives no multiple choice: it takes passages of four documents of one kind, one of "
            f"them with a line that starts after {head} tokens",
            "add held-out text",
        )
    return items


def as_tokens(items: Sequence[Item], heldout: HeldOut, documents: int | None, per_document: int) -> list[ChoiceTokens]:
    """The items of the first `documents` documents, at most `per_document` of each, spread over it.

    Raises:
        CheckpointError: they have none.
    """
    by_id = {passage.id: passage for passage in heldout.passages}
    out = []
    for index, passages in enumerate(heldout.documents[:documents]):
        mine = {passage.id for passage in passages}
        for item in spread([item for item in items if item.true.passage in mine], per_document):
            text = by_id[item.true.passage].ids[: item.true.start]
            context = (*heldout.leading, *text[len(text) - CONTEXT + len(heldout.leading) :])
            candidates = tuple(by_id[p.passage].ids[p.start : p.start + TOKENS] for p in item.candidates)
            out.append(ChoiceTokens(index, context, candidates, item.answer))
    if not out:
        raise CheckpointError("the chosen documents have no multiple-choice item", "raise --documents")
    return out


def line_starts(passage: Passage) -> list[int]:
    """Tokens that begin a line, with `TOKENS` tokens from there on."""
    ends = [end for _, end in passage.spans]
    last = len(passage.ids) - TOKENS
    return [k for k in range(1, last + 1) if passage.text[ends[k - 1] - 1 : ends[k - 1]] == "\n"]


def _distractors(
    passage: Passage, start: int, others: Sequence[Passage], begins: Mapping[str, list[int]]
) -> tuple[Place, ...]:
    """Three places of three documents, each with other tokens than the rest; fewer where there are none."""
    name = f"{passage.id}/{start}"
    sources, texts, places = {passage.source}, {passage.ids[start : start + TOKENS]}, list[Place]()
    for other in sorted(others, key=lambda p: _draw(f"{name}/{p.id}")):
        starts = begins[other.id]
        begin = starts[_draw(f"{name}/{other.id}/start") % len(starts)]
        tokens = other.ids[begin : begin + TOKENS]
        if len(places) < WAYS - 1 and other.source not in sources and tokens not in texts:
            places.append(Place(other.id, begin))
            sources.add(other.source)
            texts.add(tokens)
    return tuple(places)


def _draw(name: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
