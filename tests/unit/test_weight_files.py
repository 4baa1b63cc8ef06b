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
from tiny_models import edit_config, save_tiny_checkpoint
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
Case = Callable[[Path, Path], None]


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


def in_folders(folder: Path, single: Path) -> None:
    shards = split(single)
    write(folder, single, {"part-1/model.safetensors": shards[FIRST], "part.2/weights.safetensors": shards[SECOND]})


def with_stale(file: str, tensors: Callable[[Shards], dict[str, torch.Tensor]]) -> Case:
    """A file that has tensors which the index looks for in the other one."""

    def make(folder: Path, single: Path) -> None:
        shards = split(single)
        where = plain_map(shards)
        shards[file] |= tensors(shards)
        write(folder, single, shards, where)

    return make


def with_map(change: Callable[[dict[str, str]], object]) -> Case:
    def make(folder: Path, single: Path) -> None:
        shards = split(single)
        where = plain_map(shards)
        change(where)
        write(folder, single, shards, where)

    return make


def unlisted_files(folder: Path, single: Path) -> None:
    """Mistral's own form beside transformers', and files that are no safetensors files."""
    write(folder, single, split(single))
    save_file({GATE: torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    (folder / "consolidated-00002.safetensors").write_bytes(b"not one")


def beside_the_single_file(name: str, shards: Shards, weight_map: dict[str, str] | None = None, **config: Any) -> Case:
    def make(folder: Path, single: Path) -> None:
        write(folder, single, shards, weight_map)
        shutil.copy(single / SINGLE, folder / name)
        edit_config(folder, **config)

    return make


def index_named_by_the_configuration(folder: Path, single: Path) -> None:
    write(folder, single, split(single))
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    save_file({GATE: torch.zeros(8, 32)}, folder / SINGLE)
    edit_config(folder, transformers_weights="other.safetensors.index.json")


OTHER: Shards = {FIRST: {GATE: torch.zeros(8, 32)}}
CASES: dict[str, Case] = {
    "stale before": with_stale(FIRST, lambda shards: {max(shards[SECOND]): torch.zeros_like(shards[SECOND][max(shards[
        SECOND])])}),
    # also of another shape, as a resized copy is; transformers takes the last file's
    "stale after": with_stale(SECOND, lambda shards: {GATE: torch.zeros(3, 5)}),
    "in folders": in_folders, "unlisted files": unlisted_files,
    "an unlisted tensor": with_map(lambda where: where.pop(GATE)),
    # such as a layer for predicting further tokens, which was left out of the files
    "unused and absent": with_map(lambda where: where.update(
        {"model.layers.2.mlp.gate.weight": SECOND, "mtp.fc.weight": FIRST})),
    "an index beside a single file": beside_the_single_file(SINGLE, OTHER),
    "an index of missing files": beside_the_single_file(SINGLE, {}, {GATE: FIRST}),
    "named by the configuration": beside_the_single_file(
        "other.safetensors", {SINGLE: OTHER[FIRST]}, transformers_weights="other.safetensors"),
    "an index that the configuration names": index_named_by_the_configuration,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_read_from_where_they_are(case: str, single: Path, tmp_path: Path) -> None:
    """The same store as of the single file; and transformers reads the same where it follows the index."""
    CASES[case](tmp_path / "checkpoint", single)
    folders = (tmp_path / "checkpoint", single)
    stores = [prepare(path, tmp_path / f"{path.name}-store", progress=False) for path in folders]
    manifests = [read_manifest(store) for store in stores]
    assert manifests[0].layers == manifests[1].layers
    assert manifests[0].dense == manifests[1].dense
    found, expected = (headers(path) for path in folders)
    assert found is not None and expected is not None  # noqa: PT018
    assert {name: found[name] for name in expected} == expected
    assert facts_of_checkpoint(tmp_path / "checkpoint").dense_elements == facts_of_checkpoint(single).dense_elements
    if case != "stale after":
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
        for name, tensor in AutoModelForCausalLM.from_pretrained(single).state_dict().items():
            assert torch.equal(ours[name], tensor), name


def test_the_store_changes_with_a_file_in_a_folder(single: Path, tmp_path: Path) -> None:
    in_folders(tmp_path / "checkpoint", single)
    before = default_store_dir(tmp_path / "checkpoint", tmp_path)
    (tmp_path / "checkpoint" / "part.2" / "weights.safetensors").touch()
    assert default_store_dir(tmp_path / "checkpoint", tmp_path) != before


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4998304776\n" % (b"0" * 64)




def nan(folder: Path) -> None:
    shards = load_file(folder / FIRST)
    shards[GATE][0] = float("nan")
    save_file(shards, folder / FIRST)


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def pointing(to: object) -> Callable[[Path], object]:
    """An index that looks for a tensor there."""

    def change(data: bytes) -> bytes:
        index = json.loads(data)
        index["weight_map"][GATE] = to
        return json.dumps(index).encode()

    return changed(INDEX, change)


_LENGTH, _LFS = rf"bytes.*; download {SECOND} again", "is a git-lfs pointer.*; run `git lfs pull` in '"
_BELOW = "not a safetensors file beside it or below; pass a release"
# what is wrong -> how it comes about, and what is said; "again" of a wrong length alone
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (changed(SECOND, lambda data: data[:-1]), _LENGTH),
    "grown": (changed(SECOND, lambda data: data + b"x"), _LENGTH),
    "empty": (changed(SECOND, lambda data: b""), _LENGTH),
    **{f"a pointer for {name}": (changed(name, lambda data: POINTER), f"{name}' {_LFS}")
       for name in (FIRST, INDEX, "config.json")},
    **{f"an index to {name!r}": (pointing(name), _BELOW)
       for name in ("../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "x.bin", 3, "", ["x"])},
    "a tensor in another file": (pointing(SECOND), f"'{GATE}' is missing from {SECOND}, though"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ""),
    "no map": (lambda folder: (folder / INDEX).write_text("{}"), ""),
    "no file": (lambda folder: (folder / FIRST).unlink(), ""),
    "a folder": (lambda folder: ((folder / FIRST).unlink(), (folder / FIRST).mkdir()), ""),
    "no header": (changed(FIRST, lambda data: data[:8] + b"<" + data[9:]), ""), "NaN": (nan, ""),
    "more layers": (lambda folder: edit_config(folder, num_hidden_layers=3), ""),
    "another width": (lambda folder: edit_config(folder, moe_intermediate_size=16), ""),
    "fewer experts": (lambda folder: edit_config(folder, num_experts=4, num_local_experts=4), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_only_a_wrong_length_is_to_be_downloaded_again(case: str, single: Path, tmp_path: Path) -> None:
    damage, said = DAMAGE[case]
    folder = write(tmp_path / "checkpoint", single, split(single))
    damage(folder)
    with pytest.raises(CheckpointError, match=said or None) as caught:
        prepare(folder, tmp_path / "store", progress=False)
    assert ("again" in str(caught.value)) == (said == _LENGTH)
    assert str(caught.value).count("; ") == 1


def test_a_pointer_in_place_of_a_tokenizer(single: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", single, split(single))
    (folder / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"tokenizer.json' {_LFS}"):
        load_tokenizer(folder)
