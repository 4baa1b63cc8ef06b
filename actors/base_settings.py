"""The base of all settings."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


def in_panel(name: str) -> dict[str, Any]:
    """Metadata of a field: the part of the commands' help that its option is in, in place of the model's."""
    return {"panel": name}


class Settings(BaseModel):
    """Base: frozen, and unknown keys are refused. panel: the part of the commands' help that its options are in."""

    panel: ClassVar[str] = "Options"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
