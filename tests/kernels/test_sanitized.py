"""The C++ under the sanitizers, on buffers of exactly their size: nothing is read or written outside them.

Each program `*_main.cpp` also checks what it computes. With the argument `overrun` it reads past a buffer, which shows
that the sanitizer is awake.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from nanobind import include_dir, source_dir

pytestmark = pytest.mark.timeout(900)  # the kernels of forms take four minutes of a processor to compile

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CPU, CORE, PROTO = ROOT / "kernels" / "cpu", ROOT / "actors" / "core", ROOT / "proto"
MEMORY = "address,undefined"
FAST_MATH = ("-ffp-contract=fast", "-fno-math-errno", "-pthread")
# of the whole module and of every program that can have the same: each source is then compiled once for all of them;
# -O0: three times as fast to compile as -O1, and what is checked are small problems; -g1: names and lines for a report
MODULE = ("-O0", "-g1", "-fPIC", "-DTIERMOE_NO_CLONES", *FAST_MATH)


@dataclass(frozen=True)
class Program:
    """`NAME_main.cpp` with the sources that it checks; sanitizers "" for none."""

    name: str
    folder: Path
    sources: tuple[str, ...]
    sanitizers: str = MEMORY
    flags: tuple[str, ...] = MODULE
    says: str = "checked "

    @property
    def sanitizer_flags(self) -> tuple[str, ...]:
        return (f"-fsanitize={self.sanitizers}", "-fno-sanitize-recover=all") if self.sanitizers else ()


NEURONS = ("neuron_avx2.cpp", "neuron_avx512.cpp", "neuron_portable.cpp", "neuron_ffn.cpp", "threads.cpp")
FORMS = ("forms.cpp", "forms_avx2.cpp", "forms_avx512.cpp", "forms_portable.cpp", "threads.cpp")
LAYER = (
    "dense.cpp", "expert_ffn.cpp", "importance.cpp", "link.cpp", "order.cpp", "substitute.cpp",
    "worth.cpp", *FORMS,
    *(f"../../actors/core/{name}.cpp" for name in ("core", "cpu_layer", "layer", "rules", "thread_link")),
)  # fmt: skip
CORES = (
    "core.cpp", "stream_link.cpp", "thread_link.cpp", "virtual_link.cpp",
    *(f"../../kernels/cpu/{name}.cpp" for name in ("importance", "link", "order", "worth")),
)  # fmt: skip
DISK = ("disk_link.cpp", "../../kernels/cpu/link.cpp")
# also checks each index of a vector
CORE_FLAGS = (
    "-O0", "-g1", "-D_GLIBCXX_ASSERTIONS", "-DTIERMOE_NO_CLONES", "-ffp-contract=off", "-fno-math-errno", "-pthread",
)  # fmt: skip
PROGRAMS = {
    "experts": Program("expert", CPU, ("expert_ffn.cpp",)),
    # what a processor without AVX2 runs; the installed module picks its widest version by itself
    "experts, plain": Program(
        "expert", CPU, ("expert_ffn.cpp",), sanitizers="", flags=("-O3", "-DTIERMOE_NO_CLONES", *FAST_MATH)
    ),
    # each instruction set of this processor; also that they agree, and threads with each other, bit by bit
    "packed": Program("packed", CPU, NEURONS),
    "forms": Program("form", CPU, FORMS),
    "importance": Program("importance", CPU, ("importance.cpp",)),
    "core": Program("core", CORE, CORES, flags=CORE_FLAGS),
    "core, threads": Program("core", CORE, CORES, sanitizers="thread", flags=CORE_FLAGS),
    "disk": Program("disk", CORE, DISK, flags=CORE_FLAGS),
    "disk, threads": Program("disk", CORE, DISK, sanitizers="thread", flags=CORE_FLAGS),
    "maps": Program("maps", CORE, ("maps.cpp",), flags=CORE_FLAGS),
    "link": Program("link", CPU, ("link.cpp",)),
    "link, threads": Program("link", CPU, ("link.cpp",), sanitizers="thread"),
    "layers": Program("layer", CPU, LAYER),
    "layers, threads": Program("layer", CPU, LAYER, sanitizers="thread"),
    "planner": Program("planner", CPU, (), flags=("-O1", "-g1", "-ffp-contract=off")),
    # random problems with every option; input out of range is refused before it is used
    "substitute": Program(
        "substitute",
        CPU,
        ("substitute.cpp",),
        f"{MEMORY},float-cast-overflow",
        ("-O1", "-g1", "-ffp-contract=off"),
        "checked 2880 problems\n",
    ),
    "channel": Program("channel", PROTO, ("checks.cpp", "ring.cpp")),
    "channel, threads": Program("channel", PROTO, ("checks.cpp", "ring.cpp"), sanitizers="thread"),
}


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)


def _started(compiler: str, sanitizers: Sequence[str], folder: Path) -> tuple[str, ...]:
    """What a program with these sanitizers is started with; skips the test where none starts."""
    (folder / "empty.cpp").write_text("int main() { return 0; }")
    built = call(compiler, *sanitizers, str(folder / "empty.cpp"), "-o", str(folder / "empty"))
    # ThreadSanitizer has fixed addresses, which kernels with much randomness of addresses give to others
    for start in ((), ("setarch", "-R")) if built.returncode == 0 else ():
        if start and shutil.which(start[0]) is None:
            continue
        if call(*start, str(folder / "empty")).returncode == 0:
            return start
    pytest.skip("the compiler has no sanitizer runtime here")  # which is a package of its own


Compile = Callable[..., list[str]]


@pytest.fixture(scope="module")
def compile_all(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Objects of sources, compiled two at a time; one with the same flags is compiled once for all tests."""
    folder = tmp_path_factory.mktemp("objects")
    binding = source_dir(), include_dir(), f"{source_dir()}/../ext/robin_map/include"
    headers = [f"-I{place}" for place in (CPU, PROTO, sysconfig.get_paths()["include"], *binding)]

    @functools.cache
    def compiled(compiler: str, source: Path, flags: tuple[str, ...]) -> str:
        out = str(folder / f"{source.stem}-{hash(flags):x}.o")
        done = call(compiler, "-std=c++17", *flags, *headers, "-c", str(source), "-o", out)
        assert done.returncode == 0, done.stderr
        return out

    def all_of(compiler: str, sources: Sequence[Path], *flags: str) -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda source: compiled(compiler, source, flags), sources))

    return all_of


@pytest.mark.slow  # minutes of compilation
def test_bindings_rank_and_decode(tmp_path: Path, compile_all: Compile) -> None:
    """The whole module of kernels, called with numbers that no caller has."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C++ compiler, or no Linux")
    sanitizers = (f"-fsanitize={MEMORY}", "-fno-sanitize-recover=all")
    _started(compiler, sanitizers, tmp_path)
    sources = [source for source in sorted(CPU.glob("*.cpp")) if source.stem != "planner_module"]  # of another module
    objects = compile_all(compiler, sources, *sanitizers, *MODULE)
    module = str(tmp_path / "_cpu.so")
    linked = call(compiler, "-shared", *sanitizers, "-pthread", *objects, "-o", module)
    assert linked.returncode == 0, linked.stderr
    # the C++ library, too: a sanitizer that starts without it finds no function that throws
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    runtimes = [call(compiler, f"-print-file-name={name}").stdout.strip() for name in names]
    # Python's own allocator would hide where a buffer ends; leaks are the interpreter's
    variables = ("env", f"LD_PRELOAD={' '.join(runtimes)}", "PYTHONMALLOC=malloc", "ASAN_OPTIONS=detect_leaks=0")
    script = (sys.executable, str(HERE.parent / "hostile.py"), module)
    done = call(*variables, *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("checked ")
    overrun = call(*variables, *script, "overrun")
    assert overrun.returncode != 0
    assert "AddressSanitizer" in overrun.stderr


@pytest.mark.slow  # minutes of compilation
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_access_outside_the_buffers(name: str, tmp_path: Path, compile_all: Compile) -> None:
    program = PROGRAMS[name]
    if program.folder == PROTO and sys.platform != "linux":
        pytest.skip("shared memory is Linux only")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sanitizers = program.sanitizer_flags
    start = _started(compiler, sanitizers, tmp_path)
    sources = [*(program.folder / source for source in program.sources), HERE / f"{program.name}_main.cpp"]
    objects = compile_all(compiler, sources, *sanitizers, *program.flags)
    checked = str(tmp_path / "checked")
    linked = call(compiler, *sanitizers, "-pthread", *objects, "-o", checked)
    assert linked.returncode == 0, linked.stderr
    done = call(*start, checked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(program.says)
    if "address" in program.sanitizers:
        overrun = call(*start, checked, "overrun")
        assert overrun.returncode != 0
        assert "AddressSanitizer" in overrun.stderr or "runtime error" in overrun.stderr
