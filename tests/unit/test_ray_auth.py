"""Ray's token file, and the mode of a cluster before it is joined."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tiermoe.cluster import ray_session
from tiermoe.cluster.ray_auth import adopt_mode, check_joinable, ensure_private_token
from tiermoe.errors import ConfigError, RuntimeFailure, TierMoeError


class _Head(grpc.GenericRpcHandler):
    """A head node that knows one question."""

    def __init__(self, wants_token: bool) -> None:
        self._wants_token = wants_token

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._wants_token:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        assert details.method.endswith("/GetClusterId")
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def head(request: pytest.FixtureRequest) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[_Head(request.param)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    ("head", "ours", "remedy"),
    [
        (True, None, "RAY_AUTH_MODE=token and keep"),
        (True, "disabled", "RAY_AUTH_MODE=token and keep"),
        (False, "token", "RAY_AUTH_MODE=disabled"),
        (True, "token", None),
        (False, None, None),
    ],
    indirect=["head"],
)
def test_modes_must_agree(head: str, ours: str | None, remedy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if ours is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", ours)
    if remedy is None:
        check_joinable(head)
    else:
        with pytest.raises(RuntimeFailure, match=remedy):
            check_joinable(head)


@pytest.mark.parametrize(
    ("head", "ours", "then"),
    [(True, None, "token"), (True, "disabled", "disabled"), (False, None, None)],
    indirect=["head"],
)
def test_the_mode_of_a_cluster_is_taken_over_before_ray_is_imported(
    head: str, ours: str | None, then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is restored afterwards
    monkeypatch.delenv("RAY_AUTH_MODE")
    if ours is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", ours)
    adopt_mode(head)
    assert os.environ.get("RAY_AUTH_MODE") == ours  # too late: Ray is imported here
    monkeypatch.delitem(sys.modules, "ray")
    adopt_mode(head)
    assert os.environ.get("RAY_AUTH_MODE") == then


@pytest.mark.parametrize(
    ("address", "error"), [("127.0.0.1:1", RuntimeFailure), ("nonsense", ConfigError), ("host:port", ConfigError)]
)
def test_an_address_without_a_ray_is_refused(address: str, error: type[TierMoeError]) -> None:
    """Exit code 2 where the address is malformed, which was 1."""
    with pytest.raises(error, match=f"'{address}'"):
        check_joinable(address)


def test_the_token_is_made_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    token = tmp_path / ".ray" / "auth_token"
    ensure_private_token()
    first = token.read_text()
    assert len(first) == 64
    token.chmod(0o644)  # as Ray leaves it
    ensure_private_token()
    assert token.read_text() == first
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    token.unlink()
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN_PATH", "/a/file")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            ensure_private_token()
    assert not token.exists()


def test_actors_start_by_a_python_whose_path_has_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `tiermoe up` in such a clone: Ray's shell was to start `/x`, again and again."""
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setattr(ray_session.sys, "executable", "/x y/.venv/bin/python")
    variables = {"OMP_NUM_THREADS": "1"}
    expected = {"env_vars": variables, "py_executable": "'/x y/.venv/bin/python'"}
    assert ray_session.environment_of(variables) == expected
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"py_executable": "python3"}}))
    assert ray_session.environment_of(variables) == {"env_vars": variables}  # Ray refuses to be given it twice
    monkeypatch.setattr(ray_session.sys, "executable", "/x/.venv/bin/python")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert ray_session.environment_of(variables) == {"env_vars": variables}


@pytest.mark.parametrize("joined", [False, True])
def test_a_local_ray_within_a_job_uses_none_of_the_jobs_settings(
    joined: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards `ray job submit --working-dir . -- tiermoe run`: the own Ray looked for the job's package in itself."""
    variables = {"OMP_NUM_THREADS": "2", "MINE": "1"}
    job = json.dumps({"runtime_env": {"working_dir": "gcs://x.zip", "env_vars": variables}, "metadata": {}})
    name, hook = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK"
    monkeypatch.setenv(name, job)
    monkeypatch.setenv(hook, "a.hook")
    seen: dict[str, Any] = {}

    def init(**options: Any) -> None:
        seen.update(options, environment=dict(os.environ))

    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session, "ensure_private_token", lambda: None)
    monkeypatch.setattr(ray_session, "check_joinable", lambda address: None)
    monkeypatch.setattr(ray_session, "session_folder", lambda: tmp_path)
    if joined:
        ray_session.join("127.0.0.1:1", {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        assert seen["environment"][name] == job  # it joins what the job's package is in
        assert seen["runtime_env"] == {"env_vars": {"MKL_NUM_THREADS": "1"}}  # Ray refuses a variable given twice
    else:
        ray_session.start_local(SimpleNamespace(path=tmp_path, ray=tmp_path / "r"), 1, {}, 1 << 26, 1)  # type: ignore[arg-type]
        assert {name, hook}.isdisjoint(seen["environment"])
        assert "runtime_env" not in seen
    assert (os.environ[name], os.environ[hook]) == (job, "a.hook")
