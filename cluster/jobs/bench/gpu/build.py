"""Compile the C++ extensions in place with the Python that runs this: what setup.py names, without installing anything.

`setup.py build_ext --inplace` does the same where setuptools is new enough for pyproject.toml; this reads no
pyproject.toml, and compiles the extensions side by side. A plain script: the package needs no name yet.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGES = ("tiermoe", "tiermoe.kernels", "tiermoe.proto")


def extensions(root: Path) -> list[Any]:
    """What setup.py would build."""
    import setuptools

    asked: dict[str, Any] = {}
    with mock.patch.object(setuptools, "setup", asked.update):
        runpy.run_path(str(root / "setup.py"))
    found: list[Any] = asked["ext_modules"]
    return found


def build(root: Path) -> list[Path]:
    """Compile what is older than its sources; the files."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    before = Path.cwd()
    os.chdir(root)  # setup.py's paths are relative
    try:
        distribution = Distribution({
            "name": "tiermoe", "ext_modules": extensions(root), "packages": list(PACKAGES),
            "package_dir": {"tiermoe": "."},
        })  # fmt: skip
        command = build_ext(distribution)
        command.inplace = True
        command.parallel = os.cpu_count()
        command.build_temp = str(root / "build" / f"gpu-{sys.implementation.cache_tag}")
        command.ensure_finalized()
        command.run()
        return [Path(command.get_ext_fullpath(ext.name)).resolve() for ext in distribution.ext_modules]
    finally:
        os.chdir(before)


if __name__ == "__main__":
    for file in build(Path(__file__).resolve().parents[4]):
        print(f"built {file.name}", file=sys.stderr)
