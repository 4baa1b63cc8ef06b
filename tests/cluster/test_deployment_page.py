"""docs/deployment.md, `One node, with Ray's own head`: its commands, as written, in a home without a token."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.scratch import Scratch

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
_BLOCK = re.compile(r"## One node.*?```bash\n(.*?)```", re.DOTALL)
_ASK = "tiermoe status --address 127.0.0.1:{port} > status 2>&1 && grep -q serving status"
_UNTIL_READY = f"until {_ASK}; do sleep 1; done"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]


def _free_port() -> int:
    with closing(socket.socket()) as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


@pytest.mark.timeout(400)
def test_one_node_as_written(tmp_path: Path) -> None:
    match = _BLOCK.search(_PAGE.read_text(encoding="utf-8"))
    port = _free_port()
    lines = match[1].replace("6379", str(port)).splitlines()
    assert lines[-1].startswith("ray stop")  # it would end the Rays of others, too: this one ends with its folder
    with closing(Scratch()) as scratch:
        script = ["set -e"]
        for line in lines[:-1]:
            if line.startswith("ray start"):
                line = f"{line} --temp-dir={scratch.ray}"
            elif line.startswith("tiermoe up"):
                line = f"{line} > up 2>&1 & up=$!; {_UNTIL_READY.format(port=port)}"
            script.append(line)
        script.append("wait $up")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_"))}
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)], cwd=tmp_path, env=kept | {"HOME": str(tmp_path), "PATH": path},
            capture_output=True, text=True, timeout=380, check=False,
        )  # fmt: skip
    said = (tmp_path / "up").read_text() if (tmp_path / "up").is_file() else ""
    assert done.returncode == 0, (done.stderr[-2000:], said[-2000:])
    assert "was ended by `tiermoe down`" in said
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
