"""Decisions: pure, deterministic, NumPy at most; no torch, no Ray, no clock, no channel.

Where layers mix, an expert is named by its key, the int `layer * experts_per_layer + expert`.

A paper's method is in the file or folder of its name. Shared parts are in eviction, prefetch, routing, residency, plan,
cost and sharding; the papers' baselines in baselines. All policies register themselves (`registry`) when they are
imported: a new file is imported here, or by one of these.
"""

from . import (  # noqa: F401
    activeevict,
    baselines,
    buddymoe,
    context_ndp,
    fmoe,
    hobbit,
    hybrid,
    moepic,
    worth,
)
