"""Builds the calibration text of the default model: `python -m tiermoe.cluster.jobs.prepare.default_calibration`.

The text is held out twice. It is from documents that training held out (a hash of the path decides, see
`train_default_model/corpus.py`), and no paragraph of it stands in the evaluation's passages in `heldout/`. Documents
that the evaluation does not quote at all come first; the few large ones that it does quote fill up what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..train_default_model.corpus import Document, collect, path_hash
from ..train_default_model.heldout import Passage, read_passages, write_passages
from ..train_default_model.sources import KINDS, default_roots, installed_licences, licence_of

BYTES_PER_KIND = 60_000
LEAST_BYTES, MOST_BYTES = 600, 4000  # of a passage
_MAX_PER_GROUP = 10  # passages of one package, while there are others
_LEAST_PARAGRAPH = 40  # characters from which a paragraph that evaluation quotes is left out


def choose_calibration(
    documents: Sequence[Document], evaluation: Sequence[Passage], licences: dict[str, str]
) -> list[Passage]:
    """Passages from held-out documents that share no paragraph with `evaluation`; the same for the same documents.

    Args:
        licences: permissive licences by module or distribution (`installed_licences`).
    """
    quoted = {passage.source.rpartition(" (")[0] for passage in evaluation}
    seen = {paragraph.strip() for passage in evaluation for paragraph in passage.text.split("\n\n")}
    chosen: list[Passage] = []
    for kind in KINDS:
        cuts = [
            (document, licence, list(_cut(document, seen)))
            for document in sorted(documents, key=lambda d: (d.name in quoted, path_hash(d.name)))
            if document.kind == kind
            and document.held_out
            and (licence := licence_of(document.name, licences)) is not None
        ]
        for quotes in (False, True):  # one passage of each document before a second of any
            these = [cut for cut in cuts if (cut[0].name in quoted) == quotes]
            turns = max((len(texts) for _, _, texts in these), default=0)
            queue = [(d, lic, texts[turn]) for turn in range(turns) for d, lic, texts in these if turn < len(texts)]
            chosen += _take(kind, queue, chosen)
    return chosen


def _take(kind: str, queue: Sequence[tuple[Document, str, str]], before: Sequence[Passage]) -> Iterator[Passage]:
    """Until the kind is full; what one package has too much of comes last."""
    mine = [passage for passage in before if passage.kind == kind]
    size, number = sum(len(passage.text.encode()) for passage in mine), len(mine)
    groups: Counter[str] = Counter()
    ranked = []
    for document, licence, text in queue:
        group = "/".join(document.name.split("/")[:2])
        groups[group] += 1
        ranked.append((groups[group] > _MAX_PER_GROUP, document.name, licence, text))
    for _, name, licence, text in sorted(ranked, key=lambda item: item[0]):
        if size >= BYTES_PER_KIND:
            return
        yield Passage(f"calibration-{kind}-{number:03d}", kind, f"{name} ({licence})", text)
        size, number = size + len(text.encode()), number + 1


def _cut(document: Document, seen: set[str]) -> Iterator[str]:
    """Consecutive passages from blank line to blank line, without the paragraphs that evaluation quotes."""
    current = ""
    for paragraph in document.text.split("\n\n"):
        if len(paragraph.strip()) >= _LEAST_PARAGRAPH and paragraph.strip() in seen:
            continue
        if len((current + paragraph).encode()) > MOST_BYTES:
            if len(current.encode()) >= LEAST_BYTES:
                yield current.strip("\n") + "\n"
            current = ""
        if len(paragraph.encode()) <= MOST_BYTES:
            current += paragraph + "\n\n"
    if len(current.encode()) >= LEAST_BYTES:
        yield current.strip("\n") + "\n"


def build(model_dir: Path) -> list[Passage]:
    """Write `calibration/` of a model whose `heldout/` is there, from the text of this machine."""
    passages = choose_calibration(
        collect(default_roots()), read_passages(model_dir / "heldout"), installed_licences()
    )
    write_passages(passages, model_dir / "calibration")
    return passages


if __name__ == "__main__":
    sizes: Counter[str] = Counter()
    for passage in build(Path("models/tiny-moe")):
        sizes[passage.kind] += len(passage.text.encode())
    print(dict(sizes))
