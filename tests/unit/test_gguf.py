"""GGUF files: what their metadata and tensors say is what is computed, as llama.cpp does; the rest is refused by name.

The figures in tests/golden/gguf.json are llama.cpp's; `tests/llama_reference.py` writes them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_reference
import numpy as np
import pytest
import torch
from ggufs import GRANITE, PROMPT, cases, logits, model, rewrite, tensors_of
from serving import greedy, serving, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.checkpoints.checkpoint import open_checkpoint
from tiermoe.cluster.checkpoints.gguf_header import read_gguf, read_gguf_header
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
    ("qwen3moe", {"general.architecture": "qwen3next"}, {}, "qwen3next"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "keys", "tensors", "named"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_changes_the_computation_is_refused_by_name(
    architecture: str, keys: dict[str, Any], tensors: dict[str, Any], named: str, tmp_path: Path
) -> None:
    base = model(tmp_path / "base.gguf", architecture)
    full = {key if key.startswith("general.") else f"{architecture}.{key}": value for key, value in keys.items()}
    file = rewrite(base, tmp_path / "out" / "m.gguf", full, tensors)[0]
    if "general.architecture" in keys:
        file.write_bytes(base.read_bytes().replace(b"qwen3moe", b"qwen3nxt"))
        named = "qwen3nxt"
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
    from published import write_gguf

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
    from published import write_gguf

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


@pytest.mark.parametrize("beside", [False, True])
def test_a_dense_model_says_so_before_anything_else(beside: bool, tmp_path: Path) -> None:
    """Of the file, of its folder, and with a config.json beside it; whatever else is missing."""
    dense = {name: None for name in tensors_of(model(tmp_path / "base.gguf", "llama")) if "_exps" in name}
    keys = {"llama.expert_count": None, "general.architecture": None, "tokenizer.ggml.model": None}
    file = rewrite(tmp_path / "base.gguf", tmp_path / "dense" / "m.gguf", keys, dense)[0]
    if beside:
        (file.parent / "config.json").write_text("{}")
    for given in (file, file.parent):
        with pytest.raises(UnsupportedModelError, match=r"m\.gguf is a dense model .*: it has no experts"):
            locate(str(given))
    with pytest.raises(UnsupportedModelError, match="dense"):
        open_checkpoint_of(file.parent)


def open_checkpoint_of(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    open_checkpoint(folder)


def test_an_unknown_dense_architecture_is_dense_first(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="dense model"):
        locate(str(tmp_path / "m.gguf"))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "qwen3moe")
    file = rewrite(base, tmp_path / "lora" / "m.gguf", {"general.type": "adapter"})[0]
    with pytest.raises(CheckpointError, match="is of the type 'adapter', not a model"):
        locate(str(file))


DAMAGE = {
    "truncated": (lambda data: data[:-8], "truncated"),
    "its header alone": (lambda data: data[:200], "truncated"),
    "empty": (lambda data: b"", "truncated"),
    "a web page": (lambda data: b"<!DOCTYPE html>" + data, "not a GGUF file"),
    "a pointer": (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:", "git lfs pull"),
    "version 1": (lambda data: data[:4] + b"\x01" + data[5:], "version 1"),
    "the other byte order": (lambda data: data[:4] + bytes((0, 0, 0, 3)) + data[8:], "byte order"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_download_again_is_said_only_of_a_file_that_is_too_short(kind: str, tmp_path: Path) -> None:
    change, said = DAMAGE[kind]
    file = model(tmp_path / "m.gguf", "qwen3moe")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError) as raised:
        locate(str(file))
    assert said in str(raised.value)
    assert ("download" in raised.value.remedy) == (said == "truncated")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    base = model(tmp_path / "base.gguf", "qwen3moe")
    parts = rewrite(base, tmp_path / "split" / "m.gguf", parts=3)
    whole = [path.read_bytes() for path in parts]
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00003\.gguf"):
        locate(str(parts[0]))
    parts[1].write_bytes(whole[2])
    with pytest.raises(CheckpointError, match=r"has tensor|split\.no"):
        locate(str(parts[0]))
    lone = tmp_path / "lone" / "model.gguf"
    lone.parent.mkdir()
    lone.write_bytes(whole[0])
    with pytest.raises(CheckpointError, match="a part of 3, which its name does not say"):
        locate(str(lone))
    fewer = rewrite(base, tmp_path / "fewer" / "m.gguf", {"split.tensors.count": 99}, parts=2)
    header = read_gguf_header(fewer[0])
    assert header.metadata["split.tensors.count"] == len(read_gguf(fewer).tensors)


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


def test_a_file_beside_that_is_no_language_model(tmp_path: Path) -> None:
    """A folder with a projector alone has no model, and says so."""
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(locate(str(tmp_path)))


def test_a_file_that_is_no_gguf_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"model.safetensors' is a file, and no GGUF file"):
        check_model_dir(locate(str(tmp_path / "model.safetensors")))


def _with_type(file: Path, tensor: str, kind: int) -> None:
    """Write another number of a type into a tensor's entry of the header."""
    data = bytearray(file.read_bytes())
    at = data.index(len(tensor).to_bytes(8, "little") + tensor.encode()) + 8 + len(tensor)
    at += 4 + 8 * int.from_bytes(data[at : at + 4], "little")
    data[at : at + 4] = kind.to_bytes(4, "little")
    file.write_bytes(data)


EXPERTS, DENSE = "blk.0.ffn_down_exps.weight", "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("tensor", "kind", "named"),
    [
        (EXPERTS, 10, "the type Q2_K, which is not supported for experts"),
        (EXPERTS, 16, "the type IQ2_XXS, which is not supported for experts"),
        (EXPERTS, 23, "the type IQ4_XS, which is not supported for experts"),
        (EXPERTS, 144, "the type number 144, which today's llama.cpp does not have"),
        (DENSE, 250, "the type number 250, which today's llama.cpp does not have"),
        (DENSE, 15, "the type Q8_K, which is not supported"),
    ],
)
def test_a_type_that_is_not_supported_is_named(tensor: str, kind: int, named: str, tmp_path: Path) -> None:
    """Not called a malformed file; before anything is made."""
    base = model(tmp_path / "base.gguf", "qwen3moe")
    wide = {name: np.zeros((*array.shape[:-1], 256)) for name, array in tensors_of(base).items() if name == tensor}
    file = rewrite(base, tmp_path / "own" / "m.gguf", tensors=wide)[0]  # whole blocks of any type
    _with_type(file, tensor, kind)
    with pytest.raises(UnsupportedModelError, match=rf"m\.gguf: .*tensor '{tensor}' has {named}") as refused:
        locate(str(file))
    assert "use a" in refused.value.remedy


def test_bytes_that_are_no_utf8_count_where_they_are_read(tmp_path: Path) -> None:
    """A name in another encoding made the file malformed."""
    name, odd = "a name of twelve", "an odd \xe9 name: 1".encode("latin-1")
    assert len(name) == len(odd)
    keys = {"general.name": name, "general.description": [name, name]}
    file = rewrite(model(tmp_path / "base.gguf", "qwen3moe"), tmp_path / "m.gguf", keys)[0]
    file.write_bytes(file.read_bytes().replace(name.encode(), odd))
    assert read_gguf_header(file, texts=True).metadata["general.name"] == "an odd � name: 1"
    assert (locate(str(file)) / "config.json").is_file()


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.tokens", "tokenizer.chat_template"])
def test_bytes_that_are_no_utf8_are_refused_where_they_matter(key: str, tmp_path: Path) -> None:
    vocabulary = {"tokenizer.ggml.tokens": "eleven", "tokenizer.chat_template": "tenfold"}
    texts = {"general.architecture": "qwen3moe", **vocabulary}
    tokens = [*map(str, range(63)), "eleven"]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": "tenfold"}
    file = rewrite(model(tmp_path / "base.gguf", "qwen3moe"), tmp_path / "m.gguf", keys)[0]
    data, text = file.read_bytes(), texts[key].encode()
    at = data.index(len(text).to_bytes(8, "little") + text) + 8
    file.write_bytes(data[: at + 1] + b"\xff" + data[at + 2 :])
    with pytest.raises(CheckpointError, match=f"a string of the key '{key}' is not UTF-8"):
        locate(str(file))


def test_a_vocabulary_that_is_no_utf8_gives_way_to_a_tokenizer_beside(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*map(str, range(63)), "eleven"]}
    file = rewrite(model(tmp_path / "base.gguf", "qwen3moe"), tmp_path / "m.gguf", keys)[0]
    file.write_bytes(file.read_bytes().replace(b"eleven", b"el\xffven"))
    (tmp_path / "tokenizer.json").write_text('{"own": true}')
    assert json.loads((locate(str(file)) / "tokenizer.json").read_text()) == {"own": True}


@pytest.mark.parametrize("magic", [b"GGUF", b"FUGG"])
def test_the_other_byte_order_is_called_so(magic: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_bytes(magic + bytes((0, 0, 0, 3)) + bytes(64))
    with pytest.raises(CheckpointError, match=r"is of the other byte order \(big-endian\)") as refused:
        locate(str(file))
    assert "gguf-convert-endian" in refused.value.remedy
