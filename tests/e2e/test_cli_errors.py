"""Bad input: exit code 2, one line that says what is wrong and what to do, no traceback, and no Ray started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_byte_tokenizer

from tiermoe.cluster.cli import main


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("Ray was started for input that should have been refused")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a checkpoint as the checks before the start look at."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    save_byte_tokenizer(directory)
    return directory


def _refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        (["--policy", "magic"], "no policy 'magic'", "choose one of activeevict, "),
        (["--budget", "0"], "budget '0'", "512MiB"),
        (["--budget", "1.5"], "budget '1.5'", "share"),
        (["--budget", "lots"], "budget 'lots'", "share"),
        (["--policy", "all-resident"], "keeps every expert", "--budget 1.0"),
        (["--max-tokens", "0"], "--max-tokens is 0", "from 1"),
        (["--max-tokens", "64"], "exceed the model's 64 positions", "lower --max-tokens"),
        (["--temperature", "-1"], "--temperature is -1", "greedy"),
        (["--top-p", "7"], "--top-p is 7", "up to 1"),
        (["--seed", "-4"], "--seed is -4", "from 0"),
        (["--link-gbps", "0"], "--link-gbps is 0", "greater than 0"),
        (["--link-latency-us", "inf"], "--link-latency-us is inf", "finite"),
        (["--device", "tpu"], "--device is 'tpu'", "cuda"),
        (["--device", "cuda", "--link-gbps", "3"], "device is cuda", "leave them out"),
        (["--threads", "0"], "--threads is 0", "greater than or equal to 1"),
        (["--config", "moon"], "no configuration file 'moon'", "laptop"),
        (["--trace", "/nowhere/at/all/trace.json"], "no directory '/nowhere/at/all'", "mkdir"),
        (["--prompt-file", "x"], "both PROMPT and --prompt-file", "either"),
    ],
)
def test_a_bad_option(
    capsys: pytest.CaptureFixture[str], model: Path, options: list[str], what: str, remedy: str
) -> None:
    line = _refusal(capsys, "run", "hello", "--model", str(model), *options)
    assert what in line
    assert remedy in line


def test_a_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--model" in _refusal(capsys, "run", "hello", "--model", str(tmp_path / "none"))


def test_a_directory_that_is_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no config.json" in _refusal(capsys, "run", "hello", "--model", str(tmp_path))


def test_a_checkpoint_without_weights(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert "safetensors" in _refusal(capsys, "run", "hello", "--model", str(model), "--max-tokens", "4")


@pytest.mark.parametrize("prompt", [[""], []])
def test_an_empty_or_absent_prompt(capsys: pytest.CaptureFixture[str], model: Path, prompt: list[str]) -> None:
    assert "prompt" in _refusal(capsys, "run", *prompt, "--model", str(model))


def test_an_over_long_prompt(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("x" * 100)
    line = _refusal(capsys, "run", "--prompt-file", str(file), "--model", str(model), "--max-tokens", "1")
    assert "100 prompt tokens" in line


def test_an_unknown_key_names_its_neighbour(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("bugdet: 0.5\n")
    line = _refusal(capsys, "run", "hello", "--model", str(model), "--config", str(file))
    assert "unknown key 'bugdet'; did you mean 'budget'?" in line


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "hello", "--bugdet", "1"])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_program_itself_refuses_without_a_traceback(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tiermoe")), "run", "hello", "--model", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no model at")
    assert done.stderr.count("\n") == 1


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
