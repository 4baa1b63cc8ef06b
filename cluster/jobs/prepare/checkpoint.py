"""A checkpoint folder, opened and checked without reading any weight and without torch."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ....actors.store.format import (
    ITEM_BYTES,
    MANIFEST_NAME,
    STAMP_NAME,
    SourceFile,
    TensorSpec,
    first_problem,
    read_header,
)
from ....actors.store.replicas import REPLICA_STAMP_NAME, REPLICAS_NAME
from ....errors import CheckpointError
from ...hub import name_of
from ...quantization import HF_QUANT_CONFIG, Quantization, read_quantization
from .writer import JOURNAL_NAME

if TYPE_CHECKING:
    from .published import QuantizedEntry

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
_EXTRA_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_MAX_JSON_BYTES = 256 << 20

REFETCH = "download the checkpoint again"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint: its file and its position there."""

    path: Path
    spec: TensorSpec

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.spec.shape[0] if self.spec.shape else 1

    @property
    def row_nbytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.spec.shape[1:]) * ITEM_BYTES[self.spec.dtype]


Entry: TypeAlias = "TensorEntry | QuantizedEntry"  # a tensor, plain or (`published`) dequantized when it is read


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder.

    config: the parsed `config.json`. tensors: as the files have them. source: its files, equal while unchanged.
    quantization: of its weights; None: they are plain numbers, or GGUF's. gguf: architecture by llama.cpp's name, of
    GGUF files; their quantized tensors are entries that dequantize.
    """

    path: Path
    config: dict[str, Any] = field(repr=False)
    tensors: dict[str, Entry] = field(repr=False)
    source: tuple[SourceFile, ...]
    quantization: Quantization | None = None
    gguf: str | None = None

    @property
    def name(self) -> str:
        """The folder's name; in a Hugging Face cache the model's."""
        return name_of(self.path)

    def extras(self) -> list[Path]:
        """Configuration and tokenizer files, which a store copies."""
        return sorted(path for path in self.path.iterdir() if _is_extra(path))


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open and check a folder of safetensors or GGUF files.

    Raises:
        CheckpointError: the folder or a file is missing, truncated or malformed, or two files hold one tensor.
        UnsupportedModelError: the weights are quantized in an unsupported way; refused before they are looked at.
    """
    path = model_dir.resolve()
    if not path.is_dir():
        raise CheckpointError(f"{model_dir} is not a folder", "pass the folder of a downloaded checkpoint")
    config = _read_json(path / CONFIG_NAME)
    if not any((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)) and any(path.glob("*.gguf")):
        return _open_gguf(path, config)
    quantization = read_quantization(config, _optional_json(path / HF_QUANT_CONFIG))
    tensors: dict[str, TensorEntry] = {}
    source = [_small_file(path / CONFIG_NAME)]
    for shard in _shards(path, source):
        header, specs = read_header(shard, lambda what: CheckpointError(what, REFETCH))
        status = shard.stat()
        digest = hashlib.sha256(header).hexdigest()
        source.append(SourceFile(file=shard.name, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest))
        for spec in specs:
            if spec.name in tensors:
                first = tensors[spec.name].path.name
                raise CheckpointError(f"{first} and {shard.name} both hold tensor {spec.name!r}", REFETCH)
            tensors[spec.name] = TensorEntry(shard, spec)
    _check_index(path, tensors)
    return Checkpoint(path, config, {**tensors}, tuple(source), quantization)


def _open_gguf(path: Path, config: dict[str, Any]) -> Checkpoint:
    from ...gguf_header import gguf_files  # the package is only needed for such files
    from .gguf_files import open_weights

    found = open_weights(gguf_files(path))
    source = (_small_file(path / CONFIG_NAME), *found.source)
    return Checkpoint(path, config, found.tensors, source, gguf=found.architecture)


def read_bytes(entry: TensorEntry, offset: int, nbytes: int) -> mmap.mmap | bytes:
    """Some bytes of a tensor, in memory of their own. Raises CheckpointError: unreadable or truncated."""
    if not nbytes:
        return b""
    # mapped pages return to the system at once; the allocator would retain hundreds of such tensors
    pages = mmap.mmap(-1, nbytes)
    buffer = memoryview(pages)
    done = 0
    try:
        with open(entry.path, "rb", buffering=0) as file:
            file.seek(entry.spec.offset + offset)
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(f"{entry.path} was truncated while it was read", REFETCH)
                done += count
    except OSError as error:
        raise CheckpointError(f"{entry.path} cannot be read ({error.strerror})", REFETCH) from error
    return pages


def refuse_unsupported(model_dir: Path) -> None:
    """Raise UnsupportedModelError where the configuration names an unsupported quantization; no weight is looked at."""
    if (model_dir / CONFIG_NAME).is_file():
        read_quantization(_read_json(model_dir / CONFIG_NAME), _optional_json(model_dir / HF_QUANT_CONFIG))


def read_source(model_dir: Path) -> tuple[SourceFile, ...]:
    """The files of a checkpoint now; compare with `Manifest.source`. Raises as `open_checkpoint`."""
    return open_checkpoint(model_dir).source


def _shards(path: Path, source: list[SourceFile]) -> list[Path]:
    """The weight files, in transformers' order of preference; an index is added to `source`."""
    single, index = path / SINGLE_NAME, path / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"))
        found = f"only {other[0]}" if other else "no weights"
        raise CheckpointError(
            f"{path} has {found}, neither {SINGLE_NAME} nor {INDEX_NAME}",
            "download the safetensors or GGUF form, or convert with transformers' `save_pretrained`",
        )
    source.append(_small_file(index))
    names = sorted({str(name) for name in _weight_map(index).values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}, which is not a safetensors file beside it", REFETCH)
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, though {INDEX_NAME} names it", REFETCH)
    if not names:
        raise CheckpointError(f"{index} names no file", REFETCH)
    return [path / name for name in names]


def _check_index(path: Path, tensors: dict[str, TensorEntry]) -> None:
    """Every tensor of the index must be in the file that the index says."""
    if (path / SINGLE_NAME).is_file():
        return
    for name, shard in _weight_map(path / INDEX_NAME).items():
        entry = tensors.get(name)
        if entry is None or entry.path.name != shard:
            raise CheckpointError(f"tensor {name!r} is missing from {shard}, though {INDEX_NAME} says so", REFETCH)


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map", REFETCH)
    return weight_map


def _optional_json(path: Path) -> dict[str, Any] | None:
    return _read_json(path) if path.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is too large for a configuration file", REFETCH)
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", "pass a whole checkpoint folder") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({first_problem(error)})", REFETCH) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object", REFETCH)
    return content


def _small_file(path: Path) -> SourceFile:
    data = path.read_bytes()
    return SourceFile(file=path.name, nbytes=len(data), mtime_ns=None, sha256=hashlib.sha256(data).hexdigest())


def _is_extra(path: Path) -> bool:
    reserved = (MANIFEST_NAME, STAMP_NAME, JOURNAL_NAME, REPLICAS_NAME, REPLICA_STAMP_NAME)
    return (
        path.suffix in _EXTRA_SUFFIXES
        and path.name[0] not in ".-"
        and path.name not in reserved
        and not path.name.endswith(".index.json")
        and path.is_file()
        and path.stat().st_size <= _MAX_JSON_BYTES
    )
