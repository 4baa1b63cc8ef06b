"""GGUF files: their header, their tensors as entries of a checkpoint, and a folder with their other files.

    open_weights    the files of a folder's model -> their header, and entries by GGUF's names
    gguf_folder     a folder in the cache with links to the files, and config.json and the tokenizer: those beside the
                    file, else those of its metadata
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from ...actors.store.format import ITEM_BYTES, SourceFile, TensorSpec
from ...actors.store.published import head_digest
from ...actors.tokenizer import GGUF_MARK, is_tokenizer_file
from ...errors import CheckpointError, StoreError, UnsupportedModelError
from ...kernels.forms import FLOATS, MatrixForm
from ...proto.private import user_cache
from ..host import GGUF_CACHE, shown, stands_for_gguf
from .gguf_config import config_of
from .gguf_header import FORM_OF, INTEGERS, SPLIT, Header, Tensor, gguf_files, parts_of, read_experts, read_gguf
from .gguf_tokenizer import TOKENS, save_settings, save_tokenizer
from .matrices import Entry, QuantizedEntry, Raw
from .weight_files import CONFIG, GGUF_SUFFIX, TensorEntry, named_gguf, refuse_outside


def open_weights(folder: Path) -> tuple[Header, dict[str, Entry], list[SourceFile]]:
    """The header, the tensors by GGUF's names, and the files of a folder's model; quantized ones as `QuantizedEntry`.

    Raises:
        CheckpointError: a file is unreadable or malformed, or the files are not those of one model.
        UnsupportedModelError: the model is dense, or a tensor's type cannot be dequantized.
    """
    there = gguf_files(folder)
    files = [shown(file) for file in there]  # links may stand for them
    header = read_experts(files)
    tensors: dict[str, Entry] = {name: _entry(name, found) for name, found in header.tensors.items()}
    source = []
    for path, link in zip(files, there, strict=True):
        status = path.stat()
        try:
            digest = head_digest(path)
        except StoreError as error:
            raise CheckpointError(error.what, "make it a file that this user may read") from error
        source.append(
            SourceFile(file=link.name, nbytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)
        )
    return header, tensors, source


def _entry(name: str, tensor: Tensor) -> Entry:
    shape, kind, offset, path = tensor
    form = FORM_OF.get(GGMLQuantizationType(kind))
    if code := INTEGERS.get(kind) or (FLOATS.get(form) if form else None):
        return TensorEntry(path, _spec(name, code, shape, offset, math.prod(shape) * ITEM_BYTES[code]))
    if len(shape) not in (2, 3):
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} of {len(shape)} dimensions is of type {GGMLQuantizationType(kind).name}",
            "use another GGUF file of the model",
        )
    outputs, inputs = shape[-2:]
    stack = shape[0] if len(shape) == 3 else 0
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    bytes_shape = (*shape[:-1], inputs // block * size)
    raw = {"weight": TensorEntry(path, _spec(name, "U8", bytes_shape, offset, math.prod(bytes_shape)))}
    spec = _spec(name, "F32", shape, 0, 0)
    if form is not None:
        return QuantizedEntry(spec, MatrixForm(form, outputs, inputs), raw, stack)
    return QuantizedEntry(spec, MatrixForm("float32", outputs, inputs), raw, stack, repack=_Dequantized(kind))


def _spec(name: str, code: str, shape: tuple[int, ...], offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=code, shape=shape, offset=offset, nbytes=nbytes)


@dataclass(frozen=True)
class _Dequantized:
    """The values of a type for which there is no form: for dense weights only. kind: GGML's number."""

    kind: int

    def __call__(self, form: MatrixForm, raw: Raw) -> Raw:
        kind = GGMLQuantizationType(self.kind)
        try:
            values = dequantize(raw["weight"], kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"GGUF tensors of type {kind.name} cannot be dequantized",
                "use another GGUF file of the model, such as Q4_K_M or Q8_0",
            ) from error
        return {"weight": np.ascontiguousarray(values, np.float32)}


# --- what a checkpoint's folder has beside its weights --------------------------------------------------------------

_SETTINGS = "tokenizer_config.json"
_FORMAT = 4  # of the folders in the cache: what is made of metadata


def gguf_folder(path: Path) -> Path:
    """A folder in the user's cache that stands for a GGUF checkpoint: links to the files, config.json, the tokenizer.

    The links have the suffix, whether or not the files have it.

    Args:
        path: the file, any part of a split one, or the folder that has it. A file may be a link: the other parts and
            what lies beside it are then in its folder, or in that of the file that it leads to. A folder that this
            function answered stands for its files again.

    Raises:
        CheckpointError: a file is malformed, a part is missing, or a link leads elsewhere.
        UnsupportedModelError: the model is dense, a key or the tokenizer is not supported, or the metadata lacks a part
            of the configuration and no config.json is beside the file.
    """
    if path.is_dir() and stands_for_gguf(path):
        path = gguf_files(path)[0].readlink()
    folders = [path]
    if path.is_dir():
        path = gguf_files(path)[0]
    else:
        folders = [path.parent, path.resolve().parent]
    files, own = parts_of(path), [file for file in sorted(path.parent.iterdir()) if _is_beside(file)]
    refuse_outside([*files, *own], *folders)
    files = [file.absolute() for file in files]
    header = read_experts(files)
    stamp = json.dumps([_FORMAT, *([str(file), (s := file.stat()).st_size, s.st_mtime_ns] for file in [*files, *own])])
    name = SPLIT.fullmatch(path.name)
    stem = _stem(path) if name is None else name["stem"]
    folder = user_cache() / GGUF_CACHE / f"{stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}" / stem
    if (folder / CONFIG).is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = folder / f"{_stem(file)}{GGUF_SUFFIX}"
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    beside = {file.name: file.read_bytes() for file in own}
    config = beside.pop(CONFIG, None) or json.dumps(config_of(header), indent=1).encode()
    if TOKENS in header.metadata:
        if "tokenizer.json" not in beside:
            save_tokenizer(read_gguf(files, texts=True), folder)
            if (given := beside.pop(_SETTINGS, None)) is not None:
                _merge_settings(folder / _SETTINGS, given)
        else:
            with contextlib.suppress(CheckpointError):  # the vocabulary beside it is the one that counts
                save_settings(read_gguf(files, texts=True), folder)
    for file_name, content in beside.items():
        (folder / file_name).write_bytes(content)
    (folder / CONFIG).write_bytes(config)  # last: without it the folder is made again
    return folder


def _merge_settings(path: Path, given: bytes) -> None:
    """Settings of one's own, such as a chat template, before those of the metadata; the tokenizer is the file's."""
    with contextlib.suppress(ValueError, TypeError):  # malformed: whoever reads it says so
        made = json.loads(path.read_text(encoding="utf-8"))
        given = json.dumps({**made, **json.loads(given), GGUF_MARK: True}, indent=1).encode()
    path.write_bytes(given)


def _stem(file: Path) -> str:
    """A GGUF file's name without the suffix, which it may lack: a dot in a name is not the start of one."""
    return file.stem if named_gguf(file) else file.name


def _is_beside(file: Path) -> bool:
    """Whether a file beside a GGUF file belongs to its checkpoint."""
    known = file.suffix in (".json", ".jinja") or is_tokenizer_file(file.name)
    return file.is_file() and known and not file.name.endswith(".index.json")
