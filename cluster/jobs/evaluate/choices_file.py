"""The multiple-choice set as a file of the model folder: passages by id and token position, no text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from .choices import CONTEXT, TOKENS, WAYS, Item, Place, build_choices
from .text import HeldOut

FILE = Path("heldout") / "choices.json"
_FORMAT = 1


def choices_text(items: Sequence[Item], heldout: HeldOut) -> str:
    """The file's text, one item a line."""
    lines = ",\n".join(json.dumps(asdict(item)) for item in items)
    return json.dumps(_header(heldout))[:-1] + ', "items": [\n' + lines + "\n]}\n"


def load_choices(model_dir: Path, heldout: HeldOut) -> list[Item]:
    """The set that ships with a model; where none does, the one that would be built.

    Raises:
        CheckpointError: the file cannot be read, or was built for other text, another tokenizer or other sizes.
    """
    path = model_dir / FILE
    if not path.is_file():
        return build_choices(heldout)
    remedy = f"build it again: python -m tiermoe.cluster.jobs.evaluate '{model_dir}'"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        for key, value in _header(heldout).items():
            if record[key] != value:
                raise CheckpointError(f"'{path}' was built with another {key} than the model folder has now", remedy)
        lengths = {passage.id: len(passage.ids) for passage in heldout.passages}
        return [_item(entry, lengths) for entry in record["items"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {' '.join(str(error).split())}", remedy) from error


def _header(heldout: HeldOut) -> dict[str, Any]:
    return {"format": _FORMAT, "fingerprint": heldout.fingerprint, "context": CONTEXT, "tokens": TOKENS}


def _item(entry: dict[str, Any], lengths: dict[str, int]) -> Item:
    item = Item(Place(**entry["true"]), tuple(Place(**place) for place in entry["wrong"]), entry["answer"])
    fits = all(0 <= place.start <= lengths[place.passage] - TOKENS for place in item.candidates)
    if not fits or len(item.wrong) != WAYS - 1 or item.answer not in range(WAYS):
        raise ValueError(f"an item at {item.true} is out of range")
    return item
