"""Decisions: pure, deterministic, NumPy at most; no torch, no Ray, no clock, no channel.

An expert is named by its key `layer * experts_per_layer + expert`, an int, wherever layers mix.
"""
