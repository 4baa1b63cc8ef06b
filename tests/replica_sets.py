"""The text that replicas of a tiny model are calibrated on, and what of a store is theirs."""

from __future__ import annotations

from pathlib import Path

import torch

from tiermoe.actors.store.replicas import REPLICAS_NAME

torch.set_num_threads(1)

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(60))


def contents(folder: Path) -> dict[str, bytes]:
    names = [p for p in folder.iterdir() if p.name.startswith(("replicas-b", "losses", REPLICAS_NAME))]
    return {path.name: path.read_bytes() for path in names}


def beside(store: Path) -> list[str]:
    return [path.name for path in store.parent.iterdir()]
