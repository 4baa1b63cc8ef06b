"""The simulated rows of a run before, for one that adds the emulated part to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .....errors import ConfigError
from ....config import RunConfig
from ....host import cpu
from ....simulate.executor import Machine
from ..page_parts import rounded
from .work import LATENCY_US, Workload

_REMEDY = "run both parts (leave --parts out), or give what that run had"


def simulated_before(
    file: Path | None, base: RunConfig, work: Workload
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and settings of the result of an earlier run, without its emulated part.

    Raises:
        ConfigError: it is not there, cannot be read, or is of another model, machine or size, so that what is emulated
            could not be laid beside it.
    """
    if file is None:
        raise ConfigError(
            "--parts emulated takes its link, and what it is laid beside, from an earlier run", "give its --out"
        )
    now = rounded({  # as a result has them
        "model": base.model_dir.name, "contexts": dict(work.contexts), "learn": work.learn, "measure": work.measure,
        "max_tokens": work.max_tokens, "ratios": list(work.ratios), "latency_us": LATENCY_US,
    })  # fmt: skip
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in record["rows"] if row["section"] != "emulated"]
        settings = {"simulated_before": {"versions": record["versions"]}}  # unless that run had it from another
        settings |= {key: value for key, value in record["settings"].items() if key != "emulated"}
        then = {key: settings[key] for key in now}
        then["hardware"] = record["hardware"]["model"]
        if record["name"] != "activeevict" or not any(_on_the_first_link(row, settings) for row in rows):
            raise ValueError("it has no simulated table")
        Machine(**settings["machine"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"'{file}' holds no result of `tiermoe bench activeevict`: {error}", _REMEDY) from error
    now["hardware"] = cpu()["model"]
    if changed := [key for key, value in now.items() if then[key] != value]:
        raise ConfigError(f"'{file}' is of a run with another {', '.join(changed)}", _REMEDY)
    return rows, settings


def _on_the_first_link(row: dict[str, Any], settings: dict[str, Any]) -> bool:
    return bool(row["section"] == "table" and row["ratio"] == settings["ratios"][0])
