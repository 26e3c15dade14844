"""Real pre-trained pairs on real data, scored by linear probing: gte-small → MiniLM-L6, MiniLM-L3 → L6, deit ↔ vit.

    python benchmarks/quality/real_pairs.py [--quick] [--json benchmarks/results/real_pairs.json] [--recipes NAME …]

Runs the recipes real/* on the models and data of the shared folder. The source learns from thousands of samples; every
row of the target has a probe fitted on the same hundred samples.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common, recipes
from benchmarks.zoo import zoo_data
from taskferry.bench.recipe import recipe_names
from taskferry.bench.running import Places


def main() -> None:
    chosen = recipes.options(__doc__ or "")
    started, shared = time.time(), common.need_shared()
    names = chosen.recipes or [n for n in recipe_names() if n.startswith("real/")]
    work = zoo_data.DATA / ("work-quick" if chosen.quick else "work")
    places = Places(shared / "models", shared / "data", work)
    recipes.run_all(names[:1] if chosen.quick else names, chosen, lambda recipe: next(iter(recipe.tasks)), places)
    print(f"{time.time() - started:.0f} s")
    sys.exit(0)  # no bound: the tables say what is


if __name__ == "__main__":
    main()
