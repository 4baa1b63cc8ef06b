"""``python -m tiermoe.cluster.jobs.evaluate [MODEL]``: build a model's multiple-choice set from its held-out text."""

from __future__ import annotations

import sys
from pathlib import Path

from ....errors import TierMoeError
from ...config import default_model_dir
from .text import FILE, build_choices, choices_text, load_heldout


def main(arguments: list[str]) -> int:
    """Write the file; the exit code."""
    model_dir = Path(arguments[0]) if arguments else default_model_dir()
    try:
        heldout = load_heldout(model_dir)
        items = build_choices(heldout)
        (model_dir / FILE).write_text(choices_text(items, heldout), encoding="utf-8")
    except (TierMoeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(items)} items in {model_dir / FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
