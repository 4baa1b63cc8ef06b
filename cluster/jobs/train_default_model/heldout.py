"""The held-out passages that ship with the model: three kinds, freely redistributable text only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .corpus import Document, path_hash
from .sources import KINDS, licence_of

MIN_PASSAGE_BYTES, MAX_PASSAGE_BYTES = 1500, 4000
BYTES_PER_KIND = 68_000
_MAX_PER_GROUP = 4
# One file that holds the whole language reference, topic by topic.
_MANY_SUBJECTS = {"pydoc/topics.py": 12}


@dataclass(frozen=True)
class Passage:
    """A piece of a held-out document; ``source`` is its normalised path and its licence."""

    id: str
    kind: str
    source: str
    text: str


def choose_passages(
    documents: Iterable[Document], package_licences: dict[str, str], bytes_per_kind: int = BYTES_PER_KIND
) -> list[Passage]:
    """Passages of 1.5 to 4 KB from held-out documents, the same for the same documents.

    Takes one passage of each document before a second of any, in the order of the path hash, and
    a bounded number from one package.
    """
    held_out = sorted((d for d in documents if d.held_out), key=lambda d: path_hash(d.name))
    licensed = [(d, licence) for d in held_out if (licence := licence_of(d.name, package_licences))]
    passages: list[Passage] = []
    for kind in KINDS:
        pieces = [(d, licence, list(_cut(d))) for d, licence in licensed if d.kind == kind]
        queue = [
            (document, licence, cuts[turn])
            for turn in range(max((len(cuts) for _, _, cuts in pieces), default=0))
            for document, licence, cuts in pieces
            if turn < len(cuts)
        ]
        passages += _take(kind, queue, bytes_per_kind)
    return passages


def _take(kind: str, queue: list[tuple[Document, str, str]], limit_bytes: int) -> Iterator[Passage]:
    size, groups, number = 0, Counter[str](), 0
    for document, licence, text in queue:
        group = "/".join(document.name.split("/")[: 2 if document.name.startswith("site-packages") else 3])
        if size >= limit_bytes:
            return
        if groups[group] >= _MANY_SUBJECTS.get(group, _MAX_PER_GROUP):
            continue
        groups[group] += 1
        size += len(text.encode())
        yield Passage(f"{kind}-{number:03d}", kind, f"{document.name} ({licence})", text)
        number += 1


def _cut(document: Document) -> Iterator[str]:
    """Consecutive passages from blank line to blank line, of lengths that the path hash varies."""
    seed = path_hash(document.name)
    paragraphs = document.text.split("\n\n")
    skip = min(2, len(paragraphs) - 1)  # the opening is a licence more often than not
    current, turn = "", 0
    for paragraph in paragraphs[skip:]:
        target = MIN_PASSAGE_BYTES + path_hash(f"{seed}/{turn}") % 1800
        if len((current + paragraph).encode()) > MAX_PASSAGE_BYTES:
            current = ""
            continue
        current += paragraph + "\n\n"
        if len(current.encode()) >= target:
            yield current.strip("\n") + "\n"
            current, turn = "", turn + 1


def write_passages(passages: Iterable[Passage], folder: Path) -> None:
    """One JSON-lines file for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = list(passages)
    for kind in KINDS:
        lines = [json.dumps(asdict(p), ensure_ascii=False) for p in kept if p.kind == kind]
        (folder / f"{kind}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_passages(folder: Path) -> list[Passage]:
    """Inverse of ``write_passages``."""
    paths = [folder / f"{kind}.jsonl" for kind in KINDS]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [Passage(**json.loads(line)) for line in lines]
