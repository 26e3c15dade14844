"""The paper's tables with the zoo in place of the big models.

    python benchmarks/zoo/zoo.py [--quick] [--json benchmarks/results/zoo.json] [--recipes zoo/table1 …]

Runs the recipes zoo/*, each of which goes on where an earlier run stopped (fine-tunes and results are kept in the
folder of TASKFERRY_BENCH_DATA), and holds the averages over scenarios and tasks to their bounds. About six hours of one
core in all; several processes may share the work with --recipes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common, recipes
from benchmarks.zoo import zoo_data, zoo_tasks
from taskferry.bench.recipe import load_recipe, recipe_names
from taskferry.bench.running import Places
from taskferry.bench.tables import Groups, from_json, lines

SCENARIOS = {  # at N = 100
    "narrow → wide": "zoo/table1",
    "narrow → wide, other pre-training": "zoo/tableE",
    "wide → narrow": "zoo/tableD",
    "identical architecture": "zoo/table5",
    "shallow → deep": "zoo/table4",
    "shallow → deep, other pre-training": "zoo/tableH",
    "deep → shallow": "zoo/tableG",
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
    chosen = recipes.options(__doc__ or "")
    started = time.time()
    names = chosen.recipes or [n for n in recipe_names() if n.startswith("zoo/table")]
    if chosen.quick:
        names = chosen.recipes or ["zoo/table5"]
    for task in ["mnist"] if chosen.quick else load_recipe("zoo/tableE").tasks:
        zoo_tasks.write(task, zoo_data.DATA / "tasks")
    work = zoo_data.DATA / ("work-quick" if chosen.quick else "work")
    results = recipes.run_all(names, chosen, lambda _: "mnist", Places(zoo_data.ZOO, zoo_data.DATA / "tasks", work))
    header = ["averaged over scenarios at N = 100", "gain", "recovered", "scenarios"]
    rows = [
        [r, f"{v['gain']:+.1f}", f"{v['recovered']:.0%}", str(v["scenarios"])] for r, v in averages(results).items()
    ]
    print(common.table(header, rows))
    failures = [] if chosen.quick or set(SCENARIOS.values()) - set(results) else missed(results)
    for failure in failures:
        print("missed:", failure)
    print(f"{time.time() - started:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
