"""Passages that ship with the model, of held-out documents under permissive licences.

`heldout/` is for evaluation, `calibration/` for fitting quantized replicas; they share no paragraph.
`python models/tiny-moe/train/passages.py` writes the model's `calibration/` from the text of this machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from corpus import KINDS, Document, collect, default_roots, installed_licences, licence_of, path_hash

MODEL_DIR = Path(__file__).resolve().parents[1]
HELDOUT_BYTES = (1500, 4000)  # least and most of a passage
HELDOUT_BYTES_PER_KIND = 68_000
MAX_PER_GROUP = 4
MANY_SUBJECTS = {"pydoc/topics.py": 12}  # one file that holds the whole language reference, topic by topic
CALIBRATION_BYTES = (600, 4000)
CALIBRATION_BYTES_PER_KIND = 60_000
CALIBRATION_MAX_PER_GROUP = 10  # passages of one package, while there are others
LEAST_QUOTE = 40  # characters from which a paragraph that evaluation quotes is left out of the calibration text


@dataclass(frozen=True)
class Passage:
    """A piece of a held-out document; ``source`` is its normalised path and its licence."""

    id: str
    kind: str
    source: str
    text: str


@dataclass(frozen=True)
class _Piece:
    document: Document
    licence: str
    text: str

    def passage(self, name: str) -> Passage:
        return Passage(name, self.document.kind, f"{self.document.name} ({self.licence})", self.text)


def choose_passages(
    documents: Iterable[Document], licences: dict[str, str], bytes_per_kind: int = HELDOUT_BYTES_PER_KIND
) -> list[Passage]:
    """Evaluation passages of 1.5 to 4 KB, a bounded number of each package; deterministic.

    Args:
        licences: permissive licences by module or distribution (`installed_licences`).
    """
    passages = []
    licensed = _licensed(documents, licences)
    for kind in KINDS:
        size, groups, number = 0, Counter[str](), 0
        for piece in _in_turns([(d, licence, list(_split(d))) for d, licence in licensed if d.kind == kind]):
            depth = 2 if piece.document.name.startswith("site-packages") else 3
            group = "/".join(piece.document.name.split("/")[:depth])
            if size >= bytes_per_kind:
                break
            if groups[group] >= MANY_SUBJECTS.get(group, MAX_PER_GROUP):
                continue
            groups[group] += 1
            size += len(piece.text.encode())
            passages.append(piece.passage(f"{kind}-{number:03d}"))
            number += 1
    return passages


def choose_calibration(
    documents: Sequence[Document], evaluation: Sequence[Passage], licences: dict[str, str]
) -> list[Passage]:
    """Calibration passages that share no paragraph with ``evaluation``; deterministic.

    Documents that the evaluation does not quote come first.
    """
    quoted = {passage.source.rpartition(" (")[0] for passage in evaluation}
    paragraphs = {paragraph.strip() for passage in evaluation for paragraph in passage.text.split("\n\n")}
    licensed = _licensed(documents, licences)
    passages = []
    for kind in KINDS:
        size, number = 0, 0
        for quotes in (False, True):
            queue = _in_turns(
                [
                    (d, licence, list(_split_without(d, paragraphs)))
                    for d, licence in licensed
                    if d.kind == kind and (d.name in quoted) == quotes
                ]
            )
            for piece in _crowded_groups_last(queue):
                if size >= CALIBRATION_BYTES_PER_KIND:
                    break
                passages.append(piece.passage(f"calibration-{kind}-{number:03d}"))
                size, number = size + len(piece.text.encode()), number + 1
    return passages


def _licensed(documents: Iterable[Document], licences: dict[str, str]) -> list[tuple[Document, str]]:
    """Held-out documents that may be redistributed, in the order of their hash, each with its licence."""
    held_out = sorted((d for d in documents if d.held_out), key=lambda d: path_hash(d.name))
    return [(d, licence) for d in held_out if (licence := licence_of(d.name, licences))]


def _in_turns(documents: list[tuple[Document, str, list[str]]]) -> list[_Piece]:
    """One passage of each document before a second of any."""
    turns = max((len(texts) for _, _, texts in documents), default=0)
    return [_Piece(d, lic, texts[turn]) for turn in range(turns) for d, lic, texts in documents if turn < len(texts)]


def _crowded_groups_last(pieces: Iterable[_Piece]) -> list[_Piece]:
    groups: Counter[str] = Counter()
    ranked = []
    for piece in pieces:
        group = "/".join(piece.document.name.split("/")[:2])
        groups[group] += 1
        ranked.append((groups[group] > CALIBRATION_MAX_PER_GROUP, piece))
    return [piece for _, piece in sorted(ranked, key=lambda item: item[0])]


def _split(document: Document) -> Iterator[str]:
    """Consecutive passages from blank line to blank line, of lengths that the path hash varies."""
    least, most = HELDOUT_BYTES
    seed = path_hash(document.name)
    paragraphs = document.text.split("\n\n")
    skip = min(2, len(paragraphs) - 1)  # the opening is a licence more often than not
    current, turn = "", 0
    for paragraph in paragraphs[skip:]:
        target = least + path_hash(f"{seed}/{turn}") % 1800
        if len((current + paragraph).encode()) > most:
            current = ""
            continue
        current += paragraph + "\n\n"
        if len(current.encode()) >= target:
            yield current.strip("\n") + "\n"
            current, turn = "", turn + 1


def _split_without(document: Document, quoted: set[str]) -> Iterator[str]:
    """Consecutive passages from blank line to blank line, without the quoted paragraphs."""
    least, most = CALIBRATION_BYTES
    current = ""
    for paragraph in document.text.split("\n\n"):
        if len(paragraph.strip()) >= LEAST_QUOTE and paragraph.strip() in quoted:
            continue
        if len((current + paragraph).encode()) > most:
            if len(current.encode()) >= least:
                yield current.strip("\n") + "\n"
            current = ""
        if len(paragraph.encode()) <= most:
            current += paragraph + "\n\n"
    if len(current.encode()) >= least:
        yield current.strip("\n") + "\n"


def write_passages(passages: Sequence[Passage], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        lines = [json.dumps(asdict(p), ensure_ascii=False) for p in passages if p.kind == kind]
        (folder / f"{kind}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_passages(folder: Path) -> list[Passage]:
    paths = [folder / f"{kind}.jsonl" for kind in KINDS]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [Passage(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    chosen = choose_calibration(collect(default_roots()), read_passages(MODEL_DIR / "heldout"), installed_licences())
    write_passages(chosen, MODEL_DIR / "calibration")
    print({kind: sum(len(p.text.encode()) for p in chosen if p.kind == kind) for kind in KINDS})
