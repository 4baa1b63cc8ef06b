"""What a server looks at beside its files: whether there is room where it writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tiermoe.cluster.api.settings import ApiSettings
from tiermoe.cluster.jobs import watched
from tiermoe.cluster.jobs.watched import FileWatch, checks_of, ray_room_checks


@pytest.mark.parametrize("which", ["Ray's files", "Ray's shared memory", "the request log"])
def test_a_full_disk_is_said_once_and_so_is_its_end(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, log, shm = tmp_path / "session", tmp_path / "logs" / "log", tmp_path / "shm"
    for folder in (session, log.parent, shm):
        folder.mkdir()
    monkeypatch.setattr(watched, "SHARED_MEMORY", shm)
    full = {"Ray's files": session, "Ray's shared memory": shm, "the request log": log.parent}[which]
    free = dict.fromkeys((session, log.parent, shm), 2**30)
    monkeypatch.setattr(watched.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    checks = checks_of(ApiSettings(request_log_file=str(log)), None) | ray_room_checks(session, local=True)
    said = list[str]()
    watch = FileWatch(checks, said.append)
    for free[full] in (2**30, 2**20, 0, 2**30, 2**30):
        watch.look()
    assert len(said) == 2
    assert said[0].startswith(f"the disk of '{full}' is full: ")
    assert said[0].endswith("; make room there")
    assert said[1] == f"the disk of '{full}' is right again"


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    said = list[str]()
    watch = FileWatch(ray_room_checks(tmp_path / "gone", local=True), said.append)
    for _ in range(2):
        watch.look()
    assert said == [f"'{tmp_path / 'gone'}' cannot be looked at: No such file or directory"]
