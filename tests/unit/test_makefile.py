"""`make run` into a new environment, with a Python that notes what it was asked instead of installing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_CPU = "https://download.pytorch.org/whl/cpu"
_PYTHON = """#!/bin/sh
# as `python3 -m venv DIR`: DIR gets programs that note their arguments
mkdir -p "$3/bin"
for name in python tiermoe ruff mypy; do
    printf '#!/bin/sh\\necho "%s $*" >> "%s/asked"\\n' $name "$3" > "$3/bin/$name"
    chmod +x "$3/bin/$name"
done
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(_PYTHON)
    path.chmod(0o755)
    return path


def _make(tmp_path: Path, *words: str, target: str = "run", root: Path = _ROOT) -> tuple[int, str, str]:
    """Exit status, what it said, and the lines that the environment's programs noted."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH_INDEX", "PIP_ARGS")  # of the `make test` that runs this
    env = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", target, f"VENV={tmp_path / 'v'}", f"PYTHON={tmp_path / 'python'}", "ARGS=", "PROMPT=x", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)
    noted = tmp_path / "v" / "asked"
    return done.returncode, done.stderr, noted.read_text() if noted.exists() else ""


@pytest.mark.usefixtures("python")
def test_it_says_what_it_fetches(tmp_path: Path) -> None:
    status, said, noted = _make(tmp_path, "GPU_FILES=")
    assert status == 0
    cuda, cpu = (line for line in said.splitlines() if " GB with " in line or " disk) with " in line)
    assert "2.9 GB" in cuda
    assert "PyPI's torch, which is for NVIDIA GPUs" in cuda
    assert "0.4 GB" in cpu
    assert f"TORCH_INDEX={_CPU}: no NVIDIA GPU is seen here" in cpu
    assert "--extra-index-url" not in noted
    assert noted.splitlines()[-1] == "tiermoe run x --emulate"
    assert _make(tmp_path, "GPU_FILES=")[1] == ""  # nothing to install


@pytest.mark.usefixtures("python")
def test_it_compiles_first_and_is_never_silent(tmp_path: Path) -> None:
    """Guards minutes without a line: pip was quiet, and shows nothing of a compilation."""
    _, _, noted = _make(tmp_path)
    tools, compiled, packages, _ = noted.splitlines()
    assert tools.endswith("--quiet nanobind pip setuptools")  # seconds
    assert compiled == "python setup.py --quiet build_ext --inplace"  # without setuptools' own lines
    assert packages.startswith("python -m pip install ")
    assert packages.endswith("-c constraints.txt -e .")
    assert "--quiet" not in packages
    status, said, noted = _make(tmp_path, target=f"{tmp_path / 'v'}/.installed-dev")
    assert (status, noted.splitlines()[-1].endswith("-e .[dev]")) == (0, True)
    assert said == f"installing into {tmp_path / 'v'} what is missing there or has changed\n"


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("linked", [False, True])
def test_in_a_folder_of_any_name(tmp_path: Path, linked: bool) -> None:
    """Guards `make lint` in a folder whose name has a space: its links led nowhere."""
    (root := tmp_path / "1 tiermoé-main (2)").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py", "errors.py"):
        shutil.copy(_ROOT / name, root)
    (root / "actors" / "core").mkdir(parents=True)
    if linked:
        (tmp_path / "a-link").symlink_to(root)
        root = tmp_path / "a-link"
    status, said, noted = _make(tmp_path, root=root)
    assert (status, noted.splitlines()[-1]) == (0, "tiermoe run x --emulate"), said
    status, said, noted = _make(tmp_path, target="lint", root=root)
    assert (status, "mypy -p tiermoe\n" in noted) == (0, True), said
    package = root / "build" / "typecheck" / "tiermoe"
    assert (package / "errors.py").samefile(root / "errors.py")
    assert (package / "actors").samefile(root / "actors")


def test_an_environment_whose_path_has_a_space_is_refused(tmp_path: Path) -> None:
    """make would take it for two files. `.venv` in a folder with a space is none."""
    status, said, _ = _make(tmp_path, f"VENV={tmp_path}/a b")
    assert status == 2
    assert f"VENV is '{tmp_path}/a b'; give a path without spaces" in said


@pytest.mark.usefixtures("python")
def test_beside_a_gpu_it_does_not_speak_of_cpus(tmp_path: Path) -> None:
    assert _CPU not in _make(tmp_path, "GPU_FILES=/dev/nvidia0")[1]


@pytest.mark.usefixtures("python")
def test_torch_of_another_index(tmp_path: Path) -> None:
    """The index is passed on, and kept for the next installation; another one is refused, never left out."""
    status, said, noted = _make(tmp_path, f"TORCH_INDEX={_CPU}", "GPU_FILES=")
    assert status == 0
    assert f"0.4 GB (1.6 GB on disk) if {_CPU} has torch for CPUs" in said
    asked = f"--extra-index-url {_CPU} -c constraints.txt -e ."
    assert asked in noted
    (tmp_path / "v" / ".installed").unlink()
    status, said, noted = _make(tmp_path)
    assert status == 0
    assert noted.count(asked) == 2
    for other in ("", "https://download.pytorch.org/whl/cu126"):
        status, said, _ = _make(tmp_path, f"TORCH_INDEX={other}")
        assert status == 2
        assert f"has torch of '{_CPU}', not of '{other}'; run `make clean`" in said
