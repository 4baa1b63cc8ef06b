"""The packages that a run needs, asked for before anything is imported: what is missing is named with pip's command.

Standard library only, and run by `run.sh` as a plain script before the package has its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

# module: what pip calls it. Ray, FastAPI and matplotlib are not among them.
NEEDED = {
    "numpy": "numpy", "torch": "torch", "transformers": "transformers", "safetensors": "safetensors",
    "tokenizers": "tokenizers", "pydantic": "pydantic", "yaml": "pyyaml", "psutil": "psutil", "rich": "rich",
    "google.protobuf": "protobuf", "grpc": "grpcio",
}  # fmt: skip
USED_IF_THERE = {"triton": "triton", "accelerate": "accelerate", "pytest": "pytest", "hypothesis": "hypothesis"}


def there(module: str) -> bool:
    """Whether a module can be imported; nothing is."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is missing
        return False


def missing(modules: dict[str, str]) -> list[str]:
    """What pip calls those that are not there."""
    return [name for module, name in modules.items() if not there(module)]


def versions(modules: dict[str, str]) -> dict[str, str]:
    """Of those that are there."""
    found = {}
    for module, name in modules.items():
        if there(module):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "there"
    return found


def main(arguments: Sequence[str] = ()) -> int:
    """0 when all is there; else say what to do, and 1."""
    lacking = missing(NEEDED)
    if lacking:
        print(
            f"missing packages: {', '.join(lacking)}\n"
            f"  with a network:    {sys.executable} -m pip install {' '.join(lacking)}\n"
            f"  without one:       see docs/gpu.md, 'Packages for a machine without a network'",
            file=sys.stderr,
        )
        return 1
    for name in missing(USED_IF_THERE):
        print(f"{name} is not installed: what needs it is left out and said on the page", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
