"""Does constraints.txt install from PyPI alone? `make lint` asks.

Only metadata is fetched. pip is asked what a user would ask it, all extras at once: pins that satisfy them together
satisfy each of them. pip evaluates markers for the Python that runs it, so uv is asked for every Python.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPI = "https://pypi.org/simple"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"  # llguidance has no wheel for an older C library
COMPILED = {"peers": "llama-cpp-python"}  # no wheels on PyPI, and pip needs a compiler to read its metadata
TORCH_PICKS = re.compile(r"(nvidia|cuda)-")  # torch says which versions: those of the CUDA that it was built for
_REACH = ("cert", "client-cert", "proxy", "timeout", "default-timeout", "retries")  # how an index is reached, not which
_ANSWER_S = 30.0


def environment(environ: Mapping[str, str], settings: str) -> dict[str, str]:
    """The environment of a machine on which nobody configured pip or uv, which reaches the network as this one does.

    settings: what `pip config list` prints.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(("PIP_", "UV_"))}
    for line in settings.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in _REACH:
            kept["PIP_" + option.upper().replace("-", "_")] = value.strip("'\"")
    kept |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}
    if "PIP_CERT" in kept:
        kept.setdefault("SSL_CERT_FILE", kept["PIP_CERT"])  # uv's name for it
    return kept


def unreachable(index: str, env: Mapping[str, str]) -> str | None:
    """Why the index does not answer; None: it does."""
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=env.get("PIP_CERT")))
    ]
    if proxy := env.get("PIP_PROXY"):
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    try:
        urllib.request.build_opener(*handlers).open(f"{index}/pip/", timeout=_ANSWER_S).close()
    except OSError as error:  # no name, no route, a time-out, a certificate, a status
        return str(error)
    return None


def pip_picks(root: Path, index: str, env: Mapping[str, str]) -> dict[str, str]:
    """Version by name of what `pip install -c constraints.txt .[...]` installs under this Python.

    Raises:
        ValueError: it installs nothing, in pip's words.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ",".join(name for name in project.get("optional-dependencies", {}) if name not in COMPILED)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _ask(
            ["pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report),
             "--index-url", index, "--only-binary", ":all:", "--use-feature", "fast-deps",
             "-c", "constraints.txt", f".[{extras}]"], root, env,
        )  # fmt: skip
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    of_index = [item["metadata"] for item in chosen if not item["is_direct"]]
    return {_canonical(metadata["name"]): metadata["version"] for metadata in of_index}


def uv_picks(root: Path, index: str, env: Mapping[str, str], python: str) -> dict[str, str]:
    """As `pip_picks`, with every extra, for a Python that need not be on this machine."""
    compiled = [word for name in COMPILED.values() for word in ("--no-binary", name)]
    text = _ask(
        ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--default-index", index,
         "--python", sys.executable, "--python-version", python, "--python-platform", PLATFORM,
         "--only-binary", ":all:", *compiled, "-c", "constraints.txt", "--all-extras", "pyproject.toml"], root, env,
    )  # fmt: skip
    return {_canonical(name): version for name, version in re.findall(r"^([^\s=]+)==(\S+)", text, re.MULTILINE)}


def loose(picks: Mapping[str, str], constraints: str) -> list[str]:
    """The lines that constraints.txt lacks: of packages in whatever version is the newest on that day."""
    pinned = {_canonical(name) for name in re.findall(r"^([^#\s=]+)==", constraints, re.MULTILINE)}
    return [
        f"{name}=={version}"
        for name, version in sorted(picks.items())
        if name not in pinned and not TORCH_PICKS.match(name)
    ]


def check(root: Path = ROOT, index: str = PYPI) -> bool:
    """Prints a line for pip and for each Python. False: one installs nothing, or a package without a pin."""
    settings = _ask(["pip", "config", "list"], root, os.environ)
    env = environment(os.environ, settings)
    if reason := unreachable(index, env):
        print(f"constraints.txt is not checked: {index} cannot be reached: {reason}")
        return True
    constraints = (root / "constraints.txt").read_text(encoding="utf-8")
    passed = True
    for python in (None, *PYTHONS):
        label = f"constraints.txt, {'uv for Python ' + python if python else 'pip'}"
        try:
            picks = uv_picks(root, index, env, python) if python else pip_picks(root, index, env)
        except ValueError as error:
            passed = False
            print(f"{label}: {error}")
            continue
        missing = loose(picks, constraints)
        passed = passed and not missing
        print(f"{label}: {len(picks)} packages" + (f"; not pinned: {' '.join(missing)}" if missing else ""), flush=True)
    return passed


def _ask(words: list[str], root: Path, env: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=root, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError((done.stderr or done.stdout).strip())
    return done.stdout


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(0 if check() else 1)
