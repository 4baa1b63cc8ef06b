"""What experiments find here by name: metric functions, simulated sections, random models. Importing registers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiermoe.cluster.jobs.bench.experiment import Section
from tiermoe.cluster.jobs.bench.run import Study

from . import engine_metrics, papers, random_model, trace_metrics

__all__ = ["engine_metrics", "papers", "random_model", "simulate", "trace_metrics"]


def simulate(study: Study, section: Section, links: Sequence[trace_metrics.LinkAt]) -> list[dict[str, Any]]:
    """The rows of a simulated section, as plain values: on the routing that it states, else on the recorded one."""
    if section.simulation is not None:
        return papers.synthetic_rows(study, section, section.simulation)
    return trace_metrics.recorded_rows(study, section, links)
