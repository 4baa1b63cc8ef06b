"""What an unfinished store already holds, so that an interrupted preparation resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ....actors.store_format import FORMAT_VERSION, FileRecord, SourceFile
from ....actors.verified_files import hash_files
from .checkpoint import JOURNAL_NAME
from .write import disk_errors, write_file


class _Record(BaseModel):
    """The journal file. Finished files count only for the very same source, format and converter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    transformers_version: str
    source: tuple[SourceFile, ...]
    finished: tuple[FileRecord, ...]


class Journal:
    """The finished files of a work-in-progress folder.

    Opening it makes the folder, or takes over what an earlier run left there: files whose bytes match
    their recorded digest. What belongs to another source, format or converter is thrown away.

    Args:
        folder: the work-in-progress folder.
        source: the checkpoint's files.
        transformers_version: whose conversion is used.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, source: tuple[SourceFile, ...], transformers_version: str) -> None:
        self._path = folder / JOURNAL_NAME
        self._record = _Record(
            format_version=FORMAT_VERSION,
            transformers_version=transformers_version,
            source=source,
            finished=(),
        )
        with disk_errors(folder):
            earlier = _read(folder)
            if earlier is None or earlier.model_copy(update={"finished": ()}) != self._record:
                if folder.exists():
                    shutil.rmtree(folder)
                folder.mkdir(parents=True)
                self._write()
            else:
                kept = tuple(record for record in earlier.finished if _matches(folder, record))
                self._record = earlier.model_copy(update={"finished": kept})

    def finished(self, name: str) -> FileRecord | None:
        """The record of a finished file; None when it has to be made."""
        return next((record for record in self._record.finished if record.file == name), None)

    def add(self, record: FileRecord) -> None:
        """Note that a file is finished, durably.

        Raises:
            StoreError: the disk is full.
        """
        plain = FileRecord(file=record.file, nbytes=record.nbytes, sha256=record.sha256)
        self._record = self._record.model_copy(update={"finished": (*self._record.finished, plain)})
        self._write()

    def remove(self) -> None:
        """Drop the journal: the folder is about to become a store."""
        with disk_errors(self._path):
            self._path.unlink()

    def _write(self) -> None:
        write_file(self._path, self._record.model_dump_json(indent=1).encode())


def noted(folder: Path) -> frozenset[str] | None:
    """Names that the journal of a folder calls finished, their bytes not looked at; None where there is no journal."""
    record = _read(folder)
    return None if record is None else frozenset(file.file for file in record.finished)


def _read(folder: Path) -> _Record | None:
    try:
        return _Record.model_validate_json((folder / JOURNAL_NAME).read_bytes())
    except (OSError, ValidationError, ValueError):
        return None  # no journal, or a damaged one: start over


def _matches(folder: Path, record: FileRecord) -> bool:
    path = folder / record.file
    try:
        return path.stat().st_size == record.nbytes and hash_files([path]) == [record.sha256]
    except OSError:
        return False
