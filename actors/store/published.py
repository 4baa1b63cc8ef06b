"""Experts in the form in which their checkpoint publishes them: where their bytes lie, and their mapping.

A store whose manifest has `published` keeps each expert in an `ExpertForm` of `kernels.forms`. The file of a layer is
one of two:

    layer-NNN.json          the layer is mapped: for each part of the form, runs of experts in the checkpoint's files
    layer-NNN.safetensors   the parts, stacked by expert [E, bytes], where slots want another order

Mapped bytes are the checkpoint's: they are checked by length, modification time and a digest of each file's header.
NumPy without torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from ...errors import StoreError
from ...kernels.forms import DTYPES, ExpertForm
from .format import MAP_SUFFIX, REBUILD, Bytes, Count, Record, SourceFile, first_problem, part_bytes, read_header

_GGUF_HEAD_BYTES = 16 << 20  # of a GGUF file: its header and tensor names, without parsing them

# an embedding of so many bytes is a table: its rows are read from the mapped file when they are asked for
TABLE_BYTES = 1 << 28
_TABLE = re.compile(r"(embed_tokens|embed_tokens_per_layer|embeddings|ngram_embedding|token_embd)\.weight$")


def is_table(name: str, nbytes: int) -> bool:
    """Whether a matrix of the dense part is a table: an embedding, by its name, of so many bytes that none is widened.

    One that is the output matrix, too, is read whole for each token: whoever asks knows of that.
    """
    return nbytes >= TABLE_BYTES and _TABLE.search(name) is not None


def map_name(index: int) -> str:
    """Name of the file that says where the experts of MoE layer `index` lie."""
    return f"layer-{index:03d}{MAP_SUFFIX}"


class Run(Record):
    """Consecutive experts at a fixed distance in one file. file: index among the manifest's `source`. Bytes."""

    file: Annotated[int, Field(ge=0, le=1 << 16)]
    offset: Bytes
    stride: Bytes
    count: Count


class LayerMap(Record):
    """The content of a `layer-NNN.json`: by part of the layer's form, the runs of its experts, in their order."""

    version: ClassVar[int] = 1

    runs: dict[str, tuple[Run, ...]]

    def encode(self) -> bytes:
        return (json.dumps({"map_version": self.version, **self.model_dump(mode="json")}) + "\n").encode()

    @classmethod
    def read(cls, path: Path, form: ExpertForm, experts: int, source: Sequence[SourceFile]) -> LayerMap:
        """Read and check a map: parts, number of experts, and places within the files.

        Raises:
            StoreError: it cannot be read, or does not fit.
        """
        try:
            body = json.loads(path.read_bytes())
            version = body.pop("map_version", None)
            if version != cls.version:
                raise ValueError(f"map version {version!r}")
            found = cls.model_validate_json(json.dumps(body))
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error.strerror})", REBUILD) from error
        except (ValidationError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise StoreError(f"{path} is not a map of experts ({first_problem(error)})", REBUILD) from error
        sizes = part_bytes(form)
        if list(found.runs) != list(sizes):
            raise StoreError(f"{path} maps {', '.join(found.runs)}, not {', '.join(sizes)}", REBUILD)
        for name, runs in found.runs.items():
            if sum(run.count for run in runs) != experts:
                raise StoreError(f"{path}: {name} is mapped for another number of experts than {experts}", REBUILD)
            for run in runs:
                last = run.offset + (run.count - 1) * run.stride + sizes[name]
                if run.file >= len(source) or last > source[run.file].nbytes:
                    raise StoreError(f"{path}: {name} lies outside the checkpoint's files", REBUILD)
        return found

    def places(self, name: str) -> Iterator[tuple[int, int]]:
        """File and offset of a part of each expert, in their order."""
        for run in self.runs[name]:
            for i in range(run.count):
                yield run.file, run.offset + i * run.stride


def runs_of(places: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """The fewest runs for these places (file and offset) of consecutive experts."""
    runs: list[list[int]] = []  # file, offset, stride, count
    for file, offset in places:
        last = runs[-1] if runs else None
        if last is not None and last[0] == file:
            stride = offset - last[1] - (last[3] - 1) * last[2]
            if stride > 0 and (last[3] == 1 or stride == last[2]):
                last[2], last[3] = stride, last[3] + 1
                continue
        runs.append([file, offset, 0, 1])
    return tuple(Run(file=file, offset=offset, stride=stride, count=count) for file, offset, stride, count in runs)


def head_digest(path: Path) -> str:
    """SHA-256 of a weight file's header: of a safetensors file exactly, of a GGUF file its first 16 MiB.

    Raises:
        StoreError: the file cannot be read, or has no header.
    """

    def problem(what: str) -> StoreError:
        return StoreError(what, REBUILD)

    try:
        with open(path, "rb") as file:
            head = file.read(4)
            if head == b"GGUF":
                return hashlib.sha256(head + file.read(_GGUF_HEAD_BYTES - 4)).hexdigest()
    except OSError as error:
        raise problem(f"{path} cannot be read ({error.strerror})") from error
    return hashlib.sha256(read_header(path, problem)[0]).hexdigest()


@dataclass(frozen=True)
class FormArrays:
    """The experts of one MoE layer in their published form, as mapped bytes.

    parts: by part of `form`, one uint8 array of its bytes for each expert, read-only; not aligned.
    """

    index: int
    module: str
    form: ExpertForm
    parts: Mapping[str, Sequence[NDArray[np.uint8]]]

    def expert(self, index: int) -> tuple[NDArray[np.uint8], ...]:
        """The bytes of one expert's parts, in the order of slots."""
        return tuple(part[index] for part in self.parts.values())

    def typed(self, index: int) -> dict[str, NDArray[Any]]:
        """The parts of one expert, with the shapes and types that `ExpertForm.dequantize` takes."""
        return typed_parts(self.form, self.expert(index))

    def neurons(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The dequantized weights of one expert, neuron-major as `LayerArrays` has them: [I, 2, H] and [I, H]."""
        expert = self.form.dequantize(self.typed(index))
        return np.stack([expert.gate, expert.up], axis=1), np.ascontiguousarray(expert.down.T)

    def aligned(self, index: int) -> dict[str, NDArray[Any]]:
        """As `typed`, for kernels: a part that lies unaligned in its file, such as scales, is copied."""
        return {name: np.require(part, requirements=["A", "C"]) for name, part in self.typed(index).items()}


def typed_parts(form: ExpertForm, parts: Sequence[NDArray[np.uint8]]) -> dict[str, NDArray[Any]]:
    """Bytes of one expert's parts, in the order of slots, as `form.parts()` has them; without a copy."""
    return {
        name: np.frombuffer(part, DTYPES[code]).reshape(shape)
        for part, (name, (code, shape)) in zip(parts, form.parts().items(), strict=True)
    }


def map_layer(
    index: int, module: str, form: ExpertForm, where: LayerMap, pages: Mapping[int, mmap.mmap]
) -> FormArrays:
    """The experts of a mapped layer. pages: the mappings of the checkpoint's files, by their index."""
    sizes = part_bytes(form)
    parts = {
        name: [np.frombuffer(pages[file], np.uint8, sizes[name], offset) for file, offset in where.places(name)]
        for name in sizes
    }
    return FormArrays(index, module, form, parts)


def stacked_layer(index: int, module: str, form: ExpertForm, arrays: Mapping[str, NDArray[np.uint8]]) -> FormArrays:
    """The experts of a layer file. arrays: [E, bytes] by part."""
    return FormArrays(index, module, form, {name: list(arrays[name]) for name in form.parts()})


def mapped_files(maps: Sequence[LayerMap]) -> list[int]:
    """Indices among the manifest's `source` of the files that these layers map."""
    return sorted({run.file for where in maps for runs in where.runs.values() for run in runs})
