"""The zoo as studies use it: opened once, and one score for whatever moves its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.zoo import zoo_data
from taskferry import TaskVector
from taskferry.bench.recipe import Recipe, load_recipe
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.collect.scale import moved_by
from taskferry.evaluation import evaluate


def open_zoo(quick: bool) -> Bench:
    """With its long fine-tunes, or with short ones of their own for a quick look."""
    return opened(load_recipe("zoo/tableE"), zoo_data.ZOO, zoo_data.DATA / "tasks", quick)


def open_short(quick: bool) -> Bench:
    """With the short fine-tunes of the frontier in float32, and every task: those of the tables and the new ones."""
    recipe = load_recipe("zoo/frontier")
    every = recipe.model_copy(update={"tasks": {**load_recipe("zoo/table1").tasks, **recipe.tasks}})
    return opened(in_float32(every), zoo_data.ZOO, zoo_data.DATA / "tasks", quick)


def in_float32(recipe: Recipe) -> Recipe:
    """With fine-tunes in single precision."""
    return recipe.model_copy(update={"finetune": recipe.finetune.model_copy(update={"precision": "float32"})})


def opened(recipe: Recipe, models: Path, data: Path, quick: bool) -> Bench:
    """A bench whose fine-tunes are kept; a quick one has short ones of its own, and few test samples."""
    if quick:
        short = recipe.finetune.model_copy(update={"steps": 20, "every": 20, "warmup": 2})
        recipe = recipe.model_copy(update={"finetune": short, "test_samples": 100})
    work = zoo_data.DATA / ("work-quick" if quick else "work")
    return Bench(recipe, Places(models, data, work), Reporter())


def score(model: Any, test: Any, head: Any, moved: TaskVector, scale: float = 1.0) -> float:
    """The accuracy of a model with a task vector added."""
    with moved_by(model, moved) as set_scale:
        set_scale(scale)
        return evaluate(model, test, head).value
