"""`benchmarks/`: a clone of the repository has it, an installed wheel has not.

The root of a clone is the folder of the package itself, so that `benchmarks/` is its subpackage there, in this process
and in every other that imports the clone. It adds commands, cases, experiments, simulated sections and random models.
A Ray job whose working folder is a clone has it too, where the nodes have a wheel.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]


def in_a_ray_job() -> bool:
    """Whether `ray job submit` started this process."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def benchmarks_dir() -> Path | None:
    """The folder of `benchmarks/`; None: this is not a clone."""
    roots = [Path(part) for part in import_module(_PACKAGE).__path__]
    roots += [Path.cwd()] if in_a_ray_job() else []
    found = (root / "benchmarks" for root in roots)
    return next((folder for folder in found if (folder / "clone_commands.py").is_file()), None)


def load(name: str) -> ModuleType | None:
    """Import a module of `benchmarks/`; None: this is not a clone."""
    folder = benchmarks_dir()
    if folder is None:
        return None
    package = import_module(_PACKAGE)
    if str(folder.parent) not in package.__path__:
        package.__path__.append(str(folder.parent))
    return import_module(f"{_PACKAGE}.benchmarks.{name}")
