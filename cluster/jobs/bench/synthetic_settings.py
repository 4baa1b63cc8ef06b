"""What an experiment states in place of a model: synthetic routing on a stated machine, and a paper's figures.

`benchmarks/experiments/paper-NAME.yaml` of a clone states a paper; `benchmarks/papers.py` runs such sections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ....actors.base_settings import Settings

Count = Annotated[int, Field(ge=1)]
Published = float | Literal["higher", "lower"]


class Traces(Settings):
    """Synthetic requests of each family at each shape (`simulate.synthetic`).

    learn, measure: requests that are served first, uncounted, and those that count. prompt, decode: tokens of each.
    distances: layers ahead whose predictions a trace holds. layers: only so many of a shape's; None: all.
    recalls: share of a layer's experts that its router names 1, 2, .. layers before; None: the family's.
    """

    families: tuple[str, ...] = Field(min_length=1)
    shapes: tuple[str, ...] = Field(min_length=1)
    learn: Annotated[int, Field(ge=0)] = 6
    measure: Count = 3
    prompt: Count = 32
    decode: Count = 32
    distances: Count = 4
    seed: int = 0
    recalls: tuple[float, ...] | None = None
    layers: Count | None = None


class Simulation(Settings):
    """A section on synthetic routing and a machine of configs/machines. A budget is that of all GPUs together.

    assume: fields of `simulate.machine.Machine` in place of the table's, for every variant alike.
    batch: requests in each forward. rate, arrivals: see `tiermoe replay`; none: a request arrives when there is room.
    sweep: values by `batch`, `rate`, `machine.FIELD`, or the path of a policy's setting; every combination runs. A
        row has each value under the last part of its name.
    """

    machine: str
    traces: Traces
    assume: dict[str, Any] = Field(default_factory=dict)
    batch: Count = 1
    rate: Annotated[float, Field(gt=0)] | None = None
    arrivals: Path | None = None
    sweep: dict[str, tuple[Any, ...]] = Field(default_factory=dict)


class Comparison(Settings):
    """Our figure beside the published one: a measure, or with `over` the mean of its ratios to that of a baseline.

    source: where the paper says so. where: values of our rows; a list: one of them. of, over: variants; rows are paired
        that differ in the variant only.
    by, published: one figure, or the direction that the text states; or one for each value of a row's key `by`, where
        `of` and `over` name the variant.
    headline: a claim: that it holds is a bar, and it stands in the page's table of claims.
    why: of the verdict, as a person explains it; or one for each key of `published`.
    """

    title: str
    source: str = ""
    section: str
    measure: str
    where: dict[str, Any] = Field(default_factory=dict)
    of: str | None = None
    over: str | None = None
    by: str = "over"
    published: Published | dict[str, Published]
    headline: bool = True
    why: str | dict[str, str] = ""
