"""Standard output: results and nothing else, also beside a policy that prints; and what it says when it is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traces
import typer
from commands import Command

from tiermoe.actors.policies.fmoe import MapOptions
from tiermoe.actors.settings import MatcherSettings
from tiermoe.actors.store.artifacts import MapShape
from tiermoe.cluster import commands
from tiermoe.cluster.jobs.bench.bench_commands import bench_app
from tiermoe.cluster.jobs.trace import trace_app
from tiermoe.cluster.worker_process import Role, WorkerProcess

_MAIN = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()"]
_LOUD = """
import os
from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.policies.registry import PolicyOptions
print("imported", flush=True)

class Loud(Lru):
    class Options(PolicyOptions):
        pass

    @classmethod
    def make(cls, options, context):
        print("made")
        os.system("echo a child")
        os.write(1, b"native\\n")
        return cls(context.layers, context.experts)

class Settings:
    def __init__(self, settings):
        self.settings = settings

    def __reduce__(self):
        return _rebuilt, (self.settings,)

def _rebuilt(settings):
    print("\\n" * 100_000)  # more than a pipe holds
    return settings
"""


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The preset of a policy that prints; its module is on the path of child processes, too."""
    (tmp_path / "loud_policy.py").write_text(_LOUD)
    preset = tmp_path / "loud.yaml"
    preset.write_text("{name: loud, lossless: true, eviction: {kind: 'loud_policy:Loud'}}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield preset
    sys.modules.pop("loud_policy", None)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    traces.write(tmp_path / "trace", traces.header(), [[1, 2, 3], [4, 5]], 6)
    return tmp_path / "trace"


def test_a_policy_that_prints_leaves_json_whole(loud: Path, trace: Path, command: Command) -> None:
    """It was printed among the results; of a process, what its children and native code write, too."""
    assert command.json("replay", trace, "--policy", loud)["policy"] == "loud"
    args = [*_MAIN, "replay", str(trace), "--policy", str(loud), "--json"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["policy"] == "loud"
    assert {"imported", "made", "a child", "native"} <= set(done.stderr.splitlines())


def test_a_worker_process_may_print(loud: Path) -> None:
    """Its first line was taken for its address, and a full pipe stopped it."""
    import loud_policy  # type: ignore[import-not-found]

    role = Role.matcher(MatcherSettings(), MapOptions(kind="expert-map"), MapShape("model", 2, 4, 8), 2)
    arguments: dict[str, Any] = {**role.arguments, "settings": loud_policy.Settings(role.arguments["settings"])}
    with WorkerProcess(Role(role.name, role.label, role.worker, arguments, None)) as process:
        assert process.pid


@pytest.mark.parametrize("args", [("replay", "{trace}", "--json"), ("--version",)])
def test_a_full_device_is_one_line(args: tuple[str, ...], trace: Path) -> None:
    words = [*_MAIN, *(arg.format(trace=trace) for arg in args)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert errors == done.stderr.splitlines()[-1:]
    assert errors[0].startswith("error: standard output cannot be written: No space left on device; ")
    assert "Traceback" not in done.stderr


def test_a_reader_that_ends_is_no_error(trace: Path) -> None:
    with subprocess.Popen(
        [*_MAIN, "replay", str(trace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr is not None
        assert "rror" not in process.stderr.read()


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_the_null_device(closed: int) -> None:
    """`run 2>&-` ended with "sys.stderr is None", of a library that asks for its descriptor, before any text."""
    program = (
        "import faulthandler, os, subprocess, sys\n"
        "from tiermoe.cluster import cli\n"
        "def command(args):\n"
        "    faulthandler.enable()\n"
        "    name = os.readlink(f'/proc/self/fd/{CLOSED}')\n"
        "    there = subprocess.run(['test', '-e', f'/proc/self/fd/{CLOSED}'], close_fds=False)\n"
        "    sys.exit(5 if name == os.devnull and there.returncode == 0 else 6)\n"
        "cli._run = command\n"
        "cli.main()\n"
    ).replace("CLOSED", str(closed))
    words = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 5


def test_every_command_sets_standard_output_aside() -> None:
    def leaves(node: Any) -> Iterator[Any]:
        below = getattr(node, "commands", None)
        yield from ((leaf for part in below.values() for leaf in leaves(part)) if below else [node])

    found = [leaf for app in (bench_app, trace_app) for leaf in leaves(typer.main.get_command(app))]
    assert len(found) >= 5
    assert all(isinstance(leaf, commands.Command) for leaf in found)
