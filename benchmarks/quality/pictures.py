"""No pictures of the task at all: those of another one, labelled by the tuned source, against its own.

    python benchmarks/quality/pictures.py [--quick] [--json benchmarks/results/pictures.json]

Two pairs of the zoo, four tasks, one draw. The heads are those of the task; the pictures are its own with their labels,
its own with the labels that the tuned source gives them, or those of another task (letters for photographs and for
glyphs, photographs for letters and for glyphs in three classes), which the tuned source labels by the task's classes.
Test data of the task scores alone. A run goes on where an earlier one stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality import frontier_tables as frontier
from benchmarks.quality import ways
from benchmarks.shared import common
from benchmarks.zoo import zoo_data, zoo_tasks
from benchmarks.zoo.zoo_bench import open_short
from taskferry import TaskVector
from taskferry.bench.recipe import Cell
from taskferry.bench.rows import Mover
from taskferry.bench.running import Bench
from taskferry.methods import Job

PAIRS = frontier.PAIRS[:2]
OTHER = {"letters": "cifar10", "cifar10": "letters", "occluded": "letters", "case": "cifar10"}
COUNTS = (25, 100)
WAYS = {"BiCo": ways.WAYS[ways.BESIDE], "the default": ways.WAYS[ways.STANDARD]}
OWN, TEACHER, FOREIGN = "its own, labels", "its own, tuned source's labels", "another task's, tuned source's labels"


def study(bench: Bench, pair: tuple[str, str], task: str, count: int) -> Iterator[tuple[str, float]]:
    """The score of every way with every kind of pictures, beside the target's and the oracle's."""
    own = bench.prepare(Cell(*pair, task, "random", count, False, 0, ()))
    other = bench.prepare(Cell(*pair, OTHER[task], "random", count, False, 0, ()))
    source, target = pair
    A, B = bench.model(source).model, bench.model(target).model
    tau = bench.tuned(source, task)
    for name, change in (("target", TaskVector({})), ("oracle", bench.tuned(target, task))):
        yield name, bench.score(target, task, change, 1.0, own, 1)
    for kind in (OWN, TEACHER, FOREIGN):
        calibration = (other if kind == FOREIGN else own).calibration
        mover = Mover(Job.of(A, B, tau, calibration, own.objectives))
        for name, way in WAYS.items():
            moved, scale, _ = mover.take(replace(way, teacher=kind != OWN).row)
            yield f"{name}: {kind}", bench.score(target, task, moved, scale, own, 1)


def table(cells: dict[str, dict[str, float]]) -> str:
    """Shares of the oracle's gain: sums over the cells."""
    rows = []
    for name, kind, count in product(WAYS, (OWN, TEACHER, FOREIGN), COUNTS):
        some = {key: cell for key, cell in cells.items() if int(key.split()[3]) == count}
        if not some:
            continue
        gains = [cell[f"{name}: {kind}"] - cell["target"] for cell in some.values()]
        whole = sum(cell["oracle"] - cell["target"] for cell in some.values())
        worst = min(some, key=lambda key: some[key][f"{name}: {kind}"] - some[key]["target"])
        least = f"{min(gains):+.1f} ({' '.join(worst.split()[:3])})"
        rows.append([name, kind, str(count), str(len(some)), f"{sum(gains) / whole:.0%}", least])
    return common.table(["way", "pictures", "N", "cells", "share of the oracle's gain", "least gain, points"], rows)


def main() -> None:
    options, started = common.arguments(__doc__ or ""), time.time()
    torch.set_num_threads(1)
    pairs, tasks = (PAIRS[:1], ("letters",)) if options.quick else (PAIRS, tuple(OTHER))
    bench = open_short(options.quick)
    cells: dict[str, Any] = common.kept(options.json, {})
    for task, pair, count in product(tasks, pairs, COUNTS):
        key = f"{task} {pair[0]} {pair[1]} {count}"
        if key in cells:
            continue
        for each in (task, OTHER[task]):
            zoo_tasks.write(each, zoo_data.DATA / "tasks")
        cells[key] = dict(study(bench, pair, task, count))
        common.kept(options.json, {key: cells[key]})
        print(key, cells[key], f"{time.time() - started:.0f} s", flush=True)
    failures = [
        f"{key}, {way}: {cell[way] - cell['target']:+.1f} points"
        for key, cell in cells.items()
        for way in cell
        if cell[way] - cell["target"] < frontier.WORST
    ]
    common.finish(dict(cells), table(cells), options.json, failures, started)


if __name__ == "__main__":
    main()
