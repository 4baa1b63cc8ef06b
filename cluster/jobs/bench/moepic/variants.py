"""Presets with other values, as YAML files: a configuration file of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .....actors.policy_settings import PolicySettings
from ....config import load_policy
from ....yaml_file import explain, merged


def write_variant(folder: Path, name: str, preset: str, changes: Mapping[str, Any]) -> str:
    """A preset with other values in a file of this folder; the file's path, for `Sweep.files`.

    Args:
        name: of the variant. changes: nested as in the preset.

    Raises:
        ConfigError: the changed preset is refused.
    """
    values = merged(load_policy(preset).model_dump(mode="json"), {**changes, "name": name})
    try:
        PolicySettings(**values)
    except ValidationError as error:
        raise explain(error, PolicySettings, f"{name} of preset {preset}") from error
    path = folder / f"{name.replace(' ', '-')}.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return str(path)
