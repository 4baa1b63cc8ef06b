"""The README's commands work: every block marked `<!-- tested -->` is run, line by line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiermoe.cluster.config import default_model_dir

_ROOT = Path(__file__).resolve().parents[2]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"<!-- tested -->\n```bash\n(.*?)```", re.DOTALL)
_COMMANDS = [line for block in _BLOCK.findall(_README) for line in block.splitlines() if line.strip()]


def test_there_is_something_to_test() -> None:
    assert _COMMANDS


_MOST_S, _FIRST_TOKEN_S = 60.0, 12.0  # of a command with an empty cache; of a start to the first token


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the commands: with `--cold` (`make readme-times`) an empty cache folder, which they share."""
    cold = request.config.getoption("--cold")
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))} if cold else {}


def _run(command: str, cache: dict[str, str]) -> tuple[str, float]:
    """Standard output, and the seconds that it took; prints them."""
    path, begin_s = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", time.monotonic()
    done = subprocess.run(
        shlex.split(command), cwd=_ROOT, env=os.environ | {"PATH": path} | cache, capture_output=True, text=True,
        timeout=600,  # the first with near-data workers makes their replicas
        check=False,
    )  # fmt: skip
    took_s = time.monotonic() - begin_s
    assert done.returncode == 0, done.stderr
    print(f"\n{took_s:6.1f} s  {command}")
    return done.stdout, took_s


@pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")
@pytest.mark.timeout(660)
@pytest.mark.slow  # test_cli.py has a run of each kind
@pytest.mark.parametrize("command", _COMMANDS)
def test_command(command: str, cache: dict[str, str]) -> None:
    out, took_s = _run(command, cache)
    assert out.strip()
    assert not cache or took_s < _MOST_S


@pytest.mark.timeout(660)
def test_a_start_takes_seconds(cache: dict[str, str]) -> None:
    """After the commands above, which left a store. On a busy machine the bar says nothing: only with `--cold`."""
    if not cache:
        pytest.skip("make readme-times")
    record = json.loads(_run(f"{_COMMANDS[0]} --json", cache)[0])
    first_s = record["startup_s"] + record["ttft_s"]
    for step, seconds in (record["startup_steps_s"] | {"first token": record["ttft_s"]}).items():
        print(f"{seconds:6.1f} s    {step}")
    assert first_s < _FIRST_TOKEN_S


def test_make_run_does_what_the_readme_says() -> None:
    """`make run` itself would install; its recipe is shown instead, and must be a command that exists."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the `make test` that runs this: they would add lines
    env = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        ["make", "-n", "run"], cwd=_ROOT, env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines()[-1].strip().startswith(".venv/bin/tiermoe run ")


_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")))
    assert {link for link in links if not (page.parent / link).exists()} == set()


def test_the_folder_table_is_complete() -> None:
    named = set(re.findall(r"^\| `(\w+)/` \|", _README, re.MULTILINE))
    there = {path.name for path in _ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    generated = {"build", "out", "dist", "shared"} | {name for name in there if name.endswith(".egg-info")}
    assert named == there - generated


def test_the_option_table_names_every_option_of_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tiermoe.cluster.cli import main; main(['run', '--help'])"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    options = set(re.findall(r"(--[a-z-]+)", done.stdout)) - {"--help"}
    assert options
    table = (_ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {option for option in options if f"`{option}" not in table and f" {option}" not in table} == set()
