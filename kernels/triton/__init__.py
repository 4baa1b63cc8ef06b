"""Triton kernels. They import triton, which only GPU installations have: import them where they are used."""
