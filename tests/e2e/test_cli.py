"""The command line on the default model: `run` as a user runs it, `eval`, recorded traces."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from commands import Command
from serving import Reference, default_model_greedy
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.serving.scoring import score_with
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, serve
from tiermoe.cluster.jobs.local_worker import run_config, start_worker
from tiermoe.cluster.jobs.record.record_command import read_prompts
from tiermoe.cluster.prompt import encode_prompt, load_tokenizer
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.errors import RequestError
from tiermoe.limits import usable_cores

TIERMOE = str(Path(sys.executable).with_name("tiermoe"))
MAIN = "from tiermoe.cluster.cli import main; main()"
needs_model = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


def test_an_unknown_option_is_a_usage_error(command: Command) -> None:
    code, _, err = command("run", "hello", "--bugdet", "1")
    assert code == 2
    assert "Traceback" not in err


def test_version_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tiermoe.cluster.cli import main\n"
        "for args in (['--version'], ['--help']):\n"
        "    try: main(args)\n    except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy', 'pydantic'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch 2." in done.stdout
    assert "doctor" in done.stdout


# -- run: real Ray, real store, real worker ------------------------------------------------------------------------

CONTRACT = {
    "model": str, "policy": str, "lossless": bool, "executor": str, "prompt_tokens": int, "generated_tokens": int,
    "token_ids": list, "text": str, "ttft_s": float, "tpot_s": float, "expert_budget_bytes": int,
    "expert_bytes_peak": int, "hits": int, "misses": int, "hit_rate": float, "bytes_loaded": int, "bytes_wasted": int,
    "blocked_io_s": float, "total_io_s": float, "ndp_tokens": int, "substitutions": int, "dropped": int, "plan": dict,
    "layers": list, "versions": dict,
}  # fmt: skip


@needs_model
def test_a_run_keeps_its_contract(tmp_path: Path) -> None:
    """Its types, its budget, its sums, its timeline; and the tokens of the unmodified model.

    On a link of 2 GB/s a copy takes 108 us, and the default policy is `auto`.
    """
    prompt, trace = "def read_config(path):", tmp_path / "trace.json"
    args = [TIERMOE, "run", prompt, "--device", "cpu", "--link-gbps", "2", "--max-tokens", "24", "--json"]
    args += ["--trace", trace]
    done = subprocess.run(args, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)  # fails unless stdout is one JSON object and nothing else
    wrong = {name: result.get(name) for name, kind in CONTRACT.items() if not isinstance(result.get(name), kind)}
    assert not wrong
    assert (result["policy"], result["lossless"], result["executor"]) == ("auto", True, "emulated")
    assert any(note.startswith("the default policy is auto here: ") for note in result["topology"]["notes"])
    assert result["generated_tokens"] == len(result["token_ids"]) == 24
    assert {"python", "tiermoe", "torch", "transformers", "ray"} <= set(result["versions"])

    plan = result["plan"]
    assert 0 < result["expert_bytes_peak"] <= result["expert_budget_bytes"]
    assert result["expert_budget_bytes"] == pytest.approx(plan["expert_bytes_total"] / 4, abs=plan["slot_bytes"])
    needed = result["hits"] + result["misses"] + result["ndp_experts"]
    assert result["hit_rate"] == result["needed_shares"]["hit"] == pytest.approx(result["hits"] / needed)
    assert sum(layer["misses"] for layer in result["layers"]) == result["misses"] > 0
    assert len(result["layers"]) == plan["moe_layers"]
    assert result["bytes_loaded"] % plan["slot_bytes"] == 0
    assert [actor["name"] for actor in result["topology"]["actors"]] == [
        "lead", "store-0", *(["ndp-0", "directory"] if usable_cores() > 1 else [])
    ]  # fmt: skip
    assert (result["prediction"]["label"], result["prediction"]["tokens_per_s"]) == ("predicted", None)
    assert (result["substitutions"], result["dropped"]) == (0, 0)

    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert spans
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    copies = [event["args"] for event in spans if event["tid"] in (3, 4)]
    assert sum(copy["bytes"] for copy in copies) == result["bytes_loaded"]
    for cause in ("demand", "prefetch"):  # whether prefetch pays depends on the machine
        assert sum(copy["bytes"] for copy in copies if copy["cause"] == cause) == result[f"bytes_loaded_{cause}"]
    tokens = [event for event in spans if event["name"].startswith("decode")]
    assert len(tokens) >= 2 * (result["generated_tokens"] - 1)  # the token, and its forward

    ids = encode_prompt(load_tokenizer(default_model_dir()), prompt)
    assert result["token_ids"] == default_model_greedy([ids], 24)[0]


@contextmanager
def _streaming() -> Iterator[subprocess.Popen[str]]:
    """A long run that has begun to print its text."""
    args = [TIERMOE, "run", "import os", "--policy", "next-gate", "--device", "cpu", "--max-tokens", "2000"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = ""
        while not seen.endswith("import os") and (letter := process.stdout.read(1)):
            seen += letter
        try:
            yield process
        finally:
            process.kill()


@needs_model
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_while_text_streams_ends_in_order(number: signal.Signals, code: int) -> None:
    with _streaming() as process:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=60) == code, process.stderr.read()
        assert not psutil.wait_procs(family, timeout=10)[1]
        assert "Traceback" not in process.stderr.read()


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize(("after_s", "times"), [(0.2, 2), (2.0, 1)])
def test_ctrl_c_while_ray_starts_is_said_and_leaves_nothing(after_s: float, times: int) -> None:
    """As from a script, whose shell starts what is in the background with SIGINT ignored."""
    args = [sys.executable, "-c", MAIN, "run", "import os", "--policy", "next-gate", "--device", "cpu"]
    with subprocess.Popen(
        args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            while "starting Ray" not in process.stderr.readline():
                assert process.poll() is None
            time.sleep(after_s)
            family = psutil.Process(process.pid).children(recursive=True)
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                begin_s = time.monotonic()
            while (line := process.stderr.readline()) != "ending ...\n":
                assert line
            assert time.monotonic() - begin_s < 5.0  # a full machine stands still for seconds
            assert process.wait(timeout=20) == 130
            assert not psutil.wait_procs(family, timeout=10)[1]
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


@needs_model
def test_death_of_the_worker_is_one_line_and_exit_code_1() -> None:
    with _streaming() as process:
        worker = next(p for p in psutil.Process(process.pid).children(recursive=True) if _title(p) == "ray::GpuWorker")
        worker.kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err.splitlines()[-1].startswith("error: the worker failed during a request: its process ended")
        assert "Traceback" not in err
        assert "raylet" not in out  # Ray's own notice stays out of the text


def _title(process: psutil.Process) -> str:
    """Ray names its workers `ray::CLASS`, and `ray::CLASS.METHOD` while a method runs."""
    return ".".join(process.cmdline()[:1]).partition(".")[0]


# -- eval ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_are_those_of_the_unmodified_model() -> None:
    ids = heldout_prompts(default_model_dir(), 1, 256)[0]
    unmodified = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.log_softmax(unmodified(torch.tensor([ids])).logits[0, 127:-1], -1)
    with closing(start_worker(run_config(None, policy="on-demand", budget="0.25", link={"gbps": None}))) as worker:
        found = score_with(worker, ids, 128)
    assert found.shape == (128, 4096)
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.slow
def test_forced_tokens_are_scored_as_serving_decodes_them(reference: Reference) -> None:
    """One forward over all decode rows of a sequence is what a lossy policy does token by token."""
    with closing(start_worker(run_config(None, policy="context-ndp-2bit", budget="0.5"))) as worker:
        for prompt in reference.prompts[:3]:
            _, generated = serve(worker.submit, [prompt], 24)
            found = score_with(worker, [*prompt, *generated[0]], len(prompt))
            assert found.argmax(-1).tolist() == generated[0]
        assert worker.stats().total().ndp_tokens > 0


@pytest.mark.slow
def test_eval_prints_one_flat_object(command: Command) -> None:
    sizes = ("--documents", 3, "--prefix", 64, "--continuation", 32)
    code, out, err = command("eval", "--policy", "next-gate", "--budget", "0.5", *sizes, "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["name"], record["policy"], record["lossless"]) == ("eval", "next-gate", True)
    assert record["executor"] == "emulated"
    assert (record["documents"], record["tokens"], record["items"]) == (3, 96, 3)
    assert record["top1_agreement"] == record["perplexity_ratio"] == 1.0
    assert record["kl_nats"] < 1e-5
    assert 1 < record["perplexity_low"] <= record["perplexity"] <= record["perplexity_high"] < 100
    assert "perplexity" in err


@pytest.mark.slow
def test_ctrl_c_ends_eval() -> None:
    """Interrupted in the middle of the reference, when the first worker runs."""
    program = f"""
from tiermoe.cluster.jobs.evaluate import scoring
whole = scoring.score_with
def score_with(*args):
    print("scoring", flush=True)
    return whole(*args)
scoring.score_with = score_with
{MAIN}
"""
    args = [sys.executable, "-c", program, "eval", "--policy", "on-demand"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while (line := process.stderr.readline()) != "scoring\n":  # standard output has results alone
                assert line
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


# -- from prompts to a trace, to predictors, to replays ------------------------------------------------------------


def test_record_prepare_replay(command: Command, tmp_path: Path) -> None:
    prompts, trace = tmp_path / "prompts.txt", tmp_path / "trace"
    prompts.write_text("def add(a, b):\n\nThe linker searches the folders\n")
    code, out, err = command("record", prompts, trace, "--max-tokens", 5, "--distances", 2, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["origin"], said["repeated_8grams"]) == ("text, teacher-forced", 0.0)
    assert (said["requests"], said["layers"], said["experts"], said["top_k"]) == (2, 16, 32, 4)
    assert said["complete"]
    assert said["bytes"] < 3 * said["rows"] * said["bytes_per_row"]
    requests = list(Trace(trace).requests())
    assert all(not r.iterations[0].decode and len(r.iterations) > 2 for r in requests)
    assert all(step.decode and len(step.tokens) == 1 for r in requests for step in r.iterations[1:])

    code, out, err = command("record", prompts, trace)
    assert code == 2
    assert "not empty" in err

    store = tmp_path / "store"
    code, out, err = command("prepare", default_model_dir(), store, "--predictors", trace, "--stride", 2)
    assert code == 0, err
    options = ("--prefetch", "stride", "--distance", 2, "--predictors", store / "predictors-2.safetensors")
    code, out, err = command("replay", trace, *options, "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["executor"], record["machine"]["name"]) == ("simulated", "recorded")
    assert record["bytes_loaded_prefetch"] > 0

    code, _, err = command("jobs", "merge-traces", tmp_path / "both", trace, trace)
    assert code == 0, err
    assert Trace(tmp_path / "both").header.requests == 4


def test_prompts_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"token_ids": [4, 5]}\n{"text": "c"}\n')
    prompts = read_prompts(file, default_model_dir())
    assert prompts[1] == (4, 5)
    assert len(prompts) == 3
    assert read_prompts(file, default_model_dir(), limit=1) == prompts[:1]
    for bad in ('{"prompt": 3}', "{", '{"token_ids": []}', '{"token_ids": [true]}', "[]"):
        file.write_text(bad)
        with pytest.raises(RequestError, match=r"p\.jsonl:1"):
            read_prompts(file, default_model_dir())
    file.write_text("\n")
    with pytest.raises(RequestError, match="has no prompt"):
        read_prompts(file, default_model_dir())
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompts(tmp_path / "none", default_model_dir())
