"""Routing of other programs as a trace: each format, and refusals that name the line."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from tiermoe.cluster.simulate.importers import import_trace
from tiermoe.cluster.simulate.statistics import figures_of, routing_of
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.errors import TraceError

IDS = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 0], [1, 3]]])  # [3 tokens, 2 layers, 2]


def npy(ids: np.ndarray, order: str = "C") -> str:
    data = io.BytesIO()
    np.save(data, ids.astype(np.int16, order=order))
    return base64.b64encode(data.getvalue()).decode()


def megatron(step: int, ids: np.ndarray) -> list[dict]:
    lines = [{"step": step, "block": "decoder", "layer": 3 + i, "top_indices": ids[:, i].tolist()} for i in range(2)]
    return [*lines, {"step": step, "block": "mtp", "layer": 0, "top_indices": [[9, 8]]}]


def table(ids: np.ndarray, own: bool) -> str:
    lines = ["request,token,layer,phase," + ("expert_0,expert_1" if own else "experts")]
    for token, layers in enumerate(ids.tolist()):
        for layer, picked in enumerate(layers):
            phase = "prefill" if token < 2 else "decode"
            lines.append(f"a,{token},{layer},{phase}," + ("," if own else " ").join(map(str, picked)))
    return "\n".join(lines)


OFFLINE = {"prompt_token_ids": [7, 8], "token_ids": [9, 5]}
SOURCES = {
    "vllm lists": json.dumps(OFFLINE | {"routed_experts": IDS.tolist()}),
    "vllm base64": json.dumps(OFFLINE | {"routed_experts": npy(IDS)}),
    "vllm base64 in Fortran's order": json.dumps(OFFLINE | {"routed_experts": npy(IDS, "F")}),
    "vllm response": json.dumps(
        {"prompt_routed_experts": IDS[:2].tolist(), "choices": [{"routed_experts": IDS[2:].tolist()}]}
    ),
    "megatron": "\n".join(map(json.dumps, megatron(0, IDS[:2]) + megatron(1, IDS[2:]))),
    "csv": table(IDS, False),
    "csv columns": table(IDS, True),
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_format_by_its_contents(source: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(SOURCES[source])
    header = import_trace(tmp_path / "f", tmp_path / "t", None, "m", None, 100)
    assert (header.layers, header.experts, header.top_k, header.complete) == (2, 4, 2, True)
    [request] = Trace(tmp_path / "t").requests()
    assert [(step.decode, step.ids.tolist()) for step in request.iterations] == [
        (False, IDS[:2].tolist()), (True, IDS[2:].tolist()),
    ]  # fmt: skip
    if "lists" in source:
        assert request.iterations[0].tokens.tolist() == [7, 8]
    figures = figures_of(routing_of(header, Trace(tmp_path / "t").requests()))
    assert (figures["token_entropy"], figures["next_router"], figures["decode_tokens"]) == (None, None, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCES["vllm lists"] + "\n{", r"f:2 is not JSON"),
        (SOURCES["vllm lists"] + "\n{}", r"f:2 has no routed_experts"),
        (json.dumps({"routed_experts": IDS.tolist()}), r"f:1 does not say how long the prompt is"),
        (json.dumps(OFFLINE | {"routed_experts": [[1, 2]]}), r"f:1: routed_experts is not an array"),
        (json.dumps(OFFLINE | {"routed_experts": "xx"}), r"f:1: routed_experts is not an array"),
        (json.dumps(OFFLINE | {"routed_experts": [[[1, 1]]]}), r"f:1: .* picks one expert twice"),
        (SOURCES["megatron"] + "\n" + json.dumps(megatron(1, IDS)[0]), r"f:7: step 1 has layer 3 twice"),
        (SOURCES["megatron"] + "\n" + json.dumps(megatron(2, IDS)[0]), r"step 2 lacks a layer"),
        (SOURCES["csv"] + "\na,3,0,decode,x 1", r"f:8 has values that are not whole numbers"),
        (SOURCES["csv"] + "\na,0,0,decode,1 2", r"f:8: layer 0 of token 0 is there twice"),
        (SOURCES["csv"] + "\na,3,0,decode,1 2", r"have different layers"),
        ("layer,token\n", r"f:1 has the columns"),
        ("hello", r"has an unknown format"),
    ],
)
def test_refusals_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "f", tmp_path / "t", None, "m", None, 100)
    assert not (tmp_path / "t").exists()


def test_too_few_experts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(SOURCES["csv"])
    with pytest.raises(TraceError, match="names expert 3 of 3"):
        import_trace(tmp_path / "f", tmp_path / "t", "csv", "m", 3, 100)


def claiming(shape: tuple[int, ...], kind: str = "<i8", data: bytes = b"12345678", version: int = 1) -> str:
    """A .npy file whose header says what it likes."""
    out = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    write = np.lib.format.write_array_header_1_0 if version == 1 else np.lib.format.write_array_header_2_0
    write(out, header)
    return base64.b64encode(out.getvalue() + data).decode()


@pytest.mark.parametrize(
    "routed",
    [
        claiming((1 << 40, 4, 2)), claiming((1 << 40, 4, 2), version=2), claiming((1, 1, 2)), claiming((-1, 1, 1)),
        claiming((1 << 62, 1 << 62, 4)), claiming((1, 1, 1), "|O"), "UEsDBA==", base64.b64encode(b"\x93NUMPY").decode(),
        [[[1 << 80]]], [[[1.5]]], [[[1]], [[1, 2]]], "?",
    ],
)  # fmt: skip
def test_an_array_is_no_larger_than_its_bytes(routed: object, tmp_path: Path) -> None:
    """Guards a MemoryError: the header of a .npy file in a line of 1.2 MB said 8 TB, and was believed."""
    (tmp_path / "file").write_text(json.dumps({"prompt_token_ids": [1], "routed_experts": routed}))
    with pytest.raises(TraceError, match="routed_experts is not an array"):
        import_trace(tmp_path / "file", tmp_path / "out", None, "x", None, 1)
    assert not (tmp_path / "out").exists()


def test_one_great_id_does_not_make_a_trace_of_gigabytes(tmp_path: Path) -> None:
    """Guards a MemoryError: each token of a file of 1.2 MB got probabilities of 65536 experts."""
    lines = [f"{token},0,{token % 8}" for token in range(100_000)]
    (tmp_path / "file").write_text("\n".join(["token,layer,experts", *lines, "100000,0,65535"]))
    with pytest.raises(TraceError, match=r"would be a trace of 12\... GiB: 100001 tokens, 1 layers of 65536 experts"):
        import_trace(tmp_path / "file", tmp_path / "out", None, "x", None, 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("experts", "lines", "message"),
    [
        (1 << 20, ["0,0,1"], "cannot become a trace: experts: "),
        (None, [f"0,{layer},65535" for layer in range(100)], "100 layers of 65536 experts are more than any model has"),
        (None, ["0,0," + "1" * 200_000], "not a CSV file: field larger than field limit"),
    ],
)
def test_impossible_sizes(experts: int | None, lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("\n".join(["token,layer,experts", *lines]))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "file", tmp_path / "out", None, "x", experts, 1)


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"routed_experts": ' + "[" * 100_000)
    with pytest.raises(TraceError, match="is not JSON"):
        import_trace(tmp_path / "file", tmp_path / "out", None, "x", None, 1)


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_impossible_token_ids_are_numbers_in_their_place(token: int, tmp_path: Path) -> None:
    entry = {"prompt_token_ids": [token, 2], "token_ids": [3], "routed_experts": npy(IDS)}
    (tmp_path / "file").write_text(json.dumps(entry))
    import_trace(tmp_path / "file", tmp_path / "out", None, "x", None, 1)
    (one,) = Trace(tmp_path / "out").requests()
    assert [token for part in one.iterations for token in part.tokens.tolist()] == [0, 1, 2]
