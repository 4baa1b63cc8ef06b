"""Versions of what a result depends on."""

from __future__ import annotations

import sys
from importlib import metadata

_PACKAGES = ("tiermoe", "torch", "transformers", "ray")


def versions() -> dict[str, str]:
    """Versions of Python and of the main packages, from their metadata: none of them is imported."""
    return {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in _PACKAGES}
