"""The calibration text of the default model: held out from training and from the evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

import passages
from corpus import KINDS, Document, is_held_out
from passages import Passage, choose_calibration, read_passages
from tiermoe.cluster.jobs.prepare.calibration import read_texts

MODEL = Path(__file__).parents[2] / "models" / "tiny-moe"


def test_what_ships_is_held_out_twice() -> None:
    calibration, evaluation = read_passages(MODEL / "calibration"), read_passages(MODEL / "heldout")
    assert all(is_held_out(passage.source.rpartition(" (")[0]) for passage in calibration)
    quoted = {part.strip() for passage in evaluation for part in passage.text.split("\n\n") if len(part.strip()) >= 40}
    mine = {part.strip() for passage in calibration for part in passage.text.split("\n\n")}
    assert not mine & quoted
    sizes = {kind: sum(len(p.text.encode()) for p in calibration if p.kind == kind) for kind in KINDS}
    assert all(60_000 <= size <= 64_000 for size in sizes.values()), sizes
    assert len({passage.id for passage in calibration}) == len(calibration)


def test_it_reads_as_calibration_text() -> None:
    assert len(read_texts(MODEL / "calibration")) == len(read_passages(MODEL / "calibration"))


def held_out_name(start: int) -> str:
    return next(name for i in range(start, start + 10_000) if is_held_out(name := f"stdlib/mod{i}.py"))


def test_choice_from_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unquoted documents first, quoted paragraphs never, training documents never, up to the size."""
    first, second = held_out_name(0), held_out_name(100_000)
    trained = next(name for i in range(100) if not is_held_out(name := f"stdlib/other{i}.py"))
    secret = "this paragraph is quoted by the evaluation, all of it"

    def text(mark: str) -> str:
        return "\n\n".join(f"{mark} {i} " + "word " * 150 for i in range(12)) + f"\n\n{secret}\n\n{mark} end"

    documents = [Document(name, "python", text(mark)) for name, mark in ((first, "A"), (second, "B"), (trained, "C"))]
    evaluation = [Passage("python-000", "python", f"{first} (PSF-2.0)", secret)]
    chosen = choose_calibration(documents, evaluation, {})
    assert chosen == choose_calibration(documents[::-1], evaluation, {})
    assert all(secret not in passage.text and len(passage.text.encode()) <= 4000 for passage in chosen)
    sources = [passage.source for passage in chosen]
    assert sources == sorted(sources, key=lambda source: source.startswith(first))
    assert {source.split(" ")[0] for source in sources} == {first, second}
    monkeypatch.setattr(passages, "CALIBRATION_BYTES_PER_KIND", 5000)
    fewer = choose_calibration(documents, evaluation, {})
    assert [passage.source for passage in fewer] == [f"{second} (PSF-2.0)"] * 2
