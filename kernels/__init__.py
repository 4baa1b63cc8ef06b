"""Arithmetic on experts in slots: the torch reference and the C++ kernel for few rows."""
