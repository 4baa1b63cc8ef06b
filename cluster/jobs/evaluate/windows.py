"""Windows of held-out text: a prefix that is prefilled, and a continuation that is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ....errors import CheckpointError, ConfigError
from .options import EvaluationOptions
from .text import HeldOut, Passage

_T = TypeVar("_T")


@dataclass(frozen=True)
class Window:
    """Tokens of one passage; `nbytes` counts the UTF-8 bytes of the scored ones. `document` is an index."""

    document: int
    passage: str
    ids: tuple[int, ...]
    nbytes: int


def chosen_documents(heldout: HeldOut, options: EvaluationOptions) -> tuple[tuple[Passage, ...], ...]:
    """The first `options.documents`; their order takes the kinds in turn."""
    return heldout.documents[: options.documents]


def cut_windows(heldout: HeldOut, options: EvaluationOptions) -> list[Window]:
    """At most `options.windows` of each document, spread over it; continuations do not overlap.

    Special tokens that the tokenizer puts before a text stand first in every window and count as prefix.

    Raises:
        ConfigError: the prefix has no room for them. CheckpointError: no passage is long enough.
    """
    lead = heldout.leading
    if len(lead) >= options.prefix:
        raise ConfigError(f"a prefix of {options.prefix} tokens holds only special ones", "raise --prefix")
    head = options.prefix - len(lead)  # tokens of text in the prefix
    windows = []
    for index, passages in enumerate(chosen_documents(heldout, options)):
        places = [
            (passage, start)
            for passage in passages
            for start in range(0, len(passage.ids) - head - options.continuation + 1, options.continuation)
        ]
        for passage, start in spread(places, options.windows):
            middle, stop = start + head, start + head + options.continuation
            nbytes = passage.nbytes(middle, stop)
            windows.append(Window(index, passage.id, (*lead, *passage.ids[start:stop]), nbytes))
    if not windows:
        asked = options.prefix + options.continuation
        raise CheckpointError(f"no held-out passage has {asked} tokens", "lower --prefix or --continuation")
    return windows


def spread(candidates: Sequence[_T], count: int) -> list[_T]:
    """At most `count` of them, evenly from beginning to end."""
    total = len(candidates)
    count = min(count, total)
    return [candidates[(2 * i + 1) * total // (2 * count)] for i in range(count)]
