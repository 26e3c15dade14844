"""One alignment for every task: what is lost when maps are fitted on other data than the task's own?

    python benchmarks/quality/general.py [--quick] [--json benchmarks/results/general.json]

On the zoo (narrow → wide and twin → deep, N = 100, scale 1): maps from the task's own samples; from samples of the six
other tasks, with their own heads, as many in all, and as many of each. Nothing of the task itself is in the general
data. The share of the oracle's gain decides what a fleet should do by default.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch import nn

from benchmarks.shared import common
from benchmarks.zoo.zoo_bench import open_zoo, score
from taskferry import Alignment, TaskVector
from taskferry.bench.recipe import Cell
from taskferry.bench.running import Bench
from taskferry.collect.capture import Side, collect
from taskferry.collect.solve import GroupSums, MapOptions, solve_group
from taskferry.collect.statistics import Statistics
from taskferry.data.batch import Calibration
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import pair_sites
from taskferry.objectives.objectives import Objective

PAIRS = (("narrow", "wide"), ("twin", "deep"))
KINDS = ("own, 100", "others, 100 in all", "others, 100 of each")


def sums(bench: Bench, pair: tuple[str, str], task: str, count: int, seed: int) -> Statistics:
    """Cross-covariances of one task's samples with its own heads."""
    prepared = bench.prepare(Cell(*pair, task, "random", count, False, seed, ()))
    return captured(models(bench, pair), prepared.calibration, prepared.objectives)


def models(bench: Bench, pair: tuple[str, str]) -> tuple[nn.Module, nn.Module]:
    return bench.model(pair[0]).model, bench.model(pair[1]).model


def captured(
    models: tuple[nn.Module, nn.Module], calibration: Calibration, objectives: Sequence[Objective]
) -> Statistics:
    """Cross-covariances of one capture."""
    sides = [Side(m, objectives[i].bind(m, calibration.side(i))) for i, m in enumerate(models)]
    pairs, _ = pair_sites(*map(find_sites, models))
    found = Statistics()
    collect(found, sides[0], sides[1], pairs, calibration)
    return found


def align(A: nn.Module, B: nn.Module, found: Statistics) -> Alignment:
    pairs, reasons = pair_sites(find_sites(A), find_sites(B))
    shapes = [{n: tuple(p.shape) for n, p in m.named_parameters()} for m in (A, B)]
    return solve_group(GroupSums.of(found, pairs), pairs, MapOptions()).alignment(shapes[0], shapes[1], reasons, {})


def total(parts: Iterable[Statistics]) -> Statistics:
    """Their sum; the parts stay as they are."""
    whole = Statistics()
    for part in parts:
        whole.reads |= part.reads
        for inputs, sums, into in ((True, part.inputs, whole.inputs), (False, part.outputs, whole.outputs)):
            for name, S in sums.items():
                into.setdefault(name, whole.start(inputs, name, S.d_A, S.d_B)).merge(S)
    return whole


def study(bench: Bench, pair: tuple[str, str], tasks: list[str], seed: int) -> dict[str, dict[str, float]]:
    """Every task's scores with each kind of maps, for one pair and draw."""
    few, many = ({t: sums(bench, pair, t, n, seed) for t in tasks} for n in (max(2, 100 // (len(tasks) - 1)), 100))
    found = {}
    for task in tasks:
        B = bench.model(pair[1])
        head = bench.prepare(Cell(*pair, task, "random", 100, False, seed, ())).objectives[1]
        test = bench.task(task).test_batches(pair[1], B)
        tau, oracle = bench.tuned(pair[0], task), bench.tuned(pair[1], task)
        scores = {
            name: score(B.model, test, head, tau) for name, tau in (("target", TaskVector({})), ("oracle", oracle))
        }
        others = [other for other in tasks if other != task]
        kinds = ([many[task]], [few[other] for other in others], [many[other] for other in others])
        for kind, parts in zip(KINDS, kinds, strict=True):
            scores[kind] = score(B.model, test, head, align(*models(bench, pair), total(parts)).apply(tau))
        found[task] = scores
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    bench = open_zoo(options.quick)
    tasks = list(bench.recipe.tasks)[:2] if options.quick else list(bench.recipe.tasks)
    results: dict[str, Any] = {}
    rows = []
    for pair in PAIRS[:1] if options.quick else PAIRS:
        draws = [study(bench, pair, tasks, seed) for seed in range(1 if options.quick else 2)]
        for task in tasks:
            found = results[f"{pair[0]} → {pair[1]}: {task}"] = [draw[task] for draw in draws]
            mean = {name: statistics.mean(d[name] for d in found) for name in found[0]}
            possible = mean["oracle"] - mean["target"]
            shares = [f"{(mean[kind] - mean['target']) / possible:.0%}" for kind in KINDS]
            rows.append([f"{pair[0]} → {pair[1]}", task, f"{mean['target']:.1f}", f"{mean['oracle']:.1f}", *shares])
            print(rows[-1], flush=True)
    flat = [d for draws in results.values() for d in draws]
    possible = sum(d["oracle"] - d["target"] for d in flat)
    shares = [f"**{sum(d[kind] - d['target'] for d in flat) / possible:.0%}**" for kind in KINDS]
    rows.append(["**all**", "", "", "", *shares])
    common.finish(results, common.table(["pair", "task", "target", "oracle", *KINDS], rows), options.json, [], started)


if __name__ == "__main__":
    main()
