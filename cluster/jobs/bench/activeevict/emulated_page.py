"""The section on the engine itself of the page of `tiermoe bench activeevict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..page_parts import paragraphs, table
from .agreement import agreement, over_replay
from .work import PRESETS

Row = Mapping[str, Any]
_COLUMNS = (
    "Columns as above, medians over the repetitions, for blocking I/O and TPOT with their range; blocked over replay: "
    "blocking I/O over that of a replay of the same prompts, repetition by repetition. Tokens: the part of the prompts "
    "with the same tokens as on-demand, which a lossless row has or the benchmark fails. Of TPOT only the decode steps "
    "count, of all else the prompts too."
)


def section(record: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown; none where only replays were run."""
    rows = [row for row in record["rows"] if row["section"] == "emulated"]
    settings = record["settings"].get("emulated")
    if not rows or settings is None:
        return []
    lines = [
        "## Emulated: the engine itself on a throttled link", "",
        *paragraphs(
            f"The engine with its loader and threads, the CPU standing in for a GPU, its link held to "
            f"{settings['link_gbps']:g} GB/s (ratio {settings['ratio']:g}, as in the first replays), at a load average "
            f"of {settings['load_average']:.1f} when it began. At each budget all rows take turns, "
            f"{settings['repeats']} repetitions of {_prompts(settings['prompts_each'])} that none of them has met, "
            f"after {settings['learn']} uncounted; {settings['max_tokens']} tokens after each.",
            _COLUMNS,
        ),
    ]  # fmt: skip
    for context in dict.fromkeys(row["context"] for row in rows):
        lines += [f"### {context} context, emulated", "", *_table([r for r in rows if r["context"] == context]), ""]
    return [*lines, "### Do the two agree?", "", *paragraphs(*agreement(rows, settings))]


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("budget", "policy", "writes back", "blocking ms", "total ms", "loaded MB", "back MB", "redundant", "P", "R",
            "hit rate", "TPOT ms", "tokens", "blocked over replay")  # fmt: skip
    body = []
    for r in sorted(rows, key=lambda r: (r["budget"], PRESETS.index(r["preset"]))):  # twins side by side
        over = over_replay(r, "blocking_ms")
        body.append((
            f"{r['budget']:g}", r["policy"] if r["lossless"] else f"{r['policy']} (lossy)",
            "yes" if r["writes_back"] else "no", _spread(r, "blocking_ms"), f"{r['total_ms']:.3g}",
            f"{r['loaded_mb']:.3g}", f"{r['written_back_mb']:.3g}", f"{r['redundant']:.1%}", f"{r['precision']:.1%}",
            f"{r['recall']:.1%}", f"{r['hit_rate']:.3f}", _spread(r, "tpot_ms"), f"{r['same_tokens']:.0%}",
            "none" if over is None else f"{over:.2f}",
        ))  # fmt: skip
    return table(head, body)


def _spread(row: Row, measure: str) -> str:
    values = row["values"][measure]
    return f"{row[measure]:.3g} ({min(values):.3g} to {max(values):.3g})"


def _prompts(count: int) -> str:
    return "one prompt" if count == 1 else f"{count} prompts"
