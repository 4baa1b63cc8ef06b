"""Versions of what a result depends on."""

from __future__ import annotations

import sys
from importlib import metadata

_PACKAGES = ("tiermoe", "torch", "transformers", "ray")


def versions() -> dict[str, str]:
    """Versions of Python and of the main packages, from their metadata: none of them is imported.

    A package that is not installed is "absent": a clone may run without being installed, and GPU workers without Ray.
    """
    return {"python": sys.version.split()[0]} | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
