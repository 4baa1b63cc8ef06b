"""A clone in a folder of any name, as an archive unpacks: its tests run, and a source is compiled there once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_NAME = "1 tiermoé-main (2)"  # no name of a package: a digit, a space, dashes, not ASCII
# as g++, but for what it writes; it notes each source that it compiles
_COMPILER = """#!/bin/sh
for word; do
    case "$last" in -o) echo made > "$word";; esac
    case "$word" in *.cpp) echo "$word" >> "$NOTES";; esac
    last=$word
done
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clone without most of its Python files."""
    folder = tmp_path_factory.mktemp("clone") / _NAME
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "__init__.py", "errors.py"):
        shutil.copy(_ROOT / name, folder)
    for path in [path for part in ("actors", "kernels", "proto") for path in (_ROOT / part).rglob("*.[ch]pp")]:
        (folder / path.relative_to(_ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(_ROOT))
    (folder / "tests" / "unit").mkdir(parents=True)
    shutil.copy(_ROOT / "tests" / "conftest.py", folder / "tests")
    (folder / "tests" / "unit" / "test_it.py").write_text("def test_it(usual_liveness): ...\n")
    return folder


@pytest.mark.parametrize("linked", [False, True])
def test_its_tests_run(clone: Path, linked: bool, tmp_path: Path) -> None:
    """Guards an error of every test: pytest imported the clone's `__init__.py` under the folder's name."""
    folder = clone
    if linked:
        (folder := tmp_path / "a-link").symlink_to(clone)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder / "tests/unit/test_it.py")]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def _compiled(clone: Path, tmp_path: Path, **env: str) -> tuple[list[str], list[str]]:
    """The sources that a build compiles, and what it says."""
    (compiler := tmp_path / "c++").write_text(_COMPILER)
    compiler.chmod(0o755)
    (notes := tmp_path / "notes").write_text("")
    env = os.environ | {"CC": str(compiler), "CXX": str(compiler), "NOTES": str(notes)} | env
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return notes.read_text().splitlines(), done.stdout.splitlines()


def test_a_source_is_compiled_once(clone: Path, tmp_path: Path) -> None:
    """Guards `pip install -e '.[dev]'` after `make run`: it compiled everything again, in silence, for minutes."""
    first, said = _compiled(clone, tmp_path)
    assert len(first) > 50
    assert sorted(line.partition(": ")[2] for line in said[:-1]) == sorted(first)
    assert said[0].startswith(f"compiling 1 of {len(first)}: ")
    assert len(list(clone.rglob("*.so"))) >= 5
    shutil.rmtree(tmp_path / "temp")  # as pip, which builds in another folder each time
    os.utime(clone / "proto" / "checks.hpp")  # the same text, as after another branch
    again, said = _compiled(clone, tmp_path)
    assert (again, len(said)) == ([], 1)
    header = clone / "proto" / "checks.hpp"
    header.write_text(header.read_text() + "// changed\n")
    changed, _ = _compiled(clone, tmp_path)
    assert "proto/checks.cpp" in changed
    assert set(changed) < {f"proto/{name}.cpp" for name in ("checks", "module", "ring")}
    optimized, _ = _compiled(clone, tmp_path, CXXFLAGS="-O1", CFLAGS="-O1")
    assert sorted(optimized) == sorted(first)


def test_no_compiler_is_said_with_the_remedy(clone: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    env = os.environ | {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert done.stderr == "there is no C++ compiler '/nowhere/c++': install one (g++), or name one in CXX\n"
