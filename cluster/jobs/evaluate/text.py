"""The held-out text of a model folder or a user's own, and what is scored: windows, and four-way multiple choice.

A window is a prefix that is prefilled and a continuation that is scored. A multiple-choice item asks which of four
texts continues a passage: the true continuation, or one of three from passages of the same kind and other documents.
All four have the same number of tokens and begin at a line's start, so neither length nor a split word gives the answer
away. All draws are hashes of names, so the same text and tokenizer give the same set everywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from ....errors import CheckpointError, ConfigError, reason
from ...checkpoints.weight_files import CONFIG
from ...host import shown
from ...prompt import check_vocabulary, load_model_config, load_tokenizer
from .quality import EvaluationOptions

_REMEDY = "use the default model, give text with --text, or add heldout/KIND.jsonl with a text field on each line"
_OWN_REMEDY = "give a UTF-8 text file, or JSON lines (.jsonl) with a text field on each line"
_OWN_WINDOWS = 64  # of a user's own text in all, unless a number for each text is given


@dataclass(frozen=True)
class Passage:
    """A part of the held-out document `source`, in tokens without special ones.

    ids, spans: each token and its characters [begin, end) in `text`.
    """

    id: str
    kind: str
    source: str
    text: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def nbytes(self, start: int, stop: int) -> int:
        """UTF-8 bytes of tokens [start, stop) of the text; a character split between tokens counts for the first."""
        begin = self.spans[start - 1][1] if start else 0
        return len(self.text[begin : self.spans[stop - 1][1]].encode())


@dataclass(frozen=True)
class HeldOut:
    """All held-out text of a model.

    documents: the passages of each document, kinds in turn. leading: special tokens before a text. own: the user's
    file; None: the model's text.
    """

    documents: tuple[tuple[Passage, ...], ...]
    leading: tuple[int, ...]
    own: Path | None = None

    @property
    def passages(self) -> tuple[Passage, ...]:
        return tuple(itertools.chain.from_iterable(self.documents))


def load_heldout(model_dir: Path) -> HeldOut:
    """Read `heldout/*.jsonl` of a model folder; each line has `text`, and optionally `id`, `kind` and `source`.

    Raises:
        CheckpointError: there is no such text, or it cannot be read.
    """
    tokenizer = load_tokenizer(model_dir)
    kinds: dict[str, dict[str, list[Passage]]] = {}
    seen: set[str] = set()
    for path in sorted((model_dir / "heldout").glob("*.jsonl")):
        for number, line in enumerate(_lines(path)):
            passage = _passage(path, number, line, tokenizer)
            if passage.id in seen:
                raise CheckpointError(f"two held-out passages have the id '{passage.id}'", "give each its own")
            seen.add(passage.id)
            kinds.setdefault(passage.kind, {}).setdefault(passage.source, []).append(passage)
    if not kinds:
        raise CheckpointError(f"'{shown(model_dir)}' has no held-out passages", _REMEDY)
    queues = [[tuple(passages) for passages in sources.values()] for sources in kinds.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    documents = tuple(document for document in turns if document is not None)
    return _checked(HeldOut(documents, _leading(tokenizer)), model_dir)


def load_text(model_dir: Path, file: Path) -> HeldOut:
    """A user's text in tokens of a model: a file is one document; of a `.jsonl` file each line's `text` is one.

    Raises:
        ConfigError: the file cannot be read, or has no text. CheckpointError: the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(model_dir)
    try:
        content = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"text '{file}' cannot be read: {error.strerror}", _OWN_REMEDY) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{file}' is not UTF-8 text (byte {error.start})", _OWN_REMEDY) from error
    if "\0" in content:
        raise ConfigError(f"'{file}' is not text: it holds NUL characters", _OWN_REMEDY)
    lines = content.split("\n") if file.suffix == ".jsonl" else [json.dumps({"text": content})]
    try:
        passages = [_passage(file, n, line, tokenizer) for n, line in enumerate(lines) if line.strip()]
    except CheckpointError as error:
        raise ConfigError(error.what, _OWN_REMEDY) from error
    passages = [passage for passage in passages if passage.text.strip()]
    if not passages:
        raise ConfigError(f"'{file}' has no text", _OWN_REMEDY)
    return _checked(HeldOut(tuple((passage,) for passage in passages), _leading(tokenizer), file), model_dir)


def _checked(heldout: HeldOut, model_dir: Path) -> HeldOut:
    """Raises CheckpointError: the tokenizer has tokens that the model does not have, and the text uses one."""
    if (model_dir / CONFIG).is_file():
        used = itertools.chain(heldout.leading, *(passage.ids for passage in heldout.passages))
        check_vocabulary(used, load_model_config(model_dir), model_dir)
    return heldout


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {reason(error)}", _REMEDY) from error


def _passage(path: Path, number: int, line: str, tokenizer: Tokenizer) -> Passage:
    try:
        record = json.loads(line)
        text = record["text"]
        encoding = tokenizer.encode(text, add_special_tokens=False)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"'{path}' line {number + 1} is not an object with a text", _REMEDY) from error
    name = str(record.get("id", f"{path.stem}-{number:03d}"))
    kind, source = str(record.get("kind", path.stem)), str(record.get("source", name))
    return Passage(name, kind, source, text, tuple(encoding.ids), tuple(encoding.offsets))


def _leading(tokenizer: Tokenizer) -> tuple[int, ...]:
    encoding = tokenizer.encode("a")
    specials: Sequence[int] = encoding.special_tokens_mask
    return tuple(encoding.ids[: specials.index(0)] if 0 in specials else ())


_T = TypeVar("_T")


@dataclass(frozen=True)
class Window:
    """Tokens of one passage of document number `document`; `nbytes` counts the UTF-8 bytes of the scored ones."""

    document: int
    passage: str
    ids: tuple[int, ...]
    nbytes: int



def split_windows(heldout: HeldOut, options: EvaluationOptions) -> list[Window]:
    """At most `options.windows` of each document, evenly spread; continuations do not overlap.

    None: 1; of one's own text `_OWN_WINDOWS` in all, and one of each text at least.

    The tokenizer's leading special tokens are part of every prefix.

    Raises:
        ConfigError: the prefix has no room for them, or no own text is long enough. CheckpointError: no passage is.
    """
    lead = heldout.leading
    if len(lead) >= options.prefix:
        raise ConfigError(f"a prefix of {options.prefix} tokens holds only special ones", "raise --prefix")
    head = options.prefix - len(lead)  # tokens of text in the prefix
    windows, documents = [], heldout.documents[: options.documents]
    most = options.windows or (1 if heldout.own is None else max(1, _OWN_WINDOWS // len(documents)))
    for index, passages in enumerate(documents):
        positions = [
            (passage, start)
            for passage in passages
            for start in range(0, len(passage.ids) - head - options.continuation + 1, options.continuation)
        ]
        for passage, start in spread(positions, most):
            middle, stop = start + head, start + head + options.continuation
            nbytes = passage.nbytes(middle, stop)
            windows.append(Window(index, passage.id, (*lead, *passage.ids[start:stop]), nbytes))
    if not windows:
        asked = options.prefix + options.continuation
        if heldout.own is not None:
            longest = max(len(passage.ids) for passage in heldout.passages) + len(lead)
            what = f"the longest text of '{heldout.own}' has {longest} tokens, and a window takes {asked}"
            raise ConfigError(what, "give longer text, or lower --prefix and --continuation")
        raise CheckpointError(f"no held-out passage has {asked} tokens", "lower --prefix or --continuation")
    return windows


def spread(candidates: Sequence[_T], count: int) -> list[_T]:
    """At most `count` of the candidates, evenly spaced."""
    total = len(candidates)
    count = min(count, total)
    return [candidates[(2 * i + 1) * total // (2 * count)] for i in range(count)]


CONTEXT, TOKENS = 128, 16  # tokens before the choice, and of each choice
PER_PASSAGE = 3
WAYS = 4


@dataclass(frozen=True)
class Position:
    """A token position in a passage."""

    passage: str
    start: int


@dataclass(frozen=True)
class Item:
    """The context ends at `true`; `wrong` are three others, and `answer` is the index of `true` in all four."""

    true: Position
    wrong: tuple[Position, ...]
    answer: int

    @property
    def candidates(self) -> tuple[Position, ...]:
        return (*self.wrong[: self.answer], self.true, *self.wrong[self.answer :])


@dataclass(frozen=True)
class ChoiceTokens:
    """An item in tokens. document: number of the true passage's document."""

    document: int
    context: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    answer: int


def build_choices(heldout: HeldOut) -> list[Item]:
    """At most `PER_PASSAGE` items of each passage, in order.

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
                items.append(Item(Position(passage.id, start), wrong, _draw(f"{passage.id}/{start}") % WAYS))
    if not items:
        raise CheckpointError(
            "the held-out text gives no multiple choice: it takes passages of four documents of one kind, one of "
            f"them with a line that starts after {head} tokens",
            "add held-out text",
        )
    return items


def as_tokens(items: Sequence[Item], heldout: HeldOut, documents: int | None, per_document: int) -> list[ChoiceTokens]:
    """The items of the first `documents` documents, at most `per_document` of each, evenly spread.

    Raises:
        CheckpointError: there are none.
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
    """Tokens at the start of a line that are followed by `TOKENS - 1` more."""
    ends = [end for _, end in passage.spans]
    last = len(passage.ids) - TOKENS
    return [k for k in range(1, last + 1) if passage.text[ends[k - 1] - 1 : ends[k - 1]] == "\n"]


def _distractors(
    passage: Passage, start: int, others: Sequence[Passage], begins: Mapping[str, list[int]]
) -> tuple[Position, ...]:
    """Up to three positions of different documents, all with different tokens."""
    name = f"{passage.id}/{start}"
    sources, texts, positions = {passage.source}, {passage.ids[start : start + TOKENS]}, list[Position]()
    for other in sorted(others, key=lambda p: _draw(f"{name}/{p.id}")):
        starts = begins[other.id]
        begin = starts[_draw(f"{name}/{other.id}/start") % len(starts)]
        tokens = other.ids[begin : begin + TOKENS]
        if len(positions) < WAYS - 1 and other.source not in sources and tokens not in texts:
            positions.append(Position(other.id, begin))
            sources.add(other.source)
            texts.add(tokens)
    return tuple(positions)


def _draw(name: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
