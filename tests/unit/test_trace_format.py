"""Routing traces on disk: what is written is read, in pieces, and what is not a trace is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import traces
from safetensors.numpy import load, save

from tiermoe.cluster.simulate.trace import Trace, TraceHeader, check_chunk, read_chunk
from tiermoe.cluster.simulate.trace_writer import TraceWriter, merge_traces
from tiermoe.errors import ConfigError, TraceError

PROMPTS = [[1, 2, 3], [7], [9, 9, 1, 4]]


@pytest.mark.parametrize("chunk_bytes", [1, 400, 1 << 20])
def test_what_is_written_is_read(tmp_path: Path, chunk_bytes: int) -> None:
    shape = traces.header()
    written = traces.write(tmp_path / "t", shape, PROMPTS, chunk_bytes=chunk_bytes)
    trace = Trace(tmp_path / "t")
    assert trace.header.requests == len(PROMPTS)
    assert (len(trace.header.chunks) == 1) == (chunk_bytes == 1 << 20)
    requests = list(trace.requests())
    assert [r.number for r in requests] == [0, 1, 2]
    for request, steps, prompt in zip(requests, written, PROMPTS, strict=True):
        assert request.prompt_tokens == len(prompt)
        np.testing.assert_array_equal(request.embedding, traces.embed(np.asarray(prompt)).mean(axis=0))
        assert [step.decode for step in request.iterations] == [False, True, True, True]
        for read, step in zip(request.iterations, steps, strict=True):
            for name in shape.row_arrays():
                wanted = getattr(step, name)
                np.testing.assert_array_equal(getattr(read, name), wanted.astype(getattr(read, name).dtype))
            np.testing.assert_allclose(read.embedding, traces.embed(step.tokens).mean(axis=0))


def test_bytes_of_a_row_are_as_stated(tmp_path: Path) -> None:
    shape = traces.header()
    traces.write(tmp_path / "t", shape, PROMPTS)
    trace = Trace(tmp_path / "t")
    arrays = read_chunk(tmp_path / "t", trace.header, trace.header.chunks[0])
    held = sum(arrays[name].nbytes for name in shape.row_arrays())
    assert held == trace.header.rows * shape.row_bytes
    assert traces.header(8, 32, 4, 4).row_bytes == 996  # what the format's page states of the default model
    assert traces.header(32, 8, 2, 4).row_bytes == 1476
    assert traces.header(experts=300).id_dtype is np.uint16


def test_lookahead_gives_the_recorded_order(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.header(), PROMPTS)
    step = next(Trace(tmp_path / "t").requests()).iterations[0]
    scores = step.lookahead(0, 2)
    assert scores is not None
    np.testing.assert_array_equal(np.argsort(-scores, axis=1)[:, :2], step.ids[:, 2])
    assert np.isfinite(scores).sum() == 3 * 2
    assert [step.lookahead(*at) is None for at in ((1, 2), (2, 1), (0, 3), (0, 0))] == [True] * 4


def test_equal_probabilities_keep_their_order(tmp_path: Path) -> None:
    """fp16 rounds two probabilities to one: the expert that was first stays first."""
    shape = traces.header(2, 4, 2, 1)
    rows = traces.rows_of(shape, [5], np.random.default_rng(0))
    rows.next_ids[0, 0, 0] = (3, 1)
    rows.next_probabilities[0, 0, 0] = (0.25, 0.25)
    writer = TraceWriter(tmp_path / "t", shape, traces.embed)
    writer.begin([5])
    writer.add(rows, decode=False)
    writer.close(True)
    scores = next(Trace(tmp_path / "t").requests()).iterations[0].lookahead(0, 1)
    assert scores is not None
    assert np.argsort(-scores[0])[:2].tolist() == [3, 1]


def test_interrupted_trace_is_valid(tmp_path: Path) -> None:
    """Every forward that was flushed can be read, also when nobody closed the writer."""
    shape, rng = traces.header(), np.random.default_rng(0)
    writer = TraceWriter(tmp_path / "t", shape, traces.embed, chunk_bytes=1)
    assert list(Trace(tmp_path / "t").requests()) == []
    writer.begin([1, 2])
    writer.add(traces.rows_of(shape, [1, 2], rng), decode=False)
    writer.add(traces.rows_of(shape, [8], rng), decode=True)
    writer.begin([3])  # no forward of it ran
    (request,) = Trace(tmp_path / "t").requests()
    assert [len(step.tokens) for step in request.iterations] == [2, 1]
    assert not Trace(tmp_path / "t").header.complete
    assert writer.close(False).requests == 1
    assert not list((tmp_path / "t").glob(".*"))  # no drafts left


def test_merging(tmp_path: Path) -> None:
    first = traces.write(tmp_path / "a", traces.header(), PROMPTS, seed=1, chunk_bytes=300)
    second = traces.write(tmp_path / "b", traces.header(), PROMPTS[:2], seed=2)
    merge_traces([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    merged = merge_traces([tmp_path / "ab", tmp_path / "b"], tmp_path / "abb")
    requests = list(Trace(tmp_path / "abb").requests())
    assert merged.requests == len(requests) == 7
    assert [r.number for r in requests] == list(range(7))
    for request, steps in zip(requests, [*first, *second, *second], strict=True):
        for read, step in zip(request.iterations, steps, strict=True):
            np.testing.assert_array_equal(read.ids, step.ids)
    traces.write(tmp_path / "c", traces.header(fingerprint="0" * 64), PROMPTS)
    with pytest.raises(TraceError, match="not of the model"):
        merge_traces([tmp_path / "a", tmp_path / "c"], tmp_path / "ac")


def test_only_a_new_or_empty_folder_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        TraceWriter(tmp_path, traces.header(), traces.embed)
    with pytest.raises(ConfigError, match="cannot be made"):
        TraceWriter(tmp_path / "file", traces.header(), traces.embed)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no header", "half a header", "unknown key"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "t"
    traces.write(out, traces.header(), PROMPTS)
    chunk, head = out / "chunk-00000.safetensors", out / "trace.json"
    data = chunk.read_bytes()
    match damage:
        case "truncated":
            chunk.write_bytes(data[:-1])
        case "flipped":
            chunk.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "missing":
            chunk.unlink()
        case "no header":
            head.unlink()
        case "half a header":
            head.write_text(head.read_text()[:50])
        case "unknown key":
            head.write_text(json.dumps(json.loads(head.read_text()) | {"more": 1}))
    with pytest.raises(TraceError):
        list(Trace(out).requests())


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("ids", (0, 0, 0), 6, "name experts from 6"),
        ("ids", (0, 0, slice(None)), 1, "picks one expert twice"),
        ("next_ids", (0, 0, 0, 0), 200, "name experts from 6"),
        ("probabilities", (0, 0, 0), np.nan, "within"),
        ("probabilities", (0, 0, 0), 1.5, "within"),
        ("weights", (0, 0, 0), np.inf, "not all finite"),
        ("embeddings", (0, 0), np.nan, "not all finite"),
        ("iterations", (0, 2), 0, "impossible"),
        ("iterations", (0, 2), 2, "rows"),
        ("iterations", (0, 3), 2, "impossible"),
        ("iterations", (0, 0), -1, "impossible"),
    ],
)
def test_impossible_values_are_refused(
    tmp_path: Path, name: str, at: tuple[int, ...], value: float, message: str
) -> None:
    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    arrays = {key: array.copy() for key, array in read_chunk(tmp_path, header, header.chunks[0]).items()}
    assert check_chunk(header, header.chunks[0], arrays) is None
    arrays[name][at] = value
    assert message in str(check_chunk(header, header.chunks[0], arrays))


@pytest.mark.parametrize("change", ["missing", "dtype", "shape"])
def test_other_arrays_are_refused(tmp_path: Path, change: str) -> None:
    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    arrays = dict(read_chunk(tmp_path, header, header.chunks[0]))
    if change == "missing":
        del arrays["weights"]
    elif change == "dtype":
        arrays["weights"] = arrays["weights"].astype(np.float32)
    else:
        arrays["weights"] = arrays["weights"][1:]
    assert check_chunk(header, header.chunks[0], arrays) is not None


@pytest.mark.parametrize(("row", "column", "value"), [(1, 1, 2), (0, 1, 1), (4, 0, 0), (4, 0, 2)])
def test_iterations_that_follow_on_nothing_are_refused(tmp_path: Path, row: int, column: int, value: int) -> None:
    import hashlib

    traces.write(tmp_path, traces.header(), PROMPTS)
    header = Trace(tmp_path).header
    file = tmp_path / header.chunks[0].file
    arrays = {key: array.copy() for key, array in load(file.read_bytes()).items()}
    arrays["iterations"][row, column] = value
    data = save(arrays)
    file.write_bytes(data)
    record = header.chunks[0].model_copy(update={"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
    (tmp_path / "trace.json").write_text(header.model_copy(update={"chunks": (record,)}).model_dump_json())
    with pytest.raises(TraceError, match=r"follows on nothing|begins where it cannot"):
        list(Trace(tmp_path).requests())


def test_impossible_headers_are_refused() -> None:
    for change in ({"top_k": 9}, {"layers": 0}, {"experts": 1 << 20}, {"distances": 9}, {"format_version": 2}):
        with pytest.raises(ValueError, match="validation error"):
            traces.header(**change)  # type: ignore[arg-type]
    assert isinstance(traces.header(), TraceHeader)
