"""The C++ kernels and the rings of the channel; everything else is in pyproject.toml."""

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
                "kernels/cpu/layer_module.cpp",
                "kernels/cpu/link.cpp",
                "kernels/cpu/link_module.cpp",
                "kernels/cpu/loads.cpp",
                "kernels/cpu/measure_module.cpp",
                "kernels/cpu/module.cpp",
                "kernels/cpu/neuron_avx2.cpp",
                "kernels/cpu/neuron_avx512.cpp",
                "kernels/cpu/neuron_ffn.cpp",
                "kernels/cpu/neuron_module.cpp",
                "kernels/cpu/neuron_portable.cpp",
                "kernels/cpu/pages_module.cpp",
                "kernels/cpu/rank_module.cpp",
                "kernels/cpu/threads.cpp",
            ],
            depends=[
                "kernels/cpu/bindings.hpp",
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
                "kernels/cpu/loads.hpp",
                "kernels/cpu/neuron_body.hpp",
                "kernels/cpu/neuron_ffn.hpp",
                "kernels/cpu/threads.hpp",
            ],
            include_dirs=["kernels/cpu"],
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-pthread"],
            language="c++",
        ),
        Extension(
            "tiermoe.kernels._substitute",
            sources=["kernels/cpu/substitute.cpp", "kernels/cpu/substitute_module.cpp"],
            depends=["kernels/cpu/substitute.hpp"],
            include_dirs=["kernels/cpu"],
            # its results are those of other languages to the last bit: no sum may swallow the product before it
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off"],
            language="c++",
        ),
        Extension(
            "tiermoe.proto._ring",
            sources=["proto/checks.cpp", "proto/frame.cpp", "proto/module.cpp", "proto/ring.cpp"],
            depends=["proto/checks.hpp", "proto/frame.hpp", "proto/ring.hpp"],
            include_dirs=["proto"],
            # a thread that the interpreter ends while it waits for the lock is unwound: no destructor may run then
            extra_compile_args=["-std=c++17", "-O3", "-fno-exceptions"],
            language="c++",
        ),
    ]
)
