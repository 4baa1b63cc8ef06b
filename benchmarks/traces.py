"""`bench traces`: the routing of the default model and of the synthetic families, beside published figures."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from tiermoe.actors.requests import SamplingParams
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, markdown
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, run_config
from tiermoe.cluster.simulate.statistics import routing_of
from tiermoe.cluster.simulate.synthetic import CALIBRATIONS, FAMILIES, calibrated, comparable
from tiermoe.cluster.simulate.trace import Trace

from .cases import Traces

# Published models route so; bars of the default model's training, on longer texts: models/tiny-moe/train/export.py.
MODEL_TARGETS = {
    "random 34% - share": "-0.02 to 0.02", "lfu 34% - lru 34%": ">= 0.03", "own - other cosine": ">= 0.15",
    "token entropy": "<= 0.75", "next router 1": "0.75 to 0.9",
}  # fmt: skip
SIDE_BY_SIDE = ("flat", "sticky")
DISTANCES = 4
SIZES = (0.25, 1 / 3, 0.4, 0.5, 2 / 3, 0.75)  # of a layer's experts


def traces(options: Traces, progress: Progress | None) -> Report:
    """Statistics of the default model's routing on held-out text, teacher-forced, and of each family with its targets.

    Columns: `model`; each family, drawn at the shape of its calibration, and its published figure. The table
    `summary` has what has a target, of the model or of a family in `SIDE_BY_SIDE`.

    Bars, for each published figure of a family: the difference <= its tolerance.

    Raises:
        CheckpointError: the model ships too little held-out text. RuntimeFailure: recording failed.
    """
    columns = {name: calibrated(name, options.seed) for name in FAMILIES}
    columns = {"model": model_figures(options, progress)} | columns
    names = list(dict.fromkeys(figure for found in columns.values() for figure in found))
    report = Report("traces", "cpu", settings=options.settings(model=default_model_dir().name, distances=DISTANCES))
    report.shown = ("figure", "model", *(part for name in FAMILIES for part in (name, f"{name} target")))
    report.figures["calibrations"] = {
        name: f"{one.source}: {one.layers} layers of {one.experts} experts, top-{one.top_k}; "
        f"{one.requests} requests of {one.length} tokens"
        for name, one in CALIBRATIONS.items()
    }
    for figure in names:
        row: dict[str, object] = {"figure": figure}
        for column, found in columns.items():
            if figure in found:
                row[column] = found[figure]
            if column in CALIBRATIONS and (target := CALIBRATIONS[column].targets.get(figure)) is not None:
                row[f"{column} target"] = target.value
                off = abs(found[figure] - target.value)
                report.bars.append(Bar(f"{column}: {figure}, off its target", off, "<=", target.tolerance))
        report.rows.append(row)
    report.printed = summary(report.rows)
    return report


def summary(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of a table: the default model's figures, both families', and each one's targets."""

    def shown(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    head = ("figure", "default model", "target", *(part for name in SIDE_BY_SIDE for part in (name, "target")))
    body = []
    for row in rows:
        figure = str(row["figure"])
        targets = [MODEL_TARGETS.get(figure, ""), *(row.get(f"{name} target", "") for name in SIDE_BY_SIDE)]
        if any(target != "" for target in targets):
            found = [row.get(name, "") for name in ("model", *SIDE_BY_SIDE)]
            body.append((figure, *(shown(one) for pair in zip(found, targets, strict=True) for one in pair)))
    return markdown(head, body)


def model_figures(options: Traces, progress: Progress | None) -> dict[str, float]:
    """Figures of the default model, from a trace that is recorded for it."""
    from tiermoe.cluster.jobs.record.job import record  # torch

    config = run_config(None, None, policy="on-demand", budget="1.0", link={"gbps": None}, threads=1)
    passages = heldout_prompts(config.model_dir, options.documents, options.tokens)
    half = options.tokens // 2
    with tempfile.TemporaryDirectory(prefix="tiermoe-traces-") as scratch:
        out = Path(scratch) / "trace"
        header = record(
            config, [ids[:half] for ids in passages], out, SamplingParams(), DISTANCES, progress,
            continuations=[ids[half:] for ids in passages],
        )  # fmt: skip
        routing = routing_of(header, Trace(out).requests())
    sizes = [max(header.top_k, round(share * header.experts)) for share in SIZES]
    found = comparable(routing, sizes)
    found["random 34% - share"] = found["random 34%"] - sizes[1] / header.experts
    found["lfu 34% - lru 34%"] = found["lfu 34%"] - found["lru 34%"]
    found["own - other cosine"] = found["own cosine"] - found["other cosine"]
    return found if header.repeated_8grams is None else found | {"repeated 8-grams": header.repeated_8grams}
