"""One alignment for every task: what is lost when maps are fitted on other data than the task's own?

    python benchmarks/general.py [--quick] [--json benchmarks/results/general.json]

On the zoo (narrow → wide and twin → deep, N = 100, scale 1): maps from the task's own samples; from samples of the six
other tasks, with their own heads, as many in all, and as many of each. Nothing of the task itself is in the general
data. The share of the oracle's gain decides what a fleet should do by default.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import common
import torch
from zoo_bench import open_zoo, score

from taskferry import Alignment, TaskVector
from taskferry.bench.recipe import Cell
from taskferry.bench.running import Bench
from taskferry.capture import Side, Statistics, collect
from taskferry.finding import find_sites
from taskferry.pairing import pair_sites
from taskferry.solving import MapOptions, solve_group

PAIRS = (("narrow", "wide"), ("twin", "deep"))
KINDS = ("own, 100", "others, 100 in all", "others, 100 of each")


def sums(bench: Bench, pair: tuple[str, str], task: str, count: int, seed: int) -> Statistics:
    """Cross-covariances of one task's samples with its own heads."""
    A, B = (bench.model(name).model for name in pair)
    prepared = bench.prepare(Cell(*pair, task, "random", count, False, seed, ()))
    sides = [Side(m, prepared.objectives[i].bind(m, prepared.calibration.side(i))) for i, m in enumerate((A, B))]
    pairs, _ = pair_sites(find_sites(A), find_sites(B))
    return collect(sides[0], sides[1], pairs, prepared.calibration)


def align(bench: Bench, pair: tuple[str, str], found: Statistics) -> Alignment:
    A, B = (bench.model(name).model for name in pair)
    pairs, reasons = pair_sites(find_sites(A), find_sites(B))
    shapes = [{n: tuple(p.shape) for n, p in m.named_parameters()} for m in (A, B)]
    return solve_group(found, pairs, MapOptions()).alignment(shapes[0], shapes[1], reasons, {})


def study(bench: Bench, pair: tuple[str, str], task: str, others: list[str], seed: int) -> dict[str, float]:
    B = bench.model(pair[1])
    tau, oracle = bench.tuned(pair[0], task), bench.tuned(pair[1], task)
    test = bench.task(task).test_batches(pair[1], B)
    head = bench.prepare(Cell(*pair, task, "random", 100, False, seed, ())).objectives[1]

    target, best = (score(B.model, test, head, tau) for tau in (TaskVector({}), oracle))
    found = {"target": target, "oracle": best}
    few, many = Statistics(), Statistics()
    for other in others:
        few.merge(sums(bench, pair, other, max(2, 100 // len(others)), seed))
        many.merge(sums(bench, pair, other, 100, seed))
    for kind, total in zip(KINDS, (sums(bench, pair, task, 100, seed), few, many), strict=True):
        found[kind] = score(B.model, test, head, align(bench, pair, total).apply(tau))
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    bench = open_zoo(options.quick)
    tasks = list(bench.recipe.tasks)[:2] if options.quick else list(bench.recipe.tasks)
    # A run that was cut off goes on after its last finished row.
    kept = options.json is not None and options.json.exists() and not options.quick
    results: dict[str, Any] = json.loads(options.json.read_text()) if kept else {}
    results.pop("seconds", None)
    rows = []
    for pair in PAIRS[:1] if options.quick else PAIRS:
        for task in tasks:
            torch.manual_seed(0)
            others = [other for other in tasks if other != task]
            key = f"{pair[0]} → {pair[1]}: {task}"
            seeds = range(1 if options.quick else 2)
            draws = results.get(key) or [study(bench, pair, task, others, seed) for seed in seeds]
            mean = {name: statistics.mean(d[name] for d in draws) for name in draws[0]}
            results[key] = draws
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
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
