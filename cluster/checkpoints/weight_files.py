"""The files of a checkpoint: its JSON, which file holds which tensor, and the headers of its weights; without torch.

Which file holds a tensor is decided as transformers decides it, by the first of these that there is:

    `transformers_weights` of config.json    a safetensors file or an index
    model.safetensors                        alone, unless an index beside it has it as one of its files
    model.safetensors.index.json             the files that it names; other safetensors files do not count
    AutoGPTQ's own name                      by quantize_config.json, such as gptq_model-4bit-128g.safetensors

GGUF files count where none of these is there: `gguf_in`. A link that leads out of the checkpoint's folder is refused,
whatever file it stands for: what a checkpoint from elsewhere names would be read, and copied into a store.

An index may name files in folders below its own. A tensor that it lists is where it says: copies in other files do not
matter. A tensor that it does not list is read, too, if one of its files has it: of several copies the last file's.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ...actors.store.format import ITEM_BYTES, TensorSpec, first_problem, read_header
from ...actors.tokenizer import is_tokenizer_file
from ...errors import CheckpointError, UnsupportedModelError
from ..host import shown
from .hub_cache import repository_of

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER = "adapter_config.json"
_WEIGHTS_KEY, _INDEX_SUFFIX = "transformers_weights", ".safetensors.index.json"
_NAME = re.compile(r"(?:\w[\w.+ -]*/)*\w[\w.+ -]*\.safetensors")
_POINTER = b"version https://git-lfs.github.com/spec/v1"
HEAD = "mtp.safetensors"  # beside the one: of the model's own head for drafts
MAX_JSON_BYTES = 256 << 20
_EXTRA_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # of configuration and tokenizer files
_READ_FOLDERS = ("additional_chat_templates", "heldout", "calibration")
GGUF_SUFFIX = ".gguf"
_GGUF_MAGICS = (b"GGUF", b"FUGG")  # of the other byte order, too, which is refused by name
_NO_MODEL = re.compile(r"^mmproj|imatrix", re.IGNORECASE)  # GGUF files that are not a language model's


def replace_file(path: Path) -> str:
    """The remedy for a file of the wrong length."""
    return f"download {path.name} again: its length shows that it is damaged"


def compare_hash(*paths: Path) -> str:
    """The remedy for values that are odd, though the files have their lengths."""
    names = sorted({path.name for path in paths})
    shown = " or ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
    return (
        f"compare the sha256 of {shown} with the publisher's: replace a file where they differ, "
        "else pass another release of the model"
    )


# the remedy where weights and configuration are whole and do not belong together
OTHER_CONFIG = "pass the config.json that belongs to these weights, or another release of the model"


def refuse_unreadable(path: Path) -> None:
    """Raise CheckpointError if a file is missing, unreadable, or the pointer that git leaves without git-lfs."""
    try:
        with open(path, "rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except FileNotFoundError as error:
        remedy = "pass the folder of a whole checkpoint: `hf download ORG/NAME` fetches what is not there"
        raise CheckpointError(f"'{shown(path)}' is missing", remedy) from error
    except OSError as error:
        what = f"'{shown(path)}' cannot be read ({error.strerror})"
        raise CheckpointError(what, "make it a file that this user may read") from error
    if pointer:
        remedy = f"run `git lfs pull` in '{shown(path).parent}'"
        raise CheckpointError(f"'{shown(path)}' is a git-lfs pointer, not the file itself", remedy)


def read_json_object(path: Path) -> dict[str, Any]:
    """One of a checkpoint's JSON files.

    Raises:
        CheckpointError: it cannot be read, or is not a JSON object.
    """
    refuse_unreadable(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"'{shown(path)}' is too large for a configuration file", "pass another release")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        what = f"'{shown(path)}' is not valid JSON ({first_problem(error)})"
        raise CheckpointError(what, f"correct it, or copy {path.name} from where the model is published") from error
    if not isinstance(found, dict):
        what = f"'{shown(path)}' is not a JSON object"
        raise CheckpointError(what, f"correct it, or copy {path.name} from where the model is published")
    return found


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter (LoRA), which changes a model's weights and is not applied.

    Raises:
        UnsupportedModelError: it has one, with or without the model.
    """
    if not (folder / ADAPTER).is_file():
        return
    base = read_json_object(folder / ADAPTER).get("base_model_name_or_path")
    if (folder / CONFIG).is_file():
        what = f"'{shown(folder)}' has an adapter ({ADAPTER}) beside the model, which is not applied"
        remedy = f"merge it into the weights (PEFT's `merge_and_unload`), or remove {ADAPTER} to serve the model alone"
    else:
        what = f"'{shown(folder)}' has an adapter (of {base or 'a model that it does not name'}), not a model"
        remedy = "merge it into the weights of that model (PEFT's `merge_and_unload`), and pass the merged model"
    raise UnsupportedModelError(what, remedy)


def optional_json(path: Path) -> dict[str, Any] | None:
    """As `read_json_object`; None: there is no such file."""
    return read_json_object(path) if path.is_file() else None


# -- links -------------------------------------------------------------------------------------------------------------


def refuse_outside(files: Iterable[Path], *folders: Path) -> None:
    """Refuse files that are links, or lie in linked folders, that lead out of all of some folders.

    A snapshot of Hugging Face's cache may link to all of its repository. A folder itself may be reached through a link.

    Raises:
        CheckpointError: one leads out of them, or nowhere.
    """
    roots = [_root(folder) for folder in folders]
    for file in files:
        remedy = "put the file itself there, or pass the folder that holds all of the model's files"
        try:
            end = file.resolve()
        except (OSError, RuntimeError):
            end = file
        if end.is_symlink():  # of a circle
            raise CheckpointError(f"'{file}' is a link that leads nowhere", remedy)
        if not any(end.is_relative_to(root) for root in roots):
            raise CheckpointError(f"'{file}' is a link to '{end}', outside of the checkpoint's folder", remedy)


def refuse_links_out(folder: Path) -> None:
    """As `refuse_outside`, for the files of a checkpoint that are read or copied beside its weights.

    Those are checked where they are found: by `weight_files` and `gguf_header.gguf_files`.
    """
    try:
        own = [path for path in folder.iterdir() if is_extra(path.name)]
        for name in _READ_FOLDERS:
            if (folder / name).is_dir():
                own += [folder / name, *(folder / name).iterdir()]
    except OSError as error:
        what = f"'{folder}' cannot be read ({error.strerror})"
        raise CheckpointError(what, "make it a folder that this user may read") from error
    refuse_outside(sorted(own), folder)


def is_extra(name: str) -> bool:
    """Whether a file beside the weights, by its name, is of the configuration or the tokenizer."""
    return Path(name).suffix.lower() in _EXTRA_SUFFIXES or is_tokenizer_file(name)


def _root(folder: Path) -> Path:
    """What the links of a folder may lead to."""
    found = folder.resolve()
    snapshot = next((path for path in (found, *found.parents) if repository_of(path) is not None), None)
    return found if snapshot is None else snapshot.parents[1]


# -- GGUF files --------------------------------------------------------------------------------------------------------


def named_gguf(name: str | Path) -> bool:
    """Whether a file's name has the suffix, in upper or lower case."""
    return Path(name).suffix.lower() == GGUF_SUFFIX


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file by its suffix or by its first bytes."""
    if not path.is_file():
        return False
    if named_gguf(path):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) in _GGUF_MAGICS
    except OSError:
        return False


def gguf_in(folder: Path) -> list[Path]:
    """The GGUF files from which a folder's weights are read, sorted; none: it has safetensors files, or neither."""
    if any((folder / name).is_file() for name in (SINGLE, INDEX)) or not folder.is_dir():
        return []
    there = [path for path in sorted(folder.iterdir()) if not _NO_MODEL.search(path.name)]
    named = [path for path in there if named_gguf(path) and path.is_file()]
    return named or [path for path in there if is_gguf(path)]


# -- safetensors files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a checkpoint.

    Attributes:
        names: relative to the folder, sorted; files may be missing.
        index: the index's name; None: there is none, and one file has all tensors.
        holder: the file of each tensor that the index lists.
    """

    names: tuple[str, ...]
    index: str | None = None
    holder: Mapping[str, str] = field(default_factory=dict, repr=False)

    def holders(self, found: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
        """The file from which each tensor is read. found: the tensors of each file, in the order of `names`.

        A tensor that is not in the file that the index names is left out.
        """
        return {tensor: file for file, tensors in found for tensor in tensors if self.holder.get(tensor, file) == file}


def weight_files(folder: Path) -> WeightFiles:
    """The safetensors files of a checkpoint's folder; without an index and any file, the one that should be there.

    Raises:
        CheckpointError: config.json or the index is malformed, or names a file that is not safetensors below it, or
            that is a link that leads out of the folder.
    """
    found = _weight_files(folder)
    names = found.names if found.index is None else (found.index, *found.names)
    refuse_outside((folder / name for name in names), folder)
    return found


def _weight_files(folder: Path) -> WeightFiles:
    named = (optional_json(folder / CONFIG) or {}).get(_WEIGHTS_KEY)
    if named is not None:
        if not isinstance(named, str) or named.endswith(".safetensors"):
            return WeightFiles((_checked(named, folder / CONFIG),))
        return _indexed(folder, named)
    single = WeightFiles((SINGLE, HEAD) if (folder / HEAD).is_file() else (SINGLE,))
    if not (folder / INDEX).is_file():
        return single if (folder / SINGLE).is_file() else _of_gptq(folder) or single
    if not (folder / SINGLE).is_file():
        return _indexed(folder, INDEX)
    with contextlib.suppress(CheckpointError):  # an index beside a single file may be anything
        found = _indexed(folder, INDEX)
        return found if SINGLE in found.names else single
    return single


def _of_gptq(folder: Path) -> WeightFiles | None:
    """The file that AutoGPTQ wrote, which transformers does not look for; None: there is none."""
    config = optional_json(folder / "quantize_config.json") or {}
    default = f"gptq_model-{config.get('bits')}bit-{config.get('group_size')}g"
    for base in (config.get("model_file_base_name"), default):
        name = f"{base}.safetensors"
        if _NAME.fullmatch(name) and (folder / name).is_file():
            return WeightFiles((name,))
        if _NAME.fullmatch(name) and (folder / f"{name}.index.json").is_file():
            return _indexed(folder, f"{name}.index.json")
    return None


def _indexed(folder: Path, name: str) -> WeightFiles:
    index = folder / name
    if not name.endswith(_INDEX_SUFFIX) or not _NAME.fullmatch(name.removesuffix(".index.json")):
        raise CheckpointError(
            f"'{folder / CONFIG}' names {name!r} as its weights, which is neither a safetensors file nor an index",
            "pass a release in the safetensors form",
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what = f"'{index}' has no weight_map" if weight_map is None else f"'{index}' names no file"
        raise CheckpointError(what, f"copy {index.name} from where the model is published")
    checked: dict[str, str] = {}  # some ten files of a hundred thousand tensors
    for file in weight_map.values():
        if not isinstance(file, str) or file not in checked:
            checked[file] = _checked(file, index)
    holder = {tensor: checked[file] for tensor, file in weight_map.items()}
    return WeightFiles(tuple(sorted(set(checked.values()))), name, holder)


def _checked(name: object, where: Path) -> str:
    """A file's name, which must not lead out of the folder. where: the file that has it."""
    found = str(PurePosixPath(name)) if isinstance(name, str) else ""
    if not _NAME.fullmatch(found):
        raise CheckpointError(
            f"'{where}' names {name!r}, which is not a safetensors file beside it or below",
            "pass a release in the safetensors form",
        )
    return found


def read_weights_header(path: Path) -> tuple[bytes, tuple[TensorSpec, ...]]:
    """The raw header of a safetensors file and its tensors in file order, checked against the file's length.

    Raises:
        CheckpointError: the file is absent, unreadable, truncated, a pointer of git-lfs, or no safetensors file.
    """
    refuse_unreadable(path)
    return read_header(
        path,
        lambda what: CheckpointError(what, compare_hash(path)),
        lambda what: CheckpointError(what, replace_file(path)),
    )


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint: its file and its position there."""

    path: Path
    spec: TensorSpec

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold it."""
        return (self.path,)

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.spec.shape[0] if self.spec.shape else 1

    @property
    def row_nbytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.spec.shape[1:]) * ITEM_BYTES[self.spec.dtype]


def read_bytes(entry: TensorEntry, offset: int, nbytes: int) -> mmap.mmap | bytes:
    """A copy of some bytes of a tensor. Raises CheckpointError: unreadable or truncated."""
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
                    what = f"{entry.path} was truncated while it was read"
                    raise CheckpointError(what, "run again once no program writes to it")
                done += count
    except OSError as error:
        what = f"{entry.path} cannot be read ({error.strerror})"
        raise CheckpointError(what, "make it a file that this user may read") from error
    return pages
