"""The script that trains the default model (models/train.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from train import KINDS, Document, Root, collect, is_held_out, train_tokenizer

SCRIPT = Path(__file__).parents[2] / "models" / "train.py"
PINNED = ["stdlib/module2.py", "stdlib/module10.py", "stdlib/module28.py"]


def sentences(seed: int, count: int) -> str:
    rng = np.random.default_rng(seed)
    words = ["def", "return", "value", "self", "the", "of", "expert", "struct", "int", "(x):", "{", "}"]
    return "\n\n".join(f"{i} " + " ".join(rng.choice(words, 40)) for i in range(count)) + "\n"


def test_split_is_pinned_and_about_one_in_forty() -> None:
    held_out = [name for name in (f"stdlib/module{i}.py" for i in range(4000)) if is_held_out(name)]
    assert held_out[:3] == PINNED
    assert 60 <= len(held_out) <= 140


def test_a_document_is_named_below_its_root_and_comes_once(tmp_path: Path) -> None:
    held = PINNED[0].split("/")[1]
    (tmp_path / held).write_text(sentences(1, 12))
    (tmp_path / "copy.py").write_text(sentences(1, 12) + "x = 1\n")  # of a held-out document
    (tmp_path / "binary.py").write_bytes(b"\x00" * 500)
    (tmp_path / "page.py").write_text(sentences(2, 12))
    found = collect([Root("stdlib", "python", tmp_path, (".py",), 1_000_000, False)])
    assert [document.name for document in found] == [PINNED[0], "stdlib/page.py"]


def test_tokenizer_returns_every_byte() -> None:
    tokenizer = train_tokenizer([Document(f"{i}", "python", sentences(i, 30)) for i in range(4)], vocabulary=300)
    text = "def f(x):\n    return 'é€'\t\n\n\n  # 1234567\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|endoftext|>") == 0


def test_two_steps_from_text_to_a_checkpoint_that_loads_and_resumes(tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / "corpus" / kind).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "corpus" / kind / f"{i}.txt").write_text(sentences(KINDS.index(kind) * 8 + i, 60))
        line = json.dumps({"text": sentences(99, 2)})
        (tmp_path / f"{kind}.jsonl").write_text(line + "\n")

    def run(work_dir: str, steps: int) -> str:
        command = [
            sys.executable, str(SCRIPT), "--corpus", str(tmp_path / "corpus"), "--heldout", str(tmp_path), "--steps",
            str(steps), "--batch-tokens", "256", "--work-dir", str(tmp_path / work_dir), "--out", str(tmp_path / "out"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "step 1:" in run("resumed", 1)
    assert "step 2:" in run("resumed", 2)
    said = run("straight", 2)
    assert said.count("bits per byte") == 3
    resumed, straight = (load_file(tmp_path / d / "checkpoint.safetensors") for d in ("resumed", "straight"))
    for name, tensor in straight.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=0, msg=name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("def f(x):", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], 4096)
