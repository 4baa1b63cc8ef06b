"""The stand-in's link under the sanitizers (`link_main.cpp`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_link_races_with_nobody_and_stays_within_its_buffers(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-std=c++17", "-O1", "-g", "-pthread"]
    (tmp_path / "empty.cpp").write_text("int main() { return 0; }")
    built = call(compiler, *flags, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty"))
    if built.returncode != 0 or call(str(tmp_path / "empty")).returncode != 0:
        pytest.skip(f"g++ has no {sanitizer} sanitizer here")
    program = tmp_path / "checked"
    sources = [str(SOURCES / "link.cpp"), str(Path(__file__).with_name("link_main.cpp"))]
    built = call(compiler, *flags, f"-I{SOURCES}", *sources, "-o", str(program))
    assert built.returncode == 0, built.stderr
    done = call(str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("checked ")
    if sanitizer != "thread":
        assert call(str(program), "overrun").returncode != 0  # the sanitizer is awake
