"""The training corpus: collect, deduplicate, split by a hash of the normalised path.

Held-out documents are taken first, so a training document that repeats one of them is the one dropped.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .sources import Root
from .text import NotTextError

MAX_DOCUMENT_CHARS = 120_000
_HELD_OUT_PER_MILLE = 25
_MAX_REPEATED_LINES = 0.6
_MAX_PARAGRAPH_REPEATS = 4


@dataclass(frozen=True)
class Document:
    """One text: its normalised path, its kind (``python``, ``c`` or ``prose``), its content."""

    name: str
    kind: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)


def path_hash(name: str) -> int:
    """64 bits of SHA-256 of a normalised path; the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", errors="replace")).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    """Whether the document of this normalised path belongs to the held-out part (2.5 % of paths)."""
    return path_hash(name) % 1000 < _HELD_OUT_PER_MILLE


def collect(roots: Iterable[Root]) -> list[Document]:
    """Documents of all roots without duplicates, held-out first, then in the order of their hash."""
    named = [(name, root, path) for root in roots for name, path in _files(root)]
    named.sort(key=lambda item: (not is_held_out(item[0]), path_hash(item[0])))
    keeper = _Deduplicator()
    taken: Counter[str] = Counter()
    documents = []
    for name, root, path in named:
        group = "/".join(name.split("/")[: 1 + root.group_depth])
        if taken[group] > root.group_cap_bytes:
            continue
        try:
            text = keeper.reduce(root.read(path.read_bytes())[:MAX_DOCUMENT_CHARS])
        except (NotTextError, OSError, SyntaxError, ValueError):
            continue
        if len(text) > 200:
            taken[group] += len(text)
            documents.append(Document(name, root.kind, text))
    return documents


def _files(root: Root) -> Iterator[tuple[str, Path]]:
    for path in root.path.rglob("*"):
        relative = path.relative_to(root.path)
        if not path.name.endswith(root.suffixes) or path.is_symlink() or not path.is_file():
            continue
        if root.name == "stdlib" and relative.parts[0] in ("site-packages", "pydoc_data"):
            continue
        if root.name == "man" and not relative.parts[0].startswith("man"):  # translations
            continue
        if "vendored" in str(relative) or path.name.startswith("RECORD") or path.stat().st_size > 2_000_000:
            continue
        yield f"{root.name}/{relative.as_posix()}", path


class _Deduplicator:
    """Drops documents whose lines were mostly seen before, and paragraphs seen too often."""

    def __init__(self) -> None:
        self._texts: set[int] = set()
        self._lines: set[int] = set()
        self._paragraphs: Counter[int] = Counter()

    def reduce(self, text: str) -> str:
        """The text without over-repeated paragraphs; raises NotTextError for a near-duplicate."""
        if hash(text) in self._texts:
            raise NotTextError("duplicate")
        self._texts.add(hash(text))
        lines = {hash(line) for line in map(str.strip, text.splitlines()) if len(line) > 20}
        if lines and len(lines & self._lines) > _MAX_REPEATED_LINES * len(lines):
            raise NotTextError("near-duplicate")
        self._lines |= lines
        return "".join(part for part in re.split(r"(?<=\n\n)", text) if self._keep(part))

    def _keep(self, paragraph: str) -> bool:
        if len(paragraph) < 160:
            return True
        key = hash(re.sub(r"[\W\d]+", " ", paragraph))
        self._paragraphs[key] += 1
        return self._paragraphs[key] <= _MAX_PARAGRAPH_REPEATS
