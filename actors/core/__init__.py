"""The core: what is in the slots of one device, what is under way, and what has been counted (`core.hpp`)."""

from ...errors import RuntimeFailure
from ..policies.plan import PlanError
from ..policies.residency import ResidencyError
from . import _core

_core.errors(ResidencyError, PlanError, RuntimeFailure)
