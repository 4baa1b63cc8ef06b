"""docs/write-a-policy.md, and the two pages after it, work as written: their files are written, their commands run.

In a folder outside of the tree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiermoe.cluster.config import default_model_dir, load_policy

pytestmark = pytest.mark.slow  # four commands, each of which starts Ray

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_PAGES = ("write-a-policy.md", "write-a-prefetch-policy.md", "write-a-rule.md")
_DOCUMENT = "\n".join((_DOCS / page).read_text(encoding="utf-8") for page in _PAGES)
_FILES = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", _DOCUMENT, re.DOTALL)
_COMMANDS = re.findall(r"<!-- run -->\n```bash\n(.*?)```", _DOCUMENT, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in _FILES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")
@pytest.mark.timeout(600)
def test_the_walk_through_as_written(folder: Path) -> None:
    """In the engine on the CPU stand-in (`tiermoe run`) and in the simulated executor (`tiermoe replay`)."""
    assert len(_FILES) == 6
    assert len(_COMMANDS) == 4
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(_COMMANDS)], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True,
        text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "trace").is_dir()
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines() if line.endswith(" ms")]
    times = {row[0]: row[-1] for row in rows}
    assert set(times) == {"fifo", "drop-lightest", "successor", "on-demand", "next-gate"}
    assert len(set(times.values())) == len(times)  # a trace of five decoded tokens ranked none of them


def test_options_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    preset = folder / "fifo.yaml"
    assert load_policy(str(preset)).eviction.model_dump() == {"kind": "my_policies.fifo:Fifo", "spare": 8}
    preset.write_text(preset.read_text().replace("spare: 8", "spare: -1"))
    with pytest.raises(Exception, match="greater than or equal to 0"):
        load_policy(str(preset))
