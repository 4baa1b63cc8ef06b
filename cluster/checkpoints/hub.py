"""A model by its name: a folder, a folder of a Hugging Face cache, or `org/name[@revision][:FILE.gguf]` of a hub.

    locate     what the name means on this machine; configuration and tokenizer are fetched if they are not here
    complete   the weights of what `locate` returned, fetched if they are not here
    headers    dtype and shape of every weight: of files that are here, else by range requests

Files go to the cache that `huggingface_hub` shares with other programs (HF_HOME, HF_HUB_CACHE). What is there is used
without a look at the network; `hf download org/name` brings it up to date. Finished files stay when a download is
interrupted, and a lost connection resumes where it was. Nothing of a repository is executed.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from ...actors.tokenizer import has_tokenizer
from ...errors import CheckpointError
from ..config import RunConfig, default_model_dir
from ..report.tables import byte_progress, size
from .hub_cache import Repository, cached_in, folder_of, other_snapshots, repository_of, snapshot_of, snapshots_in
from .weight_files import (
    CONFIG,
    GGUF_SUFFIX,
    INDEX,
    SINGLE,
    gguf_in,
    is_gguf,
    named_gguf,
    read_weights_header,
    refuse_adapter,
    refuse_links_out,
    weight_files,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Need = Literal["sizes", "text"]
Header = dict[str, tuple[str, tuple[int, ...]]]  # type code and shape by tensor

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w.][\w./-]{0,199}))?"
    r"(?::(?P<gguf>[\w.][\w./-]{0,199}))?"
)
_SIZES = ("config.json", "*config*.json", INDEX)
_PATTERNS: dict[Need, tuple[str, ...]] = {
    "sizes": _SIZES,
    "text": (*_SIZES, "tokenizer*", "*tokens*.json", "merges.txt", "chat_template*",
             "additional_chat_templates/*.jinja"),
}
# fetched one after the other and behind the rest: with one of them in the cache, an interruption has left nothing out
_VOCABULARIES = (
    ("tokenizer.json",),
    ("vocab.*", "*.tiktoken", "tekken.json", "tokenizer.model*", "spiece.model", "spm*.model", "sentencepiece*.model",
     "tiktoken*.model"),
)  # fmt: skip
_WORKERS = 4  # files at a time: an interruption loses no more than these
_STOP_S = 5.0
_SPARE_BYTES = 64 << 20


def located(config: RunConfig, need: Need = "text") -> RunConfig:
    """The configuration with its model as a folder of this machine. Raises as `locate`."""
    if config.model is None:
        return config
    return config.model_copy(update={"model": str(locate(config.model, need))})


def locate(model: str | None, need: Need = "text") -> Path:
    """The folder of a model, with configuration and, for `text`, tokenizer; the weights may be missing.

    A GGUF file has its configuration in it, so one of a hub is fetched here, with all of its parts.

    A GGUF file is known by its first bytes, whatever its name. Without a network, the only snapshot of a repository in
    the cache stands for a revision of which the cache does not know the commit.

    Args:
        model: folder, GGUF file, cache folder `models--org--name`, or org/name[@revision], for a GGUF file with
            :FILE.gguf or with its type, such as :Q4_K_M; None: the project's model.

    Raises:
        CheckpointError: no such model here or at the hub, no access to it, no network, or a full disk; or a link of it
            leads out of its folder. UnsupportedModelError: it has an adapter.
    """
    found = _located(model, need)
    if found.is_dir():
        refuse_links_out(found)
        refuse_adapter(found)
    return found


def _located(model: str | None, need: Need) -> Path:
    if model is None:
        return default_model_dir()
    path = Path(model).expanduser()
    if is_gguf(path):
        return _gguf_folder(path)
    if path.is_dir():
        found = snapshot_of(path)
        return _gguf_folder(found) if gguf_in(found) else found
    match = _NAME.fullmatch(model)
    of_file = path.suffix.lower() in (GGUF_SUFFIX, ".safetensors") and (match is None or match["gguf"] is None)
    if match is None or ".." in model or "--" in match["repo"] or of_file or path.exists():
        return path  # `check_model_dir` says what is wrong with it
    repository = Repository(match["repo"], match["revision"] or "main", match["gguf"])
    if repository.gguf is not None:
        return _gguf_folder(_gguf_of(repository))
    cached = cached_in(_cache() / folder_of(repository.name), repository.revision)
    if cached is not None and _has(cached, need):
        return cached
    try:
        found = _fetch_small(repository, need)
    except _Unreachable:
        if (only := _only_snapshot(repository)) is None or not _has(only, need):
            raise
        return only
    if not (found / CONFIG).is_file():
        with _hub_errors(repository, _cache()):
            files = [name for name in _listed(repository) if named_gguf(name)]
        if files:
            raise CheckpointError(
                f"'{repository.name}' has GGUF files and no {CONFIG}",
                f"name a file, or its type, such as {repository.name}:{Path(files[0]).name}",
            )
    return found


def complete(folder: Path, *, progress: bool = True) -> None:
    """Fetch the weights of a cached snapshot that are not there; any other folder is unchanged.

    Raises:
        CheckpointError: as `locate`; or the repository has no safetensors files.
    """
    repository = repository_of(folder)
    missing = _missing(folder) if repository is not None else []
    if repository is None or not missing:
        return
    cache = folder.resolve().parents[2]
    with _hub_errors(repository, cache):
        there = _listed(repository)
        if SINGLE in there and SINGLE not in (files := weight_files(folder)).names and files.index == INDEX:
            missing = [SINGLE]  # which transformers prefers
        absent = [name for name in missing if name not in there]
        if absent:
            other = sorted(name for name in there if Path(name).suffix in (".bin", ".pt", ".pth") or named_gguf(name))
            gguf = next((name for name in other if named_gguf(name)), None)
            remedy = "choose a repository with the safetensors form"
            raise CheckpointError(
                f"'{repository.name}' has no {absent[0]}" + (f", only {other[0]}" if other else ""),
                remedy if gguf is None else f"{remedy}, or name the file: {repository.name}:{gguf}",
            )
        _fetch(repository, {name: there[name] for name in missing}, (), progress)
    still = _missing(folder)
    if still:
        raise CheckpointError(f"{still[0]} of '{repository.name}' did not arrive", "run the same command again")


def headers(folder: Path) -> Header | None:
    """Type code and shape of each of a checkpoint's tensors; None: its files are neither here nor reachable.

    Files that are not here are asked for their first bytes, a request for each.

    Raises:
        CheckpointError: a file here is not a safetensors file, or the index is malformed.
    """
    files, missing = weight_files(folder), set(_missing(folder))
    repository = repository_of(folder)
    if missing and (repository is None or _offline()):
        return None
    found = {name: tensors_of(folder / name) for name in files.names if name not in missing}
    if missing:
        assert repository is not None
        found |= _remote_headers(repository, sorted(missing))
    held = files.holders((name, found[name]) for name in files.names)
    return {tensor: found[file][tensor] for tensor, file in held.items()}


def tensors_of(file: Path) -> Header:
    """Type code and shape of every tensor of a safetensors file. Raises CheckpointError: it is not one."""
    return {spec.name: (spec.dtype, spec.shape) for spec in read_weights_header(file)[1]}


# -- the cache ---------------------------------------------------------------------------------------------------------


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _missing(folder: Path) -> list[str]:
    return [name for name in weight_files(folder).names if not (folder / name).is_file()]


class _Unreachable(CheckpointError):
    """Files of a model are not here, and there is no network to fetch them."""


def _only_snapshot(repository: Repository) -> Path | None:
    """The one snapshot of a repository in the cache, whatever its commit; None: there are several, or none."""
    there = snapshots_in(_cache() / folder_of(repository.name))
    return there[0] if len(there) == 1 and repository.revision == "main" else None


# -- GGUF files of a hub -----------------------------------------------------------------------------------------------


def _gguf_folder(path: Path) -> Path:
    from .gguf_files import gguf_folder  # the package `gguf` takes a tenth of the imports' time

    return gguf_folder(path)


def _gguf_of(repository: Repository) -> Path:
    """The first file of the named GGUF model, complete in the cache; fetched if it is missing.

    Raises:
        CheckpointError: there is no such file, or there are several, or a part is missing; or as `locate`.
    """
    cached = cached_in(_cache() / folder_of(repository.name), repository.revision)
    if cached is not None and (there := _chosen_here(repository, cached)) is not None:
        return there
    try:
        with _hub_errors(repository, _cache()):
            sizes = _listed(repository)
            files = _chosen(repository, sorted(sizes))
            _refuse_dense(repository, files[0])
            small = (*_PATTERNS["text"], *(pattern for patterns in _VOCABULARIES for pattern in patterns))
            found = _fetch(repository, {name: sizes[name] for name in files}, small)
        return found / files[0]
    except _Unreachable:
        only = _only_snapshot(repository)
        if only is None or (there := _chosen_here(repository, only)) is None:
            raise
        return there


def _has(snapshot: Path, need: Need) -> bool:
    """Whether a snapshot has the small files that are needed."""
    return (snapshot / CONFIG).is_file() and (need == "sizes" or has_tokenizer(snapshot))


def _chosen_here(repository: Repository, snapshot: Path) -> Path | None:
    """The first file of the named GGUF model in a snapshot; None: it is not there, or not whole."""
    here = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if named_gguf(path.name)]
    with contextlib.suppress(CheckpointError):
        return snapshot / _chosen(repository, [name for name in here if (snapshot / name).is_file()])[0]
    return None


def _refuse_dense(repository: Repository, name: str) -> None:
    """Raise UnsupportedModelError if the first bytes of a GGUF file show a model without experts."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    from .gguf_header import HEAD_BYTES, dense_architecture, no_experts

    url = hf_hub_url(repository.name, name, revision=repository.revision, endpoint=constants.ENDPOINT)
    asked = {**build_hf_headers(library_name="tiermoe"), "range": f"bytes=0-{HEAD_BYTES - 1}"}
    answer = get_session().get(url, headers=asked, follow_redirects=True)
    hf_raise_for_status(answer)
    if (architecture := dense_architecture(answer.content[:HEAD_BYTES])) is not None:
        raise no_experts(f"'{repository.name}:{name}'", architecture)


def _chosen(repository: Repository, names: Iterable[str]) -> list[str]:
    """The files of the model that `repository.gguf` says, all parts in order.

    Raises:
        CheckpointError: there is none, or there are several, or a part is missing.
    """
    from .gguf_header import part_names  # the package `gguf` takes a tenth of the imports' time

    wanted = repository.gguf or ""
    known = [name for name in names if named_gguf(name) and not Path(name).name.lower().startswith("mmproj")]
    of_type = re.compile(rf"(.*[-./])?{re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    fitting = [name for name in known if name == wanted] or [name for name in known if of_type.fullmatch(name)]
    models = dict.fromkeys(tuple(part_names(name)) for name in fitting)
    if len(models) != 1:
        what = "several models" if models else "no GGUF file"
        choice = ", ".join((fitting or known)[:4]) or "none"
        raise CheckpointError(
            f"'{repository.name}' has {what} of the name or type {wanted!r}", f"name one of its GGUF files: {choice}"
        )
    (files,) = models
    lacking = [name for name in files if name not in known]
    if lacking:
        raise CheckpointError(f"'{repository.name}' lacks {lacking[0]}, a part of the model", "choose another file")
    return list(files)


# -- the hub -----------------------------------------------------------------------------------------------------------


def _api() -> HfApi:
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=constants.ENDPOINT, library_name="tiermoe")


def _listed(repository: Repository) -> dict[str, int]:
    """Bytes of every file by its path."""
    tree = _api().list_repo_tree(repository.name, revision=repository.revision, recursive=True)
    return {entry.path: entry.size for entry in tree if hasattr(entry, "size")}


def _fetch(repository: Repository, files: Mapping[str, int], small: tuple[str, ...], progress: bool = True) -> Path:
    """Fetch files of so many bytes, and what patterns of small ones match, with a bar; the snapshot's folder."""
    cache, total = _cache(), sum(files.values())
    _require_space(cache, total, repository)
    with byte_progress(Console(stderr=True, quiet=not progress)) as bar:
        task = bar.add_task(f"downloading {repository.name}", total=total)
        return _snapshot(repository, [*files, *small], cache, lambda count: bar.advance(task, count))


def _fetch_small(repository: Repository, need: Need) -> Path:
    """Fetch what a need takes, without weights; the snapshot's folder."""
    cache = _cache()
    with _hub_errors(repository, cache), Console(stderr=True).status(f"asking for {repository.name} ..."):
        if need == "sizes":
            return _snapshot(repository, list(_PATTERNS[need]), cache)
        last = [pattern for patterns in _VOCABULARIES for pattern in patterns]
        found = _snapshot(repository, list(_PATTERNS[need]), cache, ignored=last)
        for patterns in _VOCABULARIES:
            _snapshot(repository, list(patterns), cache)
        return found


def _snapshot(
    repository: Repository, patterns: list[str], cache: Path, arrived: Callable[[int], None] | None = None,
    ignored: Sequence[str] = (),
) -> Path:  # fmt: skip
    """`snapshot_download` of the patterns, in a thread: the library would end a Ctrl-C only after its running files."""
    if not any("/" in pattern for pattern in patterns):
        ignored = (*ignored, "*/*")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    stop = threading.Event()

    class Bar(tqdm):
        """Passes the bytes that are written on, draws nothing, and ends the download on request."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise InterruptedError("stopped")
            if self._counts and arrived is not None:
                arrived(int(n or 0))

    done: list[str | BaseException] = []

    def work() -> None:
        try:
            done.append(snapshot_download(
                repository.name, revision=repository.revision, cache_dir=cache, endpoint=constants.ENDPOINT,
                allow_patterns=patterns, library_name="tiermoe", max_workers=_WORKERS,
                ignore_patterns=list(ignored) or None,
                tqdm_class=Bar,
            ))  # fmt: skip
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=work, name="hub-download", daemon=True)
    thread.start()
    try:
        _wait_for(thread)
    except BaseException:
        stop.set()
        thread.join(_STOP_S)
        raise
    if isinstance(done[0], BaseException):
        raise done[0]
    return Path(done[0])


def _wait_for(thread: threading.Thread) -> None:
    thread.join()


def _remote_headers(repository: Repository, names: list[str]) -> dict[str, Header]:
    from concurrent.futures import ThreadPoolExecutor

    api = _api()
    with _hub_errors(repository, _cache()), ThreadPoolExecutor(2 * _WORKERS) as pool:
        asked = pool.map(
            lambda name: api.parse_safetensors_file_metadata(repository.name, name, revision=repository.revision), names
        )
        return {
            name: {tensor: (str(info.dtype), tuple(info.shape)) for tensor, info in file.tensors.items()}
            for name, file in zip(names, asked, strict=True)
        }


def _require_space(cache: Path, needed: int, repository: Repository) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if needed + _SPARE_BYTES > free:
        raise CheckpointError(
            f"the weights of '{repository.name}' take {size(needed)} and {size(_SPARE_BYTES)} to spare, "
            f"and '{cache}' has {size(free)} free",
            "free some space, or set HF_HOME to a folder on another disk",
        )


@contextlib.contextmanager
def _hub_errors(repository: Repository, cache: Path) -> Iterator[None]:
    """Errors of `huggingface_hub` and of the disk, as CheckpointErrors with their remedy."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    name, at = repository.name, f"{constants.ENDPOINT}/{repository.name}"
    refusals: Mapping[type[BaseException], tuple[str, str]] = {
        hub.GatedRepoError: (f"'{name}' is gated, and this account has no access",
                             f"accept its terms at {at}, run `hf auth login`, and run again"),
        hub.RepositoryNotFoundError: (f"there is no model '{name}' at {constants.ENDPOINT}",
                                      "check its name, as ORG/NAME; a private one needs `hf auth login`"),
        hub.RevisionNotFoundError: (f"'{name}' has no revision '{repository.revision}'",
                                    f"choose a branch, a tag or a commit of {at}, or leave @REVISION out"),
        hub.EntryNotFoundError: (f"a file of '{name}' is gone", "run again, which asks for the present version"),
    }  # fmt: skip
    try:
        yield
    except CheckpointError:
        raise
    except Exception as failure:
        cause = failure.__cause__
        error = cause if isinstance(cause, hub.HfHubHTTPError) else failure  # such as a status 500
        unanswered = type(error).__name__ in ("ConnectError", "ConnectTimeout")  # of httpx, the library's own client
        if _offline() or unanswered or isinstance(error, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set" if _offline() else f"{constants.ENDPOINT} does not answer"
            what, how = f"files of '{name}' are missing in '{cache}'", ""
            if cached_in(cache / folder_of(name), repository.revision) is None:
                what, how = other_snapshots(cache / folder_of(name), repository) or (what, how)
            fetch = (
                f"on a machine with a network run `{repository.command}`, and copy {folder_of(name)} into that folder"
            )
            raise _Unreachable(f"{what}, and {why}", f"{how}, or {fetch}" if how else fetch) from error
        for kind, (what, remedy) in refusals.items():
            if isinstance(error, kind):
                raise CheckpointError(what, remedy) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"'{cache}' is full",
                "free some space, or set HF_HOME to a folder on another disk: the same command resumes",
            ) from error
        if isinstance(error, PermissionError):
            remedy = "set HF_HOME to a folder that you may write"
            raise CheckpointError(f"'{cache}' cannot be written", remedy) from error
        line = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"the download of '{name}' failed ({type(error).__name__}: {line})", "run again: the same command resumes"
        ) from error
