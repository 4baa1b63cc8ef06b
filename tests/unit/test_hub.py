"""A model by its name: the cache first, then a hub (one on loopback), only the files that are needed, typed errors."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command
from hub_server import HubServer, Served, hub_server
from huggingface_hub import constants

from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.checkpoints import hub
from tiermoe.cluster.checkpoints.hub_cache import Repository
from tiermoe.cluster.config import check_model_dir
from tiermoe.cluster.jobs.prepare import ensure_prepared
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.errors import CheckpointError, UnsupportedModelError

NAME = "org/tiny"
_OTHERS = {
    "pytorch_model.bin": b"bin", "original/consolidated.00.pth": b"pth", "consolidated.safetensors": b"twice",
    "onnx/model.onnx": b"onnx", "README.md": b"# tiny", "modeling_tiny.py": b"raise SystemExit('executed')",
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


@pytest.fixture(scope="module")
def sharded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in three files with an index."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("sharded")
    size = (checkpoint / "model.safetensors").stat().st_size
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(path, max_shard_size=size // 3)
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(checkpoint / name, path)
    assert len(list(path.glob("*.safetensors"))) >= 3
    return path


def test_only_what_is_needed_is_fetched_and_the_cache_comes_first(server: HubServer, sharded: Path) -> None:
    server.add(NAME, sharded).files.update(_OTHERS)
    folder = hub.locate(NAME)
    assert not any(name.endswith(".safetensors") for name in server.fetched())
    store = ensure_prepared(folder, progress=False)
    assert read_manifest(store).model == "tiny"
    weights = {path.name for path in sharded.glob("*.safetensors")}
    small = {path.name for path in sharded.iterdir()} - weights
    assert server.fetched() == weights | small
    before = len(server.requests)
    cache = Path(constants.HF_HUB_CACHE) / "models--org--tiny"
    commit = server.repositories[NAME].commit
    for name in (NAME, f"{NAME}@main", f"{NAME}@{commit}", str(cache), str(cache / "snapshots" / commit)):
        assert hub.locate(name) == folder
    assert ensure_prepared(folder, progress=False) == store
    assert len(server.requests) == before


def test_a_vocabulary_in_two_files_is_fetched_and_comes_last(
    server: HubServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused for want of a tokenizer.json that nobody had published; and a download that ended between the
    vocabulary and added_tokens.json would count as whole."""
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    more = {"vocab.json": model["vocab"], "added_tokens.json": {"<|x|>": 300}, "special_tokens_map.json": {}}
    for name, content in more.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    server.add(NAME, folder).files.update(_OTHERS)
    server.blocked.add("added_tokens.json")

    def interrupt(thread: threading.Thread) -> None:
        while "added_tokens.json" not in server.fetched():
            thread.join(0.01)
        threading.Timer(0.2, server.released.set).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hub, "_wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hub.locate(NAME)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("vocab.json"))
    server.blocked.clear()
    found = hub.locate(NAME)
    assert {*more, "merges.txt", "config.json"} <= {path.name for path in found.iterdir()}
    check_model_dir(found)
    assert load_tokenizer(found).encode("a<|x|>").ids[1:] == [259]
    before = len(server.requests)
    assert hub.locate(NAME) == found
    assert len(server.requests) == before


def test_a_plan_needs_no_weights(
    server: HubServer, sharded: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(NAME, sharded)

    def plan(model: str) -> dict[str, object]:
        return command.json("plan", "--model", model)["model"]

    named, here = plan(NAME), plan(str(sharded))
    assert named | {"name": ""} == here | {"name": ""}  # dense bytes are exact: from the files' first bytes
    assert named["name"] == "tiny"
    snapshot = hub.locate(NAME, "sizes")
    assert {path.name for path in snapshot.iterdir()} == {"config.json", "generation_config.json", hub.INDEX}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert plan(NAME)["dense_estimated"]


def test_a_lost_download_resumes_where_it_stopped(
    server: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 10)  # 10 MiB: what arrived of a smaller file is lost
    served = server.add(NAME, checkpoint)
    served.broken.add("model.safetensors")
    folder = hub.locate(NAME)
    hub.complete(folder, progress=False)
    size = (checkpoint / "model.safetensors").stat().st_size
    asked = [wanted for method, path, wanted in server.requests if (method, Path(path).name) == ("GET", hub.SINGLE)]
    assert asked == [None, f"bytes={size // 2 // 1024 * 1024}-"]
    assert (folder / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_an_interrupted_download_keeps_finished_files(
    server: HubServer, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(NAME, sharded)
    folder, weights = hub.locate(NAME), sorted(path.name for path in sharded.glob("*.safetensors"))
    server.blocked.add(weights[-1])

    def interrupt(thread: object, timeout: float | None = None) -> None:
        while not all((folder / name).is_file() for name in weights[:-1]):
            time.sleep(0.02)
        threading.Timer(0.2, server.released.set).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hub, "_wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hub.complete(folder, progress=False)
    assert not (folder / weights[-1]).exists()
    server.blocked.clear()
    server.requests.clear()
    hub.complete(folder, progress=False)
    assert server.fetched() == {weights[-1]}
    assert (folder / weights[-1]).read_bytes() == (sharded / weights[-1]).read_bytes()


def test_offline_says_the_command(server: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(NAME, checkpoint)
    folder = hub.locate(f"{NAME}@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.locate(f"{NAME}@v1") == folder
    with pytest.raises(CheckpointError, match=r"files of .* are missing in .*OFFLINE is set; .*hf download org/tiny"):
        hub.complete(folder, progress=False)
    assert server.fetched() <= {path.name for path in checkpoint.iterdir()} - {"model.safetensors"}


OFFLINE, DOWN, UNREACHABLE = "offline", "down", "unreachable"
# name, state of the hub, what is said
REFUSED: list[tuple[str, str, str]] = [
    ("org/none", "", "there is no model 'org/none' at http"),
    (f"{NAME}@none", "", "has no revision 'none'"),
    ("org/gated", "", "is gated, and this account has no access; accept its terms at http.*hf auth login"),
    (NAME, DOWN, r"the download of 'org/tiny' failed .*503.*the same command resumes"),
    (NAME, UNREACHABLE, "on a machine with a network run `hf download org/tiny`"),
    (f"{NAME}@v1", OFFLINE, r"HF_HUB_OFFLINE is set; .*`hf download org/tiny --revision v1`"),
    # GGUF files
    ("org/tiny-GGUF:Q5_K_M", "", "no GGUF file of the name or type 'Q5_K_M'.*; .*tiny-Q8_0.gguf"),
    ("org/tiny-GGUF:0", "", "no GGUF file.*; .*tiny-Q4_0.gguf"),
    ("org/tiny-GGUF", "", "has GGUF files and no config.json.*; .*org/tiny-GGUF:"),
    ("org/two:Q8_0", "", "several models.*; .*a-Q8_0.gguf, b-Q8_0.gguf"),
    ("org/half:BF16", "", "lacks m-BF16-00002-of-00002.gguf.*; .*another file"),
    ("org/none:BF16", "", "there is no model.*; .*check its name"),
    ("org/tiny-GGUF:Q8_0", OFFLINE, r"HF_HUB_OFFLINE.*; .*hf download org/tiny-GGUF --include '\*Q8_0\*'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "state", "message"), REFUSED, ids=[f"{name} {state}" for name, state, _ in REFUSED])
def test_refusals_of_the_hub(
    server: HubServer, checkpoint: Path, gguf: bytes, name: str, state: str, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server.add(NAME, checkpoint)
    server.add("org/gated", checkpoint).gated = True
    _ggufs(server, gguf)
    server.repositories["org/two"] = Served({"a-Q8_0.gguf": gguf, "b-Q8_0.gguf": gguf})
    server.repositories["org/half"] = Served({"m-BF16-00001-of-00002.gguf": gguf})
    server.down = state == DOWN
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", state == OFFLINE)
    if state == UNREACHABLE:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    with pytest.raises(CheckpointError, match=message):
        hub.locate(name)
    assert not any(file.endswith((".gguf", ".safetensors")) for file in server.fetched())


def test_a_commit_that_the_hub_no_longer_has(server: HubServer, checkpoint: Path) -> None:
    """Between configuration and weights the repository was rewritten: no mixture of two versions."""
    served = server.add(NAME, checkpoint)
    folder = hub.locate(NAME)
    served.files["config.json"] += b" "
    with pytest.raises(CheckpointError, match=r"has no revision '[0-9a-f]{40}'"):
        hub.complete(folder, progress=False)


def test_full_disks(server: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(NAME, checkpoint)
    folder = hub.locate(NAME)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(CheckpointError, match=r"the weights of 'org/tiny' take .* has 0 B free; free some space"):
            hub.complete(folder, progress=False)

    def full(*args: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "_snapshot", full)
    with pytest.raises(CheckpointError, match="is full; free some space"):
        hub.complete(folder, progress=False)


def test_what_is_quantized_is_refused_before_its_weights(server: HubServer, checkpoint: Path) -> None:
    served = server.add(NAME, checkpoint)
    config = json.loads((checkpoint / "config.json").read_bytes())
    quantized = config | {"quantization_config": {"quant_method": "never-heard-of"}}
    served.files["config.json"] = json.dumps(quantized).encode()
    with pytest.raises(UnsupportedModelError, match="never-heard-of"):
        ensure_prepared(hub.locate(NAME), progress=False)
    assert "model.safetensors" not in server.fetched()


@pytest.mark.parametrize("file", ["../../x.safetensors", "a/../x.safetensors", "*.safetensors", "/x.safetensors", "b"])
def test_an_index_cannot_lead_out_of_its_folder(server: HubServer, checkpoint: Path, file: str) -> None:
    served = server.add(NAME, checkpoint)
    del served.files["model.safetensors"]
    served.files[hub.INDEX] = json.dumps({"weight_map": {"a": file}}).encode()
    folder = hub.locate(NAME)
    with pytest.raises(CheckpointError, match="not a safetensors file beside it"):
        hub.complete(folder, progress=False)


def test_an_index_may_name_files_in_folders(server: HubServer, sharded: Path) -> None:
    served = server.add(NAME, sharded)
    index = json.loads(served.files[hub.INDEX])
    for name in set(index["weight_map"].values()):
        served.files[f"weights/{name}"] = served.files.pop(name)
    index["weight_map"] = {tensor: f"weights/{name}" for tensor, name in index["weight_map"].items()}
    served.files[hub.INDEX] = json.dumps(index).encode()
    folder = hub.locate(NAME)
    remote = hub.headers(folder)
    ensure_prepared(folder, progress=False)
    assert hub.headers(folder) == remote
    assert not hub._missing(folder)


def test_a_repository_without_safetensors(server: HubServer, checkpoint: Path) -> None:
    served = server.add(NAME, checkpoint)
    del served.files["model.safetensors"]
    served.files["pytorch_model.bin"] = b"bin"
    with pytest.raises(CheckpointError, match=r"has no model.safetensors, only pytorch_model.bin; choose a repository"):
        hub.complete(hub.locate(NAME), progress=False)


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "../x/y", "o/..", "org/na me", "org/x--y", "-o/x", "o/x@../../y", "o/x.gguf"]
)
def test_what_is_no_name_asks_no_hub(server: HubServer, name: str) -> None:
    assert not hub.locate(name).is_dir()
    assert server.requests == []


def test_a_folder_is_never_taken_for_a_name(
    server: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent.parent)
    name = str(checkpoint.relative_to(Path.cwd()))
    assert name.count("/") == 1
    assert hub.locate(name) == Path(name)
    assert server.requests == []


def cached(snapshots: int, checkpoint: Path) -> list[Path]:
    """Snapshots that were copied into the cache without `refs`, as some mirrors have them."""
    folder = Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "snapshots"
    found = [folder / (str(number) * 40) for number in range(snapshots)]
    for path in found:
        shutil.copytree(checkpoint, path)
        (path / "tokenizer.json").write_text("{}")
        (path / "tiny-Q8_0.gguf").touch()
    return found


@pytest.mark.parametrize("down", [False, True])
def test_the_only_snapshot_is_taken_where_there_is_no_network(
    server: HubServer, checkpoint: Path, down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache without `refs` was an empty one."""
    [only] = cached(1, checkpoint)
    if down:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.locate(NAME) == only
    assert hub._gguf_of(Repository(NAME, "main", "Q8_0")) == only / "tiny-Q8_0.gguf"
    hub.complete(only, progress=False)
    assert hub.locate(f"{NAME}@{'0' * 8}") == only  # the beginning of a commit
    with pytest.raises(CheckpointError, match=f"has no snapshot for v1, and has 1: {'0' * 40}, and .*; name one, as"):
        hub.locate(f"{NAME}@v1")


def test_several_snapshots_without_refs_are_named(
    server: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cached(2, checkpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for tail in ("", ":Q8_0"):
        with pytest.raises(CheckpointError) as refused:
            hub.locate(f"{NAME}{tail}")
        assert f"has no snapshot for main, and has 2: {first.name}, {second.name}" in refused.value.what
        assert f"name one, as {NAME}@{first.name}{tail}" in refused.value.remedy
    assert hub.locate(f"{NAME}@{second.name}") == second
    with pytest.raises(CheckpointError, match=f"has 2: {first.name}, {second.name}; pass one of its folders"):
        hub.locate(str(second.parents[1]))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from tiermoe.benchmarks.random_model import save_published
    from tiermoe.cluster.jobs.bench.random_model import Form, MoeShape

    folder = tmp_path_factory.mktemp("gguf") / "model"
    file = save_published(Form.GGUF, MoeShape(2, 4, 2, 256, 128, vocabulary=64), folder) / "model.gguf"
    return file.read_bytes()


def _ggufs(server: HubServer, gguf: bytes) -> None:
    """As published: several types, one in a folder in parts, and a projector of pictures."""
    split = {f"BF16/tiny-BF16-0000{i}-of-00002.gguf": gguf + bytes(i) for i in (1, 2)}
    files = {"tiny-Q8_0.gguf": gguf, "tiny-Q4_0.gguf": b"GGUF", "mmproj-Q8_0.gguf": b"GGUF", "README.md": b"# tiny"}
    server.repositories["org/tiny-GGUF"] = Served(files | split)


def test_a_gguf_file_of_a_hub(server: HubServer, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name or its type, once; only that file is fetched."""
    _ggufs(server, gguf)
    folder = hub.locate("org/tiny-GGUF:tiny-Q8_0.gguf")
    assert server.fetched() == {"tiny-Q8_0.gguf"}
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    before = len(server.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = server.repositories["org/tiny-GGUF"].commit
    for name in (":Q8_0", ":q8_0", "@main:tiny-Q8_0.gguf", f"@{commit}:Q8_0"):
        assert hub.locate(f"org/tiny-GGUF{name}") == folder
    assert len(server.requests) == before
    assert read_manifest(ensure_prepared(folder, progress=False)).expert_form == "q8_0"


def test_a_dense_gguf_file_is_refused_by_its_first_bytes(server: HubServer, tmp_path: Path) -> None:
    """Not after gigabytes are here."""
    from ggufs import model, rewrite, tensors_of

    base = model(tmp_path / "base.gguf", "llama")
    dense = {name: None for name in tensors_of(base) if "_exps" in name}
    keys = {"llama.expert_count": None, "llama.expert_used_count": None}
    file = rewrite(base, tmp_path / "dense" / "m-Q8_0.gguf", keys, dense)[0]
    server.repositories["org/dense-GGUF"] = Served({file.name: file.read_bytes()})
    with pytest.raises(UnsupportedModelError, match=r"'org/dense-GGUF:m-Q8_0\.gguf' is a dense model"):
        hub.locate("org/dense-GGUF:Q8_0")
    assert [wanted for method, path, wanted in server.requests if path.endswith(".gguf")] == ["bytes=0-65535"]


def test_all_parts_of_a_gguf_file_are_fetched(server: HubServer, gguf: bytes) -> None:
    _ggufs(server, gguf)
    found = hub._gguf_of(Repository("org/tiny-GGUF", "main", "bf16"))
    parts = {f"BF16/tiny-BF16-0000{i}-of-00002.gguf" for i in (1, 2)}
    assert server.fetched() == parts
    assert {path.name for path in found.parent.iterdir()} == {Path(part).name for part in parts}
