"""`tiermoe eval` on the default model, and that what it measures is the unmodified model where nothing is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.serving.scoring import score_with
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, run_config, serve, start_worker

pytestmark = pytest.mark.slow

_MAIN = "from tiermoe.cluster.cli import main; main()"


def test_scores_are_those_of_the_unmodified_model() -> None:
    ids = heldout_prompts(default_model_dir(), 1, 256)[0]
    model = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, 127:-1], -1)
    with closing(start_worker(run_config(None, policy="on-demand", budget="0.25", link={"gbps": None}))) as worker:
        found = score_with(worker, ids, 128)
    assert found.shape == (128, 4096)
    assert float((found - expected).abs().max()) < 1e-4


def test_forced_tokens_are_scored_as_serving_decodes_them() -> None:
    """One forward over all decode rows of a sequence is what a lossy policy does token by token."""
    prompts = heldout_prompts(default_model_dir(), 3, 96)
    with closing(start_worker(run_config(None, policy="context-ndp-2bit", budget="0.5"))) as worker:
        for prompt in prompts:
            _, generated = serve(worker.submit, [prompt], 24)
            found = score_with(worker, [*prompt, *generated[0]], len(prompt))
            assert found.argmax(-1).tolist() == generated[0]
        assert worker.stats().total().ndp_tokens > 0


def test_prints_one_flat_object() -> None:
    done = subprocess.run(
        [
            sys.executable, "-c", _MAIN, "eval", "--policy", "next-gate", "--budget", "0.5", "--documents", "3",
            "--prefix", "64", "--continuation", "32", "--json",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["name"], record["policy"], record["lossless"]) == ("eval", "next-gate", True)
    assert record["executor"] == "emulated"
    assert (record["documents"], record["tokens"], record["items"]) == (3, 96, 3)
    assert record["top1_agreement"] == record["perplexity_ratio"] == 1.0
    assert record["kl_nats"] < 1e-5
    assert 1 < record["perplexity_low"] <= record["perplexity"] <= record["perplexity_high"] < 100
    assert "perplexity" in done.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--policy", "magic"], "no policy 'magic'"),
        (["--policy", "on-demand", "--windows", "0"], "--windows is 0"),
        (["--policy", "on-demand", "--prefix", "2000"], "exceed the model's 2048 positions"),
        (["--policy", "on-demand", "--model", "/nowhere"], "no model at '/nowhere'"),
    ],
)
def test_refusals_take_one_line(options: list[str], what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "eval", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert what in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_model_without_heldout_text_is_refused(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(default_model_dir() / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "eval", "--policy", "on-demand", "--model", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "held-out passages" in done.stderr


def test_ctrl_c_ends_it() -> None:
    """Interrupted in the middle of the reference, when the first worker runs."""
    program = f"""
from tiermoe.cluster.jobs.evaluate import job
whole = job.score_with
def score_with(*args):
    print("scoring", flush=True)
    return whole(*args)
job.score_with = score_with
{_MAIN}
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, "eval", "--policy", "on-demand"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "scoring\n"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
