"""Benchmarks of tiermoe: its papers, its parts and its figures, run from a clone by `tiermoe bench NAME`."""
