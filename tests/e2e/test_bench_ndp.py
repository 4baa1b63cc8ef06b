"""The whole of `bench ndp` on the default model, with one passage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiermoe.cluster.jobs.bench.command import bench_app
from tiermoe.cluster.jobs.bench.ndp import VARIANTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # it makes replicas where there are none yet


def test_the_page_has_every_variant_and_decode_demands_nothing(tmp_path: Path) -> None:
    sizes = ["--documents", "1", "--windows", "1", "--repeats", "1"]
    done = CliRunner().invoke(bench_app, ["ndp", *sizes, "--out", str(tmp_path / "page")], catch_exceptions=False)
    assert done.exit_code == 0
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"ndp.md", "ndp.json", "ndp-similarity.png"}
    record = json.loads((tmp_path / "page" / "ndp.json").read_text())
    assert [row["case"] for row in record["rows"]] == [variant.name for variant in VARIANTS]
    for row in record["rows"]:
        assert 0 < row["ndp_share"] < 1, row["case"]
        assert row["perplexity"] > 1.0
    (demanded,) = [bar for bar in record["bars"] if bar["name"].startswith("bytes demanded by decode")]
    assert demanded["value"] == 0
    page = (tmp_path / "page" / "ndp.md").read_text()
    assert all(variant.name in page for variant in VARIANTS)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(bench_app, ["ndp", "--out", str(tmp_path / "file")])
    assert done.exit_code != 0
    assert "cannot be written" in str(done.exception)
