"""`bench traces`: the routing of the default model and of the synthetic families, beside published figures."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.progress import Progress

from ....actors.requests import SamplingParams
from ...config import default_model_dir
from ...simulate.statistics import routing_of
from ...simulate.synthetic import CALIBRATIONS, FAMILIES, calibrated, comparable
from ...simulate.trace import Trace
from .metrics import Bar, Report
from .micro import Traces
from .serving import heldout_prompts, run_config

DISTANCES = 4
SIZES = (0.25, 1 / 3, 0.4, 0.5, 2 / 3, 0.75)  # of a layer's experts


def traces(options: Traces, progress: Progress | None) -> Report:
    """Statistics of the default model's routing on held-out text, teacher-forced, and of each family with its targets.

    Columns: `model`; each family, drawn at the shape of its calibration, and its published figure.

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
    return report


def model_figures(options: Traces, progress: Progress | None) -> dict[str, float]:
    """Figures of the default model, from a trace that is recorded for it."""
    from ..record.job import record  # torch

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
    return found if header.repeated_8grams is None else found | {"repeated 8-grams": header.repeated_8grams}
