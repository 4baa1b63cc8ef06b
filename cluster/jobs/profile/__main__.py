"""``python -m tiermoe.cluster.jobs.profile``: what each way of choosing buddies costs, as a table or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ....errors import ConfigError, TierMoeError
from ...config import default_model_dir
from ...host import cpu, versions
from ...report.tables import grid, progress_on, results, show
from ..evaluate.quality import EvaluationOptions
from ..options import AsJson, Model


def main(
    model: Model = None,
    store: Annotated[Path | None, typer.Option(help="Store of the model, with a profile made from text.")] = None,
    rates: Annotated[str, typer.Option(help="Shares of each layer's experts that are resident.")] = "0.75,0.5,0.375",
    draws: Annotated[int, typer.Option(help="Random draws of the resident experts.")] = 3,
    documents: Annotated[int, typer.Option(help="Most held-out documents to use.")] = 40,
    prefix: Annotated[int, typer.Option(help="Tokens of each document before the scored ones.")] = 32,
    continuation: Annotated[int, typer.Option(help="Tokens of each document that are scored.")] = 128,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule; repeat it for several; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out loss with a part of the experts that are resident, by the rule that chooses their substitutes."""
    try:
        shares = tuple(float(rate) for rate in rates.split(","))
    except ValueError as error:
        raise ConfigError(f"--rates '{rates}' is not a list of numbers", "give, for example, 0.75,0.5") from error
    if not all(0 < rate <= 1 for rate in shares) or draws < 1:
        raise ConfigError("--rates or --draws is out of range", "give rates above 0, 1 at most, and 1 draw at least")
    options = EvaluationOptions(documents=documents, prefix=prefix, continuation=continuation)
    from .trial import trial  # torch takes seconds: imported after the options are checked

    console = Console(stderr=True)
    with progress_on(console) as bar:
        rows = trial(model, shares, range(draws), options, bar, store, rule)
    cells = []
    for row in rows[1:]:
        over = ""
        if "kl_over_drop" in row:
            over = f"{row['kl_over_drop']:+.3f} ({row['kl_over_drop_low']:+.3f} to {row['kl_over_drop_high']:+.3f})"
        cells.append((
            f"{row['rate']:g}", row["rule"], f"{row['nll_nats']:.3f}", f"{row['kl_nats']:.3f}", over,
            f"{row['top1_agreement']:.3f}", f"{row['choice_accuracy']:.3f}",
        ))  # fmt: skip
    columns = ("resident", "rule", "loss, nats", "KL, nats", "KL over drop (95%)", "top-1", "choices")
    show(results(as_json), grid(f"unchanged: {rows[0]['nll_nats']:.3f} nats", columns, cells))
    if as_json:
        record = {
            "name": "substitutes", "hardware": cpu(), "versions": versions(),
            "model": model or str(default_model_dir()), "draws": draws, "documents": documents, "prefix": prefix,
            "continuation": continuation, "rows": rows,
        }  # fmt: skip
        print(json.dumps(record))


if __name__ == "__main__":
    try:
        typer.run(main)
    except TierMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
