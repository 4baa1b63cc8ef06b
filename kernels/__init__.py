"""Arithmetic on experts in slots: torch references, C++ kernels for CPUs, Triton kernels for GPUs."""
