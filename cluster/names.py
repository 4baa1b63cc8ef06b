"""How the actors of a deployment are called in Ray: `ID/ROLE`, in the namespace of `ray_session`.

Its placement groups have such names too: `ID/GROUP`.
"""

from __future__ import annotations

import re
import secrets

from ..actors.links import MATCHER
from .topology.plan import PlannedActor

LEAD, ENDPOINTS = "lead", "endpoints"
_NAME = re.compile(r"(?P<id>[0-9a-f]{6})/(?P<role>[a-z]+(?:/[0-9]+)?)")


def new_id() -> str:
    """A random id for a deployment: six hexadecimal digits."""
    return secrets.token_hex(3)


def role_of(actor: PlannedActor) -> str:
    """The second part of an actor's name; of lead and directory apart, also what it registers under."""
    return {"lead": LEAD, "directory": ENDPOINTS, "matcher": MATCHER}.get(actor.role, f"{actor.role}/{actor.index}")


def split_name(name: str) -> tuple[str, str] | None:
    """(id, role) of an actor's name; None where it is not an actor of a deployment."""
    match = _NAME.fullmatch(name)
    return (match["id"], match["role"]) if match else None
