"""Shapes of published models, from the one table that has them: configs/shapes/published.yaml."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ...errors import ConfigError
from ..config import configs_dir
from ..yaml_file import read_yaml

Count = Annotated[int, Field(ge=1, strict=True)]


class ModelShape(BaseModel):
    """A model's layers and experts.

    Attributes:
        layers: decoder layers, `dense_layers` of which have no experts.
        hidden, intermediate: H and I; an expert has 3 H I weights. bits: of a weight as published.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Count
    dense_layers: Annotated[int, Field(ge=0, strict=True)]
    experts: Count
    top_k: Count
    hidden: Count
    intermediate: Count
    bits: Annotated[float, Field(gt=0)]

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert_bytes(self) -> int:
        """Of one expert, as published."""
        return int(3 * self.hidden * self.intermediate * self.bits / 8)


@cache
def shapes() -> dict[str, ModelShape]:
    """The table's shapes by name."""
    found = read_yaml(configs_dir() / "shapes" / "published.yaml")
    return {name: ModelShape.model_validate(values) for name, values in found.items()}


def shape_named(name: str) -> ModelShape:
    """Raises ConfigError: the table has no such shape."""
    if name not in shapes():
        raise ConfigError(f"--shape is '{name}'", f"give one of {', '.join(shapes())}")
    return shapes()[name]
