"""Calls of native entry points with numbers that no caller has: each is refused by a Python exception.

`python hostile.py MODULE.so` runs all of them on a module of its own making, such as one under a sanitizer.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HUGE, HALF = 2**62, 2**40  # HUGE * 4 and HALF * HALF are 0 in 64 bits


def at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


@contextmanager
def refused(kind: type[Exception] = ValueError) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def rows(cpu: Any) -> None:
    """Rows of more numbers than a buffer can have."""
    numbers = array("f", [3.0, 1.0, 2.0, 0.0])
    assert cpu.argmax_rows(at(numbers), 2, 2) == [0, 0]
    for number, width in ((HUGE, 4), (HALF, HALF), (-1, 4), (4, 0)):
        with refused():
            cpu.argmax_rows(at(numbers), number, width)
        with refused():
            cpu.router_scores(at(numbers), number, at(numbers), max(width, 1), HALF, 0, 0, numbers)
    for tokens, top_k, width in ((HUGE, 4, 1), (HALF, HALF, 1), (-1, 1, 1), (1, 1, -1)):
        with refused():
            cpu.combine(at(numbers), at(numbers), tokens, top_k, width, at(numbers))
    for pairs, neurons, width in ((HUGE, 1, 1), (HALF, 1, 2**20), (1, HUGE, 1), (-1, 1, 1), (1, 1, -1)):
        with refused():
            cpu.expert_ffn(at(numbers), at(numbers), at(numbers), at(numbers), pairs, [], 1, neurons, width, 0, 0)
    with refused():
        cpu.decode_next(0, [1])
    threads = cpu.threads(1, [])
    arrays = array("i", [0]), numbers, memoryview(numbers).cast("B").cast("f", (2, 2)), memoryview(
        array("f", [0.0] * 4)
    ).cast("B").cast("f", (2, 2))  # fmt: skip
    for sizes in ((2**30, 2**30, 2**30), (0, 1, 1), (2, -1, 1), (2, 2**31, 1)):
        with refused():
            cpu.full_ffn(threads, 0, 0, *sizes, 0, 0, 0, [], *arrays)
    with refused():
        cpu.form_layer(HUGE, 4, [])
    with refused():
        cpu.form_layer(-1, 4, [])


CASES: dict[str, Callable[[Any], None]] = {"rows": rows}


def main() -> None:
    name = sys.argv[1]
    loader = importlib.machinery.ExtensionFileLoader("_cpu", name)
    spec = importlib.util.spec_from_file_location("_cpu", name, loader=loader)
    assert spec is not None
    cpu = importlib.util.module_from_spec(spec)
    loader.exec_module(cpu)
    if len(sys.argv) > 2:  # shows that the sanitizer is awake
        cpu.argmax_rows(at(array("f", [0.0])), 1, 64)
    for case in CASES.values():
        case(cpu)
    print(f"checked {len(CASES)} parts")


if __name__ == "__main__":
    main()
