"""Makes a store from a checkpoint: atomically, resumably, and once for all concurrent callers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rich.console import Console

from ....actors.store.format import DENSE_NAME, MANIFEST_NAME, SourceFile, layer_name, read_manifest
from ....errors import StoreError
from ....proto.private import user_cache
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint, refuse_unsupported
from ...checkpoints.hub import complete
from ...report.tables import byte_progress, size
from .writer import beside, discard, disk_errors, locked, require_space, sync_folder

PARTIAL = ".partial"
_OLD = ".old"
REPLICA_WORK = ".replicas"  # beside a store: unfinished replicas


def default_store_dir(model_dir: Path, cache_dir: Path | None = None) -> Path:
    """The store folder of a checkpoint in the user's cache folder, or in `cache_dir`.

    The name has a digest of the checkpoint's path and files, so a changed checkpoint gets another folder.

    Raises:
        CheckpointError: the checkpoint is missing or malformed.
    """
    return store_dir(_opened(Path(model_dir)), cache_dir)


def prepare(model_dir: Path, out_dir: Path, *, progress: bool = True, force: bool = False) -> Path:
    """Make the store `out_dir` from the checkpoint `model_dir`; the store folder.

    A current store is unchanged, and an interrupted preparation resumes. `out_dir` appears atomically.

    Args:
        progress: show a progress bar on stderr.
        force: replace a current store, too.

    Raises:
        CheckpointError: the checkpoint is missing, malformed, not finite or not supported.
        StoreError: `out_dir` is something other than a store, or the disk is full.
    """
    return _prepare(_opened(Path(model_dir), progress), Path(out_dir), progress=progress, force=force)


def ensure_prepared(
    model_dir: Path, out_dir: Path | None = None, *, cache_dir: Path | None = None, progress: bool = True
) -> Path:
    """The store of a checkpoint, made now if it is missing or the checkpoint changed. One of several callers makes it.

    Args:
        model_dir: a checkpoint, or a store, which is returned.
        out_dir: the store folder; by default one in the cache folder.

    Raises:
        CheckpointError, StoreError: as `prepare`.
    """
    model_dir = Path(model_dir)
    if is_store(model_dir):
        read_manifest(model_dir)
        return model_dir
    checkpoint = _opened(model_dir, progress)
    out = Path(out_dir) if out_dir is not None else store_dir(checkpoint, cache_dir)
    return _prepare(checkpoint, out, progress=progress, force=False)


def is_store(path: Path) -> bool:
    """Whether a folder is an expert store, not a checkpoint; bytes are not verified."""
    return (path / MANIFEST_NAME).is_file() and (path / DENSE_NAME).is_file()


def _opened(model_dir: Path, progress: bool = True) -> Checkpoint:
    """The checkpoint; missing weights of a hub are downloaded, unless its configuration is refused."""
    refuse_unsupported(model_dir)
    complete(model_dir, progress=progress)
    return open_checkpoint(model_dir)


def _prepare(checkpoint: Checkpoint, out: Path, *, progress: bool, force: bool) -> Path:
    if not force and is_current(out, checkpoint.source):
        return out
    refuse_foreign(out)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, quiet=not progress)
    with locked(out, console) as waited:
        # the last holder of the lock may have made this store, even if `force` asked for a new one
        if (not force or waited) and is_current(out, checkpoint.source):
            return out
        _make(checkpoint, out.resolve(), console)  # a link stays one
    return out


def _make(checkpoint: Checkpoint, out: Path, console: Console) -> None:
    """Convert into a folder beside `out`, then rename it. The caller holds the lock."""
    from ...checkpoints.left_out import first_few
    from .convert import plan_store, write_store  # imports torch, which takes seconds: only when needed

    partial, old = beside(out, PARTIAL), beside(out, _OLD)
    with console.status(f"checking {checkpoint.name}"):
        conversion = plan_store(checkpoint)
    if left_out := conversion.left_out:
        said = f"left out, as {type(conversion.model).__name__} has no such tensors: {first_few(left_out)}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    needed, total = conversion.written_bytes(), conversion.total_bytes()
    if needed < total:
        console.print(f"{size(total - needed)} of experts stay in the checkpoint; {size(needed)} are written")
    remedy = "free some space, or name a folder on another disk as OUT"
    require_space(partial, needed, "the store", partial.parent, remedy)
    with byte_progress(console) as bar:
        task = bar.add_task(f"preparing {checkpoint.name}", total=total)
        write_store(conversion, partial, lambda nbytes: bar.advance(task, nbytes))
    with disk_errors(out):
        discard(old)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        sync_folder(out.parent)
        discard(old)
        discard(beside(out, REPLICA_WORK))  # of the replaced store


def is_current(out: Path, source: tuple[SourceFile, ...]) -> bool:
    """Whether `out` is a complete store of this checkpoint."""
    try:
        manifest = read_manifest(out)
    except StoreError:
        return False
    paths = {out / record.file: record.nbytes for record in manifest.files()}
    return manifest.source == source and all(p.is_file() and p.stat().st_size == size for p, size in paths.items())


def refuse_foreign(out: Path) -> None:
    """Refuse to replace a folder that is not a store (a damaged one counts): it may be the user's."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    first = layer_name(0).removesuffix(".safetensors")
    marks = sum((out / name).is_file() for name in (MANIFEST_NAME, DENSE_NAME)) + any(out.glob(f"{first}*"))
    if marks < 2:
        raise StoreError(f"{out} exists and is not an expert store", "remove it, or choose a new folder")


def store_dir(checkpoint: Checkpoint, cache_dir: Path | None) -> Path:
    """`default_store_dir` of an open checkpoint."""
    text = "\n".join([str(checkpoint.path), *(file.model_dump_json() for file in checkpoint.source)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    if cache_dir is None:
        cache_dir = user_cache() / "stores"
    return cache_dir / f"{checkpoint.name}-{digest}"


