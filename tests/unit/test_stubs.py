"""The committed stubs say what the compiled modules have."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from nanobind.stubgen import StubGen

from tiermoe.actors.core import _core
from tiermoe.kernels import _cpu

_ROOT = Path(__file__).resolve().parents[2]


def _lines(text: str) -> list[str]:
    """Without the module of one name, which stubgen chooses by Python's version."""
    lines = text.replace("types.CapsuleType", "CapsuleType").splitlines()
    return [line for line in lines if line != "import types" and not line.endswith(" import CapsuleType")]


@pytest.mark.parametrize("module", [_core, _cpu], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_stub_is_what_stubgen_writes(module: ModuleType) -> None:
    """After a change of a binding: `make stub`."""
    path = _ROOT.joinpath(*module.__name__.split(".")[1:]).with_suffix(".pyi")
    generator = StubGen(module=module, quiet=True)
    generator.put(module)
    assert _lines(path.read_text(encoding="utf-8")) == _lines(generator.get()), "run `make stub`"
