"""A checkpoint folder, opened and checked without reading any weight and without torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...actors.store.format import JOURNAL_NAME, MANIFEST_NAME, STAMP_NAME, SourceFile, TensorSpec
from ...actors.store.replicas import REPLICA_STAMP_NAME, REPLICAS_NAME
from ...errors import CheckpointError
from .hub_cache import name_of
from .matrices import Entry
from .quantization import Quantization, quantization_of
from .weight_files import (
    CONFIG,
    INDEX,
    MAX_JSON_BYTES,
    SINGLE,
    TensorEntry,
    WeightFiles,
    gguf_in,
    is_extra,
    read_json_object,
    read_weights_header,
    refuse_adapter,
    refuse_links_out,
    weight_files,
)

if TYPE_CHECKING:
    from .gguf_header import Header


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder.

    config: the parsed `config.json`. tensors: as the files have them. source: its files, equal while unchanged.
    absent: tensors that the index lists and the file that it names does not have, with that file. quantization: of its
    weights; None: they are plain numbers, or GGUF's. gguf: the header of GGUF files; their
    quantized tensors are entries that dequantize.
    """

    path: Path
    config: dict[str, Any] = field(repr=False)
    tensors: dict[str, Entry] = field(repr=False)
    source: tuple[SourceFile, ...]
    absent: dict[str, str] = field(default_factory=dict, repr=False)
    quantization: Quantization | None = None
    gguf: Header | None = None

    @property
    def name(self) -> str:
        """The folder's name; in a Hugging Face cache the model's."""
        return name_of(self.path)

    def extras(self) -> list[Path]:
        """Configuration and tokenizer files, which a store copies. Raises CheckpointError: a link leads out."""
        refuse_links_out(self.path)
        return sorted(path for path in self.path.iterdir() if _is_extra(path))


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open and check a folder of safetensors or GGUF files.

    Raises:
        CheckpointError: the folder or a file is missing, truncated or malformed, or a link leads out of the folder.
        UnsupportedModelError: the weights are quantized in an unsupported way; refused before they are looked at.
    """
    path = model_dir.resolve()
    if not path.is_dir():
        raise CheckpointError(f"{model_dir} is not a folder", "pass the folder of a downloaded checkpoint")
    refuse_links_out(path)
    refuse_adapter(path)
    config = read_json_object(path / CONFIG)
    if gguf_in(path):
        from .gguf_files import open_weights  # the package is only needed for such files

        gguf, entries, held_in = open_weights(path)
        return Checkpoint(path, config, entries, (_small_file(path, CONFIG), *held_in), gguf=gguf)
    quantization = quantization_of(path)
    files = weight_files(path)
    _refuse_without_weights(path, files)
    specs: dict[str, dict[str, TensorSpec]] = {}
    beside = None if quantization is None or quantization.source == CONFIG else quantization.source
    source = [_small_file(path, name) for name in (CONFIG, beside, files.index) if name is not None]
    for name in files.names:
        header, found = read_weights_header(path / name)
        status = (path / name).stat()
        digest = hashlib.sha256(header).hexdigest()
        source.append(SourceFile(file=name, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest))
        specs[name] = {spec.name: spec for spec in found}
    held = files.holders(specs.items())
    tensors: dict[str, Entry] = {tensor: TensorEntry(path / name, specs[name][tensor]) for tensor, name in held.items()}
    absent = {tensor: name for tensor, name in files.holder.items() if tensor not in held}
    return Checkpoint(path, config, tensors, tuple(source), absent, quantization)


def refuse_unsupported(model_dir: Path) -> None:
    """Refuse a configuration of an unsupported quantization; reads no weight.

    Raises:
        UnsupportedModelError: of such a one. CheckpointError: a link leads out of the folder.
    """
    if (model_dir / CONFIG).is_file():
        refuse_links_out(model_dir)
        quantization_of(model_dir)


def read_source(model_dir: Path) -> tuple[SourceFile, ...]:
    """The files of a checkpoint now; compare with `Manifest.source`. Raises as `open_checkpoint`."""
    return open_checkpoint(model_dir).source


def _refuse_without_weights(path: Path, files: WeightFiles) -> None:
    """Raise CheckpointError if a file of the weights is missing."""
    missing = [name for name in files.names if not (path / name).is_file()]
    if missing and files.names == (SINGLE,):
        other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        found = f"only {other[0]}" if other else "no weights"
        raise CheckpointError(
            f"{path} has {found}, neither {SINGLE} nor {INDEX}",
            "download the safetensors or GGUF form, or convert with transformers' `save_pretrained`",
        )
    if missing:
        named = files.index or CONFIG
        raise CheckpointError(f"{path / missing[0]} is missing, though {named} names it", f"download {missing[0]}, too")


def _small_file(path: Path, name: str) -> SourceFile:
    data = (path / name).read_bytes()
    return SourceFile(file=name, nbytes=len(data), mtime_ns=None, sha256=hashlib.sha256(data).hexdigest())


def _is_extra(path: Path) -> bool:
    reserved = (MANIFEST_NAME, STAMP_NAME, JOURNAL_NAME, REPLICAS_NAME, REPLICA_STAMP_NAME)
    return (
        is_extra(path.name)
        and path.name[0] not in ".-"
        and path.name not in reserved
        and not path.name.endswith(".index.json")
        and path.is_file()
        and path.stat().st_size <= MAX_JSON_BYTES
    )
