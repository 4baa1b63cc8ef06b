"""The held-out text of a model folder: documents, their passages, and their tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ....errors import CheckpointError
from ...prompt import load_tokenizer

_REMEDY = "use the default model, or add heldout/KIND.jsonl with a text field on each line"


@dataclass(frozen=True)
class Passage:
    """A piece of a held-out document, in tokens without special ones.

    ids, spans: each token and its characters [begin, end) in `text`. source: the document that it is a piece of.
    """

    id: str
    kind: str
    source: str
    text: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def nbytes(self, start: int, stop: int) -> int:
        """UTF-8 bytes of the text behind tokens [start, stop), from where the token before them ends.

        A character whose bytes are cut in two counts for the first part.
        """
        begin = self.spans[start - 1][1] if start else 0
        return len(self.text[begin : self.spans[stop - 1][1]].encode())


@dataclass(frozen=True)
class HeldOut:
    """All held-out text of a model.

    documents: the passages of each document, kinds in turn. leading: special tokens that the tokenizer puts before
    a text. fingerprint: of tokenizer and texts, so that token positions which were stored can be trusted.
    """

    documents: tuple[tuple[Passage, ...], ...]
    leading: tuple[int, ...]
    fingerprint: str

    @property
    def passages(self) -> tuple[Passage, ...]:
        return tuple(itertools.chain.from_iterable(self.documents))


def load_heldout(model_dir: Path) -> HeldOut:
    """Read `heldout/*.jsonl` of a model folder; each line has `text`, and may have `id`, `kind` and `source`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    tokenizer, digest = load_tokenizer(model_dir), hashlib.sha256()
    digest.update((model_dir / "tokenizer.json").read_bytes())
    kinds: dict[str, dict[str, list[Passage]]] = {}
    seen: set[str] = set()
    for path in sorted((model_dir / "heldout").glob("*.jsonl")):
        for number, line in enumerate(_lines(path)):
            passage = _passage(path, number, line, tokenizer)
            if passage.id in seen:
                raise CheckpointError(f"two held-out passages have the id '{passage.id}'", "give each its own")
            seen.add(passage.id)
            digest.update(json.dumps([passage.id, passage.kind, passage.source, passage.text]).encode())
            kinds.setdefault(passage.kind, {}).setdefault(passage.source, []).append(passage)
    if not kinds:
        raise CheckpointError(f"'{model_dir}' has no held-out passages", _REMEDY)
    queues = [[tuple(passages) for passages in sources.values()] for sources in kinds.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    documents = tuple(document for document in turns if document is not None)
    return HeldOut(documents, _leading(tokenizer), digest.hexdigest())


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}", _REMEDY) from error


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
