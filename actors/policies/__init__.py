"""Decisions: pure, deterministic, NumPy at most; no torch, no Ray, no clock, no channel.

An expert is named by its key `layer * experts_per_layer + expert`, an int, wherever layers mix.

A paper's method is in the file or folder of its name: moepic, fmoe, activeevict, buddymoe, context_ndp, hobbit and
adapmoe.
What several share is in eviction, prefetch, routing, residency, plan, cost and sharding; what the papers compare with
is in baselines. All of them register themselves (`registry`).
"""

from . import activeevict, adapmoe, baselines, buddymoe, context_ndp, fmoe, hobbit, moepic  # noqa: F401
