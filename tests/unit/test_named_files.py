"""Files and modules that comments, docstrings and pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("cluster", "actors", "proto", "kernels", "benchmarks", "docs", "tests")
_SOURCES = [
    path
    for part in _PARTS
    for path in sorted((_ROOT / part).rglob("*"))
    if path.suffix in (".py", ".md") and "results" not in path.parts and path != Path(__file__)
]
_PLACES = {f"/{path.relative_to(_ROOT)}" for part in (*_PARTS, "models") for path in (_ROOT / part).rglob("*.py")}
_PLACES |= {f"/{path.name}" for path in _ROOT.glob("*.py")} | {"/NAME.py", "/benchmarks/NAME.py"}
_OTHERS = ("stdlib/json/decoder.py",)  # of Python
_PACKAGES = "cluster|actors|policies|engine|jobs|topology|checkpoints|prepare|serving|peers"


def test_named_files_exist() -> None:
    """`policies/substitution_gates.py` was named twice, after it had been renamed."""
    found = [
        f"{path.relative_to(_ROOT)} names {name}"
        for path in _SOURCES
        for name in re.findall(r"`([\w./-]+\.py)`", path.read_text(encoding="utf-8"))
        if name not in _OTHERS and not any(place.endswith(f"/{name}") for place in _PLACES)
    ]
    assert found == []


def test_named_modules_exist() -> None:
    """Of product code: `engine.scoring` for a function, `cluster.jobs.prepare.measures` for a file."""
    found = []
    for path in (path for path in _SOURCES if path.suffix == ".py" and "tests" not in path.parts):
        for name in re.findall(rf"`((?:{_PACKAGES})(?:\.[a-z_]+){{2,}})`", path.read_text(encoding="utf-8")):
            parts = name.split(".")
            module, parent = "/".join(parts), "/".join(parts[:-1])
            is_key = name.startswith("cluster.store.")  # of the configuration
            if not is_key and not any(place.endswith((f"/{module}.py", f"/{module}/__init__.py")) for place in _PLACES):
                homes = [place for place in _PLACES if place.endswith((f"/{parent}.py", f"/{parent}/__init__.py"))]
                texts = [(_ROOT / home[1:]).read_text(encoding="utf-8") for home in homes]
                if not any(re.search(rf"\b{parts[-1]}\b", text) for text in texts):
                    found.append(f"{path.relative_to(_ROOT)} names {name}")
    assert found == []
