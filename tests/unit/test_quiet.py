"""Ray's threads cannot write to the program's output."""

from __future__ import annotations

import sys
import threading

import pytest

from tiermoe.cluster.ray_session import without_ray_notices


def test_only_the_threads_of_ray_are_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with without_ray_notices():
        for name in ("ray_listen_error_messages", "mine"):
            thread = threading.Thread(target=print, args=(name,), name=name)
            thread.start()
            thread.join()
        print("main")
    assert sys.stdout is before
    assert capsys.readouterr().out == "mine\nmain\n"
