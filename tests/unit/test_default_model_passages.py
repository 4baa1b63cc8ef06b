"""The calibration text of the default model: held out from training and from the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiermoe.cluster.jobs.prepare.calibration import read_texts
from train import KINDS, is_held_out

MODEL = Path(__file__).parents[2] / "models" / "tiny-moe"


def passages(folder: str) -> list[dict[str, Any]]:
    files = [MODEL / folder / f"{kind}.jsonl" for kind in KINDS]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_what_ships_is_held_out_twice() -> None:
    calibration, evaluation = passages("calibration"), passages("heldout")
    assert all(is_held_out(passage["source"].rpartition(" (")[0]) for passage in calibration)
    texts = [passage["text"] for passage in evaluation]
    quoted = {part.strip() for text in texts for part in text.split("\n\n") if len(part.strip()) >= 40}
    mine = {part.strip() for passage in calibration for part in passage["text"].split("\n\n")}
    assert not mine & quoted
    sizes = {kind: sum(len(p["text"].encode()) for p in calibration if p["kind"] == kind) for kind in KINDS}
    assert all(60_000 <= size <= 64_000 for size in sizes.values()), sizes
    assert len({passage["id"] for passage in calibration}) == len(calibration)


def test_it_reads_as_calibration_text() -> None:
    assert len(read_texts(MODEL / "calibration")) == len(passages("calibration"))
