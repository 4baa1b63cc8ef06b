"""Which file holds which tensor, as transformers resolves it; and what is said of files that are not whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.checkpoints.hub import headers
from tiermoe.cluster.checkpoints.weight_files import INDEX, SINGLE
from tiermoe.cluster.jobs.prepare import default_store_dir, prepare
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import CheckpointError

torch.set_num_threads(1)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.0.mlp.gate.weight"
Shards = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("single"))


def split(single: Path) -> Shards:
    """Its tensors in two files, GATE in the first."""
    tensors = load_file(single / SINGLE)
    names = sorted(tensors)
    names.remove(GATE)
    half = len(names) // 2
    return {
        FIRST: {name: tensors[name] for name in [GATE, *names[:half]]},
        SECOND: {name: tensors[name] for name in names[half:]},
    }


def write(folder: Path, single: Path, shards: Shards, weight_map: dict[str, str] | None = None) -> Path:
    """A checkpoint of these files, and of an index of where each tensor lies or of `weight_map`."""
    shutil.copytree(single, folder, ignore=shutil.ignore_patterns(SINGLE))
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    where = {name: file for file, tensors in shards.items() for name in tensors} if weight_map is None else weight_map
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def plain_map(shards: Shards) -> dict[str, str]:
    return {name: file for file, tensors in shards.items() for name in tensors}


def stale_before(folder: Path, single: Path) -> None:
    shards = split(single)
    where, last = plain_map(shards), max(shards[SECOND])
    shards[FIRST][last] = torch.zeros_like(shards[SECOND][last])
    write(folder, single, shards, where)


def stale_after(folder: Path, single: Path) -> None:
    """Also of another shape, as a resized copy is."""
    shards = split(single)
    where = plain_map(shards)
    shards[SECOND][GATE] = torch.zeros(3, 5)
    write(folder, single, shards, where)


def in_folders(folder: Path, single: Path) -> None:
    shards = split(single)
    write(folder, single, {"part-1/model.safetensors": shards[FIRST], "part.2/weights.safetensors": shards[SECOND]})


def unlisted_files(folder: Path, single: Path) -> None:
    """Mistral's own form beside transformers', and files that are no safetensors files."""
    write(folder, single, split(single))
    save_file({GATE: torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    (folder / "consolidated-00002.safetensors").write_bytes(b"not one")


def unlisted_tensor(folder: Path, single: Path) -> None:
    shards = split(single)
    where = plain_map(shards)
    del where[GATE]
    write(folder, single, shards, where)


def index_beside_a_single_file(folder: Path, single: Path) -> None:
    write(folder, single, {FIRST: {GATE: torch.zeros(8, 32)}})
    shutil.copy(single / SINGLE, folder / SINGLE)


def index_of_missing_files(folder: Path, single: Path) -> None:
    write(folder, single, {}, {GATE: FIRST})
    shutil.copy(single / SINGLE, folder / SINGLE)


def unused_and_absent(folder: Path, single: Path) -> None:
    """An index that lists a layer for predicting further tokens, which was left out of the files."""
    shards = split(single)
    where = plain_map(shards) | {"model.layers.2.mlp.gate.weight": SECOND, "mtp.fc.weight": FIRST}
    write(folder, single, shards, where)


def named_by_the_configuration(folder: Path, single: Path) -> None:
    write(folder, single, {SINGLE: {GATE: torch.zeros(8, 32)}})
    shutil.copy(single / SINGLE, folder / "other.safetensors")
    edit_config(folder, transformers_weights="other.safetensors")


def index_named_by_the_configuration(folder: Path, single: Path) -> None:
    write(folder, single, split(single))
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    save_file({GATE: torch.zeros(8, 32)}, folder / SINGLE)
    edit_config(folder, transformers_weights="other.safetensors.index.json")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


CASES = (
    stale_before, stale_after, in_folders, unlisted_files, unlisted_tensor, index_beside_a_single_file,
    index_of_missing_files, unused_and_absent, named_by_the_configuration, index_named_by_the_configuration,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_read_from_where_they_are(
    case: Callable[[Path, Path], None], single: Path, tmp_path: Path
) -> None:
    """The same store as of the single file; and transformers reads the same where it follows the index."""
    case(tmp_path / "checkpoint", single)
    folders = (tmp_path / "checkpoint", single)
    stores = [prepare(path, tmp_path / f"{path.name}-store", progress=False) for path in folders]
    manifests = [read_manifest(store) for store in stores]
    assert manifests[0].layers == manifests[1].layers
    assert manifests[0].dense == manifests[1].dense
    found, expected = (headers(path) for path in folders)
    assert found is not None and expected is not None  # noqa: PT018
    assert {name: found[name] for name in expected} == expected
    assert facts_of_checkpoint(tmp_path / "checkpoint").dense_elements == facts_of_checkpoint(single).dense_elements
    if case is not stale_after:  # of which transformers takes the last file's
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
        for name, tensor in AutoModelForCausalLM.from_pretrained(single).state_dict().items():
            assert torch.equal(ours[name], tensor), name


def test_the_store_changes_with_a_file_in_a_folder(single: Path, tmp_path: Path) -> None:
    in_folders(tmp_path / "checkpoint", single)
    before = default_store_dir(tmp_path / "checkpoint", tmp_path)
    (tmp_path / "checkpoint" / "part.2" / "weights.safetensors").touch()
    assert default_store_dir(tmp_path / "checkpoint", tmp_path) != before


def test_a_tensor_that_the_model_needs_must_be_where_the_index_says(single: Path, tmp_path: Path) -> None:
    shards = split(single)
    where = plain_map(shards) | {GATE: SECOND}
    write(tmp_path / "checkpoint", single, shards, where)
    with pytest.raises(CheckpointError, match=f"'{GATE}' is missing from {SECOND}, though") as caught:
        prepare(tmp_path / "checkpoint", tmp_path / "store", progress=False)
    assert "again" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "x.bin", 3, "", ["x"]])
def test_an_index_names_safetensors_files_below_it(name: object, single: Path, tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", single, {}, {GATE: name})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="not a safetensors file beside it or below; pass a release"):
        prepare(tmp_path / "checkpoint", tmp_path / "store", progress=False)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4998304776\n" % (b"0" * 64)


@pytest.mark.parametrize("file", [FIRST, INDEX, "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_one(file: str, single: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", single, split(single))
    (folder / file).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{file}' is a git-lfs pointer.*; run `git lfs pull` in '"):
        load_tokenizer(folder) if file == "tokenizer.json" else prepare(folder, tmp_path / "store", progress=False)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, grow, empty])
def test_a_wrong_length_says_that_the_file_is_to_be_downloaded_again(
    damage: Callable[[Path], None], single: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "checkpoint", single, split(single))
    damage(folder / SECOND)
    with pytest.raises(CheckpointError, match=rf"bytes.*; download {SECOND} again"):
        prepare(folder, tmp_path / "store", progress=False)


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_map(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def no_file(folder: Path) -> None:
    (folder / FIRST).unlink()


def a_folder(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()


def no_header(folder: Path) -> None:
    data = bytearray((folder / FIRST).read_bytes())
    data[8:9] = b"<"
    (folder / FIRST).write_bytes(data)


def nan(folder: Path) -> None:
    shards = load_file(folder / FIRST)
    shards[GATE][0] = float("nan")
    save_file(shards, folder / FIRST)


def more_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)


def other_width(folder: Path) -> None:
    edit_config(folder, moe_intermediate_size=16)


def fewer_experts(folder: Path) -> None:
    edit_config(folder, num_experts=4, num_local_experts=4)


@pytest.mark.parametrize(
    "damage", [no_json, no_map, no_file, a_folder, no_header, nan, more_layers, other_width, fewer_experts]
)
def test_nothing_else_is_called_damaged(damage: Callable[[Path], None], single: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", single, split(single))
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        prepare(folder, tmp_path / "store", progress=False)
    assert "again" not in str(caught.value)
    assert str(caught.value).count("; ") == 1
