"""A ratchet: the files and lines of Python in each folder do not grow without a commit that says why.

`python tests/unit/test_size.py` writes sizes.json again. Lower it when a folder has shrunk; raise it only with a
capability, and name the capability in the commit.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LIMITS = Path(__file__).with_name("sizes.json")
_PRODUCT = ("cluster", "actors", "proto", "kernels", "models")
_SLACK_LINES = 20  # of a folder, so that a mended line needs no new number


def _measured() -> dict[str, dict[str, int]]:
    """Files and lines by folder (two levels of product code); generated code is left out."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for top in (*_PRODUCT, "tests"):
        for path in (_ROOT / top).rglob("*.py"):
            parts = path.relative_to(_ROOT).parts
            if "generated" in parts:
                continue
            count = len(path.read_text(encoding="utf-8").splitlines())
            folders = {"/".join(parts[:-1][:3]), "tests" if top == "tests" else "product"}  # its own, and the whole
            for folder in folders:
                files[folder] += 1
                lines[folder] += count
    return {folder: {"files": files[folder], "lines": lines[folder]} for folder in sorted(files)}


_SIZES = _measured()


@pytest.mark.parametrize("folder", sorted(_SIZES))
def test_folder_does_not_grow(folder: str) -> None:
    limits = json.loads(_LIMITS.read_text(encoding="utf-8"))
    assert folder in limits, f"{folder} is new: say in the commit why, and write sizes.json again"
    assert _SIZES[folder]["files"] <= limits[folder]["files"]
    assert _SIZES[folder]["lines"] <= limits[folder]["lines"] + _SLACK_LINES


if __name__ == "__main__":
    rows = [f"  {json.dumps(folder)}: {json.dumps(size)}" for folder, size in _SIZES.items()]
    _LIMITS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
