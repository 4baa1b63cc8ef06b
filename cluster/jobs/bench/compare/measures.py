"""All counters of an engine as flat numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..metrics import Measures


def counters(stats: Any) -> Measures:
    """Totals of an `EngineStats`; what is nested is joined with dots, what is no number is left out."""
    return dict(_numbers("", {key: value for key, value in stats.as_dict().items() if key != "layers"}))


def layer_counters(stats: Any) -> list[Measures]:
    """The counters of each layer that are not zero."""
    return [{k: float(v) for k, v in layer.items() if v} for layer in stats.as_dict()["layers"]]


def added(sums: list[Measures], more: list[Measures]) -> list[Measures]:
    """Both, layer by layer."""
    if not sums:
        return more
    return [
        {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}} for a, b in zip(sums, more, strict=True)
    ]


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}.", value)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{name}", float(value)
