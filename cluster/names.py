"""How the actors of a deployment are called in Ray: `ID/ROLE`, in the namespace of `ray_session`."""

from __future__ import annotations

import re
import secrets

LEAD, STORE, ENDPOINTS = "lead", "store", "endpoints"  # besides those of `actors.links`
_NAME = re.compile(r"(?P<id>[0-9a-f]{6})/(?P<role>[a-z]+(?:/[0-9]+)?)")


def new_id() -> str:
    """A random id for a deployment: six hexadecimal digits."""
    return secrets.token_hex(3)


def split_name(name: str) -> tuple[str, str] | None:
    """(id, role) of an actor's name; None where it is not an actor of a deployment."""
    match = _NAME.fullmatch(name)
    return (match["id"], match["role"]) if match else None
