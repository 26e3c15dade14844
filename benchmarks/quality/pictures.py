"""No pictures of the task at all: those of another one, labelled by the tuned source, against its own.

    python benchmarks/quality/pictures.py [--quick] [--json benchmarks/results/pictures.json]

Two pairs of the zoo, four tasks, three draws, the default method. The heads are those of the task; the pictures are its
own with their labels, its own with the labels that the tuned source gives them, or those of another task (letters for
photographs and for glyphs, photographs for letters and for glyphs in three classes), which the tuned source labels by
the task's classes. Test data of the task scores alone. A run goes on where an earlier one stopped.
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
COUNTS, DRAWS = (25, 50, 100, 400), 3
OWN, TEACHER, FOREIGN = "its own, labels", "its own, tuned source's labels", "another task's, tuned source's labels"
KINDS = (OWN, TEACHER, FOREIGN)


def study(bench: Bench, pair: tuple[str, str], task: str, count: int, draw: int) -> Iterator[tuple[str, float]]:
    """The score of the default with every kind of pictures, beside the target's and the oracle's."""
    own = bench.prepare(Cell(*pair, task, "random", count, False, draw, ()))
    other = bench.prepare(Cell(*pair, OTHER[task], "random", count, False, draw, ()))
    source, target = pair
    A, B = bench.model(source).model, bench.model(target).model
    tau = bench.tuned(source, task)
    for name, change in (("target", TaskVector({})), ("oracle", bench.tuned(target, task))):
        yield name, bench.score(target, task, change, 1.0, own, 1)
    for kind in KINDS:
        calibration = (other if kind == FOREIGN else own).calibration
        mover = Mover(Job.of(A, B, tau, calibration, own.objectives))
        moved, scale, _ = mover.take(replace(ways.WAYS[ways.STANDARD], teacher=kind != OWN).row)
        yield kind, bench.score(target, task, moved, scale, own, 1)


def table(cells: dict[str, dict[str, float]]) -> str:
    """Shares of the oracle's gain, sums over pairs and tasks: their mean and spread over draws."""
    rows = []
    for kind, count in product(KINDS, COUNTS):
        some = {key: cell for key, cell in cells.items() if int(key.split()[3]) == count}
        if not some:
            continue
        shares = []
        for draw in sorted({key.split()[4] for key in some}):
            drawn = [cell for key, cell in some.items() if key.split()[4] == draw]
            whole = sum(cell["oracle"] - cell["target"] for cell in drawn)
            shares.append(100 * sum(cell[kind] - cell["target"] for cell in drawn) / whole)
        worst = min(some, key=lambda key: some[key][kind] - some[key]["target"])
        least = f"{some[worst][kind] - some[worst]['target']:+.1f} ({' '.join(worst.split()[:3])})"
        rows.append([kind, str(count), str(len(some)), f"{common.mean_spread(shares, 0)} %", least])
    return common.table(["pictures", "N", "cells", "share of the oracle's gain", "least gain, points"], rows)


def main() -> None:
    options, started = common.arguments(__doc__ or ""), time.time()
    torch.set_num_threads(1)
    pairs, tasks = (PAIRS[:1], ("letters",)) if options.quick else (PAIRS, tuple(OTHER))
    bench = open_short(options.quick)
    cells: dict[str, Any] = common.kept(options.json, {})
    draws, counts = (1, COUNTS[:1]) if options.quick else (DRAWS, COUNTS)
    for draw, count, pair, task in product(range(draws), counts, pairs, tasks):
        key = f"{task} {pair[0]} {pair[1]} {count} {draw}"
        if key in cells:
            continue
        for each in (task, OTHER[task]):
            zoo_tasks.write(each, zoo_data.DATA / "tasks")
        cells[key] = dict(study(bench, pair, task, count, draw))
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
