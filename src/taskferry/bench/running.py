"""Running a recipe: fine-tune sources and targets, draw calibration sets, move, score. Every step can be resumed.

>>> records = run_recipe(load_recipe("zoo/table1"), Places(models, data, work))
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from taskferry.bench.code import code_of
from taskferry.bench.recipe import Cell, Recipe
from taskferry.bench.rows import SCORED, Mover, rows
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch
from taskferry.data.data import Samples, load_samples
from taskferry.data.samplers import choose
from taskferry.disk.files import hash_parameters
from taskferry.errors import TaskferryError
from taskferry.evaluation import Pool, evaluate
from taskferry.evaluation.pool import LazyBatches
from taskferry.methods import Job
from taskferry.models import Loaded, load_model
from taskferry.models.loaded import to_device
from taskferry.objectives.heads import zero_shot
from taskferry.objectives.objectives import Classifier, LinearProbe, NewHead, Prototypes
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.settings import CalibrationSettings
from taskferry.taskvector import TaskVector
from taskferry.training import finetune

TARGET, ORACLE, TUNED = "target", "target, fine-tuned (oracle)", "source, fine-tuned"
BASE_ROWS = (TARGET, ORACLE, TUNED)
Record = dict[str, Any]
KEPT = 2000  # test samples that are kept as tensors


@dataclass(frozen=True)
class Places:
    """Where models and data are, and where results and fine-tunes are kept."""

    models: Path
    data: Path
    work: Path
    device: str = "auto"

    def records(self, name: str) -> Path:
        """The file of a recipe's finished cells."""
        return self.work / f"{name.replace('/', '-')}.jsonl"


@dataclass
class Reporter:
    """What a run tells while it works; this one is silent."""

    def training(self, model: str, task: str, step: int, steps: int) -> None:
        """One step of a fine-tune is done."""

    def cell(self, done: int, total: int, cell: Cell) -> None:
        """A cell is done, also one that an earlier run had done."""

    def score(self, record: Record) -> None:
        """One row has its score."""


class Bench:
    """Models, data and fine-tunes of a recipe, each loaded or made once."""

    def __init__(self, recipe: Recipe, places: Places, reporter: Reporter) -> None:
        self.recipe, self.places, self.reporter = recipe, places, reporter
        self._models: dict[str, Loaded] = {}
        self._weights: dict[str, str] = {}
        self._tasks: dict[str, TaskData] = {}
        self._tuned: dict[tuple[str, str], TaskVector] = {}
        self._fixed: dict[tuple[str, ...], list[Record]] = {}

    def model(self, name: str) -> Loaded:
        """A base model, on the device that was asked for."""
        if name not in self._models:
            spec = self.recipe.models[name]
            given = spec.find(self.places.models)
            loaded = load_model(given, architecture=spec.architecture, image_size=spec.image_size)
            to_device(loaded, self.places.device)
            self._models[name], self._weights[name] = loaded, hash_parameters(loaded.model)
        return self._models[name]

    def task(self, name: str) -> TaskData:
        """A task's samples; one task is kept at a time, with the fine-tunes on it."""
        if name not in self._tasks:
            self._tasks.clear()
            self._tuned.clear()
            self._tasks[name] = TaskData(self.recipe, name, self.places.data)
        return self._tasks[name]

    def identity(self, task: str, *models: str, scored: bool = True) -> str:
        """A hash of all that a fine-tune rests on, or a score: weights, samples, protocol with its code, heads."""
        for name in models:
            self.model(name)
        recipe, data = self.recipe, self.task(task)
        parts: dict[str, Any] = {
            "weights": [self._weights[name] for name in models],
            "train": data.train_identity,
            "templates": recipe.tasks[task].templates,
            "max_length": recipe.tasks[task].max_length,
            "finetune": recipe.finetune.model_dump(),
            "code": code_of("taskferry.training.finetuning", deep=False),
            "kind": recipe.kind,
        }
        if scored:
            parts |= {"test": data.test_identity, "objective": recipe.objective}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def tuned(self, model: str, task: str) -> TaskVector:
        """τ of a fine-tune of a model on a task, made by the recipe's protocol or taken from an earlier run."""
        if (model, task) not in self._tuned:
            loaded, data = self.model(model), self.task(task)
            student: nn.Module = copy.deepcopy(loaded.model)
            objective: Classifier = NewHead(data.classes)
            if self.recipe.kind == "zero-shot":
                objective = self.head(loaded, task)
            finetune(
                student,
                data.pool(loaded),
                objective,
                self.recipe.finetune,
                folder=self.places.work / "finetuned" / f"{model}-{task}-{self.identity(task, model, scored=False)}",
                progress=lambda step, steps, loss: self.reporter.training(model, task, step, steps),  # noqa: ARG005
            )
            after = {name: p.detach() for name, p in student.named_parameters()}
            self._tuned[model, task] = TaskVector.between(dict(loaded.model.named_parameters()), after)
        return self._tuned[model, task]

    def run(self, cell: Cell) -> Iterator[Record]:
        """All rows of a cell; a draw that cannot be made, or a method that cannot move it, says why in its rows."""
        source, target = self.model(cell.source), self.model(cell.target)
        try:
            prepared = self.prepare(cell)
        except TaskferryError as error:
            yield from ({"row": row, "refused": str(error)} for row in cell.rows)
            return
        key: tuple[str, ...] = (cell.source, cell.target, cell.task)
        if self.recipe.kind != "zero-shot" or key not in self._fixed:
            self._fixed[key] = list(self._base_rows(cell, prepared))
        yield from self._fixed[key]
        tau = self.tuned(cell.source, cell.task)
        mover = Mover(Job.of(source.model, target.model, tau, prepared.calibration, prepared.objectives))
        for row in cell.rows:
            once = (*key, row)
            if once in self._fixed:
                yield from self._fixed[once]
                continue
            try:
                moved, scale, seconds = mover.move(row)
                score = self.score(cell.target, cell.task, moved, scale, prepared, 1)
            except TaskferryError as error:
                yield {"row": row, "refused": str(error)}
                continue
            record = {"row": row, "score": score, "scale": round(scale, 3), "seconds": round(seconds, 2)}
            if self.recipe.kind == "zero-shot" and not rows()[row].drawn:
                self._fixed[once] = [record]  # neither the move nor the head depends on the draw
            yield record

    def prepare(self, cell: Cell) -> Prepared:
        """The calibration set of a cell, and the losses whose gradients are taken."""
        task, data = self.recipe.tasks[cell.task], self.task(cell.task)
        settings = CalibrationSettings(
            calibration=cell.task,
            samples=max(2, cell.count),
            per_class=cell.count if cell.per_class else None,
            sampler=cell.sampler,
            seed=cell.seed,
            objective=self.recipe.objective,
            templates=task.templates,
            max_length=task.max_length,
            micro_batch=self.recipe.micro_batch,
        )
        return prepare(settings, self.model(cell.source), self.model(cell.target), None, samples=data.train)

    def _base_rows(self, cell: Cell, prepared: Prepared) -> Iterator[Record]:
        sides = (
            (TARGET, cell.target, 1, TaskVector({})),
            (ORACLE, cell.target, 1, self.tuned(cell.target, cell.task)),
            (TUNED, cell.source, 0, self.tuned(cell.source, cell.task)),
        )
        for row, name, side, tau in sides:
            yield {"row": row, "score": self.score(name, cell.task, tau, 1.0, prepared, side)}

    def score(self, name: str, task: str, tau: TaskVector, scale: float, prepared: Prepared, side: int) -> float:
        """The test score of a model with a task vector added."""
        loaded = self.model(name)
        with moved_by(loaded.model, tau) as set_scale:
            set_scale(scale)
            test = self.task(task).test_batches(name, loaded)
            return round(evaluate(loaded.model, test, self.head(loaded, task), prepared.shots(side)).value, 3)

    def head(self, loaded: Loaded, task: str) -> Classifier:
        """What scores: the zero-shot head, or a head fitted on the calibration samples."""
        if self.recipe.kind == "zero-shot":
            return zero_shot(loaded, self.task(task).train.classes, self.recipe.tasks[task].templates)
        return Prototypes() if self.recipe.kind == "prototypes" else LinearProbe()


class TaskData:
    """Train and test samples of a task; test batches are made once for each model."""

    def __init__(self, recipe: Recipe, name: str, root: Path) -> None:
        spec = recipe.tasks[name]
        given = spec.find(root)
        self.recipe, self.spec = recipe, spec
        self.train = load_samples(given, config=spec.config, columns=spec.columns)
        self._all_test = load_samples(
            given, classes=self.train.classes, split=spec.test, config=spec.config, columns=spec.columns
        )
        self._test: dict[str, Sequence[Batch]] = {}

    @property
    def classes(self) -> int:
        """How many."""
        return len(self.train.classes) or max(self.train.labels or (1,)) + 1

    @cached_property
    def test(self) -> Samples:
        """The test samples that are scored: all, or as many as the recipe says, drawn once."""
        return self._all_test.take(sorted(choose(len(self._all_test), self.recipe.test_samples)))

    @cached_property
    def train_identity(self) -> str:
        """A hash of the training samples."""
        return self.train.identity()

    @cached_property
    def test_identity(self) -> str:
        """A hash of the samples that are scored."""
        return self.test.identity()

    def pool(self, loaded: Loaded) -> Pool:
        """The training samples of one model."""
        return Pool(self.train, loaded, max_length=self.spec.max_length)

    def test_batches(self, name: str, loaded: Loaded) -> Sequence[Batch]:
        """The test samples of one model: kept as tensors where they are few."""
        if name not in self._test:
            pool, size = Pool(self.test, loaded, max_length=self.spec.max_length), 4 * self.recipe.micro_batch
            lazy = LazyBatches(pool, range(len(pool)), size)
            self._test[name] = list(lazy) if len(pool) <= KEPT else lazy
        return self._test[name]


def run_recipe(recipe: Recipe, name: str, places: Places, reporter: Reporter | None = None) -> list[Record]:
    """Every cell of a recipe; what an earlier run finished is read from its results.

    A result is taken only if weights, samples, protocol, heads and the code that made it are the same.
    """
    reporter = reporter or Reporter()
    file = places.records(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {_key(record["cell"]): record for record in finished(file)}
    bench, cells = Bench(recipe, places, reporter), sorted(recipe.cells(), key=lambda cell: cell.task)
    records: list[Record] = []
    for done, cell in enumerate(cells, 1):
        of = bench.identity(cell.task, cell.source, cell.target)
        key = {**cell.key(), "rows": list(cell.rows), "of": of}
        stored = known.get(_key(key), {"rows": []})["rows"]
        now = {entry["row"]: entry for entry in stored if entry.get("code") == code(entry["row"])}
        if not stored or len(now) < len(stored):
            for record in bench.run(replace(cell, rows=tuple(row for row in cell.rows if row not in now))):
                now[record["row"]] = {**record, "code": code(record["row"])}
                reporter.score({**cell.key(), **record})
            order = [row for row in (*BASE_ROWS, *cell.rows) if row in now]
            known[_key(key)] = {"cell": key, "rows": [now[row] for row in order]}
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(known[_key(key)]) + "\n")
        records.append(known[_key(key)])
        reporter.cell(done, len(cells), cell)
    return records


def code(row: str) -> str:
    """A hash of the code behind a row."""
    return code_of(*SCORED) if row in BASE_ROWS else rows()[row].code


def finished(file: Path) -> list[Record]:
    """The cells of earlier runs; a last line that was cut off is dropped."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        part = file.with_suffix(".part")
        part.write_text(whole, encoding="utf-8")
        part.replace(file)
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except json.JSONDecodeError as error:
        raise TaskferryError(f"{file} is damaged: {error}; remove it to run again") from error


def _key(cell: Record) -> str:
    return json.dumps(cell, sort_keys=True)
