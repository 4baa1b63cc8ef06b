"""The tables of docs/results/gpu.md, from what gpu.json has: whole, cut off, or nothing yet.

The page is hand-written Markdown. Between `<!-- table: NAME -->` and `<!-- end -->` it holds tables made here: `run`,
`parts`, `limits`, and one block for each part with its rows, notes and last words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..page_parts import table

PAGE = "docs/results/gpu.md"
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VERDICT = {True: "holds", False: "**missed**"}
_LOG_LINES = 12
_TPOT = "{tpot_ms[median]:.2f} ({tpot_ms[minimum]:.2f} to {tpot_ms[maximum]:.2f})"

# columns of the rows of each kind: head, format
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "peaks": {
        "host to device, 1e9 bytes/s": "{h2d_gbps:.1f}", "device to host": "{d2h_gbps:.1f}",
        "device memory, read and written": "{hbm_gbps:.1f}",
    },
    "host read": {"threads": "{threads}", "host memory read, 1e9 bytes/s": "{gbps:.1f}"},
    "load": {
        "shape": "{shape}", "expert": "{expert}", "batch": "{batch}", "host memory": "{memory}",
        "1e9 bytes/s": "{gbps:.1f} ({gbps_minimum:.1f} to {gbps_maximum:.1f})", "share of the peak": "{share:.1%}",
    },
    "shape": {
        "shape": "{shape}", "MoE layers": "{moe_layers} of {all_moe_layers}", "experts": "{experts}",
        "per token": "{top_k}", "bytes of an expert": "{expert_bytes}",
        "of all, in host memory": "{expert_memory_bytes}", "host memory": "{host_memory[0]}",
        "of the rest, on the device": "{dense_bytes}", "dtype": "{dtype}", "set-up s": "{setup_s:.0f}",
    },
    "trace": {
        "LRU hit rate at a share of": "{fraction:.0%}", "here": "{here:.0%}", "recorded": "{recorded:.0%}",
        "fitted share": "{fitted[share]:g}", "decay": "{fitted[decay]:g}", "error": "{fitted[error]:.3f}",
        "recall by distance": "{recalls_shown}",
    },
    "reference": {"reference": "{case}", "ms per token": _TPOT},
    "offload": {"reference": "{case}", "ms per token": _TPOT},
    "decode": {
        "resident": "{budget:.0%}", "preset": "{preset}", "lossless": "{lossless}", "ms per token": _TPOT,
        "reference": "{reference_ms[median]:.2f}", "speed": "{speed:.2f}", "hit rate": "{hit_rate:.1%}",
        "MB per token": "{mb_per_token:.1f}", "blocked ms": "{blocked_ms:.2f}",
        "floor ms: link + weights": "{floor_link_ms:.2f} + {floor_read_ms:.2f}", "kernel": "{kernels[decode]}",
    },
    "ndp calls": {
        "resident": "{budget:.0%}", "calls per token": "{ndp[calls_per_token]:.1f}",
        "experts per layer": "{ndp[experts_per_layer]:.2f}", "waited us per call": "{ndp[wait_us_per_call]:.0f}",
        "kernel us per call": "{ndp[kernel_us_per_call]:.0f}", "recomputed": "{ndp[recomputed]}",
        "transports": "{transports}",
    },
    "tests": {
        "tests": "{folder}", "passed": "{passed}", "failed": "{failed}", "errors": "{errors}", "skipped": "{skipped}",
        "status": "{status}", "cut off": "{cut_off}",
    },
    "failure": {"failure": "`{test}`", "why": "{first_line}"},
    "kernel": {
        "shape": "{shape}", "kernel": "{kernel}", "rows": "{row_class}", "of each expert": "{rows}",
        "experts": "{experts}", "us": "{us:.1f}", "us on the device": "{device_us:.1f}",
        "1e9 weight bytes/s": "{gbps:.0f}", "chosen": "{chosen}",
    },
    "host": {
        "case": "{case}", "us outside kernels": "{host_us:.0f}", "by part": "{parts_shown}",
        "experts: launches, copies, waits": "{experts_calls}", "dense: launches, graphs": "{dense_calls}",
        "ms per token": "{tpot_ms:.2f}", "layers": "{layers}",
    },
    "ndp kernel": {
        "threads": "{threads}", "expert": "{hidden} x {intermediate}", "set": "{instruction_set}",
        "read": "{gbps[read]:.1f}",
        "1 bit": "{gbps[1 bit]:.1f} ({of_read[1 bit]:.0%})",
        "2 bits": "{gbps[2 bits]:.1f} ({of_read[2 bits]:.0%})",
        "3 bits": "{gbps[3 bits]:.1f} ({of_read[3 bits]:.0%})",
        "4 bits": "{gbps[4 bits]:.1f} ({of_read[4 bits]:.0%})",
    },
}  # fmt: skip


def write(out: Path, root: Path, document: Mapping[str, Any] | None) -> None:
    """Fill the page in the folder; where it has none, that of the repository is copied."""
    page = out / "gpu.md"
    text = (page if page.exists() else root / PAGE).read_text(encoding="utf-8")
    page.write_text(render(text, document), encoding="utf-8")


def render(text: str, document: Mapping[str, Any] | None) -> str:
    """The page with its blocks filled."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(_block(match["name"], document)) + f"\n\n{match[3]}"

    return _BLOCK.sub(fill, text)


def _block(name: str, document: Mapping[str, Any] | None) -> list[str]:
    if document is None or not document.get("parts"):
        return ["Not run yet."]
    parts = document["parts"]
    if name == "run":
        versions = ", ".join(f"{package} {number}" for package, number in document["versions"].items())
        run = (("device", document["device_name"]), ("sizes", document["sizes"]), ("versions", versions))
        return table(("run", ""), run)
    if name == "parts":
        outcomes = ((part, f["outcome"], f"{f['seconds']:.0f}", f.get("when", "")) for part, f in parts.items())
        return table(("part", "outcome", "seconds", "when"), outcomes)
    if name == "limits":
        limits = (
            (kind[:-1], bar["name"], "none" if bar["value"] is None else f"{bar['value']:.4g}",
             f"{bar['op']} {bar['limit']:g}", _VERDICT[bar["ok"]])
            for kind in ("checks", "goals") for found in parts.values() for bar in found.get(kind, ())
        )  # fmt: skip
        return table(("", "limit", "value", "", ""), limits)
    return _part(parts[name]) if name in parts else ["Not run yet."]


def _part(found: Mapping[str, Any]) -> list[str]:
    """A table for each kind of row, notes, and the last words of a part that did not come to its end."""
    lines = [f"Outcome: {found['outcome']}.", ""]
    rows = list(_rows(found["rows"]))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        columns = _COLUMNS.get(kind) or {"": "{name}", "value": "{value}"}
        body = ([form.format(**row) for form in columns.values()] for row in rows if row["kind"] == kind)
        lines += [*table(tuple(columns), body), ""]
    lines += [f"- {note}" for note in found["notes"]] + ([""] if found["notes"] else [])
    if found.get("log"):
        lines += ["```", *found["log"].strip().splitlines()[-_LOG_LINES:], "```"]
    return lines if lines[-1] else lines[:-1]


def _rows(rows: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Rows as `_COLUMNS` reads them: one for each line of a table."""
    for row in rows:
        if row["kind"] == "machine":
            values = {**row["cpu"], **{name: row[name] for name in row if name not in ("kind", "cpu")}}
            shown = {name: ", ".join(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}
            yield from ({"kind": "machine", "name": name, "value": value} for name, value in shown.items())
        elif row["kind"] == "trace":
            recalls = ", ".join(f"{value:.0%}" for value in row["recalls"])
            rates = zip((0.1, 0.25, 0.5, 0.75), row["hit_rates_here"], row["hit_rates"], strict=True)
            for fraction, here, there in rates:
                yield {**row, "fraction": fraction, "here": here, "recorded": there, "recalls_shown": recalls}
        elif row["kind"] == "host":
            calls = row["calls"] or {"experts": {}, "dense": {}}
            cells = {
                f"{where}_calls": ", ".join(f"{calls[where][name]:.1f}" for name in names if name in calls[where])
                for where, names in (("experts", ("launches", "copies", "waits")), ("dense", ("launches", "graphs")))
            }
            parts = ", ".join(f"{name} {us:.1f}" for name, us in row["parts_us"].items())
            yield {**row, **cells, "parts_shown": parts}
        else:
            yield dict(row)
        if "ndp" in row:
            transports = ", ".join(map(str, row["ndp"]["transports"].values()))
            yield {**row, "kind": "ndp calls", "transports": transports}
        for failure in row.get("failures", ()):
            lines = failure["why"].strip().splitlines() or [""]
            yield {"kind": "failure", "test": failure["test"], "first_line": lines[0][:300].replace("|", "\\|")}
