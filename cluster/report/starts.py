"""How long the steps of starts took on this machine, kept in the user's cache: the next start of the same
configuration says about how many seconds are left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from ...proto.private import open_own, own_folder, user_cache
from ..config import RunConfig

_KEPT = 64  # configurations


class LastStart:
    """The last start of a command with a configuration on this machine.

    Args:
        command: whose steps they are.
        config: any other value in it is another start.
        file: None: in the user's cache.

    Attributes:
        seconds: of each step, in their order; empty: it is not known.
    """

    def __init__(self, command: str, config: RunConfig, file: Path | None = None) -> None:
        self._file = file or user_cache() / "starts.json"
        text = f"{platform.node()}\n{command}\n{config.model_dump_json()}"
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.seconds: dict[str, float] = {}
        found = self._read().get(self._key)
        if isinstance(found, dict) and all(isinstance(value, (int, float)) and value >= 0 for value in found.values()):
            self.seconds = found

    def remember(self, seconds: Mapping[str, float]) -> None:
        """This start's steps; a cache that cannot be written changes nothing."""
        known = self._read()
        known.pop(self._key, None)
        newest = dict(list(known.items())[1 - _KEPT :])
        newest[self._key] = {step: round(value, 3) for step, value in seconds.items()}
        with contextlib.suppress(OSError):
            own_folder(self._file.parent)
            written = self._file.with_suffix(f".{os.getpid()}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(open_own(written, flags), "w", encoding="utf-8") as file:
                json.dump(newest, file)
            written.replace(self._file)

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            with os.fdopen(open_own(self._file, os.O_RDONLY), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
