"""The C++ under the sanitizers, on buffers of exactly their size: nothing is read or written outside them.

Each program `*_main.cpp` also checks what it computes. With the argument `overrun` it reads past a buffer, which shows
that the sanitizer is awake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CPU, PROTO = ROOT / "kernels" / "cpu", ROOT / "proto"
MEMORY = "address,undefined"


@dataclass(frozen=True)
class Program:
    """`NAME_main.cpp` with the sources that it checks; sanitizers "" for none."""

    name: str
    folder: Path
    sources: tuple[str, ...]
    sanitizers: str = MEMORY
    flags: tuple[str, ...] = ("-O1", "-g", "-pthread", "-DTIERMOE_NO_CLONES")
    says: str = "checked "

    @property
    def sanitizer_flags(self) -> tuple[str, ...]:
        return (f"-fsanitize={self.sanitizers}", "-fno-sanitize-recover=all") if self.sanitizers else ()


FAST_MATH = ("-ffp-contract=fast", "-fno-math-errno", "-pthread")
NEURONS = ("neuron_avx2.cpp", "neuron_avx512.cpp", "neuron_portable.cpp", "neuron_ffn.cpp", "threads.cpp")
FORMS = ("forms.cpp", "forms_avx2.cpp", "forms_avx512.cpp", "forms_portable.cpp", "threads.cpp")
PASSES = (
    "dense.cpp", "expert_ffn.cpp", "importance.cpp", "link.cpp", "loads.cpp", "order.cpp", "split.cpp",
    "split_order.cpp", "threads.cpp",
)  # fmt: skip
PROGRAMS = {
    "experts": Program("expert", CPU, ("expert_ffn.cpp",), flags=("-O1", "-g", "-DTIERMOE_NO_CLONES", *FAST_MATH)),
    # what a processor without AVX2 runs; the installed module picks its widest version by itself
    "experts, plain": Program(
        "expert", CPU, ("expert_ffn.cpp",), sanitizers="", flags=("-O3", "-DTIERMOE_NO_CLONES", *FAST_MATH)
    ),
    # each instruction set of this processor; also that they agree, and threads with each other, bit by bit
    "packed": Program("packed", CPU, NEURONS, flags=("-O1", *FAST_MATH)),
    "forms": Program("form", CPU, FORMS, flags=("-O1", *FAST_MATH)),
    "importance": Program("importance", CPU, ("importance.cpp",), flags=("-O1", "-g", *FAST_MATH)),
    "link": Program("link", CPU, ("link.cpp",)),
    "link, threads": Program("link", CPU, ("link.cpp",), sanitizers="thread"),
    "passes": Program("passes", CPU, PASSES, flags=("-O1", "-g", "-DTIERMOE_NO_CLONES", *FAST_MATH)),
    "planner": Program("planner", CPU, (), flags=("-O1", "-g", "-ffp-contract=off")),
    # random problems with every option; input out of range is refused before it is used
    "substitute": Program(
        "substitute", CPU, ("substitute.cpp",), f"{MEMORY},float-cast-overflow", ("-O1", "-g", "-ffp-contract=off"),
        "checked 2880 problems\n",
    ),
    "channel": Program("channel", PROTO, ("checks.cpp", "frame.cpp", "ring.cpp")),
}


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow  # minutes of compilation
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_access_outside_the_buffers(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    if program.folder == PROTO and sys.platform != "linux":
        pytest.skip("shared memory is Linux only")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sanitizers = program.sanitizer_flags
    (tmp_path / "empty.cpp").write_text("int main() { return 0; }")
    built = call(compiler, *sanitizers, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty"))
    if built.returncode != 0 or call(str(tmp_path / "empty")).returncode != 0:  # the runtime is a package of its own
        pytest.skip("the compiler has no sanitizer runtime here")

    def compiled(source: Path) -> str:
        out = str(tmp_path / f"{source.stem}.o")
        flags = ("-std=c++17", *sanitizers, *program.flags, f"-I{program.folder}", f"-I{CPU}")
        done = call(compiler, *flags, "-c", str(source), "-o", out)
        assert done.returncode == 0, done.stderr
        return out

    with ThreadPoolExecutor(2) as pool:
        sources = [*(program.folder / source for source in program.sources), HERE / f"{program.name}_main.cpp"]
        objects = list(pool.map(compiled, sources))
    checked = str(tmp_path / "checked")
    linked = call(compiler, *sanitizers, "-pthread", *objects, "-o", checked)
    assert linked.returncode == 0, linked.stderr
    done = call(checked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(program.says)
    if "address" in program.sanitizers:
        overrun = call(checked, "overrun")
        assert overrun.returncode != 0
        assert "AddressSanitizer" in overrun.stderr or "runtime error" in overrun.stderr
