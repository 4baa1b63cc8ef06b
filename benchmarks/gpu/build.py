"""The packages and compiled C++ extensions that a run needs before the package can be imported.

A plain script of the standard library, run by `run.sh`. It compiles what setup.py names, in parallel and in place, with
g++ and Python's headers alone; `setup.py build_ext --inplace` is slower and needs a new setuptools.
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
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

# module: name for pip. Ray and what the command line needs are of one part alone; nanobind is needed as sources.
NEEDED = {
    "numpy": "numpy", "torch": "torch", "transformers": "transformers", "safetensors": "safetensors",
    "tokenizers": "tokenizers", "pydantic": "pydantic", "yaml": "pyyaml", "psutil": "psutil", "rich": "rich",
    "grpc": "grpcio", "nanobind": "nanobind",
}  # fmt: skip
USED_IF_THERE = {"triton": "triton", "accelerate": "accelerate", "pytest": "pytest", "hypothesis": "hypothesis"}
FOR_RAY = {"ray": "ray", "typer": "typer", "grpc_health": "grpcio-health-checking"}  # of part `ray`


def installed(module: str) -> bool:
    """Whether a module can be imported, without an import."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is missing
        return False


def missing(modules: dict[str, str]) -> list[str]:
    """The pip names of the modules that are not installed."""
    return [name for module, name in modules.items() if not installed(module)]


def package_versions(modules: dict[str, str]) -> dict[str, str]:
    found = {}
    for module, name in modules.items():
        if installed(module):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "there"
    return found


@dataclass(frozen=True)
class Extension:
    """An extension of setup.py, with setuptools' names."""

    name: str
    sources: Sequence[str]
    depends: Sequence[str] = ()
    include_dirs: Sequence[str] = ()
    extra_compile_args: Sequence[str] = ()
    language: str = "c++"

    def file(self, root: Path) -> Path:
        """The compiled file in the clone, the first part of whose name is the package itself."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        return root.joinpath(*self.name.split(".")[1:]).with_suffix(suffix)

    def stale(self, root: Path) -> bool:
        file = self.file(root)
        if not file.exists():
            return True
        made = file.stat().st_mtime
        return any((root / source).stat().st_mtime > made for source in (*self.sources, *self.depends))


def extensions(root: Path) -> list[Extension]:
    """The extensions that setup.py names, without setuptools."""
    asked: dict[str, Any] = {}
    stand_in = types.ModuleType("setuptools")
    stand_in.Extension, stand_in.setup = Extension, asked.update  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"setuptools": stand_in}):
        runpy.run_path(str(root / "setup.py"))
    found: list[Extension] = asked["ext_modules"]
    return found


def build(root: Path, scratch: Path) -> list[Path]:
    """Compile the extensions that are older than their sources; return their files.

    Raises:
        RuntimeError: there is no compiler, or it refused a file; the message is the compiler's.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("there is no g++: install one, or name a C++ compiler in CXX")
    python = sysconfig.get_path("include")
    stale = [ext for ext in extensions(root) if ext.stale(root)]
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


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def main(root: Path) -> int:
    """0 when the packages are there and the extensions are built; else report what to do, and return 1."""
    if lacking := missing(NEEDED):
        say(f"missing packages: {', '.join(lacking)}")
        say(f"  with a network:    {sys.executable} -m pip install -c constraints.txt {' '.join(lacking)}")
        say("  without one:       see docs/gpu-measurements.md, 'What it needs'")
        return 1
    for name in missing(USED_IF_THERE | FOR_RAY):
        say(f"{name} is not installed: what needs it is left out and said on the page")
    say("building the C++ extensions ...")
    try:
        for file in build(root, root / "build" / f"gpu-{sys.implementation.cache_tag}"):
            say(f"built {file.name}")
    except RuntimeError as error:
        log = root / "build/gpu-build.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(str(error), encoding="utf-8")
        say("\n".join(str(error).splitlines()[-20:]))
        say(f"the C++ extensions did not build ({log}): g++ with C++17 and Python's headers are needed")
        return 1
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
