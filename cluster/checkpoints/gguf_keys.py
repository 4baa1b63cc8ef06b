"""The keys of a GGUF file's architecture: every one is looked at, and used, or the file is refused by its name."""

from __future__ import annotations

import math
from typing import Any

from ...errors import UnsupportedModelError
from .gguf_architectures import (
    ARCHITECTURES,
    COMMON,
    INFORMATIVE,
    INTERVAL,
    KNOWN,
    NEUTRAL,
    RECURRENT,
    ROPE,
    WINDOWS,
    Architecture,
    Of,
)
from .gguf_header import Header, count, no_number, shortest, unsupported


def architecture_of(header: Header) -> Architecture:
    """Raises UnsupportedModelError: it is not known."""
    if header.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.name}: GGUF files of architecture {header.architecture} are not supported",
            f"use one of {', '.join(KNOWN)}, or the model's safetensors form",
        )
    return ARCHITECTURES[header.architecture]


def absent_of(header: Header, known: Architecture) -> dict[str, Any]:
    """key -> the value that llama.cpp uses if the key is absent."""
    return {key: value(header) if callable(value) else value for key, value in known.absent.items()}


def names_of(known: Architecture) -> dict[str, Of]:
    """key -> the configuration's name for it, of keys with one value."""
    return {key: of for key, of in {**COMMON, **known.names}.items() if key not in known.layers}


def values_of(header: Header, known: Architecture) -> dict[str, Any]:
    """The values of the architecture's keys that have a name; every other key is looked at.

    Raises:
        UnsupportedModelError: a key is not supported, or has a value for each layer. CheckpointError: it is malformed.
    """
    prefix, found = f"{header.architecture}.", {}
    for full, raw in header.metadata.items():
        key = full.removeprefix(prefix)
        named = key in names_of(known)
        if key == full or key in known.layers or key in known.shapes:
            continue
        if not named and (key in INFORMATIVE or key in ROPE):
            continue
        value = _scalar(header, key, raw)
        if named:
            if type(value) is str:
                raise no_number(header, key, value)
            found[key] = value
        elif not is_neutral(known, key, value):
            raise unsupported(header, key, raw)
    return found


def layer_values(key: str, header: Header, known: Architecture, layers: int) -> list[Any] | None:
    """The values of a key with one for each layer, but those of layers for drafts; None: llama.cpp has none."""
    value = header.get(key)
    if key == RECURRENT and value is None:
        every = count(header, INTERVAL) if header.get(INTERVAL) is not None else 4
        value = [bool((layer + 1) % every) for layer in range(layers)]
    if key == WINDOWS and not isinstance(value, list):
        if header.get("attention.sliding_window") is None:
            return None
        (every, first), every_layer = known.windows, range(layers)
        every = every if value is None else value
        value = [bool(every == 0 or (layer if first else layer + 1) % every) for layer in every_layer]
    if value is None and key not in known.absent:
        return None
    value = absent_of(header, known)[key] if value is None else value
    return [shortest(one) for one in value[:layers]] if isinstance(value, list) else [shortest(value)] * layers


def is_neutral(known: Architecture, key: str, value: Any) -> bool:
    """Whether llama.cpp computes with a value as if the key were absent."""
    return value in {**NEUTRAL, **known.neutral}.get(key, ())


def _scalar(header: Header, key: str, value: Any) -> Any:
    """A value; of an array with one for each layer, the common one."""
    if not isinstance(value, list):
        return shortest(value)
    if not value or any(one != value[0] for one in value):
        raise unsupported(header, key, value)
    return shortest(value[0])


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are one, but for what 32 bits round."""
    if None not in (one, other) and (isinstance(one, float) or isinstance(other, float)):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)
