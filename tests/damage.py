"""Damage to safetensors files and others: bits, lengths, headers. Every change is seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def overwrite(path: Path, data: bytes | bytearray) -> None:
    assert data != path.read_bytes(), "the mutation changed nothing"
    path.write_bytes(data)


def flip(path: Path, rng: random.Random, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    overwrite(path, data)


def truncate(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    overwrite(path, data[: rng.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, rng.randrange(len(data))])])


def header_length(path: Path) -> int:
    """Of a safetensors file, with the eight bytes that say so; of others, such as GGUF files, some."""
    size = path.stat().st_size
    return 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.suffix == ".safetensors" else min(size, 3008)


def flip_header(path: Path, rng: random.Random) -> None:
    flip(path, rng, 8, header_length(path))


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the header and leave the data as it is."""
    data, length = path.read_bytes(), header_length(path)
    entries = json.loads(data[8:length])
    edit(entries)
    text = json.dumps(entries).encode()
    overwrite(path, len(text).to_bytes(8, "little") + text + data[length:])


def tensor_of(entries: dict[str, Any], rng: random.Random) -> str:
    return rng.choice(sorted(set(entries) - {"__metadata__"}))


def relabel(path: Path, rng: random.Random) -> None:
    """Another type of the same size, or another shape of the same length, for one tensor."""
    alike = (("U8", "I8", "F8_E4M3", "F8_E5M2"), ("BF16", "F16", "I16"), ("F32", "I32", "U32"))

    def change(entries: dict[str, Any]) -> None:
        entry = entries[tensor_of(entries, rng)]
        if rng.random() < 0.5:
            kinds = next((kinds for kinds in alike if entry["dtype"] in kinds), ("U8",))
            entry["dtype"] = rng.choice([kind for kind in kinds if kind != entry["dtype"]] or ["U8"])
        else:
            entry["shape"] = rng.choice(([int(np.prod(entry["shape"])), 1, 1], [1, *entry["shape"]]))

    edit_header(path, change)


def rename_tensor(path: Path, rng: random.Random) -> None:
    def change(entries: dict[str, Any]) -> None:
        name = tensor_of(entries, rng)
        renamed = rng.choice([name + "x", "x" + name, name.replace("model.", "", 1) + ".0", "\u00b2", name.upper()])
        entries[renamed] = entries.pop(name)

    edit_header(path, change)


def drop_tensor(path: Path, rng: random.Random) -> None:
    """A tensor less in the header and in the data."""
    data, length = path.read_bytes(), header_length(path)
    entries = json.loads(data[8:length])
    begin, end = entries.pop(tensor_of(entries, rng))["data_offsets"]
    for name, entry in entries.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    text = json.dumps(entries).encode()
    overwrite(path, len(text).to_bytes(8, "little") + text + data[length : length + begin] + data[length + end :])
