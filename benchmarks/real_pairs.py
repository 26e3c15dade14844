"""Real pre-trained pairs on real data, scored by linear probing: gte-small → MiniLM-L6, MiniLM-L3 → L6, deit ↔ vit.

    python benchmarks/real_pairs.py [--quick] [--json benchmarks/results/real_pairs.json] [--recipes real/vision …]

Runs the recipes real/* on the models and data of the shared folder. The source learns from thousands of samples; every
row of the target has a probe fitted on the same hundred samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common
import zoo_data
from zoo import Told

from taskferry.bench.recipe import load_recipe, recipe_names
from taskferry.bench.running import Places, run_recipe
from taskferry.bench.tables import collect, from_json, markdown, refusals, to_json


def run(name: str, quick: bool) -> dict[str, Any]:
    recipe = load_recipe(name)
    if quick:
        first = next(iter(recipe.tasks))
        short = recipe.finetune.model_copy(update={"steps": 5, "every": 5, "warmup": 1})
        recipe = recipe.model_copy(
            update={"tasks": {first: recipe.tasks[first]}, "finetune": short, "seeds": 1, "costly_seeds": 0,
                    "test_samples": 40, "pairs": recipe.pairs[:1]}
        )  # fmt: skip
    shared = common.need_shared()
    work = zoo_data.DATA / ("work-quick" if quick else "work")
    records = run_recipe(recipe, name, Places(shared / "models", shared / "data", work), Told(name))
    return {
        "title": recipe.title,
        "counted": "N",
        "seconds_moving": round(sum(e.get("seconds", 0.0) for r in records for e in r["rows"])),
        "groups": to_json(collect(records)),
        "refused": refusals(records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one task, five steps of fine-tuning")
    parser.add_argument("--json", type=Path, help="write the results here; those of other recipes there are kept")
    parser.add_argument("--recipes", nargs="*", default=[], help="these alone")
    options = parser.parse_args()
    started = time.time()
    names = options.recipes or [n for n in recipe_names() if n.startswith("real/")]
    results: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    for name in names[:1] if options.quick else names:
        results[name] = run(name, options.quick)
        print(f"\n## {name}\n\n{markdown(from_json(results[name]['groups']))}\n", flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(dict(sorted(results.items()))) + "\n")
    print(f"{time.time() - started:.0f} s")
    sys.exit(0)  # no bound: the tables say what is


if __name__ == "__main__":
    main()
