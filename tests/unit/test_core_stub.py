"""The committed stub of the core says what the compiled module has."""

from __future__ import annotations

from pathlib import Path

from nanobind.stubgen import StubGen

from tiermoe.actors.core import _core

_STUB = Path(__file__).resolve().parents[2] / "actors" / "core" / "_core.pyi"


def _lines(text: str) -> list[str]:
    """Without the module of one name, which stubgen chooses by Python's version."""
    lines = text.replace("types.CapsuleType", "CapsuleType").splitlines()
    return [line for line in lines if line != "import types" and not line.endswith(" import CapsuleType")]


def test_the_stub_is_what_stubgen_writes() -> None:
    """After a change of actors/core/module.cpp: `make stub`."""
    generator = StubGen(module=_core, quiet=True)
    generator.put(_core)
    assert _lines(_STUB.read_text(encoding="utf-8")) == _lines(generator.get()), "run `make stub`"
