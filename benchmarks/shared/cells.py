"""Cells of a table of classifiers: a pair of models, a task and a draw of the calibration samples, every row scored.

    recipe, cells = run_named("zoo/table1", options)

A recipe is a table in benchmarks/paper/recipes with models, pairs, tasks, numbers of samples, seeds and rows
(`rows.py`). A cell's key is "recipe task source target sampler count seed". Fine-tunes are kept in `work`; remove them
where models or data change.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from benchmarks.paper.samplers import draw
from benchmarks.shared import common
from benchmarks.shared.finetune import Protocol, train
from benchmarks.shared.rows import FRONTIER, ROWS, run_rows
from benchmarks.zoo import zoo_data, zoo_tasks
from taskferry import Batch, Pool, TaskferryError, TaskVector, evaluate, load_model, load_samples
from taskferry.collect.scale import moved_by
from taskferry.config import CalibrationSettings
from taskferry.layers import family_of
from taskferry.models import Loaded
from taskferry.objectives.heads import zero_shot
from taskferry.objectives.objectives import Classifier, LinearProbe
from taskferry.objectives.preparation import Prepared, prepare

RECIPES = common.ROOT / "benchmarks" / "paper" / "recipes"


@dataclass(frozen=True)
class ModelSpec:
    """Where a model comes from: a folder below the models', any other path, or a hub id."""

    given: str
    architecture: str | None = None
    image_size: int | None = None

    def load(self, root: Path) -> Loaded:
        return load_model(found(self.given, root), architecture=self.architecture, image_size=self.image_size)


@dataclass(frozen=True)
class TaskSpec:
    """A data set with a train and a test part."""

    given: str
    config: str | None = None  # the hub's name of a part of it
    test: str = "test"
    columns: dict[str, str] = field(default_factory=dict)  # its columns that are text, text_pair, image or label
    templates: tuple[str, ...] = ("a photo of a {}.",)
    max_length: int = 128


@dataclass(frozen=True)
class Recipe:
    """One table."""

    name: str
    title: str
    models: dict[str, ModelSpec]
    pairs: list[tuple[str, str]]
    tasks: dict[str, TaskSpec]
    rows: list[str]
    samples: list[str]  # "100", or "5K" for five of each class
    head: str = "zero-shot"  # what scores: that, or a "probe" on the calibration samples
    samplers: tuple[str, ...] = ("random",)
    seeds: int = 1
    finetune: Protocol = field(default_factory=Protocol)
    test_samples: int = 1000
    micro_batch: int = 20

    def cells(self, first_seed: int = 0) -> Iterator[Cell]:
        """Every draw, whole seeds first: what a stop leaves can be compared."""
        for seed in range(first_seed, self.seeds):
            for task in self.tasks:
                for source, target in self.pairs:
                    for sampler in self.samplers:
                        for count in self.samples:
                            yield Cell(task, source, target, sampler, count, seed)


@dataclass(frozen=True)
class Cell:
    """One draw of the calibration samples."""

    task: str
    source: str
    target: str
    sampler: str
    count: str
    seed: int


def load_recipe(name: str) -> Recipe:
    """Read a table of a file of recipes, such as zoo/table1: its keys over those of all tables in the file."""
    file, _, table = name.partition("/")
    known = yaml.safe_load((RECIPES / f"{file}.yaml").read_text()) if (RECIPES / f"{file}.yaml").is_file() else {}
    if table not in known or table == "all":
        raise SystemExit(f"no recipe '{name}': one of {', '.join(recipe_names())}")
    values = {**known["all"], **known[table]}
    values["models"] = {k: ModelSpec(**v) for k, v in values["models"].items()}
    some = values.pop("some", list(values["tasks"]))  # of the tasks of the file
    values["tasks"] = {k: TaskSpec(**values["tasks"][k]) for k in some}
    values["finetune"] = Protocol(**values["finetune"])
    values["samples"] = list(map(str, values["samples"]))
    if values["rows"] == "frontier":
        values["rows"] = FRONTIER
    return Recipe(name=name, **values)


def recipe_names() -> list[str]:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(RECIPES.glob("*.yaml"))}
    return [f"{file}/{table}" for file, tables in files.items() for table in tables if table != "all"]


@dataclass(frozen=True)
class Places:
    """Where models and data are, and where fine-tunes are kept."""

    models: Path
    data: Path
    work: Path = common.DATA / "finetuned"
    device: str = "cpu"


class Bench:
    """Models, data and fine-tunes of a recipe, each loaded or made once."""

    def __init__(self, recipe: Recipe, places: Places) -> None:
        self.recipe, self.places = recipe, places
        self._models: dict[str, Loaded] = {}
        self._samples: dict[str, tuple[Any, Any]] = {}
        self._tests: dict[tuple[str, str], Sequence[Batch]] = {}
        self._tuned: dict[tuple[str, str], TaskVector] = {}

    def model(self, name: str) -> Loaded:
        if name not in self._models:
            self._models[name] = self.recipe.models[name].load(self.places.models)
            self._models[name].model.to(self.places.device)
        return self._models[name]

    def samples(self, task: str) -> tuple[Any, Any]:
        """All training samples, and the test samples that are scored."""
        if task not in self._samples:
            spec = self.recipe.tasks[task]
            given = {"config": spec.config, "columns": spec.columns}
            data = load_samples(found(spec.given, self.places.data), **given)
            test = load_samples(found(spec.given, self.places.data), classes=data.classes, split=spec.test, **given)
            order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0)).tolist()
            self._samples[task] = data, test.take(sorted(order[: self.recipe.test_samples]))
        return self._samples[task]

    def classes(self, task: str) -> int:
        data = self.samples(task)[0]
        return len(data.classes) or 1 + max(data.labels)

    def head(self, name: str, task: str) -> Classifier:
        if self.recipe.head == "probe":
            return LinearProbe()
        return zero_shot(self.model(name), self.samples(task)[0].classes, self.recipe.tasks[task].templates)

    def tuned(self, name: str, task: str) -> TaskVector:
        """The change of a fine-tune on all training samples, made by the recipe's protocol once."""
        if (name, task) in self._tuned:
            return self._tuned[name, task]
        recipe, spec = self.recipe, self.recipe.tasks[task]
        what = [recipe.head, asdict(recipe.models[name]), asdict(spec), asdict(recipe.finetune)]
        known = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
        path = self.places.work / f"{name}-{task}-{known}.safetensors"
        if not path.exists():
            loaded = self.model(name)
            student = copy.deepcopy(loaded.model).requires_grad_(True)
            pool = Pool(self.samples(task)[0], loaded, max_length=spec.max_length)
            if recipe.head == "probe":
                new, loss = new_head(student, pool, self.classes(task))
            else:
                new, loss = None, self.head(name, task).bind(student, [])
            train(student, pool, loss, recipe.finetune, new)
            path.parent.mkdir(parents=True, exist_ok=True)
            before = dict(loaded.model.named_parameters())
            after = {n: p.detach() for n, p in student.named_parameters()}
            TaskVector.between(before, after).save(path)
        self._tuned[name, task] = TaskVector.load(path)
        return self._tuned[name, task]

    def prepare(self, cell: Cell) -> Prepared:
        """Draw the calibration samples of a cell."""
        spec, (data, _) = self.recipe.tasks[cell.task], self.samples(cell.task)
        chosen = draw(data, cell.sampler, cell.count, cell.seed, lambda: self.features(cell.source, cell.task))
        settings = CalibrationSettings(
            calibration=cell.task, samples=max(2, len(chosen)), seed=cell.seed, templates=list(spec.templates),
            max_length=spec.max_length, micro_batch=self.recipe.micro_batch,
        )  # fmt: skip
        return prepare(settings, self.model(cell.source), self.model(cell.target), None, samples=data.take(chosen))

    @torch.no_grad()
    def features(self, name: str, task: str) -> Tensor:
        """[samples, width] of all training samples, for the samplers that look at them."""
        loaded, pool = self.model(name), Pool(self.samples(task)[0], self.model(name))
        parts = pool.batches(range(len(pool)), 64)
        return torch.cat([family_of(loaded.model).features(loaded.model, part).float() for part in parts])

    def score(self, name: str, task: str, change: TaskVector, shots: Sequence[Batch]) -> float:
        """The test accuracy of a model with a change added."""
        loaded = self.model(name)
        if (name, task) not in self._tests:
            pool = Pool(self.samples(task)[1], loaded, max_length=self.recipe.tasks[task].max_length)
            self._tests[name, task] = pool.batches(range(len(pool)), 4 * self.recipe.micro_batch)
        with moved_by(loaded.model, change) as at:
            at(1.0)
            return round(evaluate(loaded.model, self._tests[name, task], self.head(name, task), shots).value, 3)

    def pair(self, cell: Cell) -> tuple[nn.Module, nn.Module]:
        return self.model(cell.source).model, self.model(cell.target).model

    def run(self, cell: Cell, rows: Sequence[str], known: dict[str, Any]) -> Iterator[str]:
        """Every row of a cell that is not known yet."""
        try:
            prepared = self.prepare(cell)
        except TaskferryError as error:
            known["refused"] = str(error)
            return
        shots = [prepared.calibration.side(side) for side in (0, 1)]
        if "oracle" not in known:
            known["target"] = self.score(cell.target, cell.task, TaskVector({}), shots[1])
            known["oracle"] = self.score(cell.target, cell.task, self.tuned(cell.target, cell.task), shots[1])
            known["source"] = self.score(cell.source, cell.task, self.tuned(cell.source, cell.task), shots[0])

        def score(change: TaskVector) -> dict[str, float]:
            return {"score": self.score(cell.target, cell.task, change, shots[1])}

        tau, found = self.tuned(cell.source, cell.task), known.setdefault("rows", {})
        yield from run_rows(self.pair(cell), tau, prepared, rows, score, found, cell.seed)


def new_head(model: nn.Module, pool: Pool, classes: int) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    """A linear layer on an encoder's features that is trained with it, and its loss."""
    family = family_of(model)
    with torch.no_grad():
        width = family.features(model, pool.batch([0, 1])).shape[1]
    head = nn.Linear(width, classes)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(head(family.features(model, batch)).float(), batch.labels, reduction="sum")

    return head, loss


def found(given: str, root: Path) -> str:
    local = root / given
    return str(local) if local.is_dir() else given


def run_named(name: str, options: argparse.Namespace) -> tuple[Recipe, dict[str, Any]]:
    """Run all cells of a recipe but what the JSON file holds already; each row is kept when it is done."""
    recipe = narrowed(load_recipe(name), options)
    places = Places(common.SHARED / "models", common.SHARED / "data", device=options.device)
    if name.startswith("zoo/"):
        places = Places(zoo_data.ZOO, common.DATA / "tasks")
        for task in recipe.tasks:
            zoo_tasks.write(task, places.data)
    torch.set_num_threads(1)
    cells = common.keep(options.json, {})
    bench = Bench(recipe, places)
    for cell in recipe.cells(options.first_seed):
        key = " ".join([recipe.name, *map(str, asdict(cell).values())])
        known = cells.setdefault(key, {})
        for row in bench.run(cell, recipe.rows, known):
            common.keep(options.json, {key: known})
            print(key, row, known["rows"][row], flush=True)
        cells = common.keep(options.json, {key: known} if options.json else cells)
    return recipe, {key: cell for key, cell in cells.items() if key.split()[0] == recipe.name}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What narrows a recipe."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), metavar="A:B")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--counts", nargs="+", help="of samples; 5K is five of each class")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the draws before this one")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW")


def narrowed(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The part of a recipe that is asked for; `--quick` is one cell of short fine-tunes under a name of its own."""
    given = {"pairs": options.pairs, "samples": options.counts, "seeds": options.seeds, "rows": options.rows}
    recipe = replace(recipe, **{key: value for key, value in given.items() if value})
    tasks = options.tasks or list(recipe.tasks)
    if options.quick:
        short = replace(recipe.finetune, steps=10, warmup=2)
        recipe = replace(recipe, name=f"{recipe.name}-quick", pairs=recipe.pairs[:1], finetune=short, test_samples=60)
        recipe = replace(recipe, samples=recipe.samples[:1], seeds=1, samplers=recipe.samplers[:1])
        tasks = tasks[:1]
    return replace(recipe, tasks={name: recipe.tasks[name] for name in tasks})
