"""The Dockerfile as tests read it: its stages, and which files of the clone an image is built from."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage of a Dockerfile by the stage's name: (word, rest), lines joined."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    current = ""
    for word, _, rest in (line.strip().partition(" ") for line in lines if line.strip()):
        if word == "FROM":
            current = rest.split(" AS ")[1]
            found[current] = []
        found[current].append((word, re.sub(r" +", " ", rest)))
    return found


STAGES = stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))


def pip_step(stage: str) -> str:
    """The stage's one step that runs pip, without its mount."""
    (step,) = [rest for word, rest in STAGES[stage] if word == "RUN" and " pip " in rest]
    return re.sub(r"--mount=\S+ ", "", step)


def in_context(name: str) -> bool:
    """Whether .dockerignore lets a file of the clone into the build: its last matching line decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [name, *map(str, Path(name).parents)] if not line.startswith("**/") else name.split("/")
        if any(fnmatch(part, pattern) for part in parts):
            kept = line.startswith("!")
    return kept
