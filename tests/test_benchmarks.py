"""The slow measurements are not run here: each can be started, recipes can be read, tables are those of the results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.language.tasks import TASKS
from benchmarks.paper.samplers import draw
from benchmarks.shared import cells, tables
from benchmarks.shared.rows import ROWS
from taskferry import TaskferryError
from taskferry.methods import methods
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
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    if not name.endswith(("fuzzing", "zoo_tasks", "example_models")):
        assert "--quick" in capsys.readouterr().out


def test_pages_have_the_tables_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "shared" / "pages.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_recipe_can_be_read() -> None:
    names = [f"paper/table{n}" for n in (*"12345", *"ABDEFGH")]
    assert set(names) < set(cells.recipe_names())
    for name in cells.recipe_names():
        recipe = cells.load_recipe(name)
        assert {model for pair in recipe.pairs for model in pair} <= set(recipe.models)
        assert set(recipe.rows) <= set(ROWS)
        assert next(recipe.cells())


def test_rows_are_those_of_methods() -> None:
    for name, row in ROWS.items():
        if row.method in methods():
            methods()[row.method].checked(row.settings)
        else:
            assert row.method in ("", "natural"), f"{name}: no method {row.method}"


def test_tables_add_up() -> None:
    def cell(*rows: float) -> dict[str, object]:
        shown = {name: {"score": value, "cpu": 1.0} for name, value in zip(("BiCo", "THESEUS"), rows, strict=False)}
        return {"target": 50.0, "oracle": 90.0, "source": 95.0, "rows": shown}

    found = {
        "t x a b random 100 0": cell(60.0, 70.0),
        "t x a b random 100 1": cell(70.0),
        "t y a b random 100 0": cell(40.0),
    }
    bico = tables.summed(tables.keyed(found), "BiCo")
    assert bico is not None
    assert bico.share == pytest.approx((15 - 10) / 80)  # the mean over the draws of each task
    assert (bico.least, bico.worst, bico.cells, bico.places) == (-10.0, "y, a → b", 3, 2)
    assert "| BiCo | 100 | 65.0 | 40.0 | 52.5 (+6.7) | 17 % |" in tables.scores(found)


class Labelled:
    labels = tuple(i % 3 for i in range(30))

    def __len__(self) -> int:
        return 30


def test_samplers_take_what_they_say() -> None:
    import torch

    X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    samples = Labelled()

    def classes(sampler: str, count: str) -> list[int]:
        chosen = draw(samples, sampler, count, 0, lambda: X)
        assert len(set(chosen)) == len(chosen)
        return sorted(samples.labels[i] for i in chosen)

    assert classes("class-balanced", "6") == classes("random", "2K") == [0, 0, 1, 1, 2, 2]
    assert len(set(classes("single-class", "5"))) == len(set(classes("half-class", "5"))) == 1
    centres = torch.stack([X[[i for i in range(30) if i % 3 == c]].mean(0) for c in range(3)])
    distance = [float((X[i] - centres[i % 3]).norm()) for i in range(30)]
    near, far = (sum(distance[i] for i in draw(samples, f"centroid-{n}", "6", 0, lambda: X)) for n in ("near", "far"))
    assert near < far
    with pytest.raises(TaskferryError, match="11 are asked for"):
        draw(samples, "random", "11K", 0, lambda: X)


@pytest.mark.real
@pytest.mark.parametrize("name", ["trec", "emotion"])
def test_answers_are_those_of_the_classes(name: str, shared: Path) -> None:
    """By the first letters of both: DESC is called description."""
    classes = json.loads((shared / "data" / name / "note.json").read_text())["classes"]
    assert [answer[:3] for answer in TASKS[name].answers] == [known[:3].lower() for known in classes]


def test_the_zoo_is_small_and_says_how_it_was_made() -> None:
    folders = [p.parent for p in (ROOT / "benchmarks" / "zoo").glob("*/training.json")]
    assert {p.name for p in folders} == {"narrow", "wide", "twin", "deep"}
    assert sum(f.stat().st_size for p in folders for f in p.iterdir()) < 30e6
    for folder in folders:
        record = json.loads((folder / "training.json").read_text())
        assert record["command"] == f"python benchmarks/zoo/pretrain_zoo.py {folder.name}"
        assert record["log"][-1]["step"] == record["steps"]
