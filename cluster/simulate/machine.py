"""The machine that a replay runs on: what computing and copying take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ...actors.policies.cost import Link
from ...errors import ConfigError
from ..yaml_file import explain, read_yaml
from .trace_format import Costs, TraceHeader


class Machine(Costs):
    """A simulated machine: costs of computing, and the link. Fields in the order of a forward pass.

    name: what reports call it. link_gbps: gigabytes (1e9) per second; none: copies take no time. link_latency_us: of
    each copy. Experts run one after the other, so that the times of a layer add up.
    """

    name: Annotated[str, Field(min_length=1)]
    link_gbps: Annotated[float, Field(gt=0)] | None = None
    link_latency_us: Annotated[float, Field(ge=0)] = 0.0

    @property
    def link(self) -> Link | None:
        return None if self.link_gbps is None else Link(self.link_gbps, self.link_latency_us)

    def dense(self, rows: int) -> float:
        """Seconds of a layer's attention, norms and router."""
        return self.dense_s + (rows - 1) * self.dense_row_s

    def experts(self, experts: int, pairs: int) -> float:
        """Seconds of so many experts on so many rows in all."""
        return experts * self.expert_s + (pairs - experts) * self.expert_row_s


def load_machine(
    header: TraceHeader, file: Path | None, link_gbps: float | None, link_latency_us: float | None
) -> Machine:
    """The machine of a YAML file, or the one that the trace was recorded on; with another link if one is given.

    Raises:
        ConfigError: the file is refused, or there is none and the trace was recorded without costs.
    """
    given = {"link_gbps": link_gbps, "link_latency_us": link_latency_us}
    link = {key: value for key, value in given.items() if value is not None}
    if file is not None:
        try:
            values = read_yaml(file)
            return Machine(**(values | link))
        except ValidationError as error:
            raise explain(error, Machine, str(file)) from error
    if header.costs is None:
        raise ConfigError("the trace says nothing of what computing took", "give a machine with --machine FILE")
    try:
        return Machine(name="recorded", **header.costs.model_dump(), **link)
    except ValidationError as error:
        raise explain(error, Machine, "the trace", link) from error
