"""The C++ of the channel under AddressSanitizer: nothing is read or written outside its buffers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiermoe.proto

_PROTO = Path(tiermoe.proto.__file__).parent
_FLAGS = ("-std=c++17", "-O1", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only")
def test_no_access_outside_the_buffers(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() { return 0; }")
    works = subprocess.run([compiler, *_FLAGS, str(empty), "-o", str(tmp_path / "empty")], check=False)
    if works.returncode != 0 or _run(tmp_path / "empty").returncode != 0:
        pytest.skip("the compiler has no sanitizer runtime here")
    sources = [Path(__file__).with_name("asan_channel.cpp")]
    sources += [_PROTO / name for name in ("checks.cpp", "frame.cpp", "ring.cpp")]
    program = tmp_path / "checked"
    subprocess.run(
        [compiler, *_FLAGS, f"-I{_PROTO}", *map(str, sources), "-o", str(program)], check=True, timeout=60
    )
    done = _run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checked ")
    assert _run(program, "overrun").returncode != 0  # the sanitizer is awake
