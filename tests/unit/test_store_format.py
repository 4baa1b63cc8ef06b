"""The manifest and the tensor file layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tiermoe.actors.store.format import (
    DATA_ALIGNMENT,
    DTYPE_CODES,
    ITEM_BYTES,
    DenseFile,
    ExpertShape,
    FileRecord,
    LayerFile,
    Manifest,
    SourceFile,
    TiedWeight,
    build_header,
    read_header,
)
from tiermoe.errors import StoreError

SHAPE = ExpertShape(num_experts=4, hidden=6, intermediate=5, gates=2, has_bias=True)
DIGEST = "0" * 64


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "format_version": 1,
        "model": "tiny",
        "architecture": "TinyForCausalLM",
        "dtype": "bfloat16",
        "transformers_version": "5.0",
        "experts": SHAPE,
        "layers": (LayerFile(index=0, module="m.0.experts", file="layer-000.safetensors", nbytes=8, sha256=DIGEST),),
        "dense": DenseFile(file="dense.safetensors", nbytes=8, sha256=DIGEST, tied=(TiedWeight(name="a", source="b"),)),
        "extras": (FileRecord(file="config.json", nbytes=2, sha256=DIGEST),),
        "source": (SourceFile(file="model.safetensors", nbytes=9, mtime_ns=1, sha256=DIGEST),),
    }
    return Manifest.model_validate({**fields, **changes})


def fail(what: str) -> StoreError:
    return StoreError(what, "test")


def test_a_manifest_is_read_back_and_every_altered_byte_is_noticed() -> None:
    data = manifest().encode()
    assert Manifest.decode(data, "m") == manifest()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(StoreError):
            Manifest.decode(bytes(altered), "m")
    body = json.loads(data)
    body["format_version"] = 2
    with pytest.raises(StoreError, match="store format 2, not 1"):
        Manifest.decode(json.dumps(body).encode(), "m")


@pytest.mark.parametrize("name", ["../secret", "a/b", "", ".hidden", "/etc/passwd"])
def test_file_names_cannot_leave_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        FileRecord(file=name, nbytes=1, sha256=DIGEST)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"unknown": 1},
        {"dtype": "int8"},
        {"layers": (LayerFile(index=1, module="m", file="l", nbytes=1, sha256=DIGEST),)},
        {"extras": (FileRecord(file="dense.safetensors", nbytes=1, sha256=DIGEST),)},
    ],
)
def test_inconsistent_manifests_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        manifest(**changes)


_names = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)
_tensor = st.tuples(st.sampled_from(sorted(DTYPE_CODES.values())), st.lists(st.integers(0, 5), max_size=3).map(tuple))


@given(tensors=st.dictionaries(_names, _tensor, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_headers_are_aligned_and_read_back(tmp_path_factory: pytest.TempPathFactory, tensors: dict) -> None:
    head, specs = build_header(tensors)
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    path.write_bytes(head + bytes(sum(spec.nbytes for spec in specs)))
    assert len(head) % DATA_ALIGNMENT == 0
    raw, found = read_header(path, fail)
    assert raw == head
    assert {s.name: (s.dtype, s.shape) for s in found} == tensors
    assert all(s.nbytes == math.prod(s.shape) * ITEM_BYTES[s.dtype] for s in found)
    with safe_open(path, "np") as file:  # the safetensors library agrees
        assert set(file.keys()) == set(tensors)


def header_file(entries: object, data: int) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        (1 << 62).to_bytes(8, "little") + b"{}",
        header_file(b"[]", 0),
        header_file(b"{", 0),
        header_file(b"[" * 100_000, 0),
        header_file(b"\xff\xfe", 0),
        header_file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', 8),
        header_file({"a": entry()}, 7),
        header_file({"a": entry()}, 9),
        header_file({"a": entry(shape=(3,))}, 8),
        header_file({"a": entry(shape=(-2,))}, 8),
        header_file({"a": entry(shape=(2.0,))}, 8),
        header_file({"a": entry(shape=(True, 2))}, 8),
        header_file({"a": entry(shape=(1 << 60, 1 << 60))}, 8),
        header_file({"a": entry(dtype="F31")}, 8),
        header_file({"a": entry(dtype=["F32"])}, 8),
        header_file({"a": entry(offsets=(8, 0))}, 8),
        header_file({"a": entry(offsets=(0,))}, 8),
        header_file({"a": entry(), "b": entry()}, 8),
        header_file({"a": entry(), "b": entry(offsets=(12, 20))}, 20),
        header_file({"a": 5}, 8),
        header_file({"a\n": entry()}, 8),
        header_file({"²": entry()}, 8),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreError):
        read_header(path, fail)
    with pytest.raises(StoreError, match="cannot be read"):
        read_header(tmp_path / "none", fail)
