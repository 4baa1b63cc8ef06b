"""Damaged checkpoints and stores: only typed errors come out, and a damaged store never opens.

Every mutation is seeded. A store is protected by digests, so any change of any byte must be refused.
A checkpoint has none: there a change may pass if what it leaves is whole, well-shaped and finite.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import damage
import numpy as np
import pytest
import torch
from damage import edit_header, flip, header_length, overwrite
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM
from words import check_words

from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import MANIFEST_NAME
from tiermoe.cluster.jobs.prepare import ensure_prepared, prepare
from tiermoe.errors import StoreError, TierMoeError

torch.set_num_threads(1)

STORE_SEEDS = range(12)
CHECKPOINT_SEEDS = range(8)
VERIFY_MODES: tuple[Literal["full", "stamp"], ...] = ("full", "stamp")
Mutation = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A sharded checkpoint with one tensor per expert, and a single file with fused experts and biases."""
    root = tmp_path_factory.mktemp("checkpoints")
    single = save_tiny_checkpoint("qwen3_moe", root / "single")
    model = AutoModelForCausalLM.from_pretrained(single)
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    return [root / "sharded", save_tiny_checkpoint("gpt_oss", root / "fused")]


@pytest.fixture(scope="module")
def stores(checkpoints: list[Path]) -> list[Path]:
    """Their stores, verified once, so that each has a stamp file."""
    made = [prepare(path, path.with_name(path.name + "-store"), progress=False) for path in checkpoints]
    for store in made:
        ExpertStore(store)
    return made


def pick(folder: Path, rng: random.Random, *patterns: str) -> Path:
    return rng.choice(sorted(path for pattern in patterns for path in folder.glob(pattern)))


def weights(folder: Path, rng: random.Random) -> Path:
    return pick(folder, rng, "*.safetensors")


def of_weights(change: Mutation) -> Mutation:
    """A change of one of the files of weights."""
    return lambda folder, rng: change(weights(folder, rng), rng)


JSON_FILES = ("config.json", "*.index.json", MANIFEST_NAME)


def flip_payload(folder: Path, rng: random.Random) -> None:
    flip(path := weights(folder, rng), rng, header_length(path), path.stat().st_size)


def flip_json(folder: Path, rng: random.Random, *patterns: str) -> None:
    flip(path := pick(folder, rng, *patterns), rng, 0, path.stat().st_size)


def edit_shape(entry: dict, rng: random.Random) -> None:
    """The same number of elements in one more or less dimension: the file stays consistent."""
    shape = entry["shape"]
    entry["shape"] = [1, *shape] if len(shape) == 1 else [shape[0] * shape[1], *shape[2:]]


def edit_dimension(entry: dict, rng: random.Random) -> None:
    entry["shape"][0] = rng.choice([0, -1, entry["shape"][0] + 1, 1 << 40, 1.5, "x", None, True])


def edit_type(entry: dict, rng: random.Random) -> None:
    entry["dtype"] = rng.choice(["I32", "U32", "F16", "BF16", "F64", "BOOL", "F4", 7, None])


def edit_offsets(entry: dict, rng: random.Random) -> None:
    entry["data_offsets"][rng.randrange(2)] += rng.choice([-8, -1, 4, 64, 1 << 45])


def in_an_entry(edit: Callable[[dict, random.Random], None]) -> Mutation:
    def mutate(folder: Path, rng: random.Random) -> None:
        edit_header(weights(folder, rng), lambda entries: edit(entries[damage.tensor_of(entries, rng)], rng))

    return mutate


def put_nan(folder: Path, rng: random.Random) -> None:
    path = weights(folder, rng)
    length, data = header_length(path), bytearray(path.read_bytes())
    start = length + 4 * rng.randrange((len(data) - length) // 4)
    data[start : start + 4] = np.float32(rng.choice([np.nan, np.inf, -np.inf])).tobytes()
    overwrite(path, data)


def zero_a_page(folder: Path, rng: random.Random) -> None:
    """A lost block of a disk or a copy tool."""
    path = weights(folder, rng)
    data, length = bytearray(path.read_bytes()), header_length(path)
    start = rng.randrange(length, max(length + 1, len(data) - 4096))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    overwrite(path, data)


def swap_files(folder: Path, rng: random.Random) -> None:
    files = sorted(folder.glob("*.safetensors"))
    one, other = rng.sample(files, 2) if len(files) > 1 else (files[0], folder / "config.json")
    first, second = one.read_bytes(), other.read_bytes()
    overwrite(one, second)
    overwrite(other, first)


def replace_by_folder(folder: Path, rng: random.Random) -> None:
    path = pick(folder, rng, "*.safetensors", *JSON_FILES)
    path.unlink()
    path.mkdir()


def junk_json(folder: Path, rng: random.Random) -> None:
    path = pick(folder, rng, *JSON_FILES)
    overwrite(path, rng.choice([b"[]", b"null", b"{}", b"\xff" * 9, b"[" * 100_000, b'{"weight_map": {"a": "../b"}}']))


def edit_json_value(folder: Path, rng: random.Random) -> None:
    path = pick(folder, rng, *JSON_FILES)
    content = json.loads(path.read_bytes())
    content[rng.choice(sorted(content))] = rng.choice([None, -1, 0, 3, "x", [], {}, 1e9, True, [[1]]])
    overwrite(path, json.dumps(content, indent=1).encode())


# must be refused in a checkpoint too: missing or surplus data, or numbers that are not finite
FATAL: dict[str, Mutation] = {
    "truncate_weights": of_weights(damage.truncate),
    "extend_weights": of_weights(
        lambda path, rng: overwrite(path, path.read_bytes() + bytes(rng.choice([1, 64, 4096])))
    ),
    "flip_length": of_weights(lambda path, rng: flip(path, rng, 0, 8)),
    "edit_shape": in_an_entry(edit_shape),
    "edit_dimension": in_an_entry(edit_dimension),
    "edit_offsets": in_an_entry(edit_offsets),
    "rename_tensor": of_weights(damage.rename_tensor),
    "drop_tensor": of_weights(damage.drop_tensor),
    "put_nan": put_nan,
    "swap_files": swap_files,
}
MUTATIONS: dict[str, Mutation] = FATAL | {
    "truncate_json": lambda folder, rng: damage.truncate(pick(folder, rng, *JSON_FILES), rng),
    "flip_header": of_weights(damage.flip_header),
    "flip_payload": flip_payload,
    "flip_config": lambda folder, rng: flip_json(folder, rng, "config.json"),
    "flip_index": lambda folder, rng: flip_json(folder, rng, *JSON_FILES),
    "edit_type": in_an_entry(edit_type),
    "zero_a_page": zero_a_page,
    "remove_file": lambda folder, rng: pick(folder, rng, "*.safetensors", *JSON_FILES).unlink(),
    "replace_by_folder": replace_by_folder,
    "junk_json": junk_json,
    "edit_json_value": edit_json_value,
}
every_mutation = pytest.mark.parametrize("mutation", MUTATIONS)


def mutated(pristine: list[Path], mutation: str, seed: int, target: Path) -> Path:
    shutil.copytree(pristine[seed % len(pristine)], target)  # with modification times
    MUTATIONS[mutation](target, random.Random(f"{mutation}/{seed}"))
    return target


@every_mutation
def test_no_damaged_store_opens(stores: list[Path], mutation: str, tmp_path: Path) -> None:
    for seed in STORE_SEEDS:
        store = mutated(stores, mutation, seed, tmp_path / str(seed))
        for verify in VERIFY_MODES:
            with pytest.raises(StoreError) as caught:
                ExpertStore(store, verify=verify)
            assert caught.value.remedy


@every_mutation
def test_damaged_checkpoints_raise_typed_errors(checkpoints: list[Path], mutation: str, tmp_path: Path) -> None:
    for seed in CHECKPOINT_SEEDS:
        checkpoint = mutated(checkpoints, mutation, seed, tmp_path / str(seed))
        out = tmp_path / f"{seed}-store"
        error: TierMoeError | None = None
        try:
            prepare(checkpoint, out, progress=False)
        except TierMoeError as raised:  # anything else escapes
            error = raised
        if error is not None:
            check_words(error)
            assert not out.exists(), seed
            continue
        assert mutation not in FATAL, f"seed {seed} passed"
        for layer in ExpertStore(out).layers:
            assert np.isfinite(layer.gate_up).all(), seed
            assert np.isfinite(layer.down).all(), seed


@pytest.mark.parametrize("mutation", ["truncate_weights", "truncate_json", "remove_file", "flip_payload"])
def test_damaged_leftovers_are_not_taken_over(
    checkpoints: list[Path], stores: list[Path], mutation: str, tmp_path: Path
) -> None:
    """A damaged work-in-progress folder: what comes out is the store that a clean run makes."""
    from tiermoe.cluster.jobs.prepare import convert

    for seed in range(4):
        out = tmp_path / f"{seed}-store"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "read_source", lambda _path: ())  # fails after the last tensor file
            with pytest.raises(TierMoeError, match="changed while"):
                prepare(checkpoints[0], out, progress=False)
        partial = out.with_name(out.name + ".partial")
        MUTATIONS[mutation](partial, random.Random(seed))
        ensure_prepared(checkpoints[0], out, progress=False)
        ExpertStore(out)
        assert (out / MANIFEST_NAME).read_bytes() == (stores[0] / MANIFEST_NAME).read_bytes()
