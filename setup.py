"""The C++ kernels, the core and the rings of the channel; everything else is in pyproject.toml.

`benchmarks/gpu/build.py` compiles the same extensions without setuptools.
"""

import copy
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    import nanobind
except ModuleNotFoundError:  # pip and uv install what pyproject.toml names, unless they build without isolation
    raise SystemExit("nanobind is not installed: python -m pip install 'nanobind==3.1.0'") from None
from setuptools import Extension, setup

try:
    from setuptools.command.build_ext import build_ext
except ModuleNotFoundError:  # benchmarks/gpu/build.py reads the extensions without setuptools, and compiles them itself
    build_ext = object

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "objects"
KEPT_DAYS = 30  # an object that no build has used since is removed
NANOBIND = [
    nanobind.source_dir(), nanobind.include_dir(), os.path.join(nanobind.source_dir(), "../ext/robin_map/include"),
]  # fmt: skip
# -g0: Python's own flags may have -g, with which an extension is ten times as large
# -Wno: false alarms of Python's own -Wall, mostly in loops that -O3 unrolls; tests/kernels runs such loops sanitized
COMMON = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-Wno-psabi", "-pthread"]
COMMON += ["-Wno-array-bounds", "-Wno-maybe-uninitialized", "-Wno-switch"]
# as nanobind's nb_combined.cpp asks; without -fvisibility=hidden, types of two extensions with the same names would be
# mixed up. What it asks besides for its own source alone is in kernels/cpu/nanobind.cpp
BINDING = ["-fvisibility=hidden", "-DNB_COMPACT_ASSERTIONS"]


def headers(sources: Iterable[str], include_dirs: Iterable[str]) -> list[str]:
    """The headers of this repository that sources include, directly or not; by their paths below its root."""
    found, queue = set[Path](), [ROOT / source for source in sources]
    while queue:
        file = queue.pop()
        for included in re.findall(r'^#include "(.+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
            places = (folder / included for folder in (file.parent, *(ROOT / folder for folder in include_dirs)))
            header = next((place.resolve() for place in places if place.is_file()), None)
            # an environment may lie in the clone, and with it nanobind, whose version `ParallelBuild` knows
            if header is not None and header.is_relative_to(ROOT) and "site-packages" not in header.parts:
                if header not in found:
                    queue.append(header)
                found.add(header)
    return sorted(str(header.relative_to(ROOT)) for header in found)


def extension(name: str, sources: list[str], include_dirs: list[str], **options: Any) -> Extension:
    """Depends on the headers of this repository that its sources include."""
    depends = headers(sources, include_dirs)
    return Extension(name, sources=sources, include_dirs=include_dirs, depends=depends, **options)


class ParallelBuild(build_ext):  # type: ignore[misc]
    """Compiles the sources of all extensions on all cores, each only after a change; setuptools does neither.

    An object is kept in `build/objects` under a hash of what it is made of: source, headers, options, compiler, Python
    and nanobind. So every build of a clone takes it: pip's in a new folder with a new nanobind, one by hand, a wheel's.
    """

    def build_extensions(self) -> None:
        self.parallel = len(self.extensions)  # each in a thread of its own, which mostly waits for the pool's
        self.force = True  # to link: setuptools compares times, which say nothing of options
        self.total = sum(len(ext.sources) for ext in self.extensions)
        self.begun, self.compiled, self.lock = 0, 0, threading.Lock()
        OBJECTS.mkdir(parents=True, exist_ok=True)
        words = self.compiler.compiler_so_cxx
        if shutil.which(words[0]) is None:
            raise SystemExit(f"there is no C++ compiler '{words[0]}': install one (g++), or name one in CXX")
        version = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False).stdout
        self.tools = (version, nanobind.__version__, sysconfig.get_config_var("SOABI"), platform.python_version())
        with ThreadPoolExecutor(os.cpu_count()) as self.pool:
            super().build_extensions()
        print(f"compiled {self.compiled} of {self.total} C++ sources; the others are as they were", flush=True)
        for kept in OBJECTS.iterdir():
            if kept.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                kept.unlink(missing_ok=True)

    def build_extension(self, ext: Extension) -> None:
        apart = copy.copy(self)
        # an object's path is its source's, and extensions compile the same source with other flags
        apart.build_temp = os.path.join(self.build_temp, ext.name)
        apart.compiler = copy.copy(self.compiler)
        compile_all, compile_one = apart.compiler.compile, apart.compiler._compile
        started: list[Future[None]] = []

        def compile_in_pool(*sources: Any, **options: Any) -> Any:
            objects = compile_all(*sources, **options)
            for source in started:
                source.result()  # raises what the compiler refused
            return objects

        def compile_changed(
            made: str, source: str, suffix: str, words: list[str], after: list[str], *rest: Any
        ) -> None:
            kept = OBJECTS / f"{Path(source).stem}-{self._hash(ext, source, [*words, *after])}.o"
            changed = not kept.exists()
            with self.lock:
                self.begun += 1
                self.compiled += changed
                if changed:
                    print(f"compiling {self.begun} of {self.total}: {source}", flush=True)
            if not changed:
                os.utime(kept)
                shutil.copyfile(kept, made)
                return
            compile_one(made, source, suffix, words, after, *rest)
            draft = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(made, draft)
            draft.replace(kept)  # under its name an object is whole

        apart.compiler._compile = lambda *source: started.append(self.pool.submit(compile_changed, *source))
        apart.compiler.compile = compile_in_pool
        build_ext.build_extension(apart, ext)

    def _hash(self, ext: Extension, source: str, options: list[str]) -> str:
        """Of all that decides what a source compiles to, wherever the clone and nanobind are."""
        flags = [word for word in (*self.compiler.compiler_so_cxx, *options) if not word.startswith("-I")]
        digest = hashlib.sha256(repr((self.tools, flags, ext.name)).encode())
        for file in (source, *headers([source], ext.include_dirs)):
            digest.update(f"\0{file}\0".encode() + (ROOT / file).read_bytes())
        return digest.hexdigest()[:32]


setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        extension(
            "tiermoe.kernels._cpu",
            sources=[
                "kernels/cpu/decode_module.cpp",
                "kernels/cpu/dense.cpp",
                "kernels/cpu/dense_module.cpp",
                "kernels/cpu/expert_ffn.cpp",
                "kernels/cpu/forms.cpp",
                "kernels/cpu/forms_avx2.cpp",
                "kernels/cpu/forms_avx512.cpp",
                "kernels/cpu/forms_portable.cpp",
                "kernels/cpu/link.cpp",
                "kernels/cpu/module.cpp",
                "kernels/cpu/nanobind.cpp",
                "kernels/cpu/neuron_avx2.cpp",
                "kernels/cpu/neuron_avx512.cpp",
                "kernels/cpu/neuron_ffn.cpp",
                "kernels/cpu/neuron_module.cpp",
                "kernels/cpu/neuron_portable.cpp",
                "kernels/cpu/threads.cpp",
            ],
            include_dirs=["kernels/cpu", *NANOBIND],
            extra_compile_args=[*COMMON, *BINDING, "-ffp-contract=fast"],
            language="c++",
        ),
        extension(
            "tiermoe.kernels._launch",
            sources=["kernels/cpu/nanobind.cpp", "kernels/triton/launch_module.cpp"],
            include_dirs=[*NANOBIND],
            extra_compile_args=[*COMMON, *BINDING],
            language="c++",
        ),
        extension(
            "tiermoe.actors.core._core",
            sources=[
                "actors/core/core.cpp",
                "actors/core/cpu_layer.cpp",
                "actors/core/cpu_module.cpp",
                "actors/core/disk_link.cpp",
                "actors/core/gpu_module.cpp",
                "actors/core/layer.cpp",
                "actors/core/maps.cpp",
                "actors/core/maps_module.cpp",
                "actors/core/module.cpp",
                "actors/core/order_module.cpp",
                "actors/core/planned.cpp",
                "actors/core/planner_module.cpp",
                "actors/core/python_layer.cpp",
                "actors/core/rank_module.cpp",
                "actors/core/routing_module.cpp",
                "actors/core/rule_module.cpp",
                "actors/core/rules.cpp",
                "actors/core/stream_link.cpp",
                "actors/core/stream_module.cpp",
                "actors/core/thread_link.cpp",
                "actors/core/virtual_link.cpp",
                "actors/core/virtual_module.cpp",
                "actors/core/virtual_run.cpp",
                # the orders of eviction, rules, and the copying thread: not those of _cpu, which are compiled otherwise
                "kernels/cpu/importance.cpp",
                "kernels/cpu/link.cpp",
                "kernels/cpu/nanobind.cpp",
                "kernels/cpu/order.cpp",
                "kernels/cpu/substitute.cpp",
                "kernels/cpu/threads.cpp",
                "kernels/cpu/worth.cpp",
            ],
            include_dirs=["kernels/cpu", *NANOBIND],
            # no contraction: virtual seconds and scores must not depend on the processor
            extra_compile_args=[*COMMON, *BINDING, "-ffp-contract=off"],
            language="c++",
        ),
        extension(
            "tiermoe.proto._ring",
            sources=["proto/checks.cpp", "proto/module.cpp", "proto/ring.cpp"],
            include_dirs=["proto", "kernels/cpu"],
            # a thread that the interpreter ends while it waits for the lock is unwound: no destructor may run then
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fno-exceptions"],
            language="c++",
        ),
    ],
)
