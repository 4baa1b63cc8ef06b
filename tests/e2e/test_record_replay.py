"""From prompts to a trace, to predictors, to replays: the commands as a user gives them, on the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiermoe.cluster.cli import main
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.record.command import read_prompts
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.errors import RequestError


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_record_prepare_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, trace = tmp_path / "prompts.txt", tmp_path / "trace"
    prompts.write_text("def add(a, b):\n\nThe linker searches the folders\n")
    code, out, err = command(
        capsys, "record", prompts, trace, "--max-tokens", 5, "--distances", 2, "--ignore-eos", "--json"
    )
    assert code == 0, err
    said = json.loads(out)
    assert (said["requests"], said["layers"], said["experts"], said["top_k"]) == (2, 8, 32, 4)
    assert (said["forwards"], said["complete"]) == (10, True)
    assert said["bytes"] < 3 * said["rows"] * said["bytes_per_row"]
    requests = list(Trace(trace).requests())
    assert [len(r.iterations) for r in requests] == [5, 5]

    code, out, err = command(capsys, "record", prompts, trace)
    assert code == 2
    assert "not empty" in err

    code, out, err = command(
        capsys, "prepare", default_model_dir(), tmp_path / "store", "--predictors", trace, "--stride", 2
    )
    assert code == 0, err
    file = tmp_path / "store" / "predictors-2.safetensors"
    code, out, err = command(
        capsys, "replay", trace, "--prefetch", "stride", "--distance", 2, "--predictors", file, "--json"
    )
    assert code == 0, err
    record = json.loads(out)
    assert (record["executor"], record["machine"]["name"]) == ("simulated", "recorded")
    assert record["bytes_loaded_prefetch"] > 0

    code, _, err = command(capsys, "jobs", "merge-traces", tmp_path / "both", trace, trace)
    assert code == 0, err
    assert Trace(tmp_path / "both").header.requests == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--max-tokens", "5000"], "prompt 1: "),
        (["--distances", "9"], "--distances is 9"),
        (["--limit", "0"], "--limit is 0"),
    ],
)
def test_record_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    code, out, err = command(capsys, "record", prompts, tmp_path / "out", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "out").exists()


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
