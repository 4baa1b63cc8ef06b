"""A report: one HTML page that needs nothing else, with the figures and a table of all measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .figures import Figure, figures
from .results import Measurement, Range

_TITLE = "tiermoe: report"
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { border: 1px solid #8886; padding: .2rem .5rem; text-align: left; font-variant-numeric: tabular-nums; }
.panels { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; max-width: 36rem; }
figure svg { width: 100%; height: auto; background: white; }
figcaption, .lacks { font-size: 12px; opacity: .8; }
"""


def report_page(found: Sequence[Measurement]) -> str:
    """The page."""
    parts = [f"<h1>{_TITLE}</h1>", *(part for figure in figures(found) for part in _figure(figure))]
    parts += ["<h2>All measurements</h2>", *_table(found)]
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{_TITLE}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def caption(shown: Sequence[Measurement]) -> str:
    """Executor, machine, model, setting, date, versions and files of one panel, which have one origin."""
    origin, dates = shown[0].origin, dict.fromkeys(one.date or "date not said" for one in shown)
    files = ", ".join(dict.fromkeys(one.file for one in shown))
    said = [f"executor: {origin.executor}", f"machine: {origin.machine}", f"model: {origin.model}", shown[0].setting,
            ", ".join(dates), origin.versions, f"from {files}"]  # fmt: skip
    return "; ".join(part for part in said if part)


def _figure(figure: Figure) -> Iterator[str]:
    yield f"<h2>{escape(figure.title)}</h2>"
    if figure.says:
        yield f"<p>{escape(figure.says)}</p>"
    if figure.panels:
        yield '<div class="panels">'
        for panel in figure.panels:
            yield f"<figure>\n{panel.svg}\n<figcaption>{escape(caption(panel.shown))}</figcaption></figure>"
        yield "</div>"
    for file, needs in figure.lacking.items():
        yield f'<p class="lacks">Not shown: {escape(file)} ({escape(needs)})</p>'


def _table(found: Sequence[Measurement]) -> Iterator[str]:
    columns = ("file", "executor", "machine", "model", "setting", "policy", "budget", "expert memory (MB)", "TPOT (ms)",
               "TTFT (ms)", "hit rate", "blocked (s)", "KL (nats)", "date")  # fmt: skip
    yield "<table>\n<tr>" + "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr>"
    for one in found:
        cells = (
            one.file, *one.origin[:3], one.setting, one.policy, one.budget,
            _number(None if one.memory_bytes is None else one.memory_bytes / 1e6, ".1f"), _range(one.tpot_ms),
            _range(one.ttft_ms), _number((one.hit_rates or {}).get("all"), ".1%"),
            _number(sum(one.blocked_s.values()) if one.blocked_s else None, ".3f"),
            _number((one.quality or {}).get("kl_nats"), ".5f"), one.date or "-",
        )  # fmt: skip
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _range(value: Range | None) -> str:
    if value is None:
        return "-"
    middle, low, high = (f"{part:.2f}" for part in value)
    return middle if low == high else f"{middle} ({low} to {high})"
