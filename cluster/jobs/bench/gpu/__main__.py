"""`python -m tiermoe.cluster.jobs.bench.gpu`: see `run.sh` and docs/gpu.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .....errors import TierMoeError
from .job import Plan, failures, read_document, run_all, run_part
from .options import PARTS, chosen_parts, parser
from .page import render


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every part came to its end and every check holds, 1 when not, 2 where nothing could be begun."""
    asked = parser().parse_args(arguments)
    if asked.part is not None:
        run_part(asked.part, asked.device, asked.sizes, asked.deadline, asked.record)
        return 0
    try:
        if asked.page_only:
            (asked.out / "gpu.md").write_text(render(read_document(asked.out)), encoding="utf-8")
            return 0
        parts = chosen_parts(asked.parts)
        document = run_all(Plan(asked.out, asked.device, asked.sizes, parts, asked.seconds), _say)
    except TierMoeError as error:
        _say(str(error))
        return 2
    failed = failures(document, parts)
    for name in failed:
        _say(f"failed: {name}")
    _say(f"{len(parts)} of {len(PARTS)} parts; see {asked.out / 'gpu.md'}")
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
