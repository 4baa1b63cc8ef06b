"""Ray's token authentication: a private token, and the mode of a cluster before it is joined.

A local Ray reads its token from ~/.ray/auth_token. Ray itself would write that file readable to everybody, and two
drivers that start together would each write their own. So the token is made here, atomically and with mode 0600.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import grpc

from ..errors import ConfigError, RuntimeFailure
from ..proto.private import open_own, own_folder

_ANSWER_DEADLINE_S = 5.0


def ensure_private_token() -> None:
    """Make ~/.ray/auth_token where it is missing, readable to its owner only.

    Raises:
        RuntimeFailure: the home directory cannot be written.
    """
    elsewhere = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if elsewhere or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own_folder(path.parent)
        if not path.exists():
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(draft, path)  # unlike a rename, this fails where another driver was first
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        found = open_own(path, os.O_RDONLY)
        try:
            if os.fstat(found).st_mode & 0o077:
                os.fchmod(found, 0o600)
        finally:
            os.close(found)
    except OSError as error:
        raise RuntimeFailure(
            f"Ray's token '{path}' cannot be made private: {error.strerror or error}",
            "make the home directory writable, or set RAY_AUTH_TOKEN_PATH to a token file of your own",
        ) from error


def check_joinable(address: str) -> None:
    """Check in a moment that a Ray answers and has this process's mode; Ray's client takes twenty seconds.

    Asks the head node for its cluster id, once and without a token. Ray's client fixes its authentication mode when it
    is imported, so this process cannot change it.

    Args:
        address: HOST:PORT of a head node.

    Raises:
        ConfigError: the address is malformed.
        RuntimeFailure: no Ray answers, or its authentication mode is not this process's.
    """
    remedy = "give HOST:PORT of a running head node (`ray start --head` prints it)"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"Ray address '{address}' is not HOST:PORT", remedy)
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # the question below would have to be asked with the cluster's certificates
    code = _ask_for_cluster_id(address)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise RuntimeFailure(f"no Ray answers at '{address}'", remedy)
    theirs = "token" if code is grpc.StatusCode.UNAUTHENTICATED else "disabled"
    ours = os.environ.get("RAY_AUTH_MODE", "disabled").lower()
    if theirs != ours:
        raise RuntimeFailure(
            f"the Ray at '{address}' has authentication mode '{theirs}', this process has '{ours}'",
            f"set RAY_AUTH_MODE={theirs}"
            + (" and keep the cluster's token in ~/.ray/auth_token" if theirs == "token" else ""),
        )


def adopt_mode(address: str) -> None:
    """Take over the authentication mode of a cluster, while that is possible: before Ray is imported.

    A mode that the user has set stays, and `check_joinable` says what is wrong with it.

    Args:
        address: HOST:PORT of a head node.
    """
    host, _, port = address.rpartition(":")
    if "ray" in sys.modules or "RAY_AUTH_MODE" in os.environ or not host or not port.isdecimal():
        return
    if os.environ.get("RAY_USE_TLS", "0") == "0" and _ask_for_cluster_id(address) is grpc.StatusCode.UNAUTHENTICATED:
        os.environ["RAY_AUTH_MODE"] = "token"


def _ask_for_cluster_id(address: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=_ANSWER_DEADLINE_S)  # the empty message; the answer itself does not matter
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK
