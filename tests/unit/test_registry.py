"""The registry of runtimes on this machine: private, gone at the end, never believed when stale."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from tiermoe.cluster.processes import ProcessId
from tiermoe.cluster.registry import Entry, Registry
from tiermoe.errors import RuntimeFailure


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "tiermoe")


def _mine(deployment: str) -> Entry:
    return Entry(deployment, "127.0.0.1:1", True, ProcessId.of())


def _leave(registry: Registry, entry: Entry) -> Path:
    """What a process that was killed leaves."""
    registry.folder.mkdir(mode=0o700, exist_ok=True)
    path = registry.folder / f"{entry.deployment}.json"
    path.write_text(json.dumps(asdict(entry) | {"owner": str(entry.owner)}))
    return path


def test_an_entry_is_private_and_goes_with_its_block(registry: Registry) -> None:
    with registry.entered("aaaaaa", "10.0.0.5:6379", local=False) as entry:
        (path,) = registry.folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(registry.folder.stat().st_mode) == 0o700
        assert registry.entries() == [entry]
        assert (entry.address, entry.local, entry.pid) == ("10.0.0.5:6379", False, os.getpid())
    assert registry.entries() == []
    assert not registry.folder.exists()
    with registry.entered("bbbbbb", "h:2", local=True), registry.entered("aaaaaa", "h:1", local=True):
        assert [entry.deployment for entry in registry.entries()] == ["aaaaaa", "bbbbbb"]


def test_stale_entries_are_ignored_and_removed(registry: Registry) -> None:
    own = ProcessId.of()
    stale = {
        "cccccc": replace(own, start=own.start - 6000),  # its pid is another process's now
        "dddddd": replace(own, pid=2**22 + 1),  # over the kernel's largest
        "eeeeee": replace(own, boot="0" * 32),  # of an earlier boot
    }
    paths = [_leave(registry, replace(_mine(name), owner=owner)) for name, owner in stale.items()]
    assert registry.entries() == []
    assert not any(path.exists() for path in paths)


def test_a_start_removes_what_killed_ones_left(registry: Registry) -> None:
    """Only `status` and `down` did, and a killed server's file stayed beside the new one's."""
    own = ProcessId.of()
    left = _leave(registry, replace(_mine("cccccc"), owner=replace(own, start=own.start - 6000)))
    draft = left.with_name(f"dddddd.{2**22 + 1}")
    draft.touch()
    alive, other = _leave(registry, _mine("eeeeee")), left.with_name("notes.1a")
    other.touch()
    with registry.entered("aaaaaa", "h:1", local=True):
        assert sorted(registry.folder.iterdir()) == [registry.folder / "aaaaaa.json", alive, other]


def test_an_entry_stays_while_the_clock_is_set(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` reported no runtime and removed its entry once NTP had set the clock by two seconds."""
    with registry.entered("aaaaaa", "h:1", local=True) as entry:
        started_s = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: started_s(process) + 2.0)
        assert registry.entries() == [entry]
        assert entry.process() is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"deployment": "eeeeee"}', "\x00"])
def test_what_is_no_entry_is_left_alone(registry: Registry, text: str) -> None:
    path = _leave(registry, _mine("eeeeee"))
    path.write_text(text)
    assert registry.entries() == []
    assert path.exists()
    _leave(registry, replace(_mine("ffffff"), owner="1"))  # type: ignore[arg-type]
    assert registry.entries() == []


@pytest.mark.parametrize("link", [False, True])
def test_a_link_or_a_folder_that_others_may_write_is_neither_read_nor_used(
    registry: Registry, tmp_path: Path, link: bool
) -> None:
    if link:
        (tmp_path / "other").mkdir(mode=0o700)
        registry.folder.symlink_to(tmp_path / "other")
    _leave(registry, _mine("aaaaaa"))
    if not link:
        registry.folder.chmod(0o777)
    assert registry.entries() == []
    with pytest.raises(RuntimeFailure, match="cannot list this runtime"), registry.entered("b", "h:1", local=True):
        pytest.fail("entered")
