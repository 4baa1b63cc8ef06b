"""The base of all settings."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


def in_panel(name: str, unit: str | None = None) -> dict[str, Any]:
    """Metadata of a field: the part of the commands' help that its option is in, instead of the model's; its unit."""
    return {"panel": name} | ({} if unit is None else {"unit": unit})


def in_unit(name: str) -> dict[str, Any]:
    """Metadata of a numeric field whose name does not end with its unit, such as tokens; `1`: a share or a count."""
    return {"unit": name}


class Settings(BaseModel):
    """Base: frozen, and unknown keys are refused. panel: the part of the commands' help that its options are in."""

    panel: ClassVar[str] = "Options"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
