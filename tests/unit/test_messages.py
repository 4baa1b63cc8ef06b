"""The words of typed errors: one remedy, bytes with a fitting unit, nothing called damaged that is not."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiermoe import errors

_ROOT = Path(errors.__file__).parent
_SOURCES = sorted(path for top in ("cluster", "actors", "proto", "kernels") for path in (_ROOT / top).rglob("*.py"))
_OURS = {name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)}


@functools.cache
def sources() -> list[tuple[Path, list[ast.AST], set[str]]]:
    """Each source: its nodes, and the names of error classes in it, those of its own included."""
    found = []
    for path in _SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        own = {
            node.name
            for node in nodes
            if isinstance(node, ast.ClassDef) and _OURS & {base.id for base in node.bases if isinstance(base, ast.Name)}
        }
        found.append((path, nodes, _OURS | own))
    return found


@pytest.fixture(autouse=True, scope="module")
def _no_trees_stay() -> Iterator[None]:
    gc.disable()  # as in test_import_directions.py
    yield
    sources.cache_clear()
    gc.enable()


def texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def places(found: list[tuple[Path, int]]) -> list[str]:
    return [f"{path.relative_to(_ROOT)}:{line}" for path, line in found]


def test_a_remedy_is_one() -> None:
    """`what; remedy` is taken apart at its last semicolon when an error comes from another process."""
    found = []
    for path, nodes, classes in sources():
        for node in nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes):
                continue
            remedies = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "remedy")]
            if any(";" in text for remedy in remedies for text in texts(remedy)):
                found.append((path, node.lineno))
    assert places(found) == []


def test_an_error_within_an_error_leaves_its_remedy_out() -> None:
    """`{error}` of a typed error is `what; remedy`: within another message the remedies would be two."""
    found = []
    for path, nodes, classes in sources():
        for handler in nodes:
            if not isinstance(handler, ast.ExceptHandler) or handler.name is None or handler.type is None:
                continue
            caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
            if not caught & classes:
                continue
            for node in ast.walk(handler):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes):
                    continue
                whole = [part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]
                if any(isinstance(value, ast.Name) and value.id == handler.name for value in whole):
                    found.append((path, node.lineno))
    assert places(found) == []


def test_bytes_are_written_by_one_function() -> None:
    """`cluster.report.tables.size`: 1.17 MiB, not 0.0 GB. Tables of benchmarks have columns with their unit."""
    written = re.compile(r"/ ?(1e[69]|\(1 << [23]0\)|2 ?\*\* ?[23]0):[.\d]+f\} ?([MG]i?B)")
    found = [
        (path, number)
        for path in _SOURCES
        if "bench" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if written.search(line)
    ]
    assert places(found) == []
