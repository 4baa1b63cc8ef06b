"""Buddy substitution under AddressSanitizer, on buffers of exactly their size (`substitute_main.cpp`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"
FLAGS = (
    "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-std=c++17", "-O1", "-g",
    "-ffp-contract=off",
)  # fmt: skip


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_no_access_outside_the_buffers(tmp_path: Path) -> None:
    """Random problems with every option; input out of range is refused before it is used."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    (tmp_path / "empty.cpp").write_text("int main() { return 0; }")
    built = call(compiler, *FLAGS, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty"))
    if built.returncode != 0 or call(str(tmp_path / "empty")).returncode != 0:
        pytest.skip("g++ has no sanitizer runtime here")
    program = tmp_path / "checked"
    sources = [str(SOURCES / "substitute.cpp"), str(Path(__file__).with_name("substitute_main.cpp"))]
    built = call(compiler, *FLAGS, f"-I{SOURCES}", *sources, "-o", str(program))
    assert built.returncode == 0, built.stderr
    done = call(str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "checked 2880 problems\n"
    awake = call(str(program), "overrun")
    assert awake.returncode != 0
    assert "AddressSanitizer" in awake.stderr
