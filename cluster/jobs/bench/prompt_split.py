"""Held-out prompts, split 7:3 by document: those that are learnt from and those that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from ....errors import CheckpointError
from ..evaluate.text import HeldOut, Passage, load_heldout

Prompt = tuple[int, ...]
_MEASURED = frozenset({2, 5, 8})  # of ten documents, spread so that all kinds of text are on both sides
LEARNED_SHARE = 0.7


@dataclass(frozen=True)
class Split:
    """Prompts of documents that are learnt from, and of others. No document is on both sides."""

    learn: tuple[Prompt, ...]
    measure: tuple[Prompt, ...]

    def first(self, prompts: int) -> Split:
        """The first so many, 70% of them to learn from.

        Raises:
            CheckpointError: there are not as many.
        """
        learn = round(LEARNED_SHARE * prompts)
        return self.take(learn, prompts - learn)

    def take(self, learn: int, measure: int) -> Split:
        """The first so many of each side.

        Raises:
            CheckpointError: there are not as many.
        """
        if len(self.learn) < learn or len(self.measure) < measure:
            there = f"{len(self.learn)} and {len(self.measure)}"
            what = f"the held-out text gives {there} prompts, not {learn} and {measure}"
            raise CheckpointError(what, "ask for fewer prompts, or use the default model")
        return Split(self.learn[:learn], self.measure[:measure])


def split_prompts(model_dir: Path, tokens: int) -> Split:
    """The first `tokens` tokens of every held-out passage that has them, documents in turn.

    Raises:
        CheckpointError: there is no held-out text.
    """
    heldout = load_heldout(model_dir)
    sides = [
        [document for i, document in enumerate(heldout.documents) if (i % 10 in _MEASURED) == measured]
        for measured in (False, True)
    ]
    learn, measure = (_prompts(heldout, documents, tokens) for documents in sides)
    return Split(learn, measure)


def _prompts(heldout: HeldOut, documents: list[tuple[Passage, ...]], tokens: int) -> tuple[Prompt, ...]:
    passages = chain.from_iterable(zip_longest(*documents))
    head = tokens - len(heldout.leading)
    return tuple(
        (*heldout.leading, *passage.ids[:head])
        for passage in passages
        if passage is not None and len(passage.ids) >= head
    )
