"""generation_config.json: the defaults that a model publishes are those of its requests, or are said.

Guards against a published repetition penalty that was dropped: greedy text was another than that of transformers'
`generate` and of vLLM.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import Command

import tiermoe
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.cluster.checkpoints.generation import NO_DEFAULTS, read_defaults
from tiermoe.cluster.jobs.run import Asked
from tiermoe.errors import CheckpointError, ConfigError

PUBLISHED = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.25,
    "max_new_tokens": 3, "eos_token_id": 1, "transformers_version": "4.51.0", "num_beams": 1, "suppress_tokens": [],
}  # fmt: skip


def write(folder: Path, name: str = "generation_config.json", **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))
    return folder


def test_what_a_file_says(tmp_path: Path) -> None:
    found = read_defaults(write(tmp_path, **PUBLISHED))
    assert found.values == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.25, "max_new_tokens": 3
    }  # fmt: skip
    assert found.warning is None
    assert found.said(server=True) == (
        "defaults of generation_config.json: temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, "
        "repetition_penalty 1.25, max_new_tokens 3; --generation-config none turns them off"
    )
    assert "temperature" not in (found.said(server=False) or "")
    assert read_defaults(tmp_path, "none") == NO_DEFAULTS
    assert read_defaults(write(tmp_path, top_k=-1, temperature=None)).values == {"top_k": 0}
    assert read_defaults(tmp_path / "none").values == {}
    assert NO_DEFAULTS.said(server=True) is None
    with pytest.raises(ConfigError, match="--generation-config is 'vllm'; give one of auto, none"):
        read_defaults(tmp_path, "vllm")


def test_values_of_config_json_count_where_there_is_no_such_file(tmp_path: Path) -> None:
    """As in transformers; of a multimodal model, those of its text model."""
    found = read_defaults(write(tmp_path, "config.json", repetition_penalty=1.2, text_config={"temperature": 0.5}))
    assert (found.values, found.file) == ({"temperature": 0.5, "repetition_penalty": 1.2}, "config.json")
    write(tmp_path, eos_token_id=1)
    assert read_defaults(tmp_path).values == {}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("repetition_penalty", 0, "a number from 0.01 to 100"),
        ("repetition_penalty", 0.005, "a number from 0.01 to 100"),  # the start took it, and no request after it
        ("repetition_penalty", -1.5, "a number from 0.01 to 100"),
        ("repetition_penalty", "1.1", "a number from 0.01"),
        ("repetition_penalty", True, "a number from 0.01"),
        ("temperature", -0.1, "a number from 0 to 2"),
        ("temperature", float("nan"), "a number from 0 to 2"),
        ("top_p", 0, "a number over 0 and up to 1"),
        ("top_p", 1.5, "a number over 0 and up to 1"),
        ("top_k", 2.5, "a whole number from -1"),
        ("top_k", 10**400, "a whole number from -1"),
        ("min_p", [0.1], "a number from 0 to 1"),
        ("presence_penalty", 3, "a number from -2 to 2"),
        ("max_new_tokens", 0, "a whole number from 1"),
        ("max_new_tokens", float("inf"), "a whole number from 1"),
    ],
)
def test_a_value_out_of_range_names_the_file(name: str, value: Any, wanted: str, tmp_path: Path) -> None:
    write(tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json' has {name} = .*, not {wanted}") as refused:
        read_defaults(tmp_path)
    assert refused.value.remedy == "correct it, or pass --generation-config none"
    assert read_defaults(tmp_path, "none") == NO_DEFAULTS


def test_fields_that_are_not_carried_out_are_named(tmp_path: Path) -> None:
    fields = {
        "no_repeat_ngram_size": 3, "bad_words_ids": [[5]], "suppress_tokens": [1], "forced_eos_token_id": 2,
        "num_beams": 4, "guidance_scale": 1.5, "stop_strings": ["x"], "min_new_tokens": 2,
    }  # fmt: skip
    found = read_defaults(write(tmp_path, **fields, typical_p=1.0, guidance=3, output_scores=True, length_penalty=2.0))
    assert set(found.not_carried_out) == set(fields)
    assert found.warning is not None
    assert all(name in found.warning for name in fields)


def test_run_and_llm_stay_greedy(checkpoint: Path, tmp_path: Path) -> None:
    """Their temperature and number of tokens are their own; the rest is the model's where it is not given."""
    folder = write(Path(shutil.copytree(checkpoint, tmp_path / "model")), **PUBLISHED, no_repeat_ngram_size=2)
    with pytest.warns(UserWarning, match="no_repeat_ngram_size: not carried out") as warned:
        llm = tiermoe.LLM(str(folder))
    assert warned[0].filename == __file__
    own = {"top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.25}
    assert llm.stream("a").sampling == SamplingParams(**own)
    assert llm.stream("a", top_p=1.0, top_k=0, temperature=0.5, max_tokens=9).sampling == SamplingParams(
        max_tokens=9, temperature=0.5, min_p=0.05, repetition_penalty=1.25
    )
    llm = tiermoe.LLM(str(folder), generation_config="none")
    assert llm.stream("a").sampling == SamplingParams()
    asked = Asked(top_k=0)
    assert (asked.params(), asked.given) == (SamplingParams(), ("top_k",))
    with pytest.raises(ConfigError, match="--generation-config"):
        tiermoe.LLM(str(folder), generation_config="all")


def test_run_says_defaults_and_refuses_a_file_before_anything_starts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    folder = write(Path(shutil.copytree(checkpoint, tmp_path / "model")), repetition_penalty=1.25, num_beams=2)
    tiermoe.LLM(str(folder), progress=True)
    said = capsys.readouterr().err
    assert "defaults of generation_config.json: repetition_penalty 1.25; --generation-config none" in said
    assert "generation_config.json has num_beams: not carried out" in said
    write(folder, repetition_penalty=-1)
    for args in (("run", "a"), ("serve", "--port", "0")):
        code, _, err = command(*args, "--model", str(folder))
        assert code == 2
        assert "generation_config.json' has repetition_penalty = -1, not a number from 0.01" in err
    code, _, err = command("run", "a", "--model", str(folder), "--generation-config", "some")
    assert (code, "give one of auto, none" in err) == (2, True)


def test_greedy_text_is_that_of_generate(checkpoint: Path, tmp_path: Path) -> None:
    """The file's penalty is part of what `generate` does; the worker takes nothing from the file by itself."""
    import torch
    from serving import gathered, reference_greedy, serving, settings
    from transformers import AutoModelForCausalLM

    from tiermoe.actors.store.files import ExpertStore
    from tiermoe.cluster.jobs.prepare import prepare

    folder = write(Path(shutil.copytree(checkpoint, tmp_path / "model")), repetition_penalty=1.6, eos_token_id=0)
    prompts = [[5, 6, 7, 5, 6, 7], [9, 10, 11]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference_greedy(model, prompts, 12)
    store = prepare(folder, tmp_path / "store", progress=False)
    defaults, plain = read_defaults(store), SamplingParams(max_tokens=12)
    assert defaults.values == {"repetition_penalty": 1.6}
    with serving(ExpertStore(store), settings(1.0)) as worker:
        found = []
        for params in (defaults.completed(plain), plain):
            requests = [GenerationRequest(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
            found.append([gathered(worker.submit(request)).token_ids for request in requests])
    assert found[0] == expected
    assert found[1] != expected
