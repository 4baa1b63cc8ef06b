"""`docs/results/ndp.md`: the report of `tiermoe bench ndp` as a page, its raw data and its plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from .ndp import NdpReport
from .similarity import plot_similarity

_COLUMNS = (
    ("perplexity", "perplexity", "{:.3f}"),
    ("perplexity_ratio", "over lossless", "{:.4f}"),
    ("top1_agreement", "top-1 agreement", "{:.2%}"),
    ("kl_nats", "mean KL (nats)", "{:.5f}"),
    ("choice_accuracy", "multiple choice", "{:.1%}"),
)


def write_page(report: NdpReport, folder: Path) -> None:
    """Write ndp.md, ndp.json and ndp-similarity.png.

    Raises:
        ConfigError: the folder cannot be written, or matplotlib is missing.
    """
    similarity = report.similarity
    assert similarity is not None  # `bench_ndp` measures it
    try:
        (folder / "ndp.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        (folder / "ndp.md").write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be written: {error}", "give another folder") from error
    plot_similarity(
        folder / "ndp-similarity.png",
        similarity.per_layer,
        model=report.settings["model"],
        sequences=similarity.sequences,
    )


def page(report: NdpReport) -> str:
    """The page as Markdown."""
    record = report.as_dict()
    settings, overlap = record["settings"], record["settings"]["overlap"]
    shape, longer = overlap["shape"], overlap["over_longer"]
    first = report.rows[0]
    hardware = record["hardware"]
    similarity, strangers = record["similarity"], record["strangers"]
    lines = [
        "# Near-data execution: quality, similarity, overlap",
        "",
        f"Written by `tiermoe bench ndp --out docs/results` on {hardware['model']} ({hardware['cores']} cores); "
        f"numbers are *{record['executor']}* (the CPU stands in for the GPU, a CPU process for the NDP device). "
        "Raw data: [ndp.json](ndp.json).",
        "",
        f"Model {settings['model']}, budget {settings['budget']} (K = half of each layer's experts on the device), "
        f"replicas in groups of {settings['group_size']}. {first['documents']} held-out documents, {first['tokens']} "
        f"scored tokens after prefixes of {settings['evaluation']['prefix']}, {first['items']} multiple-choice items. "
        "Decode rows are forced to the text's own tokens. Brackets: 95% bootstrap intervals over documents; perplexity "
        "*over lossless* is paired token by token, so most of the text's own spread cancels in it.",
        "",
        "| placement, precision | " + " | ".join(title for _, title, _ in _COLUMNS) + " | experts on NDP |",
        "|---" * (len(_COLUMNS) + 2) + "|",
        *(_row(row) for row in report.rows),
        "",
        f"Lossless: perplexity {first['reference_perplexity']:.3f}, multiple choice "
        f"{first['reference_choice_accuracy']:.1%}.",
        "",
        "| bar | value | |",
        "|---|---|---|",
        *(f"| {b['name']} {b['op']} {b['limit']:g} | {b['value']:.3g} | {'holds' if b['ok'] else 'missed'} |"
          for b in record["bars"]),
        "",
        "## Does prefill foretell decode?",
        "",
        f"Cosine similarity of the expert activation distributions of prefill and decode, mean over "
        f"{similarity['sequences']} sequences: **{similarity['overall']:.3f}** (the paper: 0.89 for Mixtral-8x7B on "
        f"TruthfulQA). Of one document's prefill with the next document's decode: {strangers['overall']:.3f}, which is "
        "what even routing alone gives.",
        "",
        "| layer | own | another's |",
        "|---|---|---|",
        *(f"| {i} | {own:.3f} | {other:.3f} |"
          for i, (own, other) in enumerate(zip(similarity["per_layer"], strangers["per_layer"], strict=True))),
        "",
        "![Similarity by layer](ndp-similarity.png)",
        "",
        "## Overlap",
        "",
        f"{overlap['layers']} layers of decode steps of a random model ({shape['experts']} experts of "
        f"{shape['hidden']} x {shape['intermediate']}, top-{shape['top_k']}), the NDP worker in full precision, paced "
        f"to a device of {overlap['modelled_memory_gbps']:g} GB/s. Medians: GPU part {overlap['gpu_s'] * 1e3:.2f} ms, "
        f"NDP part {overlap['ndp_s'] * 1e3:.2f} ms, layer {overlap['layer_s'] * 1e3:.2f} ms. Layer over the longer "
        f"part: **{longer['median']:.3f}** ({longer['minimum']:.3f} to {longer['maximum']:.3f}); over their sum: "
        f"{overlap['over_sum']['median']:.3f}.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    cells = [f"{form.format(row[key])} ({_bounds(row, key, form)})" for key, _, form in _COLUMNS]
    return f"| {row['case']} | " + " | ".join(cells) + f" | {row['ndp_share']:.1%} |"


def _bounds(row: dict[str, Any], key: str, form: str) -> str:
    return f"{form.format(row[key + '_low'])} to {form.format(row[key + '_high'])}"
