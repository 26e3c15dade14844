"""How much of the gap that BiCo leaves is closed: the default of `transfer` (twofold) on every pair of the zoo.

    python benchmarks/quality/beyond.py [--quick] [--json benchmarks/results/beyond.json] [--tasks NAME …] [--seeds N]

Everything was chosen on mnist, fashion and drawings (ideas.py); what is shown are the other four tasks. One draw of all
pairs and tasks is finished before the next begins, and a run goes on where an earlier one stopped: the table says how
many draws it holds. BiCo and the default without labels are run on all draws; true labels, 400 unlabelled samples and a
short training (distil) on one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common, recipes
from benchmarks.zoo import zoo_data, zoo_tasks
from taskferry.bench.recipe import Recipe, load_recipe
from taskferry.bench.running import Places, Record, finished, run_recipe
from taskferry.bench.tables import Groups, collect, lines, to_json

NAME = "zoo/beyond"
DRAWN, LABELLED = ("bico", "twofold, teacher"), ("bico, automatic scale", "twofold")
TRAINED = ("distil", "distil, from the target")
ROWS = (*DRAWN, *LABELLED, *TRAINED)
WORST = -1.0  # points that the default may lose on a task
MANY = 400


def versions(recipe: Recipe, distil: bool) -> Iterable[tuple[str, Recipe]]:
    """What is run under which name: one draw of everything, the other draws, then what takes longest."""

    def with_(seeds: int, *rows: str, **changes: Any) -> Recipe:
        return recipe.model_copy(update={"seeds": seeds, "costly_seeds": seeds, "rows": list(rows), **changes})

    yield NAME, with_(1, *DRAWN)
    yield f"{NAME}-labels", with_(1, *LABELLED)
    for seeds in range(2, recipe.seeds + 1):
        yield NAME, with_(seeds, *DRAWN)
    yield f"{NAME}-{MANY}", with_(1, "twofold, teacher", samples=[MANY])
    if distil:
        yield f"{NAME}-distil", with_(1, *TRAINED)


def merged(first: Groups, second: Groups) -> Groups:
    """The scores of both."""
    for key, rows in second.items():
        for row, tasks in rows.items():
            for task, draws in tasks.items():
                first.setdefault(key, {}).setdefault(row, {}).setdefault(task, {}).update(draws)
    return first


def shares(groups: Groups, row: str, count: int) -> list[float]:
    """The share that a row recovers, for each draw that is finished on all its pairs and tasks, averaged over pairs."""
    found = [scores for key, scores in groups.items() if key[3] == count and row in scores]
    draws = [set(scores) for group in found for scores in group[row].values()]
    result = []
    for draw in sorted(set.intersection(*draws)) if draws else []:
        recovered = []
        for group in found:
            one = {r: {t: {draw: s[draw]} for t, s in tasks.items() if draw in s} for r, tasks in group.items()}
            one = {r: tasks for r, tasks in one.items() if tasks}
            line = next(line for line in lines(one, count) if line.row == row)
            if line.recovered is not None:
                recovered.append(line.recovered)
        result.append(statistics.mean(recovered))
    return result


def worst(groups: Groups, row: str, count: int) -> float:
    """The smallest gain over the target on any pair and task, a mean over the draws."""
    gains = [
        line.tasks[task] - target.tasks[task]
        for key, scores in groups.items()
        if key[3] == count
        for found in [{line.row: line for line in lines(scores, count)}]
        if row in found
        for line, target in [(found[row], found["target"])]
        for task in line.tasks
    ]
    return min(gains)


def table(groups: Groups) -> str:
    """The mean over pairs, and each pair."""
    rows = []
    for count in sorted({key[3] for key in groups}):
        for row in ROWS:
            found = [100 * share for share in shares(groups, row, count)]
            if not found:
                continue
            by_pair, by_task = [], {}
            for key, scores in groups.items():
                if key[3] != count or row not in scores:
                    continue
                named = {line.row: line for line in lines(scores, count)}
                by_pair.append(f"{key[0]} → {key[1]} {named[row].recovered:.0%}")
                for task, score in named[row].tasks.items():
                    base, best = named["target"].tasks[task], named["target, fine-tuned (oracle)"].tasks[task]
                    by_task.setdefault(task, []).append((score - base, best - base))
            tasks = [f"{t} {sum(g for g, _ in v) / sum(o for _, o in v):.0%}" for t, v in by_task.items()]
            spread = common.mean_spread(found, 0)
            rows.append(
                [row, str(count), str(len(found)), f"{spread} %", f"{worst(groups, row, count):+.1f}",
                 ", ".join(tasks), ", ".join(by_pair)]
            )  # fmt: skip
    header = ["", "N", "draws", "recovered", "least gain on a task", "by task", "by pair"]
    return common.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small version for CI")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--tasks", nargs="+", help="only these: several processes may share the work")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    parser.add_argument("--distil", action="store_true", help="with the rows that train")
    options = parser.parse_args()
    started = time.time()
    recipe = load_recipe(NAME).model_copy(update={"seeds": options.seeds})
    if options.tasks:
        recipe = recipe.model_copy(update={"tasks": {name: recipe.tasks[name] for name in options.tasks}})
    if options.quick:
        recipe = recipes.quick_version(recipe, "case").model_copy(update={"samples": [20]})
    places = Places(zoo_data.ZOO, zoo_data.DATA / "tasks", zoo_data.DATA / ("work-quick" if options.quick else "work"))
    groups: Groups = {}
    if options.shown:
        for name in dict(versions(recipe, distil=True)):
            groups = merged(groups, collect(finished(places.records(name))))
    else:
        for task in recipe.tasks:
            zoo_tasks.write(task, zoo_data.DATA / "tasks")
        for name, version in [(NAME, recipe)] if options.quick else versions(recipe, options.distil):
            records: list[Record] = run_recipe(version, name, places, recipes.Told(name))
            groups = merged(groups, collect(records))
    results: dict[str, Any] = {"groups": to_json(groups)}
    failures = []
    if not options.quick:
        found = {row: statistics.mean(s) for row in (*DRAWN, *LABELLED) if (s := shares(groups, row, 100))}
        for row in sorted({"twofold", "twofold, teacher"} & set(found)):
            if found[row] < 1.3 * found["bico"]:
                failures.append(f"{row} recovers {found[row]:.0%}, less than 1.3 times BiCo ({found['bico']:.0%})")
            if found[row] < 0.65:
                failures.append(f"{row} recovers {found[row]:.0%}, less than 65 %")
            if worst(groups, row, 100) < WORST:
                failures.append(f"{row} loses {-worst(groups, row, 100):.1f} points on a task")
        many = shares(groups, "twofold, teacher", MANY)
        if not many or statistics.mean(many) < 0.7:
            failures.append(f"{MANY} unlabelled samples recover {many or 'nothing yet'}, 70 % is the bound")
    common.finish(results, table(groups), options.json, failures, started)


if __name__ == "__main__":
    main()
