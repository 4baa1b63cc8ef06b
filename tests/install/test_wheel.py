"""The steps of the Dockerfile, run here: a wheel of a source distribution, in an environment and a folder of its own.

The wheel is then made portable as by `make wheel`, and installed where there is no compiler. Packages are those of the
environment that runs the tests: pip is told by its variables to fetch none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from dockerfile import ROOT, in_context, pip_step

_OFFLINE = {
    "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0",  # 0: without isolation
    "PIP_IGNORE_INSTALLED": "1",  # the clone's
    "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}  # fmt: skip

# a name that is none of a package, and not ASCII, as a folder may have into which a user unpacks an archive
_FOLDER = "1 tiermoé-main"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # it compiles what the clone has not compiled


def tracked() -> list[str]:
    """Files of the clone that .gitignore does not name; a downloaded archive is no repository."""
    patterns = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]

    def kept(name: str) -> bool:
        return name != ".git" and not any(fnmatch(name, pattern) for pattern in patterns)

    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = filter(kept, below)
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names if kept(name)]
    return found


def _step(step: str, env: Mapping[str, str], paths: Mapping[str, Path], **arguments: str) -> None:
    """Run a step of the Dockerfile with the image's folders in other places."""
    for name, value in arguments.items():
        step = step.replace(f"${{{name}}}", value)
    for name, path in paths.items():
        step = re.sub(rf"(?<![\w/]){name}\b", lambda _, path=path: shlex.quote(str(path)), step)
    subprocess.run(["/bin/sh", "-ec", step], env=dict(env), check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the build stage of what a source distribution holds, of the files that the image's build sees."""
    folder = tmp_path_factory.mktemp("build")
    for name in filter(in_context, tracked()):
        (folder / "context" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "context" / name)
    code = f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "context", check=True, capture_output=True)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    shutil.rmtree(folder / "context")
    (unpacked,) = (path for path in folder.glob("tiermoe-*") if path.is_dir())
    unpacked = unpacked.rename(folder / _FOLDER)
    if (ROOT / "build" / "objects").is_dir():  # the whole compilation takes minutes
        shutil.copytree(ROOT / "build" / "objects", unpacked / "build" / "objects")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | _OFFLINE | {"PATH": path}
    (wheels := folder / "wheels").mkdir()
    _step(pip_step("build"), env, {"/src": unpacked, "/wheels": wheels})
    (made,) = wheels.iterdir()
    (repair,) = re.findall(r"-m (auditwheel .+) --wheel-dir dist", (ROOT / "Makefile").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", *repair.split(), "--wheel-dir", folder / "dist", made]
    subprocess.run(command, env=env, check=True, capture_output=True)
    (portable,) = (folder / "dist").iterdir()
    return portable


def test_its_name_says_which_c_library_it_needs(wheel: Path) -> None:
    """PyPI, and pip on another machine, take no wheel for `linux_x86_64` alone."""
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", wheel.name)


def test_extensions_hold_no_debugging_information(wheel: Path) -> None:
    """They were ten times as large: 30 MB of the installed package."""
    archive = zipfile.ZipFile(wheel)
    names = [name for name in archive.namelist() if name.endswith(".so")]
    assert len(names) >= 4
    assert [name for name in names if b".debug_info" in archive.read(name)] == []  # a section


Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command with the wheel installed as in the CPU image: no compiler, a new home, another folder."""
    folder = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "local"], check=True)
    binaries = folder / "local" / "bin"
    (site,) = (folder / "local").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join(others) + "\n")  # their own .pth files, so the clone's, are not read
    (tools := folder / "tools").mkdir()
    for path in Path("/usr/bin").iterdir():
        if not re.match(r"(\w+-linux-gnu-)?(cc|c\+\+|gcc|g\+\+|clang)", path.name):
            (tools / path.name).symlink_to(path)
    env = {
        "PATH": f"{binaries}{os.pathsep}{tools}", "HOME": str(folder / "home"), "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "CC": "/bin/false", "CXX": "/bin/false",
    }  # fmt: skip
    (folder / "home").mkdir()
    paths = {"/wheels": wheel.parent, "/constraints.txt": ROOT / "constraints.txt"}
    _step(pip_step("cpu"), env | _OFFLINE, paths, TORCH_INDEX="https://download.pytorch.org/whl/cpu")

    def call(*words: str) -> str:
        done = subprocess.run(
            words, cwd=folder / "home", env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = call("python", "-c", "import tiermoe; print(tiermoe.__file__)")
    assert Path(place.strip()).is_relative_to(site)
    return call


def test_the_wheel_holds_the_packages_data(wheel: Path) -> None:
    """Every file that the package reads beside its code, and nothing of the tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = [
        name
        for name in tracked()
        if name.startswith(("configs/", "models/tiny-moe/", "actors/", "cluster/", "kernels/", "proto/"))
        and not name.endswith((".cpp", ".hpp", ".pyi", ".sh"))
    ]
    assert len(wanted) > 300
    assert [name for name in wanted if f"tiermoe/{name}" not in names] == []
    assert not [name for name in names if "tests/" in name or "benchmarks/" in name or name.endswith((".cpp", ".hpp"))]


def test_the_default_model_runs(run: Run) -> None:
    for options, executor in ((), "real"), (("--emulate",), "emulated"):
        record = json.loads(run("tiermoe", "run", "import os", "--max-tokens", "8", "--json", *options))
        assert len(record["token_ids"]) == 8
        assert record["plan"]["executor"] == executor
    near_data = ("--policy", "context-ndp-full", "--budget", "50%", "--max-tokens", "4", "--json")
    assert len(json.loads(run("tiermoe", "run", "import os", *near_data))["token_ids"]) == 4


def test_presets_and_what_else_ships(run: Run) -> None:
    assert "shard-1" in run("tiermoe", "plan", "--shards", "2", "--policy", "context-ndp-full", "--ndp-workers", "2")
    assert json.loads(run("tiermoe", "doctor", "--json"))["versions"]["tiermoe"]
    benchmarks = run("tiermoe", "bench", "--help")
    assert "compare" in benchmarks
    assert "overhead" not in benchmarks  # of a clone
    loads = """
from tiermoe.cluster.config import configs_dir, load_policy, load_run_config
import tiermoe.cluster.api.server
print(*sorted(path.stem for path in (configs_dir() / "policies").glob("*.yaml") if load_policy(path.stem)))
print(*sorted(path.stem for path in (configs_dir() / "clusters").glob("*.yaml") if load_run_config(path.stem)))
"""
    policies, clusters = run("python", "-c", loads).splitlines()
    assert policies.split() == sorted(path.stem for path in (ROOT / "configs" / "policies").iterdir())
    assert clusters.split() == sorted(path.stem for path in (ROOT / "configs" / "clusters").iterdir())
