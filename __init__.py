"""tiermoe: serve Mixture-of-Experts language models beyond their GPU memory budget.

`LLM`, `plan` and `replay` are imported when they are first used: importing the package loads nothing else.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .proto.private import keep_code_private

if TYPE_CHECKING:
    from .cluster.jobs.plan import plan
    from .cluster.jobs.replay import replay_trace as replay
    from .cluster.llm import LLM

# torch then asks for huge pages for large CPU tensors, such as weights and slots: decode reads them once a token,
# a quarter faster where they are not cut into pages of 4 KiB. torch reads the variable when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# gRPC, in grpcio and in Ray, then writes errors only to standard error: no lines about a connection that its peer ends.
# It reads the variable when it is first used.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
keep_code_private()  # before torch is imported: it makes the folder then

__version__ = "0.1.0"
__all__ = ["LLM", "__version__", "plan", "replay"]

_HOMES = {"LLM": "cluster.llm:LLM", "plan": "cluster.jobs.plan:plan", "replay": "cluster.jobs.replay:replay_trace"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
