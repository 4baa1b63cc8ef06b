"""`tiermoe.LLM` on the default model: the unmodified model's tokens, batches, streams; nothing stays behind."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import ray
from serving import default_model_greedy

import tiermoe
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.prompt import encode_prompt, load_tokenizer
from tiermoe.errors import RuntimeFailure

_PROMPTS = ["import os", "def read_config(path):", "static int"]
_TOKENS = 8

pytestmark = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


def _scratch() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("tiermoe-*"))


def test_a_model_in_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose modules shadow others, as a clone's do: the workers must not find them."""
    for name in ("profile", "triton", "numpy", "models", "proto"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the folder of the user')")
    monkeypatch.chdir(tmp_path)
    ids = [encode_prompt(load_tokenizer(default_model_dir()), prompt) for prompt in _PROMPTS]
    expected = default_model_greedy(ids, _TOKENS)
    threads, files = set(threading.enumerate()), _scratch()
    llm = tiermoe.LLM(policy="next-gate", budget="50%", threads=1)
    assert set(threading.enumerate()) == threads  # nothing starts before it is needed
    with llm:
        done = llm.generate(_PROMPTS, max_tokens=_TOKENS)
        assert [c.token_ids for c in done] == expected
        assert llm.generate(_PROMPTS[0], max_tokens=_TOKENS).text == done[0].text
        stream = llm.stream(_PROMPTS[1], max_tokens=_TOKENS)
        assert "".join(stream) == stream.completion.text == done[1].text
        assert (stream.completion.token_ids, stream.completion.finish) == (expected[1], "length")
        assert stream.completion.ttft_s is not None
        assert llm.generate([ids[2]], max_tokens=_TOKENS)[0].token_ids == expected[2]
        for _ in llm.stream(_PROMPTS[0], max_tokens=1000):
            break  # leaving early cancels it
        assert Path.cwd() == tmp_path
        assert llm.plan["policy"] == "next-gate"
        assert llm.stats()["hits"] > 0
        with pytest.raises(RuntimeFailure, match="this process uses Ray already"):
            tiermoe.LLM(budget="50%").generate("import os")
        family = psutil.Process(os.getpid()).children(recursive=True)
        assert family
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not ray.is_initialized()
    assert _scratch() == files
    left = [t.name for t in threading.enumerate() if t not in threads and t.is_alive()]
    assert not left
    llm.close()
    with pytest.raises(RuntimeFailure, match="not running"):
        llm.stats()
