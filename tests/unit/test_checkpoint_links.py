"""Links in a checkpoint: those that lead out of it are refused by name, whatever file they stand for.

Guards against a checkpoint from elsewhere whose link to a file of this machine was read, and copied into the store.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ggufs import model, rewrite
from tiny_models import save_tiny_checkpoint

from tiermoe.cluster.checkpoints.checkpoint import open_checkpoint
from tiermoe.cluster.checkpoints.hub import headers, locate
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.errors import CheckpointError

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def secret(tmp_path: Path, content: bytes = b'{"a": "secret"}') -> Path:
    file = tmp_path / "private" / "secret"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return file


def link_out(link: Path, tmp_path: Path) -> Path:
    """Move a file out of its folder, or make one there, and leave a link to it."""
    end = secret(tmp_path, link.read_bytes() if link.is_file() else b"{}")
    link.unlink(missing_ok=True)
    link.symlink_to(end)
    return end


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json", "chat_template.jinja",
     "vocab.txt", "tokenizer.model", "tokenizer.model.v3", "quantize_config.json"],
)  # fmt: skip
def test_a_small_file_that_is_elsewhere(name: str, folder: Path, tmp_path: Path) -> None:
    end = link_out(folder / name, tmp_path)
    for read in (lambda: locate(str(folder)), lambda: prepare(folder, tmp_path / "store", progress=False)):
        with pytest.raises(CheckpointError) as refused:
            read()
        assert refused.value.what == f"'{folder / name}' is a link to '{end}', outside of the checkpoint's folder"
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_elsewhere(name: str, folder: Path, tmp_path: Path) -> None:
    if name != "model.safetensors":
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        header = headers_of(folder / "model-1.safetensors")
        (folder / name).write_text(json.dumps({"weight_map": dict.fromkeys(header, "model-1.safetensors")}))
    link_out(folder / name, tmp_path)
    for read in (headers, open_checkpoint):  # of a plan, and of a conversion
        with pytest.raises(CheckpointError, match=rf"{name}' is a link to '.*private/secret', outside of"):
            read(folder)


def headers_of(file: Path) -> list[str]:
    data = file.read_bytes()
    return [name for name in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) if name != "__metadata__"]


@pytest.mark.parametrize("name", ["additional_chat_templates", "heldout", "calibration", "shards"])
def test_a_folder_that_is_elsewhere(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "a.jinja").write_text("secret")
    (folder / name).symlink_to(tmp_path / "private")
    if name == "shards":
        (folder / "model.safetensors").rename(tmp_path / "private" / "m.safetensors")
        header = headers_of(folder / name / "m.safetensors")
        index = {"weight_map": dict.fromkeys(header, "shards/m.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{name}.*' is a link to '{tmp_path}/private.*', outside of"):
        open_checkpoint(folder)


def test_a_circle_of_links(folder: Path) -> None:
    (folder / "vocab.txt").symlink_to("merges.txt")
    (folder / "merges.txt").symlink_to("vocab.txt")
    with pytest.raises(CheckpointError, match="' is a link that leads nowhere"):
        locate(str(folder))


def test_links_that_stay_within(folder: Path, tmp_path: Path) -> None:
    """A folder that is itself reached through a link, and a link to another of its files."""
    (folder / "data").mkdir()
    (folder / "config.json").rename(folder / "data" / "config")
    (folder / "config.json").symlink_to("data/config")
    (tmp_path / "link").symlink_to(folder)
    assert locate(str(tmp_path / "link")) == tmp_path / "link"
    assert open_checkpoint(tmp_path / "link").path == folder


def in_a_cache(tiny: Path, cache: Path) -> Path:
    """A snapshot as Hugging Face lays it out."""
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "models--org--tiny" / "blobs").mkdir()
    for number, path in enumerate(tiny.iterdir()):
        shutil.copyfile(path, cache / "models--org--tiny" / "blobs" / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_snapshot_links_to_its_own_blobs_alone(tiny: Path, tmp_path: Path) -> None:
    snapshot = in_a_cache(tiny, tmp_path / "hub")
    for folder in (snapshot, snapshot.parents[1]):
        assert locate(str(folder)) == snapshot
    assert open_checkpoint(snapshot).tensors
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../../../private/secret")
    end = secret(tmp_path)
    with pytest.raises(CheckpointError, match=f"generation_config.json' is a link to '{end}'"):
        locate(str(snapshot))
    other = tmp_path / "hub" / "models--org--other" / "blobs" / "0"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../../models--org--other/blobs/0")
    with pytest.raises(CheckpointError, match=f"generation_config.json' is a link to '{other}'"):
        open_checkpoint(snapshot)


def test_gguf_files_that_are_elsewhere(tmp_path: Path) -> None:
    """A link that the user names is the user's choice; one that is found in a folder is the publisher's."""
    (tmp_path / "mine").mkdir()
    base = model(tmp_path / "mine" / "base.gguf", "qwen3moe")
    parts = rewrite(base, tmp_path / "real" / "m.gguf", parts=2)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "m.gguf").symlink_to(base)
    assert (locate(str(folder / "m.gguf")) / "config.json").is_file()
    with pytest.raises(CheckpointError, match=rf"m\.gguf' is a link to '{base}', outside of"):
        locate(str(folder))
    split = tmp_path / "split"
    split.mkdir()
    for part in parts:
        (split / part.name).symlink_to(part)
    assert (locate(str(split / parts[0].name)) / "config.json").is_file()  # all parts where the named one leads to
    (split / parts[1].name).unlink()
    end = tmp_path / "elsewhere.gguf"
    shutil.copyfile(parts[1], end)
    (split / parts[1].name).symlink_to(end)
    with pytest.raises(CheckpointError, match=rf"m-00002-of-00002\.gguf' is a link to '{end}', outside of"):
        locate(str(split / parts[0].name))
    (folder / "config.json").symlink_to(secret(tmp_path))
    with pytest.raises(CheckpointError, match=r"config\.json' is a link to '.*secret', outside of"):
        locate(str(folder / "m.gguf"))


@pytest.mark.parametrize(("name", "parts"), [("m.gguf", 1), ("m", 1), ("m.gguf", 2)])
def test_a_folder_of_the_cache_stands_for_its_files_again(name: str, parts: int, tmp_path: Path) -> None:
    """`bench` and `eval` locate what `located` answered: its link to the file was refused as one that leads out."""
    (tmp_path / "mine").mkdir()
    base = model(tmp_path / "mine" / "m.gguf", "qwen3moe")
    if parts > 1:
        base = rewrite(base, tmp_path / "parts" / "m.gguf", parts=parts)[1]
    base = base.rename(base.with_name(name)) if parts == 1 else base
    found = locate(str(base))
    assert locate(str(found)) == found == locate(str(base.parent))
    (base.parent / "generation_config.json").write_text("{}")  # what the folder stands for has changed
    assert locate(str(found)) == locate(str(base)) != found


def test_gguf_files_of_a_snapshot(tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "qwen3moe")
    real = tmp_path / "real"
    real.mkdir()
    shutil.copyfile(base, real / "m.gguf")
    snapshot = in_a_cache(real, tmp_path / "hub")
    (snapshot / "Q8_0").mkdir()
    (snapshot / "m.gguf").rename(snapshot / "Q8_0" / "m.gguf")
    (snapshot / "Q8_0" / "m.gguf").unlink()
    (snapshot / "Q8_0" / "m.gguf").symlink_to("../../../blobs/0")
    for path in (snapshot / "Q8_0", snapshot / "Q8_0" / "m.gguf"):
        assert (locate(str(path)) / "config.json").is_file()
