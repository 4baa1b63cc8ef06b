"""A result as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object; the file is whole or not there, also when the process is killed meanwhile.

    Raises:
        ConfigError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}", "give a path that you may write") from error
