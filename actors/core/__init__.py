"""The core: what is in the slots of one device, what is under way, and what has been counted (`core.hpp`)."""

from ...errors import RuntimeFailure, StoreError
from ...kernels import _cpu
from ..policies.plan import PlanError
from ..policies.residency import ResidencyError
from . import _core

_takes = getattr(_core, "takes", None)  # a module that is older than this file has none
if _takes is None or not _takes(_cpu.table()):
    raise RuntimeFailure(
        "kernels/_cpu and actors/core/_core are of different builds, with other layouts of what they exchange",
        "build both again: python -m pip install -e . in the clone",
    )
_core.errors(ResidencyError, PlanError, RuntimeFailure, StoreError)
