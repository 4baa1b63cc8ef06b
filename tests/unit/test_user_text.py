"""Text files that users give: a byte order mark, which editors and spreadsheets write, is not part of the text.

Guards against a CSV whose first column was named "\\ufeffrequest": two requests became one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiermoe.cluster.api.keys import KeyRing, read_keys
from tiermoe.cluster.api.templates import _read as read_template
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.cluster.jobs.evaluate.text import load_heldout, load_text
from tiermoe.cluster.jobs.prepare.calibration import read_texts
from tiermoe.cluster.jobs.record.record_command import read_prompts
from tiermoe.cluster.jobs.run import _prompt_text
from tiermoe.cluster.report.results import read_json
from tiermoe.cluster.simulate.arrivals import azure
from tiermoe.cluster.simulate.importers import import_trace
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.cluster.yaml_file import read_yaml

MODEL = default_model_dir()
ROUTING = "request,token,layer,experts\na,0,0,0 1\na,1,0,1 2\nb,2,0,0 3\n"
STEP = json.dumps({"step": 0, "layer": 0, "top_indices": [[0, 1], [1, 2]]})
LINE = json.dumps({"text": "a text\u2028of two lines"}, ensure_ascii=False) + "\n"  # of JSON one line


def _imported(file: Path) -> list[list[list[int]]]:
    import_trace(file, file.parent / f"{file.name}-trace", None, "m", None, 100)
    requests = Trace(file.parent / f"{file.name}-trace").requests()
    return [[step.ids.tolist() for step in request.iterations] for request in requests]


def _heldout(file: Path) -> object:
    folder = file.with_suffix("")
    (folder / "heldout").mkdir(parents=True)
    (folder / "heldout" / "a.jsonl").write_bytes(file.read_bytes())
    (folder / "tokenizer.json").symlink_to(MODEL / "tokenizer.json")
    return load_heldout(folder).documents, heldout_prompts(folder, 1, 4)


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "imported csv": (".csv", ROUTING, _imported),
    "imported lines": (".jsonl", STEP, _imported),
    "arrivals": (".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:47.5,7,9\n", azure),
    "prompts": (".txt", "one\ntwo\n", lambda file: read_prompts(file, MODEL)),
    "prompts in JSON": (".jsonl", LINE, lambda file: read_prompts(file, MODEL)),
    "a prompt": (".txt", "one", lambda file: _prompt_text(None, file)),
    "calibration": (".txt", "one", read_texts),
    "calibration in JSON": (".jsonl", LINE, read_texts),
    "eval": (".txt", "one", lambda file: load_text(MODEL, file).documents[0][0].ids),
    "held-out text": (".jsonl", LINE, _heldout),
    "YAML": (".yaml", "policy: lru\n", read_yaml),
    "a result": (".json", "{}", read_json),
    "a template": (".jinja", "{{ messages }}", read_template),
    "keys": (".txt", "sesame-open\n", lambda file: (read_keys(file), [key.secret for key in read_keys(file)])),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_not_text(name: str, tmp_path: Path) -> None:
    suffix, text, read = READERS[name]
    plain, marked = tmp_path / f"f{suffix}", tmp_path / "marked" / f"f{suffix}"
    marked.parent.mkdir()
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    for file in (plain, marked):
        file.chmod(0o600)
    assert read(marked) == read(plain)


def test_two_requests_of_a_marked_csv_stay_two(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text(ROUTING, encoding="utf-8-sig")
    assert _imported(file) == [[[[[0, 1]]], [[[1, 2]]]], [[[[0, 3]]]]]


def test_a_former_key_stays_in_force_whatever_mark_the_file_gets(tmp_path: Path) -> None:
    """A refused file revokes the keys that it no longer names: the first one is behind the mark."""
    file, now = tmp_path / "keys", [0.0]
    file.write_text("sesame-open\n")
    file.chmod(0o600)
    ring = KeyRing(file, clock=lambda: now[0], refused=lambda line: None)
    file.write_text("sesame-open\nanother name=?\n", encoding="utf-8-sig")
    now[0] = 60.0
    assert ring.find(b"Bearer sesame-open") is not None
    assert "1 of 1 former keys" in (ring.problem or "")


def test_arrays_are_written_in_their_logical_order(tmp_path: Path) -> None:
    """safetensors writes memory as it lies: arrays in Fortran's order gave other expert ids."""
    from safetensors.numpy import load

    from tiermoe.actors.store.artifacts import encode_tensors

    ids = np.arange(24).reshape(2, 3, 4)
    arrays = {
        "fortran": np.asfortranarray(ids), "transposed": ids.T, "strided": ids[:, ::2], "reversed": ids[::-1],
        "scalar": np.array(7.0),
    }  # fmt: skip
    read = load(encode_tensors(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
