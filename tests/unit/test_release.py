"""What a tag releases, by .github/workflows/release.yml: wheels of every Python that is supported, and each image."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).resolve().parents[2]
_FLOWS = sorted((_ROOT / ".github" / "workflows").glob("*.yml"))
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_PYTHONS = [
    line.rpartition(" ")[2] for line in _PROJECT["project"]["classifiers"] if re.search(r"Python :: 3\.\d", line)
]


def _jobs(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return jobs


@pytest.mark.parametrize("path", _FLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_jobs_that_exist_and_versions_of_actions(path: Path) -> None:
    jobs = _jobs(path)
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(jobs)
        for used in [step["uses"] for step in job["steps"] if "uses" in step]:
            assert re.search(r"@v\d", used), used


def test_wheels_of_every_python_and_both_machines() -> None:
    jobs, tool = _jobs(_ROOT / ".github/workflows/release.yml"), _PROJECT["tool"]["cibuildwheel"]
    assert tool["build"].split() == [f"cp{version.replace('.', '')}-manylinux_*" for version in _PYTHONS]
    assert jobs["try"]["strategy"]["matrix"]["python"] == _PYTHONS
    for job, key in (("wheels", "include"), ("try", "target")):
        machines = [each["architecture"] for each in jobs[job]["strategy"]["matrix"][key]]
        assert machines == ["x86_64", "aarch64"]


def test_each_image_of_the_dockerfile() -> None:
    stages = re.findall(r"^FROM base AS (\w+)$", (_ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert _jobs(_ROOT / ".github/workflows/release.yml")["images"]["strategy"]["matrix"]["target"] == stages
