"""Running recipes and keeping their results as small JSON: what zoo.py, beyond.py and real_pairs.py share."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import common
from taskferry.bench.recipe import Recipe, load_recipe
from taskferry.bench.running import Places, Reporter, run_recipe
from taskferry.bench.tables import collect, from_json, markdown, refusals, to_json


class Told(Reporter):
    """A line for every cell."""

    def __init__(self, name: str) -> None:
        self.name, self.started = name, time.time()

    def cell(self, done: int, total: int, cell: Any) -> None:
        print(f"{self.name} {done}/{total} {cell.task} {time.time() - self.started:.0f} s", flush=True)


def quick_version(recipe: Recipe, task: str) -> Recipe:
    """One task, one draw, a few steps of fine-tuning."""
    short = recipe.finetune.model_copy(update={"steps": 10, "every": 10, "warmup": 2})
    changes = {
        "tasks": {task: recipe.tasks[task]},
        "pairs": recipe.pairs[:1],
        "finetune": short,
        "seeds": 1,
        "costly_seeds": 0,
        "costly_tasks": [],
        "test_samples": 60,
    }
    return recipe.model_copy(update=changes)


def run(name: str, recipe: Recipe, places: Places) -> dict[str, Any]:
    """The results of a recipe as small data."""
    records = run_recipe(recipe, name, places, Told(name))
    entries = [entry for record in records for entry in record["rows"]]
    scales = [e["scale"] for e in entries if e["row"] == "bico, automatic scale" and "scale" in e]
    scaled = {"mean": round(statistics.mean(scales), 2), "least": min(scales), "most": max(scales)} if scales else {}
    return {
        "title": recipe.title,
        "counted": "K" if recipe.per_class else "N",
        "seconds_moving": round(sum(entry.get("seconds", 0.0) for entry in entries)),
        "scales": scaled,
        "groups": to_json(collect(records)),
        "refused": refusals(records),
    }


def options(description: str) -> argparse.Namespace:
    """--quick, --json and --recipes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="one task and draw, ten steps of fine-tuning, no bounds")
    parser.add_argument("--json", type=Path, help="write the results here; those of other recipes there are kept")
    parser.add_argument("--recipes", nargs="*", default=[], help="these alone")
    return parser.parse_args()


def run_all(
    names: Sequence[str], chosen: argparse.Namespace, quick_task: Callable[[Recipe], str], places: Places
) -> dict[str, Any]:
    """Each recipe in turn; what is finished is kept at once."""
    results: dict[str, Any] = {}
    for name in names:
        recipe = load_recipe(name)
        if chosen.quick:
            recipe = quick_version(recipe, quick_task(recipe))
        results[name] = found = run(name, recipe, places)
        page = markdown(from_json(found["groups"]), found["counted"], found["refused"])
        print(f"\n## {name}\n\n{page}\n", flush=True)
        if chosen.json is not None:
            results = common.keep(chosen.json, results)
    return results
