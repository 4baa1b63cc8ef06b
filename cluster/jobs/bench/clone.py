"""`benchmarks/`: a clone of the repository has it, an installed wheel has not.

The root of a clone is the folder of the package itself, so that `benchmarks/` is its subpackage there, in this process
and in every other that imports the clone. It adds commands, cases, experiments, simulated sections and random models.
A Ray job whose working folder is a clone has it too, where the nodes have a wheel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ....errors import ConfigError

_PACKAGE = __name__.partition(".")[0]


def in_a_ray_job() -> bool:
    """Whether `ray job submit` started this process."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def benchmarks_dir(in_job: bool | None = None) -> Path | None:
    """The folder of `benchmarks/`; None: this is not a clone.

    Args:
        in_job: whether the working folder is that of a Ray job; None: if `ray job submit` started this process.
    """
    roots = [Path(part) for part in import_module(_PACKAGE).__path__]
    roots += [Path.cwd()] if (in_a_ray_job() if in_job is None else in_job) else []
    found = (root / "benchmarks" for root in roots)
    return next((folder for folder in found if (folder / "clone_commands.py").is_file()), None)


def load(name: str, in_job: bool | None = None) -> ModuleType | None:
    """Import a module of `benchmarks/`; None: this is not a clone. in_job: as of `benchmarks_dir`."""
    folder = benchmarks_dir(in_job)
    if folder is None:
        return None
    package = import_module(_PACKAGE)
    if str(folder.parent) not in package.__path__:
        package.__path__.append(str(folder.parent))
    return import_module(f"{_PACKAGE}.benchmarks.{name}")


@dataclass(frozen=True)
class CloneCall:
    """A call of a function of `benchmarks/` on another node, which may have a wheel and the working folder of the job.

    It is of plain values: a class of `benchmarks/` could not be unpickled before `load` has found the folder.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]
    in_job: bool = field(default_factory=in_a_ray_job)


def called(call: CloneCall) -> Any:
    """What the function returns. Raises ConfigError: this node has no `benchmarks/`."""
    module = load(call.module, call.in_job)
    if module is None:
        remedy = "submit the benchmark as a Ray job from a clone, or install the clone on each node"
        raise ConfigError("a node has no benchmarks/ of a clone", remedy)
    return getattr(module, call.function)(*call.arguments)
