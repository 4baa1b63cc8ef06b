"""Tables and plots of experiments: pages whose text a person wrote, and pictures."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from PIL import Image

from tiermoe.benchmarks.clone_commands import redraw
from tiermoe.benchmarks.papers import experiment_names, module_of
from tiermoe.cluster.config import configs_dir
from tiermoe.cluster.jobs.bench.experiment import Experiment, Served
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, Spread, fill_tables
from tiermoe.cluster.jobs.bench.page import (
    Figure,
    Panel,
    caption,
    draw,
    over,
    pivot,
    select,
    table,
    table_of,
    write_folder,
)
from tiermoe.cluster.report.files import new_canvas
from tiermoe.errors import ConfigError

_DOCS = configs_dir().parent / "docs" / "results"
WITH_DATA = [name for name in experiment_names() if (_DOCS / f"{name}.json").exists()]


def _row(policy: str, budget: str, tpot_s: list[float], **more: Any) -> dict[str, Any]:
    spread = {"tpot_s": vars(Spread.of(tpot_s)), "experts": vars(Spread.of([8.0]))}
    return {"section": "s", "policy": policy, "budget": budget, "link_gbps": 2.0, "tpot_ms": 1e3 * tpot_s[0],
            "spread": spread, "layers": [{"hits": 1.0}], "quality": None} | more  # fmt: skip


def _page(experiment: Experiment, record: dict[str, Any], before: str) -> str:
    return fill_tables(before, lambda name: table_of(experiment, name, record))


def _report() -> dict[str, Any]:
    rows = [_row("a", "0.25", [0.01, 0.02]), _row("b", "0.25", [0.005, 0.005]), _row("b", "0.5", [0.004])]
    settings = {"model": "tiny", "load_average": 0.5, "links": []}
    bars = [Bar("fast", math.nan, "<=", 1)]
    return Report("x", "emulated", rows, bars, settings, figures={"more": {"n": 3}}).as_dict()


def test_a_folder_has_page_data_and_plots(tmp_path: Path) -> None:
    panel = Panel(kind="bar", each=("budget", "link_gbps"), x="policy", y="tpot_s", title="{budget}")
    sections = (Served("s", ()),)
    experiment = Experiment(name="x", title="X", sections=sections, figures={"x.png": Figure((panel,))})
    write_folder(experiment, _report(), tmp_path)
    assert (tmp_path / "x.md").read_text().startswith("# X\n\n## run\n\n<!-- table: run -->\n\n|")
    (tmp_path / "x.md").write_text("By hand.\n")
    write_folder(experiment, _report(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"x.md", "x.json", "x.png"}
    assert (tmp_path / "x.md").read_text() == "By hand.\n"
    saved = json.loads((tmp_path / "x.json").read_text())
    assert saved["rows"][0]["values"] == {"tpot_s": [0.01, 0.02]}  # without what is constant, and without layers
    assert saved["more"] == {"n": 3}
    assert "layers" not in saved["rows"][0]


def test_tables_select_group_and_pair_rows() -> None:
    record = _report()
    lines = table([("policy", "{policy}"), ("over a", over("a")), ("a over it", over("a", inverse=True))],
                  each=("budget",), heading="### {budget}")(record)  # fmt: skip
    assert lines == [
        "### 0.25", "", "| policy | over a | a over it |", "|---|---|---|", "| a | 1.00 | 1.00 |",
        "| b | 0.38 | 2.67 |", "", "### 0.5", "", "| policy | over a | a over it |", "|---|---|---|", "| b | - | - |",
    ]  # fmt: skip
    assert pivot([("policy", "{policy}")], "{budget}", "{tpot_ms:.0f}", policy=("a", "b"))(record) == [
        "| policy | 0.25 | 0.5 |", "|---|---|---|", "| a | 10 | - |", "| b | 5 | 4 |",
    ]  # fmt: skip
    assert select(record, policy="b", budget="0.5")[0]["values"] == {"tpot_s": [0.004], "experts": [8.0]}
    assert select(record, "more.none") == []


@pytest.mark.parametrize("name", WITH_DATA)
def test_the_pages_of_docs_show_the_data_beside_them(name: str) -> None:
    """Of a page whose tables or data were changed by hand, `write_folder` writes the tables again."""
    record, page = json.loads((_DOCS / f"{name}.json").read_text()), (_DOCS / f"{name}.md").read_text()
    experiment = module_of(name).experiment()
    assert _page(experiment, record, page) == page
    assert all(f"({plotted})" in page for plotted in experiment.figures)
    assert all(f"<!-- table: {table} -->" in page for table in ("run", *experiment.tables) if table != "families")
    for figure in experiment.figures.values():
        assert all(select(record, panel.source, **panel.where) for panel in figure.panels)


def _figures() -> list[tuple[str, Figure, dict[str, Any]]]:
    """The images of docs/results, with their figures and data."""
    found = []
    for file in sorted(_DOCS.glob("*.json")):
        if file.name.endswith(".partial.json"):  # of a run that did not end
            continue
        record = json.loads(file.read_text())
        name = str(record["name"])
        plots = module_of(name).experiment().figures if name in WITH_DATA else {}
        found += [(image, figure, record) for image, figure in plots.items()]
    return found


_FIGURES = _figures()


def test_every_image_of_the_docs_is_drawn_from_data() -> None:
    assert {image for image, _, _ in _FIGURES} == {path.name for path in _DOCS.glob("*.png")}


@pytest.mark.parametrize(("image", "figure", "record"), _FIGURES, ids=[image for image, _, _ in _FIGURES])
def test_an_image_says_where_its_numbers_are_from_and_shows_all_of_them(
    image: str, figure: Figure, record: dict[str, Any]
) -> None:
    """Issue 30: no *emulated* in the image, clipped points, colours reused, a legend of numbers.

    `tiermoe bench redraw docs/results/NAME.json` draws an image again.
    """
    canvas = new_canvas((12.0, 8.0))
    draw(canvas, figure, record)
    canvas.canvas.draw()
    said = caption(figure, record)
    executors, _, rest = said.partition(" | ")
    assert re.match("(emulated|simulated|real)", executors)
    assert record["settings"].get("model", record["settings"].get("shape")) in rest
    assert canvas._suptitle.get_text().replace("\n", " ") == said
    assert Image.open(_DOCS / image).info["Description"] == said  # of the committed file, too

    looks: dict[str, tuple[Any, ...]] = {}
    for axes in canvas.axes:
        (left, right), (bottom, top) = sorted(axes.get_xlim()), axes.get_ylim()
        shown = [line for bars in axes.containers for line in [bars[0]] if isinstance(line, Line2D)]
        for line in shown:
            for x, y in line.get_xydata():
                assert left < x < right
                assert bottom < y < top
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
            look = (line.get_color(), line.get_marker(), line.get_linestyle())
            assert looks.setdefault(label, look) == look  # one name, one look, in all panels
    assert len(set(looks.values())) == len(looks)
    assert not [label for label in looks if re.fullmatch(r"[-+.\d\s]+", label)]


def test_redraw_draws_beside_the_data_and_refuses_what_has_no_figure(tmp_path: Path) -> None:
    for name in ("ndp.json", "host.json"):
        shutil.copy(_DOCS / name, tmp_path)
    redraw([tmp_path / "ndp.json"])
    assert (tmp_path / "ndp-similarity.png").read_bytes() == (_DOCS / "ndp-similarity.png").read_bytes()
    for name in ("host.json", "none.json"):
        with pytest.raises(ConfigError, match=name):
            redraw([tmp_path / name])
    (tmp_path / "ndp-similarity.png").unlink()
    (tmp_path / "ndp-similarity.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        redraw([tmp_path / "ndp.json"])
