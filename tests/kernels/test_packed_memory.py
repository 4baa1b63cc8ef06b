"""The neuron kernels under AddressSanitizer, on buffers of exactly their size (`packed_main.cpp`)."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
UNITS = ("neuron_avx2.cpp", "neuron_avx512.cpp", "neuron_portable.cpp", "neuron_ffn.cpp", "threads.cpp")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("empty")
    (folder / "empty.cpp").write_text("int main() { return 0; }")
    built = call(found, *FLAGS, str(folder / "empty.cpp"), "-o", str(folder / "empty"))
    if built.returncode != 0 or call(str(folder / "empty")).returncode != 0:
        pytest.skip("g++ has no sanitizer runtime here")
    return found


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_no_access_outside_the_buffers(compiler: str, tmp_path: Path) -> None:
    """Each instruction set of this processor; also that they agree, and threads with each other, bit by bit."""

    def compiled(source: Path) -> str:
        out = tmp_path / f"{source.stem}.o"
        done = call(
            compiler, "-std=c++17", "-O1", *FLAGS, "-ffp-contract=fast", "-fno-math-errno", "-pthread",
            f"-I{SOURCES}", "-c", str(source), "-o", str(out),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        units = [*(SOURCES / unit for unit in UNITS), Path(__file__).with_name("packed_main.cpp")]
        objects = list(pool.map(compiled, units))
    program = tmp_path / "checked"
    linked = call(compiler, *FLAGS, "-pthread", *objects, "-o", str(program))
    assert linked.returncode == 0, linked.stderr
    done = call(str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checked ")
    assert call(str(program), "overrun").returncode != 0  # the sanitizer is awake
