"""The cache of Hugging Face on this machine: where a repository's files are, and which one a folder is of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError

_COMMIT, _SHORT_COMMIT = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{7,39}")
_FOLDER = "models--"
_SHOWN = 4  # snapshots that a message names


@dataclass(frozen=True)
class Repository:
    """A model of a hub. revision: branch, tag or commit. gguf: a file, or the type of one, such as Q4_K_M."""

    name: str
    revision: str = "main"
    gguf: str | None = None

    @property
    def command(self) -> str:
        """What downloads it by hand."""
        name = self.name if self.gguf is None else f"{self.name} --include '*{self.gguf}*'"
        return f"hf download {name}" + ("" if self.revision == "main" else f" --revision {self.revision}")


def folder_of(repo: str) -> str:
    """The name of a repository's folder."""
    return _FOLDER + repo.replace("/", "--")


def snapshot_of(path: Path) -> Path:
    """A folder `models--org--name` of a cache as the snapshot of its branch main; any other folder as it is."""
    if not path.name.startswith(_FOLDER) or not (path / "snapshots").is_dir():
        return path
    found = cached_in(path, "main")
    if found is not None:
        return found
    there = snapshots_in(path)
    if len(there) == 1:
        return there[0]
    raise CheckpointError(
        f"'{path}' names no snapshot for the branch main, and has {len(there)}{_listed(there)}",
        "pass one of its folders snapshots/COMMIT",
    )


def snapshots_in(folder: Path) -> list[Path]:
    """The snapshots in a folder `models--org--name`, by commit."""
    there = folder / "snapshots"
    return sorted(path for path in there.iterdir() if path.is_dir()) if there.is_dir() else []


def _listed(snapshots: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in snapshots[:_SHOWN])
    return f": {names}{', ..' if len(snapshots) > _SHOWN else ''}" if names else ""


def other_snapshots(folder: Path, repository: Repository) -> tuple[str, str] | None:
    """Which snapshots of a repository are there, in place of the one that is asked for, and how to name one.

    None: there is none.
    """
    there = snapshots_in(folder)
    if not there:
        return None
    tail = "" if repository.gguf is None else f":{repository.gguf}"
    what = f"'{folder}' has no snapshot for {repository.revision}, and has {len(there)}{_listed(there)}"
    return what, f"name one, as {repository.name}@{there[0].name}{tail}"


def cached_in(folder: Path, revision: str) -> Path | None:
    """The snapshot of a revision in a folder `models--org--name`; None where it is not there."""
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            short = [path.name for path in snapshots_in(folder) if path.name.startswith(revision)]
            if not _SHORT_COMMIT.fullmatch(revision) or len(short) != 1:
                return None
            commit = short[0]
    found = folder / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def repository_of(folder: Path) -> Repository | None:
    """The repository at the commit of a snapshot's folder; None where it is not one."""
    path = folder.resolve()
    above = [parent.name for parent in path.parents[:2]]
    if not _COMMIT.fullmatch(path.name) or above[:1] != ["snapshots"] or not above[-1].startswith(_FOLDER):
        return None
    return Repository(above[-1].removeprefix(_FOLDER).replace("--", "/"), path.name)


def name_of(folder: Path) -> str:
    """A checkpoint's name for people: the folder's; in a Hugging Face cache the model's."""
    repository = repository_of(folder)
    return repository.name.rpartition("/")[2] if repository is not None else folder.resolve().name or "model"
