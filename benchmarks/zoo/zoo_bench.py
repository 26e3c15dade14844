"""The zoo as studies use it: opened once, and one score for whatever moves its models."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo import zoo_data
from taskferry import TaskVector
from taskferry.bench.recipe import load_recipe
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.evaluation import evaluate
from taskferry.fitting.scale import moved_by


def open_zoo(quick: bool) -> Bench:
    """With its long fine-tunes, or with short ones of their own for a quick look."""
    recipe = load_recipe("zoo/tableE")
    if quick:
        short = recipe.finetune.model_copy(update={"steps": 20, "every": 20, "warmup": 2})
        recipe = recipe.model_copy(update={"finetune": short, "test_samples": 100})
    work = zoo_data.DATA / ("work-quick" if quick else "work")
    return Bench(recipe, Places(zoo_data.ZOO, zoo_data.DATA / "tasks", work), Reporter())


def score(model: Any, test: Any, head: Any, moved: TaskVector, scale: float = 1.0) -> float:
    """The accuracy of a model with a task vector added."""
    with moved_by(model, moved) as set_scale:
        set_scale(scale)
        return evaluate(model, test, head).value
