"""How many fine-tuning steps a moved task vector saves: the target tuned from where it is, and from what was moved.

    python benchmarks/quality/warm_start.py [--quick] [--json benchmarks/results/warm_start.json]

Both starts are tuned by the zoo's protocol on all training samples; every ten steps the held-out tenth is scored. The
moved start is the default method's, with the tuned source's labels on 100 samples. A goal is a share of what the cold
start gains in the end. Nothing is chosen here.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common
from benchmarks.zoo import zoo_data, zoo_tasks
from taskferry.bench.recipe import Cell, load_recipe
from taskferry.bench.rows import Mover
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.evaluation import evaluate
from taskferry.evaluation.pool import LazyBatches
from taskferry.methods import Job
from taskferry.training.finetuning import finetune, split

CELLS = tuple(("wide", "narrow", task) for task in ("letters", "cifar10", "occluded"))
GOALS = (0.5, 0.8, 0.9, 0.95)
EVERY = 10


def curve(bench: Bench, target: str, task: str, moved: Any = None) -> list[tuple[int, float]]:
    """(steps done, accuracy on the held-out samples), from the target as it is or with something added."""
    loaded, data = bench.model(target), bench.task(task)
    student, head, pool = copy.deepcopy(loaded.model), bench.head(loaded, task), data.pool(loaded)
    if moved is not None:
        moved.add_to(student)
    protocol = bench.recipe.finetune.model_copy(update={"every": EVERY})
    held_out = LazyBatches(pool, split(len(pool), protocol)[1], 64)
    first = evaluate(student, held_out, head).value
    history = finetune(student, pool, head, protocol)
    return [(0, first), *((step, score) for step, _, score in history.evaluations if score is not None)]


def first_at(points: list[tuple[int, float]], goal: float) -> int | None:
    """The first evaluation that reaches it."""
    return next((step for step, score in points if score >= goal), None)


def table(results: dict[str, dict[str, list[tuple[int, float]]]]) -> str:
    rows = []
    for name, found in results.items():
        cold, warm = found["cold"], found["warm"]
        gain = cold[-1][1] - cold[0][1]
        steps = []
        for share in GOALS:
            both = [first_at(points, cold[0][1] + share * gain) for points in (warm, cold)]
            steps.append(" / ".join("—" if step is None else str(step) for step in both))
        ends = [f"{points[0][1]:.1f} → {points[-1][1]:.1f}" for points in (warm, cold)]
        rows.append([name, *ends, *steps])
    goals = [f"{share:.0%} of the gain" for share in GOALS]
    return common.table(["", "moved start", "cold start", *goals], rows)


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    recipe = load_recipe("zoo/beyond")
    cells: tuple[tuple[str, str, str], ...] = CELLS
    if options.quick:
        short = recipe.finetune.model_copy(update={"steps": 20, "warmup": 2})
        recipe, cells = recipe.model_copy(update={"finetune": short}), (("wide", "narrow", "case"),)
    work = zoo_data.DATA / ("work-quick" if options.quick else "work")
    results: dict[str, Any] = {}
    bench = Bench(recipe, Places(zoo_data.ZOO, zoo_data.DATA / "tasks", work), Reporter())
    for source, target, task in cells:
        zoo_tasks.write(task, zoo_data.DATA / "tasks")
        prepared = bench.prepare(Cell(source, target, task, "random", 20 if options.quick else 100, False, 0, ()))
        tau = bench.tuned(source, task)
        models = bench.model(source).model, bench.model(target).model
        job = Job.of(*models, tau, prepared.calibration, prepared.objectives)
        moved, scale, _ = Mover(job).move("twofold, teacher")
        results[f"{source} → {target}, {task}"] = {
            "warm": curve(bench, target, task, scale * moved),
            "cold": curve(bench, target, task),
        }
        print(table(results), flush=True)
    common.finish({"curves": results}, table(results), options.json, [], started)


if __name__ == "__main__":
    main()
