"""Recipes: every table of the paper plans and runs on stand-ins, goes on after an interrupt, and adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taskferry import TaskferryError
from taskferry.bench import code as code_module
from taskferry.bench import running
from taskferry.bench.planning import plan_recipe
from taskferry.bench.recipe import load_recipe, recipe_names
from taskferry.bench.rows import Mover, rows
from taskferry.bench.running import BASE_ROWS, ORACLE, TARGET, TUNED, Reporter, run_recipe
from taskferry.bench.smoke import smoke_failures
from taskferry.bench.standin import stand_in
from taskferry.bench.tables import collect, from_json, lines, markdown, refusals, to_json
from taskferry.collect.scale import moved_by
from taskferry.methods import CannotMove, methods, run
from taskferry.objectives.objectives import Classifier, teacher_labels
from tests.helpers.command import taskferry
from tests.helpers.tiny import job, rebuilt, relative
from tests.properties.equivariant import distance

PAPER = [name for name in recipe_names() if name.startswith("paper/")]


def test_every_table_of_the_paper_has_a_recipe() -> None:
    assert [f"paper/table{n}" for n in (*"12345", *"ABCDEFGH")] == PAPER


@pytest.mark.parametrize("name", PAPER)
def test_sizes_and_names_of_the_paper(name: str) -> None:
    """Parameters of the towers as published, without a download."""
    plan = plan_recipe(load_recipe(name), Path("nowhere"))
    millions = {given.given: size / 1e6 for given in plan.models.values() for size in [given.parameters]}
    published = {"B-16-laion2B": 86.2, "B-16-DataComp": 86.2, "plus_clip_240": 117.2, "L-14": 304.0, "t5-large": 302.0,
                 "t5-3b": 1208.0}  # fmt: skip
    for given, found in millions.items():
        (expected,) = [size for part, size in published.items() if part in given]
        assert found == pytest.approx(expected, rel=0.01), given
    assert len(plan.tasks) == (5 if name == "paper/table2" else 8)


def test_the_plan_s_arithmetic_is_the_paper_s() -> None:
    """Fine-tuning B sees 2,000 × 128 samples forward and backward: 6 operations a parameter and token."""
    plan = plan_recipe(load_recipe("paper/table4"), Path("nowhere"))
    A, B = plan.models["B16-datacomp"], plan.models["L14-datacomp"]
    assert (A.tokens, B.tokens) == (197, 257)
    assert plan.finetune_flops == 8 * 6.0 * 2000 * 128 * (A.parameters * 197 + B.parameters * 257)
    names = ("naive", "theseus", "bico", "bico, automatic scale", "few-shot", "few-shot, from bico")
    a, b = (sum(rows()[name].row.passes[side] for name in names) for side in (0, 1))
    assert plan.transfer_flops == pytest.approx(8 * 100 * 6.0 * (a * A.parameters * 197 + b * B.parameters * 257))


def test_rows_are_declared_by_their_methods() -> None:
    """In the order of the methods, each under a name of its own; a row to beat is a row."""
    found = rows()
    declared = [row.name for known in methods().values() for row in known.shown.rows]
    assert sorted(found) == sorted(declared)
    places = [kind.method.shown.place for kind in found.values()]
    assert places == sorted(places)
    assert len({known.shown.place for known in methods().values()}) == len(methods())
    for name, kind in found.items():
        kind.method.checked(kind.row.settings)
        assert set(kind.row.beats) <= {*found, TARGET}, name
    curves = [kind.row.curve for kind in found.values() if kind.row.curve is not None]
    assert len(set(curves)) == len(curves)  # each its own colour and mark
    assert {name for name, kind in found.items() if kind.costly} >= {"few-shot", "distil"}
    assert not found["naive"].drawn


def test_a_mover_scales_what_its_method_did_not() -> None:
    given = job("vit")
    mover = Mover(given)
    moved, scale, seconds = mover.move("bico")
    assert scale == 1.0
    assert seconds > 0
    auto, best, _ = mover.move("bico, automatic scale")
    for name, delta in moved.deltas.items():  # judged on folds, moved by all samples
        assert relative(auto.deltas[name], delta) < 1e-9, name
    folded = given.in_folds()
    assert best == folded.best_scale(run("bico", folded).judged).best
    masked, scale, _ = mover.move("gradfix")
    assert scale == 1.0
    auto, best, _ = mover.move("gradfix, automatic scale")
    assert auto is masked
    assert best != 1.0
    own, scale, _ = mover.move("twofold")  # at its best already, or refused
    curve = run("twofold", given).curve
    assert curve is not None
    assert scale == float(curve.helps)
    assert distance(own, run("twofold", given).tau) < 1e-9
    with pytest.raises(CannotMove, match="equal widths"):  # what an analysis tells beside its other rows
        Mover(job("vit", (16, 2), (24, 2))).move("bico, input-only")
    with pytest.raises(CannotMove, match="the teacher labels classes"):
        Mover(job("llama")).move("bico, teacher")


@pytest.mark.parametrize("name", ["bert-classifier", "vit"])
def test_a_teacher_s_labels_replace_those_of_the_data(name: str) -> None:
    """Nothing that was made from the labels before is used again: losses, heads, sums."""
    given = job(name)
    mover = Mover(given)
    plain = mover.move("bico")[0]
    taught = mover.move("bico, teacher")[0]
    head = given.pair.objectives[0]
    assert isinstance(head, Classifier)
    with moved_by(given.source, given.tau) as set_scale:
        set_scale(1.0)
        labels = teacher_labels(given.source, given.calibration.side(0), head)
    fresh = rebuilt(given, calibration=given.calibration.with_labels(labels))
    assert distance(taught, run("bico", fresh).tau) < 1e-9
    assert distance(taught, plain) > 1e-3
    assert distance(mover.move("bico")[0], plain) == 0


@pytest.mark.parametrize(
    "name", ["paper/tableB", *(pytest.param(f"paper/table{n}", marks=pytest.mark.every) for n in "123G")]
)
def test_stand_ins_run_from_end_to_end(name: str, tmp_path: Path) -> None:
    recipe, places = stand_in(load_recipe(name), tmp_path)
    records = run_recipe(recipe, name, places)
    cells = sorted(recipe.cells(), key=lambda cell: cell.task)
    assert {row for cell in cells for row in cell.rows} == set(recipe.rows)
    for record, cell in zip(records, cells, strict=True):
        assert [entry["row"] for entry in record["rows"]] == [*BASE_ROWS, *cell.rows]
        refused = [entry["row"] for entry in record["rows"] if "refused" in entry]
        assert not refused
        assert all(0 <= entry["score"] <= 100 for entry in record["rows"])
    page = markdown(collect(records))
    assert all(f"| {row} |" in page for row in [*BASE_ROWS, *recipe.rows])


class Stop(Reporter):
    """Interrupts a run after some cells."""

    def __init__(self, after: int) -> None:
        self.after, self.cells = after, 0

    def score(self, record: dict[str, Any]) -> None:
        if self.cells == self.after and record["row"] == "bico":
            raise KeyboardInterrupt

    def cell(self, done: int, total: int, cell: object) -> None:
        self.cells = done


class Never(Reporter):
    """Whatever is computed again fails the test."""

    def score(self, record: dict[str, Any]) -> None:
        raise AssertionError(f"computed again: {record}")

    def training(self, model: str, task: str, step: int, steps: int) -> None:
        raise AssertionError(f"trained again: {model} on {task}")


@pytest.mark.every
def test_a_changed_recipe_takes_no_old_results(tmp_path: Path) -> None:
    """Protocol, heads, models and data are part of a result's identity."""
    recipe, places = stand_in(load_recipe("paper/tableG"), tmp_path)
    recipe = recipe.model_copy(update={"rows": ["naive"], "tasks": {"mnist": recipe.tasks["eurosat"]}})
    run_recipe(recipe, "t", places)
    run_recipe(recipe, "t", places, Never())
    longer = recipe.finetune.model_copy(update={"steps": 3})
    swapped = {**recipe.models, "L14-datacomp": recipe.models["B16-datacomp"]}
    for change in ({"finetune": longer}, {"test_samples": 9}, {"models": swapped}):
        with pytest.raises(AssertionError, match="again"):
            run_recipe(recipe.model_copy(update=change), "t", places, Never())


def test_rows_of_another_code_are_made_again_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, places = stand_in(load_recipe("paper/tableG"), tmp_path)
    recipe = recipe.model_copy(update={"rows": ["naive", "bico"], "tasks": {"mnist": recipe.tasks["eurosat"]}})
    before = run_recipe(recipe, "t", places)
    told: list[str] = []

    class Told(Reporter):
        def score(self, record: dict[str, Any]) -> None:
            told.append(record["row"])

    code = running.code
    monkeypatch.setattr(running, "code", lambda row: "other" if row == "bico" else code(row))
    after = run_recipe(recipe, "t", places, Told())
    assert set(told) == {*BASE_ROWS, "bico"}  # what stands beside it is scored with it
    assert [[(e["row"], e["score"]) for e in r["rows"]] for r in after] == [
        [(e["row"], e["score"]) for e in r["rows"]] for r in before
    ]
    run_recipe(recipe, "t", places, Never())


def test_a_row_rests_on_the_code_that_makes_it() -> None:
    """On what its method imports or runs by name, and on nothing else; words about the code do not count."""
    found = rows()
    assert found["bico"].code == found["bico, automatic scale"].code != found["theseus"].code
    reached = code_module._reached("taskferry.methods.distil")
    assert {"taskferry.methods.bico", "taskferry.linalg.procrustes", "taskferry.data.augmentation"} <= reached
    assert "taskferry.methods.gradfix" not in reached
    assert not any(name.startswith(("taskferry.cli", "taskferry.report")) for name in reached)


def test_code_is_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "taskferry_probe.py"
    hashes = []
    for text in ("def f():\n    return 1\n", '"""Words."""\n\ndef f():  # more\n    """Too."""\n    return 1\n',
                 "def f():\n    return 2\n"):  # fmt: skip
        file.write_text(text)
        code_module._parsed.cache_clear()
        hashes.append(code_module._parsed("taskferry_probe")[0])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_draw_that_cannot_be_made_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    recipe, places = stand_in(load_recipe("paper/table3"), tmp_path)
    recipe = recipe.model_copy(update={"per_class": [1, 500], "rows": ["naive", "bico"]})
    records = run_recipe(recipe, "t", places)
    few = [r for r in records if r["cell"]["per_class"] == 500]
    assert all("500 are asked for" in entry["refused"] for record in few for entry in record["rows"])
    page = markdown(collect(records), "K", refusals(records))
    assert "500 are asked for (1 of 4 draws)" in page or "500 are asked for (2 of 4 draws)" in page


@pytest.mark.every
def test_heads_follow_the_kind(tmp_path: Path) -> None:
    """A probe scores image-text models where the recipe says so, and then the target depends on the draw."""
    recipe, places = stand_in(load_recipe("paper/table4"), tmp_path)
    changes = {"kind": "probe", "rows": ["naive"], "seeds": 3, "test_samples": 16, "samples": [12]}
    records = run_recipe(recipe.model_copy(update=changes), "t", places)
    (scores,) = collect(records).values()
    draws = [tuple(scores[TARGET][task].values()) for task in scores[TARGET]]
    assert any(len(set(values)) > 1 for values in draws)
    fixed = run_recipe(
        recipe.model_copy(update={**changes, "kind": "zero-shot", "objective": "prototypes"}), "u", places
    )
    (scores,) = collect(fixed).values()
    assert all(len(set(scores[TARGET][task].values())) == 1 for task in scores[TARGET])


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    recipe, places = stand_in(load_recipe("paper/table5"), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, "t", places, Stop(2))
    file = places.work / "t.jsonl"
    assert len(file.read_text().splitlines()) == 2
    with file.open("a") as out:
        out.write('{"cell": {"half": ')  # what a kill in the middle of a write leaves
    after = run_recipe(recipe, "t", places)
    again = run_recipe(recipe, "t", places, Never())
    fresh, elsewhere = stand_in(load_recipe("paper/table5"), tmp_path / "fresh")
    whole = run_recipe(fresh, "t", elsewhere)

    def scores(records: list[dict[str, Any]]) -> list[Any]:
        return [[(e["row"], e["score"]) for e in record["rows"]] for record in records]

    assert scores(after) == scores(again) == scores(whole)
    assert len(file.read_text().splitlines()) == len(list(recipe.cells())) == len(after)


def record(task: str, seed: int, count: int, **scores: float) -> dict[str, Any]:
    cell = {"source": "a", "target": "b", "task": task, "sampler": "random", "samples": count, "seed": seed}
    names = {"target": TARGET, "oracle": ORACLE, "tuned": TUNED}
    return {"cell": cell, "rows": [{"row": names.get(row, row), "score": value} for row, value in scores.items()]}


def test_tables_add_up() -> None:
    records = [
        record("x", 0, 100, target=50.0, oracle=90.0, tuned=95.0, bico=60.0, few=70.0),
        record("x", 1, 100, target=50.0, oracle=90.0, tuned=95.0, bico=70.0),
        record("y", 0, 100, target=20.0, oracle=40.0, tuned=45.0, bico=30.0, few=20.0),
        record("y", 1, 100, target=20.0, oracle=40.0, tuned=45.0, bico=20.0),
    ]
    found = {line.row: line for line in lines(collect(records)["a", "b", "random", 100], 100)}
    bico, few = found["bico"], found["few"]
    assert bico.tasks == {"x": 65.0, "y": 25.0}
    assert bico.average == 45.0
    assert bico.draws == 2
    assert bico.gain == 10.0
    assert bico.recovered == pytest.approx(10 / 30)
    assert bico.spread == pytest.approx(0.0)  # both draws average to 45
    assert few.draws == 1
    assert few.gain == 10.0
    assert few.spread is None
    assert found[ORACLE].recovered == 1.0
    assert found[TARGET].recovered is None
    assert from_json(json.loads(json.dumps(to_json(collect(records))))) == collect(records)
    page = markdown(collect(records))
    assert "| bico | 100 | 65.0 | 25.0 | 45.0 ± 0.0 (+10.0) | 33 % |" in page
    assert "| few (1 draw, 2 tasks) | 100 |" in page
    assert page.count(f"| {TARGET} |") == 1
    probed = [
        record("x", d, n, target=40.0 + d + n, oracle=90.0, tuned=90.0, bico=60.0) for d in (0, 1) for n in (1, 5)
    ]
    page = markdown(collect(probed))
    assert "| target | 1 | 41.5 | 41.5 ± 0.7" in page
    assert "| target | 5 | 45.5 | 45.5 ± 0.7" in page


def test_the_smoke_run_knows_a_wrong_order() -> None:
    right = {"target": 50.0, "oracle": 95.0, "tuned": 96.0, "naive": 49.0, "theseus": 55.0, "bico": 70.0}
    right |= {"bico, automatic scale": 80.0, "twofold": 69.5}
    good = [record("x", 0, 100, **right)]
    assert smoke_failures(good, 100.0) == []
    assert "400 CPU-seconds" in smoke_failures(good, 400.0)[0]
    wrong = {"naive": 60.0, "theseus": 75.0, "bico": 40.0, "oracle": 70.0, "tuned": 10.0, "twofold": 68.5}
    for row, value in wrong.items():
        bad = [record("x", 0, 100, **{**right, row: value})]
        assert smoke_failures(bad, 100.0), row


def test_mistakes_in_a_recipe_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("title: x\nmodels: {}\npairs: [[a, b]]\ntasks: nlp5\nrows: [magic]\ncolour: red\n")
    with pytest.raises(TaskferryError) as caught:
        load_recipe(str(file))
    assert "unknown setting 'colour'" in str(caught.value)
    file.write_text("title: x\nmodels: {}\npairs: [[a, b]]\ntasks: nlp5\nrows: [magic]\n")
    with pytest.raises(TaskferryError) as caught:
        load_recipe(str(file))
    assert all(part in str(caught.value) for part in ("no model 'a'", "no row 'magic'", "samples or per_class"))
    file.write_text("title: x\nmodels: {}\npairs: []\ntasks: nowhere\nrows: []\n")
    with pytest.raises(TaskferryError, match="no tasks 'nowhere'"):
        load_recipe(str(file))


@pytest.mark.every
def test_the_command_runs_stand_ins(tmp_path: Path) -> None:
    shown = taskferry("bench", "run", "paper/table4", "--stand-in", cwd=tmp_path).out
    assert "few-shot, from bico" in shown
    assert "recovered" in shown
    assert not list(tmp_path.iterdir())  # stand-ins leave nothing


def test_the_command(tmp_path: Path) -> None:
    plan = taskferry("bench", "run", "paper/table1", "--dry-run", "--json").json
    assert plan["models"]["B16plus-laion400m"]["tokens"] == 226
    listed = taskferry("bench", "recipes", "--json").json
    assert set(listed) == set(recipe_names())
    assert "no recipe 'paper/table99'" in taskferry("bench", "run", "paper/table99", code=2).err
    lost = taskferry("bench", "run", "zoo/table1", "--dry-run", "--models", tmp_path, code=2).err
    assert "--models" in lost
    json.dumps(plan)
