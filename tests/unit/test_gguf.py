"""GGUF files: what their metadata and tensors say is what is computed, as llama.cpp does; the rest is refused by name.

The figures in tests/golden/gguf.json are llama.cpp's; `tests/llama_reference.py` writes them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_reference
import numpy as np
import pytest
import torch
from ggufs import GRANITE, PROMPT, cases, logits, model, rewrite, tensors_of
from published import write_gguf
from serving import greedy, serving, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.checkpoints.checkpoint import open_checkpoint
from tiermoe.cluster.checkpoints.gguf_header import read_gguf_header
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.checkpoints.quantization import published_as
from tiermoe.cluster.config import check_model_dir
from tiermoe.cluster.jobs.doctor import routed_expert_elements
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import CheckpointError, StoreError, UnsupportedModelError
from tiermoe.proto.private import user_cache

torch.set_num_threads(1)
GOLDEN = json.loads(llama_reference.GOLDEN.read_text())
MODELS = [name for name, found in GOLDEN.items() if "best" in found]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return cases(tmp_path_factory.mktemp("cases"))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MODELS)
def test_metadata_is_computed_with_as_llama_cpp_does(name: str, files: Mapping[str, Path]) -> None:
    """Every kind of rotary embedding, a head in another part, tensors in one: yarn and such a head were lost."""
    found = logits(locate(str(files[name])), PROMPT)
    assert found.argmax(axis=1).tolist() == GOLDEN[name]["best"]
    np.testing.assert_allclose(found[-1], GOLDEN[name]["last"], atol=5e-4)


def test_the_cases_are_those_that_were_recorded(files: Mapping[str, Path]) -> None:
    assert list(files) == MODELS


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_the_recorded_figures_are_those_of_llama_cpp(files: Mapping[str, Path]) -> None:
    for name, file in files.items():
        found = llama_reference.logits(file)
        assert found.argmax(axis=1).tolist() == GOLDEN[name]["best"]
        np.testing.assert_allclose(found[-1], GOLDEN[name]["last"], atol=5e-4)


def apart(file: Path) -> dict[str, np.ndarray | None]:
    """A tensor for each expert, as converters before April 2024 wrote them."""
    found: dict[str, np.ndarray | None] = {}
    for name, array in tensors_of(file).items():
        if "_exps" in name:
            found |= {name: None, **{name.replace("_exps.", f".{i}."): each for i, each in enumerate(array)}}
    return found


@pytest.mark.parametrize("named", [1, 2, 3])
def test_tensors_are_found_in_any_part_whichever_is_named(named: int, tmp_path: Path) -> None:
    """Experts apart, spread over three files, and a first part of metadata alone."""
    base = model(tmp_path / "base.gguf", "qwen3moe")
    parts = rewrite(base, tmp_path / "split" / "m.gguf", tensors=apart(base), parts=3, no_tensor_first=named > 1)
    folder = locate(str(parts[named - 1]))
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert logits(folder, PROMPT).argmax(axis=1).tolist() == GOLDEN["qwen3moe: plain"]["best"]
    assert facts_of_checkpoint(folder).form is not None


def test_experts_apart_are_served(tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "llama")
    stacked = rewrite(base, tmp_path / "stacked" / "m.gguf")[0]
    parts = rewrite(base, tmp_path / "apart" / "m.gguf", tensors=apart(base), parts=2)
    tokens = []
    for number, file in enumerate((stacked, parts[1])):
        store = ExpertStore(prepare(locate(str(file)), tmp_path / f"store-{number}", progress=False))
        with serving(store, settings(0.5)) as worker:
            tokens.append(greedy(worker, [PROMPT[:12], PROMPT[20:25]], 8))
    assert tokens[0] == tokens[1]


ONE = np.ones(32)
REFUSED = [  # architecture, keys, tensors, what the message names
    ("qwen3moe", {"rope.scaling.type": "longrope"}, {}, "'qwen3moe.rope.scaling.type' = longrope"),
    ("qwen3moe", {"rope.scaling.type": "su"}, {}, "'qwen3moe.rope.scaling.type' = su"),
    ("qwen3moe", {"rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast"),
    ("qwen3moe", {"rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier"),
    ("qwen3moe", {"rope.dimension_count": 4}, {}, "rope.dimension_count"),
    ("qwen3moe", {"rope.dimension_sections": [1, 1, 1, 1]}, {}, "dimension_sections"),
    ("qwen3moe", {"attention.head_count_kv": [2, 4]}, {}, "attention.head_count_kv"),
    ("qwen3moe", {"expert_feed_forward_length": [24, 48]}, {}, "expert_feed_forward_length"),
    ("qwen3moe", {"attention.value_length": 16}, {}, "attention.value_length"),
    ("qwen3moe", {"attention.sliding_window": 64}, {}, "attention.sliding_window"),
    ("qwen3moe", {"attention.causal": False}, {}, "attention.causal"),
    ("qwen3moe", {"expert_weights_scale": 2.5}, {}, "expert_weights_scale"),
    ("qwen3moe", {"expert_weights_norm": False}, {}, "expert_weights_norm"),
    ("qwen3moe", {"expert_gating_func": 2}, {}, "expert_gating_func"),
    ("qwen3moe", {"expert_group_count": 2}, {}, "expert_group_count"),
    ("qwen3moe", {"nextn_predict_layers": 1}, {}, "nextn_predict_layers"),
    ("qwen3moe", {"something.new": 1.0}, {}, "something.new"),
    ("olmoe", {"attention.clamp_kqv": 8.0}, {}, "attention.clamp_kqv"),
    ("olmoe", {"expert_weights_norm": True}, {}, "expert_weights_norm"),
    ("qwen2moe", {"expert_shared_count": 2}, {}, "expert_shared_count"),
    ("llama", {"attention.scale": 0.5}, {}, "attention.scale"),
    ("llama", {"logit_scale": 8.0}, {}, "logit_scale"),
    ("llama", {"rope.scaling.type": "yarn"}, {"rope_freqs.weight": np.array([1, 2, 3, 4])}, "rope.scaling.type"),
    ("qwen3moe", {}, {"rope_freqs.weight": np.array([1, 2, 3, 4])}, "rope_freqs.weight"),
    ("llama", {}, {"blk.1.attn_output.bias": ONE}, "blk.1.attn_output.bias"),
    ("llama", {}, {"blk.0.attn_q.bias": ONE}, "blk.0.attn_q.bias"),
    ("qwen3moe", {}, {"blk.0.attn_q.bias": ONE}, "blk.0.attn_q.bias"),
    ("qwen3moe", {}, {"blk.0.attn_output.scale": np.ones(1)}, "blk.0.attn_output.scale"),
    ("qwen3moe", {}, {"blk.0.ffn_up_exps.scale": np.ones(4)}, "blk.0.ffn_up_exps.scale"),
    ("qwen3moe", {}, {"blk.0.ffn_up_exps.input_scale": np.ones(4)}, "input_scale"),
    ("qwen3moe", {}, {"blk.2.attn_norm.weight": ONE}, "blk.2.attn_norm.weight"),
    ("qwen3moe", {}, {"output.bias": np.ones(64)}, "output.bias"),
    ("qwen2moe", {}, {"output.weight": None}, "output.weight"),
    ("qwen3moe", {"block_count": "two"}, {}, "block_count"),
    ("qwen3moe", {"attention.head_count": None}, {}, "attention.head_count"),
    ("qwen3moe", {"rope.freq_base": -1.0}, {}, "rope"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "keys", "tensors", "named"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_changes_the_computation_is_refused_by_name(
    architecture: str, keys: dict[str, Any], tensors: dict[str, Any], named: str, tmp_path: Path
) -> None:
    full = {f"{architecture}.{key}": value for key, value in keys.items()}
    file = rewrite(model(tmp_path / "base.gguf", architecture), tmp_path / "out" / "m.gguf", full, tensors)[0]
    with pytest.raises(CheckpointError) as raised:
        logits(locate(str(file)), PROMPT)
    assert named in str(raised.value)
    assert "m.gguf" in str(raised.value)
    assert "download" not in raised.value.remedy


NEUTRAL = {
    "rope.scaling.finetuned": True, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_ext_factor": 1.0,
    "attention.causal": True, "expert_weights_scale": 1.0, "expert_group_count": 1, "nextn_predict_layers": 0,
    "attention.head_count_kv": [2, 2], "attention.clamp_kqv": 0.0, "expert_weights_norm": True,
    "rope.dimension_count": 8, "feed_forward_length": [24, 24],
}  # fmt: skip


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "qwen3moe")
    keys = {f"qwen3moe.{key}": value for key, value in NEUTRAL.items()}
    others = {"quantize.imatrix.file": "x", "general.quantized_by": "me", "other.rope.scaling.type": "yarn"}
    file = rewrite(base, tmp_path / "out" / "m.gguf", {**keys, **others})[0]
    assert logits(locate(str(file)), PROMPT).argmax(axis=1).tolist() == GOLDEN["qwen3moe: plain"]["best"]


CONTRADICTIONS = [
    ({"rms_norm_eps": 1e-3}, "layer_norm_rms_epsilon"),
    ({"num_experts_per_tok": 3}, "expert_used_count"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope.freq_base"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "scaling.factor"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 2.0,
                          "original_max_position_embeddings": 64}}, "scaling"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), CONTRADICTIONS, ids=[row[1] for row in CONTRADICTIONS])
def test_a_configuration_beside_that_contradicts_the_file(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    """The file is what llama.cpp computes with: a config.json of another model does not win silently."""
    file = model(tmp_path / "m.gguf", "qwen3moe")
    config = json.loads((locate(str(file)) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert logits(locate(str(file)), PROMPT).argmax(axis=1).tolist() == GOLDEN["qwen3moe: plain"]["best"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=r"config\.json does not belong to m\.gguf") as raised:
        logits(locate(str(file)), PROMPT)
    assert named in raised.value.what
    (tmp_path / "config.json").unlink()
    assert logits(locate(str(file)), PROMPT).argmax(axis=1).tolist() == GOLDEN["qwen3moe: plain"]["best"]


@pytest.mark.parametrize("key", GRANITE)
def test_a_multiplier_that_is_not_the_files(key: str, files: Mapping[str, Path], tmp_path: Path) -> None:
    file = Path(shutil.copytree(files["granitemoe: multipliers"].parent, tmp_path / "own")) / "model.gguf"
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps({**config, GRANITE[key][0]: 1.5}))
    with pytest.raises(CheckpointError, match=key) as raised:
        logits(locate(str(file)), PROMPT)
    assert raised.value.remedy == "put the model's own beside it"


def test_a_configuration_beside_for_an_architecture_without_a_whole_one(tmp_path: Path) -> None:
    """gpt-oss's sliding window and DeepSeek's scale of experts are in both, and must be equal."""
    plain = save_tiny_checkpoint("deepseek_v2", tmp_path / "plain")
    file, _ = write_gguf(plain, tmp_path / "gguf", "deepseek2", lambda name: "F32")
    keys = {"deepseek2.expert_weights_scale": 3.0, "deepseek2.leading_dense_block_count": 1,
            "deepseek2.rope.dimension_count": 8}  # fmt: skip
    for number, scale in enumerate((1.0, 3.0)):
        out = rewrite(file, tmp_path / str(number) / "m.gguf", {**keys, "deepseek2.expert_weights_scale": scale})[0]
        shutil.copy(plain / "config.json", out.parent)
        if scale == 1.0:
            logits(locate(str(out)), PROMPT[:4])
            continue
        with pytest.raises(CheckpointError, match="expert_weights_scale = 3"):
            logits(locate(str(out)), PROMPT[:4])


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    """GLM's published files have one more block than the model has layers, with experts of its own."""
    plain = save_tiny_checkpoint("glm4_moe", tmp_path / "plain")
    file, _ = write_gguf(plain, tmp_path / "gguf", "glm4moe", lambda name: "F32")
    config = json.loads((plain / "config.json").read_text())
    last = config["num_hidden_layers"]
    own = {name: array for name, array in tensors_of(file).items() if f"blk.{last - 1}." in name}
    draft = {name.replace(f"blk.{last - 1}.", f"blk.{last}."): array for name, array in own.items()}
    keys = {"block_count": last + 1, "nextn_predict_layers": 1, "expert_weights_norm": True, "expert_gating_func": 2,
            "leading_dense_block_count": 1, "rope.dimension_count": 4, "attention.value_length": 8}  # fmt: skip
    more = {f"blk.{last}.nextn.eh_proj.weight": np.ones((config["hidden_size"], 2 * config["hidden_size"]))}
    out = tmp_path / "out" / "m.gguf"
    rewrite(file, out, {f"glm4moe.{key}": value for key, value in keys.items()}, {**draft, **more})
    shutil.copy(plain / "config.json", out.parent)
    assert np.isfinite(logits(locate(str(out)), PROMPT[:4])).all()
    assert facts_of_checkpoint(locate(str(out))).layers == last - 1


# --- what is said of files that are not served -----------------------------------------------------------------------

EXPERTS, DENSE = "blk.0.ffn_down_exps.weight", "blk.0.attn_q.weight"
_WORDS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*map(str, range(63)), "eleven"],
          "tokenizer.chat_template": "tenfold"}  # fmt: skip
Make = Callable[[Path], Path]


def changed(change: Callable[[bytes], bytes], keys: dict[str, Any] | None = None) -> Make:
    """A file whose bytes are changed."""

    def make(folder: Path) -> Path:
        file = rewrite(model(folder / "base.gguf", "qwen3moe"), folder / "own" / "m.gguf", keys or {})[0]
        file.write_bytes(change(file.read_bytes()))
        return file

    return make


def no_utf8(text: str) -> Make:
    """A string of the metadata of which a byte is none of a text."""
    entry = len(text).to_bytes(8, "little") + text.encode()
    return changed(lambda data: data.replace(entry, entry[:9] + b"\xff" + entry[10:], 1), _WORDS)


def dense(*, beside: bool = False, as_folder: bool = False) -> Make:
    """A dense model, whatever else is missing."""

    def make(folder: Path) -> Path:
        base = model(folder / "base.gguf", "llama")
        keys = {"llama.expert_count": None, "general.architecture": None, "tokenizer.ggml.model": None}
        none = {name: None for name in tensors_of(base) if "_exps" in name}
        file = rewrite(base, folder / "dense" / "m.gguf", keys, none)[0]
        if beside:
            (file.parent / "config.json").write_text("{}")
        return file.parent if as_folder else file

    return make


def unknown_dense(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "m.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def parts(change: Callable[[list[Path]], Path]) -> Make:
    """A model in three parts."""
    return lambda folder: change(rewrite(model(folder / "base.gguf", "qwen3moe"), folder / "m" / "m.gguf", parts=3))


def of_type(tensor: str, kind: int) -> Make:
    """Another number of a type in a tensor's entry of the header."""

    def make(folder: Path) -> Path:
        base = model(folder / "base.gguf", "qwen3moe")
        wide = {name: np.zeros((*array.shape[:-1], 256)) for name, array in tensors_of(base).items() if name == tensor}
        file = rewrite(base, folder / "own" / "m.gguf", tensors=wide)[0]  # whole blocks of any type
        data = bytearray(file.read_bytes())
        at = data.index(len(tensor).to_bytes(8, "little") + tensor.encode()) + 8 + len(tensor)
        at += 4 + 8 * int.from_bytes(data[at : at + 4], "little")
        data[at : at + 4] = kind.to_bytes(4, "little")
        file.write_bytes(data)
        return file

    return make


def plain(name: str, data: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        (folder / "config.json").write_text("{}")
        return folder / name if name != "mmproj-F16.gguf" else folder  # a projector alone is no model

    return make


_IS_DENSE = r"m\.gguf is a dense model .*: it has no experts"
# what is wrong -> what makes it, and how it is said; "download" is said only of a file that is too short
FILES: dict[str, tuple[Make, str]] = {
    "truncated": (changed(lambda data: data[:-8]), r"truncated.*; download"),
    "its header alone": (changed(lambda data: data[:200]), r"truncated.*; download"),
    "empty": (changed(lambda data: b""), r"truncated.*; download"),
    "a web page": (changed(lambda data: b"<!DOCTYPE html>" + data), "not a GGUF file"),
    "a pointer": (changed(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:"), "git lfs pull"),
    "version 1": (changed(lambda data: data[:4] + b"\x01" + data[5:]), "version 1"),
    **{f"the other byte order, {magic!r}": (
        changed(lambda data, magic=magic: magic + bytes((0, 0, 0, 3)) + data[8:]),
        r"is of the other byte order \(big-endian\).*gguf-convert-endian") for magic in (b"GGUF", b"FUGG")},
    "an adapter": (changed(bytes, {"general.type": "adapter"}), "is of the type 'adapter', not a model"),
    "an architecture of tomorrow": (changed(lambda data: data.replace(b"qwen3moe", b"qwen3nxt")), r"m\.gguf.*qwen3nxt"),
    "no GGUF file": (plain("model.safetensors", b"{}"), r"model.safetensors' is a file, and no GGUF file"),
    "a projector alone": (plain("mmproj-F16.gguf", b"GGUF"), "has no weights"),
    "dense": (dense(), _IS_DENSE), "dense, its folder": (dense(as_folder=True), _IS_DENSE),
    "dense, a configuration": (dense(beside=True), _IS_DENSE),
    "dense, both": (dense(beside=True, as_folder=True), _IS_DENSE),
    "dense, unknown": (unknown_dense, "dense model"),
    "a part is missing": (parts(lambda files: (files[1].unlink(), files[0])[1]), r"lacks m-00002-of-00003\.gguf"),
    "a part twice": (parts(lambda files: (files[1].write_bytes(files[2].read_bytes()), files[0])[1]),
                     r"has tensor|split\.no"),
    "a part under another name": (parts(lambda files: files[0].rename(files[0].with_name("model.gguf"))),
                                  "a part of 3, which its name does not say"),
    **{kind: (of_type(tensor, number), rf"m\.gguf: .*tensor '{tensor}' has the type {kind}.*; .*use a")
       for tensor, number, kind in (
           (EXPERTS, 9, "Q8_1, which is not supported for experts"),
           (EXPERTS, 40, "NVFP4, which is not supported for experts"),
           (EXPERTS, 41, "Q1_0, which is not supported for experts"),
           (EXPERTS, 144, "number 144, which today's llama.cpp does not have"),
           (DENSE, 250, "number 250, which today's llama.cpp does not have"),
           (DENSE, 15, "Q8_K, which is not supported"))},
    **{f"no UTF-8: {key}": (no_utf8(text), f"a string of the key '{key}' is not UTF-8") for key, text in (
        ("general.architecture", "qwen3moe"), ("tokenizer.ggml.tokens", "eleven"),
        ("tokenizer.chat_template", "tenfold"))},
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_model(kind: str, tmp_path: Path) -> None:
    make, said = FILES[kind]
    file = make(tmp_path)

    def read() -> None:
        folder = locate(str(file))
        check_model_dir(folder) if file.suffix == ".safetensors" else open_checkpoint(folder)

    with pytest.raises(CheckpointError, match=said) as raised:
        read()
    supported = not any(word in kind for word in ("dense", "architecture of", "which"))
    assert isinstance(raised.value, UnsupportedModelError) != supported
    assert ("download" in raised.value.remedy) == ("truncated" in said or "weights" in said)
    if file.is_dir() and "dense" in kind:
        (file / "config.json").write_text("{}")
        with pytest.raises(UnsupportedModelError, match="dense"):
            open_checkpoint(file)


def test_messages_show_the_users_file(tmp_path: Path) -> None:
    """A folder of the cache with a hash in its name stands for the file, and is nobody's path."""
    (tmp_path / "mine").mkdir()
    file = model(tmp_path / "mine" / "m.gguf", "qwen3moe")
    folder = locate(str(file))
    assert user_cache() in folder.parents
    with pytest.raises(CheckpointError) as raised:
        check_model_dir(folder)
    assert str(raised.value) == f"'{file}' has no tokenizer.json; put the model's tokenizer.json beside it"
    store = prepare(folder, tmp_path / "store", progress=False)
    file.touch()
    with pytest.raises(StoreError) as changed:
        ExpertStore(store, "stamp")
    assert str(file) in str(changed.value)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError) as malformed:
        facts_of_checkpoint(folder)
    for error in (raised, changed, malformed):
        assert str(user_cache()) not in str(error.value)


def test_the_doctor_counts_the_experts_of_a_file(tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "qwen3moe")
    file = rewrite(base, tmp_path / "apart" / "m.gguf", tensors=apart(base))[0]
    assert [routed_expert_elements(locate(str(path))) for path in (base, file)] == [2 * 4 * 3 * 24 * 32] * 2


def test_what_lies_beside_a_file_makes_its_folder_anew(tmp_path: Path) -> None:
    file = model(tmp_path / "m.gguf", "qwen3moe")
    first = locate(str(file))
    assert locate(str(file)) == first
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    second = locate(str(file))
    assert second != first
    assert json.loads((second / "generation_config.json").read_text()) == {"eos_token_id": 7}


@pytest.mark.parametrize("name", ["m", "m.GGUF", "sha256-0a.v2", "m.Gguf"])
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_is_known_by_its_first_bytes(name: str, as_folder: bool, tmp_path: Path) -> None:
    """Whatever it is called, alone or in a folder; its experts are mapped under its own name."""
    (tmp_path / "mine").mkdir()
    file = model(tmp_path / "m.gguf", "qwen3moe").rename(tmp_path / "mine" / name)
    folder = locate(str(file.parent if as_folder else file))
    assert [path.suffix for path in folder.iterdir() if path.is_symlink()] == [".gguf"]
    assert facts_of_checkpoint(folder).form is not None
    assert routed_expert_elements(folder) > 0
    assert published_as(folder) == "GGUF"
    store = prepare(folder, tmp_path / "store", progress=False)
    assert ExpertStore(store).mapped
    file.touch()
    with pytest.raises(StoreError, match=f"{re.escape(str(file))}, which the store maps, changed"):
        ExpertStore(store)


@pytest.mark.parametrize("suffix", ["", ".GGUF"])
def test_parts_are_known_without_the_suffix(suffix: str, tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "qwen3moe")
    parts = rewrite(base, tmp_path / "split" / "m.gguf", parts=3)
    named = [part.rename(part.with_name(part.stem.replace("-of-", "-OF-" if suffix else "-of-") + suffix))
             for part in parts]  # fmt: skip
    for path in (named[1], named[0].parent):
        folder = locate(str(path))
        assert len([link for link in folder.iterdir() if link.is_symlink()]) == 3
    store = prepare(folder, tmp_path / "store", progress=False)
    assert len(ExpertStore(store).describe().checkpoint) > 1
    named[2].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {named[2].name}, a part of the model"):
        locate(str(named[0]))


def test_bytes_that_are_no_utf8_count_where_they_are_read(tmp_path: Path) -> None:
    """A name in another encoding made the file malformed."""
    name, odd = "a name of twelve", "an odd \xe9 name: 1".encode("latin-1")
    assert len(name) == len(odd)
    keys = {"general.name": name, "general.description": [name, name]}
    file = rewrite(model(tmp_path / "base.gguf", "qwen3moe"), tmp_path / "m.gguf", keys)[0]
    file.write_bytes(file.read_bytes().replace(name.encode(), odd))
    assert read_gguf_header(file, texts=True).metadata["general.name"] == "an odd � name: 1"
    assert (locate(str(file)) / "config.json").is_file()


def test_a_vocabulary_that_is_no_utf8_gives_way_to_a_tokenizer_beside(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*map(str, range(63)), "eleven"]}
    file = rewrite(model(tmp_path / "base.gguf", "qwen3moe"), tmp_path / "m.gguf", keys)[0]
    file.write_bytes(file.read_bytes().replace(b"eleven", b"el\xffven"))
    (tmp_path / "tokenizer.json").write_text('{"own": true}')
    assert json.loads((locate(str(file)) / "tokenizer.json").read_text()) == {"own": True}
