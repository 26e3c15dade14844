"""The slow measurements are not run here; that each can still be started is."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.language_tasks import TASKS
from tests.helpers.pages import ROOT

SCRIPTS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "benchmarks").glob("*/*.py")
    if "def main()" in path.read_text() and path.parent.name != "shared"
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_starts_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its imports are there, and it has a small version."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    if "fuzzing" in name:
        pytest.importorskip("atheris")
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    if "zoo." not in name and "fuzzing" not in name:
        assert "--quick" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.parametrize("name", ["trec", "emotion", "snli"])
def test_answers_are_those_of_the_classes(name: str, shared: Path) -> None:
    """By the first letters of both: DESC is called description."""
    classes = json.loads((shared / "data" / name / "note.json").read_text())["classes"]
    assert [answer[:3] for answer in TASKS[name].answers] == [known[:3].lower() for known in classes]


@pytest.mark.parametrize("name", ["frontier", "language_models"])
def test_the_tables_of_committed_results_are_made_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is run: `--shown` reads what was found, and says what it says in benchmarks/results."""
    results = ROOT / "benchmarks" / "results"
    given = shutil.copy(results / f"{name}.json", tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--shown", "--json", str(given)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.quality.{name}").main()
    assert ended.value.code in (0, 1)  # 1: a bound is missed
    assert (tmp_path / f"{name}.md").read_text() == (results / f"{name}.md").read_text()
    assert capsys.readouterr().out


def test_cells_with_more_steps_have_a_curve_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few that were trained longest must not take the others out of the curve of all."""
    monkeypatch.syspath_prepend(str(ROOT))
    tables = importlib.import_module("benchmarks.quality.frontier_tables")

    def cell(*steps: int) -> dict[str, Any]:
        way = {"score": 20.0, "cpu": 1.0, "passes": [1.0, 1.0], "code": ""}
        return {"target": 10.0, "oracle": 30.0, "ways": {f"refined, no move, {n} steps": way for n in steps}}

    cells = {f"letters narrow twin 100 {draw}": cell(10, 30, 100) for draw in range(3)}
    cells["letters narrow twin 100 0"] = cell(10, 30, 100, 300)
    found = tables.refined(cells, 100)
    assert [(list(curve.points), curve.last.cells) for curve in found] == [([10, 30, 100], 3), ([10, 30, 100, 300], 1)]
    assert tables.zoo_curves(cells)["refined, no move"].last.cells == 3
