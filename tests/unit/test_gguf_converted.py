"""Files of llama.cpp's own converter are the models that they were made of, by their metadata or a config.json beside.

`tests/gguf_converter.py` made them, with what transformers' model of the published weights computes. No tolerance would
hide two heads, experts or norms in each other's place.
"""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

import gguf_converter
import numpy as np
import pytest
from gguf_converter import CASES, TOKENS
from ggufs import PROMPT, logits, rewrite
from serving import greedy, serving, settings

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import CheckpointError

GOLDEN = json.loads(gguf_converter.GOLDEN.read_text())
WAYS = [(name, beside) for name, case in CASES.items() for beside in {True, case.beside}]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def unpacked(name: str, folder: Path, beside: bool = True) -> Path:
    """The file of a case. beside: with the published config.json."""
    file = folder / "model.gguf"
    file.write_bytes(lzma.decompress((gguf_converter.FILES / f"{name}.gguf.xz").read_bytes()))
    if beside:
        (folder / "config.json").write_text(json.dumps(GOLDEN[name]["config"]))
    return file


@pytest.mark.parametrize(("name", "beside"), WAYS)
def test_a_converted_file_is_its_model(name: str, beside: bool, tmp_path: Path) -> None:
    folder = locate(str(unpacked(name, tmp_path, beside)))
    found = logits(folder, PROMPT)
    assert found.argmax(axis=1).tolist() == GOLDEN[name]["best"]
    np.testing.assert_allclose(found[-1], GOLDEN[name]["last"], atol=3e-4)
    assert facts_of_checkpoint(folder).layers > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_is_served(name: str, tmp_path: Path) -> None:
    file = unpacked(name, tmp_path, CASES[name].beside)
    store = ExpertStore(prepare(locate(str(file)), tmp_path / "store", progress=False))
    wanted = GOLDEN[name]["tokens"]
    with serving(store, settings(0.5)) as worker:
        found = greedy(worker, [PROMPT[:12]], TOKENS)[0]
    assert found[: len(wanted)] == wanted  # the metadata of these has no end of a text, at which transformers ends


CHANGED = [  # case, keys, what the message names
    ("glm-dsa", {"expert_weights_norm": None}, "expert_weights_norm"),
    ("glm-dsa", {"expert_gating_func": 1}, "expert_gating_func"),
    ("glm-dsa", {"attention.indexer.top_k": 8}, "attention.indexer.top_k"),
    ("glm-dsa", {"attention.indexer.types": [True, False, True]}, "attention.indexer.types"),
    ("afmoe", {"expert_weights_norm": None}, "has no expert_weights_norm, which means False"),
    ("afmoe", {"attention.sliding_window_pattern": [True, False, True, False, True]}, "sliding_window_pattern"),
    ("afmoe", {"attention.sliding_window_pattern": 2}, "sliding_window_pattern"),
    ("laguna", {"attention.head_count": [4, 4, 8, 4, 4]}, "attention.head_count"),
    ("laguna", {"rope.freq_base_swa": 5e5}, "rope.freq_base"),
    ("deepseek2 of V3", {"expert_gating_func": 1}, "expert_gating_func = 1"),
    ("deepseek2 of V3", {"expert_gating_func": None}, "has no expert_gating_func, which means 1"),
    ("nemotron_h_moe", {"attention.head_count_kv": [2, 0, 2, 0]}, "attention.head_count_kv"),
    ("gemma4", {"final_logit_softcapping": None}, "final_logit_softcapping"),
    ("gemma4", {"attention.shared_kv_layers": 1}, "attention.shared_kv_layers"),
    ("deepseek4", {"attention.compress_ratios": [8, 8, 4, 4]}, "attention.compress_ratios"),
    ("deepseek4", {"attention.compress_rope_freq_base": 1e4}, "rope.freq_base"),
    ("glm5-next", {"swiglu_clamp_exp": [10.0, 10.0, 10.0, 7.0]}, "swiglu_clamp_exp"),
    ("granitehybrid", {"rope.scaling.finetuned": True}, "rope.scaling.finetuned"),
    ("qwen4exp", {"ple.layers": [1]}, "ple.layers"),
    ("qwen4exp with a table of n-grams", {"ple.layers": None}, "ple.layers"),
    ("qwen4exp with a table of n-grams", {"ple.ngram_size": 2}, "ple.ngram_size"),
    ("qwen4exp with a table of n-grams", {"ple.head_offsets": None}, "ngram_heads_offsets"),
    ("mimo2", {"attention.value_scale": None}, "attention.value_scale"),
]
ALONE = [
    ({"ssm.state_size": None}, "ssm.state_size"), ({"ssm.group_count": 1}, "blk.0.ssm_conv1d.weight"),
    ({"attention.recurrent_layers": None, "full_attention_interval": 3}, "blk.1.ssm_dt.bias"),
    ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms"), ({"rope.dimension_sections": [2, 1, 1, 4]}, "dimension_sections"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "named"), ALONE, ids=[row[1] for row in ALONE])
def test_metadata_alone_that_is_no_model_of_the_file(keys: dict[str, object], named: str, tmp_path: Path) -> None:
    file = unpacked("qwen35moe", tmp_path, beside=False)
    out = rewrite(file, tmp_path / "out" / "m.gguf", {f"qwen35moe.{key}": of for key, of in keys.items()})[0]
    with pytest.raises(CheckpointError, match=re.escape(named)):
        logits(locate(str(out)), PROMPT)


@pytest.mark.parametrize(("name", "keys", "named"), CHANGED)
def test_a_key_that_the_model_does_not_have_is_refused(
    name: str, keys: dict[str, object], named: str, tmp_path: Path
) -> None:
    """Missing ones too, where llama.cpp computes with a default that is not the model's."""
    file = unpacked(name, tmp_path)
    architecture = name.partition(" ")[0]
    out = rewrite(file, tmp_path / "out" / "m.gguf", {f"{architecture}.{key}": of for key, of in keys.items()})[0]
    (out.parent / "config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError) as raised:
        logits(locate(str(out)), PROMPT)
    assert named in str(raised.value)
