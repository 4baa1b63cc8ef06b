"""Which cases of a test belong to `make test`: each value once or so; the others belong to `make test-slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters of a test.

    Args:
        cases: values, or tuples of them where the test has several parameters.
        fast: those of them that are not marked slow.
    """
    cases = list(cases)
    assert set(fast) <= set(cases), set(fast) - set(cases)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
