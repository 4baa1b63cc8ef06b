"""The C++ kernels; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tiermoe.kernels._cpu",
            sources=["kernels/cpu/expert_ffn.cpp", "kernels/cpu/module.cpp"],
            depends=["kernels/cpu/expert_ffn.hpp"],
            include_dirs=["kernels/cpu"],
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno"],
            language="c++",
        )
    ]
)
