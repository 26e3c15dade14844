"""The paper's tables with the zoo in place of the big models.

    python benchmarks/zoo.py [--quick] [--json benchmarks/results/zoo.json] [--recipes zoo/table1 …]

Runs the recipes zoo/*, each of which goes on where an earlier run stopped (fine-tunes and results are kept in the
folder of TASKFERRY_BENCH_DATA), and holds the averages over scenarios and tasks to their bounds. About six hours of one
core in all; several processes may share the work with --recipes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
import zoo_data
import zoo_tasks

from taskferry.bench.recipe import load_recipe, recipe_names
from taskferry.bench.running import ORACLE, TARGET, Places, Reporter, run_recipe
from taskferry.bench.tables import Groups, collect, from_json, lines, markdown, refusals, to_json

ZOO = Path(__file__).parent / "zoo"
SCENARIOS = {  # at N = 100
    "narrow → wide": "zoo/table1",
    "narrow → wide, other pre-training": "zoo/tableE",
    "wide → narrow": "zoo/tableD",
    "identical architecture": "zoo/table5",
    "shallow → deep": "zoo/table4",
    "shallow → deep, other pre-training": "zoo/tableH",
    "deep → shallow": "zoo/tableG",
}


class Told(Reporter):
    """A line for every cell."""

    def __init__(self, name: str) -> None:
        self.name, self.started = name, time.time()

    def cell(self, done: int, total: int, cell: Any) -> None:
        print(f"{self.name} {done}/{total} {cell.task} {time.time() - self.started:.0f} s", flush=True)


def run(name: str, quick: bool) -> dict[str, Any]:
    """The results of a recipe as small data."""
    recipe = load_recipe(name)
    started = time.time()
    if quick:
        short = recipe.finetune.model_copy(update={"steps": 20, "every": 20, "warmup": 2})
        tasks = {"mnist": recipe.tasks["mnist"]}
        recipe = recipe.model_copy(
            update={"tasks": tasks, "finetune": short, "seeds": 1, "costly_seeds": 0, "test_samples": 100}
        )
    for task in recipe.tasks:
        zoo_tasks.write(recipe.tasks[task].given, zoo_data.DATA / "tasks")
    work = zoo_data.DATA / ("work-quick" if quick else "work")
    records = run_recipe(recipe, name, Places(ZOO, zoo_data.DATA / "tasks", work), Told(name))
    timed = sum(entry.get("seconds", 0.0) for record in records for entry in record["rows"])
    scales = [e["scale"] for r in records for e in r["rows"] if e["row"] == "bico, automatic scale" and "scale" in e]
    return {
        "title": recipe.title,
        "counted": "K" if recipe.per_class else "N",
        "seconds_moving": round(timed),
        "seconds_now": round(time.time() - started),
        "scales": {"mean": round(statistics.mean(scales), 2), "least": min(scales), "most": max(scales)}
        if scales
        else {},
        "groups": to_json(collect(records)),
        "refused": refusals(records),
    }


def at_hundred(results: dict[str, Any]) -> dict[str, Groups]:
    """The scenarios at N = 100."""
    found = {}
    for scenario, name in SCENARIOS.items():
        if name in results:
            groups = from_json(results[name]["groups"])
            found[scenario] = {key: scores for key, scores in groups.items() if key[3] == 100}
    return found


def averages(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Row -> gain, share recovered, both averaged over scenarios (each an average over tasks and draws)."""
    by_row: dict[str, list[tuple[float, float]]] = {}
    for groups in at_hundred(results).values():
        for key, scores in groups.items():
            for line in lines(scores, key[3]):
                if line.recovered is not None:
                    by_row.setdefault(line.row, []).append((line.gain, line.recovered))
    return {
        row: {
            "gain": statistics.mean(g for g, _ in v),
            "recovered": statistics.mean(r for _, r in v),
            "scenarios": len(v),
        }
        for row, v in by_row.items()
    }


def growth(results: dict[str, Any], row: str) -> dict[int, float]:
    """Mean gain of a row by number of samples, over the scenarios that have them all."""
    gains: dict[int, list[float]] = {}
    for name in SCENARIOS.values():
        if name not in results:
            continue
        groups = from_json(results[name]["groups"])
        if len(groups) < 4:
            continue
        for key, scores in groups.items():
            gains.setdefault(key[3], []).extend(line.gain for line in lines(scores, key[3]) if line.row == row)
    return {count: statistics.mean(values) for count, values in sorted(gains.items())}


def missed(results: dict[str, Any]) -> list[str]:
    """The bounds that do not hold."""
    mean = averages(results)
    bico, auto, theseus, naive = (mean[r] for r in ("bico", "bico, automatic scale", "theseus", "naive"))
    grown = list(growth(results, "bico").values())
    bounds = {
        f"BiCo gains {bico['gain']:.1f}, less than twice THESEUS ({theseus['gain']:.1f})": bico["gain"]
        < 2 * theseus["gain"],
        f"BiCo recovers {bico['recovered']:.0%}, less than 40 %": bico["recovered"] < 0.4,
        f"automatic scale recovers {auto['recovered']:.0%}, less than 50 %": auto["recovered"] < 0.5,
        f"naive gains {naive['gain']:.1f}": naive["gain"] > 1.0,
        f"gains do not grow with N: {grown}": any(b <= a for a, b in itertools.pairwise(grown)),
    }
    return [sentence for sentence, broken in bounds.items() if broken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one task, 20 steps of fine-tuning, no bounds")
    parser.add_argument("--json", type=Path, help="write the results here; those of other recipes there are kept")
    parser.add_argument("--recipes", nargs="*", default=[], help="these alone")
    options = parser.parse_args()
    started = time.time()
    names = options.recipes or [n for n in recipe_names() if n.startswith("zoo/table")]
    if options.quick:
        names = options.recipes or ["zoo/table5"]
    results: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    for name in names:
        results[name] = run(name, options.quick)
        print(f"\n## {name}\n\n{markdown(from_json(results[name]['groups']), results[name]['counted'])}\n", flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(dict(sorted(results.items()))) + "\n")
    header = ["averaged over scenarios at N = 100", "gain", "recovered", "scenarios"]
    rows = [
        [r, f"{v['gain']:+.1f}", f"{v['recovered']:.0%}", str(v["scenarios"])] for r, v in averages(results).items()
    ]
    print(common.table(header, rows))
    failures = [] if options.quick or set(SCENARIOS.values()) - set(results) else missed(results)
    for failure in failures:
        print("missed:", failure)
    print(f"{time.time() - started:.0f} s; target row {TARGET!r}, oracle {ORACLE!r}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
