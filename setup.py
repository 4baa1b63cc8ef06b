"""The C++ kernels, the core and the rings of the channel; everything else is in pyproject.toml.

`benchmarks/gpu/build.py` compiles the same extensions without setuptools.
"""

import os

try:
    from nanobind import include_dir, source_dir
except ModuleNotFoundError:  # pip and uv install what pyproject.toml names, unless they build without isolation
    raise SystemExit("nanobind is not installed: python -m pip install 'nanobind==3.1.0'") from None
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
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
                "kernels/cpu/importance.cpp",
                "kernels/cpu/importance_module.cpp",
                "kernels/cpu/link.cpp",
                "kernels/cpu/measure_module.cpp",
                "kernels/cpu/module.cpp",
                "kernels/cpu/neuron_avx2.cpp",
                "kernels/cpu/neuron_avx512.cpp",
                "kernels/cpu/neuron_ffn.cpp",
                "kernels/cpu/neuron_module.cpp",
                "kernels/cpu/neuron_portable.cpp",
                "kernels/cpu/order.cpp",
                "kernels/cpu/order_module.cpp",
                "kernels/cpu/pages_module.cpp",
                "kernels/cpu/rank_module.cpp",
                "kernels/cpu/split_order.cpp",
                "kernels/cpu/substitute.cpp",
                "kernels/cpu/substitute_module.cpp",
                "kernels/cpu/threads.cpp",
                "kernels/cpu/worth.cpp",
            ],
            depends=[
                "kernels/cpu/bindings.hpp",
                "kernels/cpu/cores.hpp",
                "kernels/cpu/dense.hpp",
                "kernels/cpu/exponential.hpp",
                "kernels/cpu/expert_ffn.hpp",
                "kernels/cpu/fit.hpp",
                "kernels/cpu/fit_body.hpp",
                "kernels/cpu/forms.hpp",
                "kernels/cpu/forms_body.hpp",
                "kernels/cpu/importance.hpp",
                "kernels/cpu/lanes.hpp",
                "kernels/cpu/lanes_avx2.hpp",
                "kernels/cpu/lanes_avx512.hpp",
                "kernels/cpu/lanes_portable.hpp",
                "kernels/cpu/link.hpp",
                "kernels/cpu/neuron_body.hpp",
                "kernels/cpu/neuron_ffn.hpp",
                "kernels/cpu/order.hpp",
                "kernels/cpu/rank.hpp",
                "kernels/cpu/sizes.hpp",
                "kernels/cpu/split_order.hpp",
                "kernels/cpu/substitute.hpp",
                "kernels/cpu/table.hpp",
                "kernels/cpu/threads.hpp",
                "kernels/cpu/worth.hpp",
            ],
            include_dirs=["kernels/cpu"],
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-pthread"],
            language="c++",
        ),
        Extension(  # apart, so that a change of the planner compiles in seconds
            "tiermoe.kernels._planner",
            sources=["kernels/cpu/planner_module.cpp"],
            depends=[
                "kernels/cpu/bindings.hpp", "kernels/cpu/planner.hpp", "kernels/cpu/planner_replay.hpp",
                "kernels/cpu/sizes.hpp",
            ],
            include_dirs=["kernels/cpu"],
            # no contraction: predicted seconds must not depend on the processor
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"],
            language="c++",
        ),
        Extension(
            "tiermoe.actors.core._core",
            sources=[
                "actors/core/core.cpp",
                "actors/core/cpu_layer.cpp",
                "actors/core/cpu_module.cpp",
                "actors/core/module.cpp",
                "actors/core/nanobind.cpp",
                "actors/core/thread_link.cpp",
                "actors/core/virtual_link.cpp",
                "actors/core/virtual_run.cpp",
                # the orders of eviction, rules, and the copying thread; its own copies, compiled as the core is
                "kernels/cpu/importance.cpp",
                "kernels/cpu/link.cpp",
                "kernels/cpu/order.cpp",
                "kernels/cpu/split_order.cpp",
                "kernels/cpu/threads.cpp",
                "kernels/cpu/worth.cpp",
            ],
            depends=[
                "actors/core/bindings.hpp",
                "actors/core/core.hpp",
                "actors/core/cpu_layer.hpp",
                "actors/core/orders.hpp",
                "actors/core/python.hpp",
                "actors/core/thread_link.hpp",
                "actors/core/virtual_link.hpp",
                "actors/core/virtual_run.hpp",
                "kernels/cpu/cores.hpp",
                "kernels/cpu/dense.hpp",
                "kernels/cpu/expert_ffn.hpp",
                "kernels/cpu/importance.hpp",
                "kernels/cpu/link.hpp",
                "kernels/cpu/order.hpp",
                "kernels/cpu/rank.hpp",
                "kernels/cpu/sizes.hpp",
                "kernels/cpu/split_order.hpp",
                "kernels/cpu/substitute.hpp",
                "kernels/cpu/table.hpp",
                "kernels/cpu/threads.hpp",
                "kernels/cpu/worth.hpp",
            ],
            include_dirs=[
                "kernels/cpu", source_dir(), include_dir(), os.path.join(source_dir(), "../ext/robin_map/include"),
            ],
            # no contraction: virtual seconds and scores must not depend on the processor. The rest as nanobind's
            # nb_combined.cpp asks; without -fvisibility=hidden, types of _cpu with the same names would be mixed up
            extra_compile_args=[
                "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-pthread",
                "-fvisibility=hidden", "-fno-strict-aliasing", "-DNB_COMPACT_ASSERTIONS",
            ],
            language="c++",
        ),
        Extension(
            "tiermoe.proto._ring",
            sources=["proto/checks.cpp", "proto/frame.cpp", "proto/module.cpp", "proto/ring.cpp"],
            depends=["proto/checks.hpp", "proto/frame.hpp", "proto/ring.hpp", "kernels/cpu/cores.hpp"],
            include_dirs=["proto", "kernels/cpu"],
            # a thread that the interpreter ends while it waits for the lock is unwound: no destructor may run then
            extra_compile_args=["-std=c++17", "-O3", "-fno-exceptions"],
            language="c++",
        ),
    ]
)
