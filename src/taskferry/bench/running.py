"""Running a recipe: fine-tune sources and targets, draw calibration sets, move, score. Every step can be resumed.

>>> records = run_recipe(load_recipe("zoo/table1"), Places(models, data, work))
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.bench.recipe import Cell, Recipe
from taskferry.bench.rows import ROWS, Mover
from taskferry.calibration.batch import Batch
from taskferry.calibration.data import Samples, load_samples
from taskferry.checkpoints import Loaded, load_model
from taskferry.errors import TaskferryError
from taskferry.evaluation import Pool, evaluate, finetune
from taskferry.methods import CannotMove, Job
from taskferry.objectives import Classifier, LinearProbe, NewHead, Prototypes, ZeroShot
from taskferry.preparing import Prepared, prepare, zero_shot
from taskferry.scale import moved_by
from taskferry.settings import CalibrationSettings
from taskferry.taskvector import TaskVector

TARGET, ORACLE, TUNED = "target", "target, fine-tuned (oracle)", "source, fine-tuned"
BASE_ROWS = (TARGET, ORACLE, TUNED)
Record = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Where models and data are, and where results and fine-tunes are kept."""

    models: Path
    data: Path
    work: Path


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
        self._tasks: dict[str, TaskData] = {}
        self._tuned: dict[tuple[str, str], TaskVector] = {}
        self._fixed: dict[tuple[str, ...], list[Record]] = {}

    def model(self, name: str) -> Loaded:
        """A base model."""
        if name not in self._models:
            spec = self.recipe.models[name]
            local = self.places.models / spec.given
            given = str(local) if local.is_dir() else spec.given
            self._models[name] = load_model(given, architecture=spec.architecture, image_size=spec.image_size)
        return self._models[name]

    def task(self, name: str) -> TaskData:
        """A task's samples; one task is kept at a time, with the fine-tunes on it."""
        if name not in self._tasks:
            self._tasks.clear()
            self._tuned.clear()
            self._tasks[name] = TaskData(self.recipe, name, self.places.data)
        return self._tasks[name]

    def tuned(self, model: str, task: str) -> TaskVector:
        """τ of a fine-tune of a model on a task, made by the recipe's protocol or taken from an earlier run."""
        if (model, task) not in self._tuned:
            loaded, data = self.model(model), self.task(task)
            student: nn.Module = copy.deepcopy(loaded.model)
            objective: Classifier = NewHead(data.classes)
            if self.recipe.kind == "zero-shot":
                objective = zero_shot(loaded, data.train.classes, self.recipe.tasks[task].templates)
            finetune(
                student,
                data.pool(loaded),
                objective,
                self.recipe.finetune,
                folder=self.places.work / "finetuned" / f"{model}-{task}",
                progress=lambda step, steps, loss: self.reporter.training(model, task, step, steps),  # noqa: ARG005
            )
            after = {name: p.detach() for name, p in student.named_parameters()}
            self._tuned[model, task] = TaskVector.between(dict(loaded.model.named_parameters()), after)
        return self._tuned[model, task]

    def run(self, cell: Cell) -> Iterator[Record]:
        """All rows of a cell."""
        source, target, data = self.model(cell.source), self.model(cell.target), self.task(cell.task)
        prepared = self._prepare(cell, source, target, data)
        key: tuple[str, ...] = (cell.source, cell.target, cell.task)
        if self.recipe.kind != "zero-shot" or key not in self._fixed:
            self._fixed[key] = list(self._base_rows(cell, source, target, data, prepared))
        yield from self._fixed[key]
        tau = self.tuned(cell.source, cell.task)
        mover = Mover(Job(source.model, target.model, tau, prepared.calibration, prepared.objectives))
        for row in cell.rows:
            once = (*key, row)
            if once in self._fixed:
                yield from self._fixed[once]
                continue
            started = time.perf_counter()
            try:
                moved, scale = mover.move(row)
            except CannotMove as error:
                yield {"row": row, "refused": str(error)}
                continue
            seconds = time.perf_counter() - started
            with _tuned(target.model, moved, scale):
                score = evaluate(target.model, data.test_batches(target), self._head(prepared), prepared.shots(1)).value
            record = {"row": row, "score": round(score, 3), "scale": round(scale, 3), "seconds": round(seconds, 2)}
            if self.recipe.kind == "zero-shot" and not ROWS[row].drawn:
                self._fixed[once] = [record]  # neither the move nor the head depends on the draw
            yield record

    def _base_rows(
        self, cell: Cell, source: Loaded, target: Loaded, data: TaskData, prepared: Prepared
    ) -> Iterator[Record]:
        sides = (
            (TARGET, target, 1, TaskVector({})),
            (ORACLE, target, 1, self.tuned(cell.target, cell.task)),
            (TUNED, source, 0, self.tuned(cell.source, cell.task)),
        )
        for row, loaded, side, tau in sides:
            with _tuned(loaded.model, tau, 1.0):
                head = self._head(prepared, side)
                score = evaluate(loaded.model, data.test_batches(loaded), head, prepared.shots(side)).value
            yield {"row": row, "score": round(score, 3)}

    def _head(self, prepared: Prepared, side: int = 1) -> Classifier:
        """What scores: the zero-shot head, or a head fitted on the calibration samples."""
        objective = prepared.objectives[side]
        if isinstance(objective, ZeroShot):
            return objective
        return Prototypes() if self.recipe.kind == "prototypes" else LinearProbe()

    def _prepare(self, cell: Cell, source: Loaded, target: Loaded, data: TaskData) -> Prepared:
        task = self.recipe.tasks[cell.task]
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
        return prepare(settings, source, target, None, samples=data.train)


class TaskData:
    """Train and test samples of a task; test batches are made once for each model."""

    def __init__(self, recipe: Recipe, name: str, root: Path) -> None:
        spec = recipe.tasks[name]
        local = root / spec.given
        given = str(local) if local.is_dir() else spec.given
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
        shuffled = torch.randperm(len(self._all_test), generator=torch.Generator().manual_seed(0)).tolist()
        return self._all_test.take(sorted(shuffled[: self.recipe.test_samples]))

    def pool(self, loaded: Loaded) -> Pool:
        """The training samples of one model."""
        return Pool(self.train, loaded, max_length=self.spec.max_length)

    def test_batches(self, loaded: Loaded) -> Sequence[Batch]:
        """The test samples of one model."""
        if loaded.given not in self._test:
            pool = Pool(self.test, loaded, max_length=self.spec.max_length)
            self._test[loaded.given] = pool.batches(range(len(pool)), 4 * self.recipe.micro_batch)
        return self._test[loaded.given]


def run_recipe(recipe: Recipe, name: str, places: Places, reporter: Reporter | None = None) -> list[Record]:
    """Every cell of a recipe; those that an earlier run finished are read from its results."""
    reporter = reporter or Reporter()
    file = places.work / f"{name.replace('/', '-')}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    records = _finished(file)
    known = {_identity(record["cell"]) for record in records}
    bench, cells = Bench(recipe, places, reporter), sorted(recipe.cells(), key=lambda cell: cell.task)
    for done, cell in enumerate(cells, 1):
        key = {**cell.key(), "rows": list(cell.rows)}
        if _identity(key) not in known:
            rows = []
            for record in bench.run(cell):
                rows.append(record)
                reporter.score({**cell.key(), **record})
            records.append({"cell": key, "rows": rows})
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(records[-1]) + "\n")
        reporter.cell(done, len(cells), cell)
    return records


def _finished(file: Path) -> list[Record]:
    """The cells of an earlier run; a line that was cut off by its end is dropped."""
    if not file.exists():
        return []
    whole = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    file.write_text("".join(whole), encoding="utf-8")
    try:
        return [json.loads(line) for line in whole]
    except json.JSONDecodeError as error:
        raise TaskferryError(f"{file} is damaged: {error}; remove it to run again") from error


def _identity(key: Record) -> str:
    return json.dumps(key, sort_keys=True)


@contextmanager
def _tuned(model: nn.Module, tau: TaskVector, scale: float) -> Iterator[None]:
    with moved_by(model, tau) as set_scale:
        set_scale(scale)
        yield
