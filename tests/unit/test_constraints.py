"""The check of constraints.txt, against an index on loopback: what it notices, and which configuration it ignores."""

from __future__ import annotations

import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("uv", reason="uv is not installed: pip install -c constraints.txt '.[dev]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "install"))
import constraints

_BACKEND = '''
import pathlib


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    place = pathlib.Path(folder, "own-1.dist-info")
    place.mkdir()
    (place / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: own\\nVersion: 1\\nRequires-Dist: torch<3\\nProvides-Extra: gpu\\n"
        "Requires-Dist: triton>=3; extra == 'gpu'\\n")
    (place / "WHEEL").write_text("Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    return place.name
'''
_PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "own"
version = "1"
dependencies = ["torch<3"]
[project.optional-dependencies]
gpu = ["triton>=3"]
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index of `tmp_path/index`."""
    (tmp_path / "index" / "pip").mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "own"
    root.mkdir()
    (root / "backend.py").write_text(_BACKEND)
    (root / "pyproject.toml").write_text(_PROJECT)
    return root


def _wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    inside = f"{name}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
        wheel.writestr(f"{inside}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{inside}/RECORD", "")


def _publish(tmp_path: Path, *torch_requires: str) -> None:
    _wheel(tmp_path / "index" / "torch", "torch", "2.13.0", "triton==3.7.1", *torch_requires)
    for version in ("3.7.1", "3.9.0"):
        _wheel(tmp_path / "index" / "triton", "triton", version)
    _wheel(tmp_path / "index" / "nvidia-cublas", "nvidia_cublas", "13.1")
    _wheel(tmp_path / "index" / "pathspec", "pathspec", "1.0")


def _holds(root: Path, index: str, *pins: str) -> bool:
    (root / "constraints.txt").write_text("# what the tests ran with\n" + "\n".join(pins) + "\n")
    return constraints.check(root, index)


def test_pins_that_contradict_each_other(
    root: Path, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: triton was pinned to another version than PyPI's torch takes, hidden by a wheel in a folder of pip's."""
    _publish(tmp_path)
    _wheel(tmp_path / "wheels", "torch", "2.13.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    assert not _holds(root, index, "torch==2.13.0", "triton==3.9.0")
    said = capsys.readouterr().out
    assert "pip: " in said
    assert "triton" in said
    assert _holds(root, index, "torch==2.13.0", "triton==3.7.1")
    assert "pip: 2 packages\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_package_without_a_pin(root: Path, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that only another Python takes; what torch picks for its CUDA is left to torch."""
    _publish(tmp_path, "nvidia-cublas==13.1", "pathspec; python_version >= '3.13'")
    assert not _holds(root, index, "torch==2.13.0", "triton==3.7.1")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("uv for Python 3.13: 4 packages; not pinned: pathspec==1.0")
    assert _holds(root, index, "torch==2.13.0", "Triton==3.7.1", "pathspec==1.0")


@pytest.mark.slow
def test_a_version_without_a_wheel_for_one_python(
    root: Path, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _publish(tmp_path, "pathspec")
    for tag in ("cp311-cp311-manylinux_2_17_x86_64", "cp312-cp312-manylinux_2_17_x86_64"):
        _wheel(tmp_path / "index" / "pathspec", "pathspec", "1.1", tag=tag)
    pins = ("torch==2.13.0", "triton==3.7.1")
    assert not _holds(root, index, *pins, "pathspec==1.1")
    failed = [line for line in capsys.readouterr().out.splitlines() if "Python 3.13: error" in line]
    assert failed
    assert _holds(root, index, *pins, "pathspec==1.0")


def test_the_build_of_another_index_is_taken(root: Path, index: str, tmp_path: Path) -> None:
    """`make run TORCH_INDEX=...`: the pin 2.13.0 admits 2.13.0+cpu, and pip prefers it; nothing of CUDA is fetched."""
    _publish(tmp_path, "nvidia-cublas==13.1")
    _wheel(tmp_path / "index" / "cpu" / "torch", "torch", "2.13.0+cpu")
    (root / "constraints.txt").write_text("torch==2.13.0\ntriton==3.7.1\n")
    env = constraints.environment(os.environ, "") | {"PIP_EXTRA_INDEX_URL": f"{index}/cpu"}
    assert constraints.pip_picks(root, index, env) == {"torch": "2.13.0+cpu", "triton": "3.7.1"}


def test_an_index_that_does_not_answer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _holds(root, "http://127.0.0.1:9", "torch==0")
    assert "constraints.txt is not checked: http://127.0.0.1:9 cannot be reached: " in capsys.readouterr().out


def test_configuration_that_is_left_out() -> None:
    """How the index is reached stays, whether from the environment or a file; which packages are seen does not."""
    listed = (
        ":env:.find-links='/wheels'\nglobal.cert='/ca.pem'\nglobal.constraint='/c.txt'\nglobal.proxy='http://p:1'\n"
        "global.extra-index-url='file:///a file:///b'\ninstall.no-index='true'\nglobal.timeout='180'\n"
    )
    environ = {"PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1", "UV_INDEX_URL": "file:///x", "HTTPS_PROXY": "q"}
    assert constraints.environment(environ, listed) == {
        "HTTPS_PROXY": "q", "PIP_CERT": "/ca.pem", "PIP_PROXY": "http://p:1", "PIP_TIMEOUT": "180",
        "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1",
        "SSL_CERT_FILE": "/ca.pem",
    }  # fmt: skip
