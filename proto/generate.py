"""Writes `proto/generated` from the `.proto` files: `python -m tiermoe.proto.generate`, or `make proto`.

Two changes to protoc's output: imports between the files become relative, and the check of protobuf's version goes,
because protobuf 6 and 7 share all that the files use, and the developer's grpcio-tools should not decide for users.
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENERATED = HERE / "generated"
NAMES = ("channel", "messages", "services")
_IMPORT_ROOT = "tiermoe/v1"

_RUNTIME_IMPORT = re.compile(r"^from google\.protobuf import runtime_version as _runtime_version\n", re.M)
_RUNTIME_CHECK = re.compile(r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?: .*\n)*\)\n", re.M)
_VERSION_LINE = re.compile(r"^# Protobuf Python Version: .*\n", re.M)
_OWN_IMPORT = re.compile(r"^from tiermoe\.v1 import ", re.M)


def generate() -> dict[str, str]:
    """File name -> text of every generated file.

    Raises:
        ModuleNotFoundError: grpcio-tools is not installed.
        RuntimeError: protoc refuses a file.
    """
    from grpc_tools import protoc  # a tool of developers

    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "protoc", f"-I{_IMPORT_ROOT}={HERE}", f"-I{resources.files('grpc_tools') / '_proto'}",
            f"--python_out={folder}", f"--pyi_out={folder}", *(f"{_IMPORT_ROOT}/{name}.proto" for name in NAMES),
        ]  # fmt: skip
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused the .proto files")
        made = sorted((Path(folder) / _IMPORT_ROOT).iterdir())
        return {path.name: _ours(path.read_text(encoding="utf-8")) for path in made}


def _ours(text: str) -> str:
    for pattern in (_RUNTIME_IMPORT, _RUNTIME_CHECK, _VERSION_LINE):
        text = pattern.sub("", text)
    return _OWN_IMPORT.sub("from . import ", text)


def main() -> None:
    """Write the files, and remove generated files without a `.proto`."""
    files = generate()
    for path in GENERATED.glob("*_pb2.*"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (GENERATED / name).write_text(text, encoding="utf-8")
    print(f"{len(files)} files in {GENERATED}", file=sys.stderr)


if __name__ == "__main__":
    main()
