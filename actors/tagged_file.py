"""Small safetensors files beside a store that say which model they are of: written by `tiermoe prepare`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..errors import TierMoeError

Arrays = dict[str, NDArray[Any]]


def encode_tagged(arrays: Mapping[str, NDArray[Any]], tag: Mapping[str, object]) -> bytes:
    """What the file holds; `tag` is JSON that says what the arrays are of."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(whole, {"tiermoe": json.dumps(dict(tag))})


def read_tagged(path: Path, what: str, error: type[TierMoeError], remedy: str) -> tuple[dict[str, Any], Arrays]:
    """The tag and the arrays of a file; what each array must be is the caller's to check.

    Args:
        what: plural name of the content, for messages.

    Raises:
        error: the file is missing or malformed.
    """
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        tag = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tiermoe"])
        return dict(tag), load(data)
    except OSError as failure:
        raise error(f"{what} '{path}' cannot be read: {failure.strerror}", remedy) from failure
    except (ValueError, KeyError, TypeError, SafetensorError) as failure:
        raise error(f"'{path}' holds no {what}", remedy) from failure
