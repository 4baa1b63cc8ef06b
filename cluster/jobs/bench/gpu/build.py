"""Compile the C++ extensions in place with the Python that runs this: what setup.py names, without installing anything.

`setup.py build_ext --inplace` gives the same, one file after another and only where setuptools is new enough for
pyproject.toml; this asks nothing but g++ and Python's headers, and compiles all files side by side. A plain script: the
package needs no name yet.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Extension:
    """What setup.py says of one; the names are those of setuptools."""

    name: str
    sources: Sequence[str]
    depends: Sequence[str] = ()
    include_dirs: Sequence[str] = ()
    extra_compile_args: Sequence[str] = ()
    language: str = "c++"

    def file(self, root: Path) -> Path:
        """Where it goes: beside the package's own files; the first part of its name is the clone itself."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        return root.joinpath(*self.name.split(".")[1:]).with_suffix(suffix)


def extensions(root: Path) -> list[Extension]:
    """What setup.py would build; setuptools is not asked."""
    asked: dict[str, Any] = {}
    stand_in = types.ModuleType("setuptools")
    stand_in.Extension, stand_in.setup = Extension, asked.update  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"setuptools": stand_in}):
        runpy.run_path(str(root / "setup.py"))
    found: list[Extension] = asked["ext_modules"]
    return found


def build(root: Path, scratch: Path) -> list[Path]:
    """Compile the extensions that are older than their sources; the files.

    Raises:
        RuntimeError: there is no compiler, or it refused a file; the message is the compiler's.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("there is no g++: install one, or name a C++ compiler in CXX")
    python = sysconfig.get_path("include")
    stale = [ext for ext in extensions(root) if _stale(ext, root)]
    objects = {
        (ext.name, source): scratch / f"{ext.name}.{Path(source).stem}.o" for ext in stale for source in ext.sources
    }
    scratch.mkdir(parents=True, exist_ok=True)

    def compile_one(ext: Extension, source: str) -> None:
        folders = [f"-I{root / folder}" for folder in ext.include_dirs]
        _run([compiler, "-fPIC", "-DNDEBUG", "-fwrapv", *ext.extra_compile_args, *folders, f"-I{python}", "-c",
              str(root / source), "-o", str(objects[ext.name, source])])  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(compile_one, ext, source) for ext in stale for source in ext.sources]:
            done.result()
    for ext in stale:
        file = ext.file(root)
        draft = scratch / file.name
        _run([compiler, "-shared", "-pthread", *(str(objects[ext.name, source]) for source in ext.sources), "-o",
              str(draft)])  # fmt: skip
        shutil.move(draft, file)  # a process that has the old one mapped keeps it
    return [ext.file(root) for ext in stale]


def _stale(ext: Extension, root: Path) -> bool:
    file = ext.file(root)
    if not file.exists():
        return True
    made = file.stat().st_mtime
    return any((root / source).stat().st_mtime > made for source in (*ext.sources, *ext.depends))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[4]
    for built in build(here, here / "build" / f"gpu-{sys.implementation.cache_tag}"):
        print(f"built {built.name}", file=sys.stderr)
