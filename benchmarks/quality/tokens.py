"""Which singular directions, which precision and whether all tokens are needed for a map, by what it moves.

    python benchmarks/quality/tokens.py [--quick] [--json benchmarks/results/tokens.json]

On the zoo (two pairs, four tasks, two draws, N = 100, scale 1): the share of the oracle's gain that BiCo recovers when
singular values below a tolerance are dropped, and with the statistics rounded to bfloat16 or kept in float64. The
distance column says how far the moved task vector is from the one in float32. The rows `N tokens per width` of the
committed results, where each map saw at most so many tokens, were measured with an option that was then removed.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from benchmarks.shared import common
from benchmarks.zoo.zoo_bench import open_zoo, score
from taskferry import Alignment, Calibration, TaskVector, fit
from taskferry.bench.recipe import Cell
from taskferry.bench.running import Bench
from taskferry.linalg.sums import CrossCovariance
from taskferry.objectives.preparation import Prepared
from taskferry.taskvector import as_dense

PAIRS = (("narrow", "wide"), ("twin", "deep"))
TASKS = ("mnist", "letters", "fashion", "cifar10")
TOLERANCES = (1e-5, 1e-4, 1e-3, 1e-2)
Fit = Callable[[Any, Any, Prepared], Alignment]


def _rounded(A: Any, B: Any, prepared: Prepared) -> Alignment:
    """Rows rounded to bfloat16 before they are multiplied; sums in float32."""
    add = CrossCovariance.add

    def rounded(sums: CrossCovariance, X_A: Tensor, X_B: Tensor, *more: Any) -> None:
        add(sums, X_A.bfloat16().float(), X_B.bfloat16().float(), *more)

    with patch.object(CrossCovariance, "add", rounded):
        return fit(A, B, prepared.calibration, prepared.objectives)


def _double(A: Any, B: Any, prepared: Prepared) -> Alignment:
    """Everything in float64: models, inputs, sums."""
    pairs = [
        tuple(
            replace(b, inputs={k: v.double() if v.is_floating_point() else v for k, v in b.inputs.items()}) for b in p
        )
        for p in prepared.calibration
    ]
    objectives = tuple(copy.deepcopy(o) for o in prepared.objectives)
    for objective in objectives:
        for name, value in vars(objective).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                object.__setattr__(objective, name, value.double())
    A, B = copy.deepcopy(A).double(), copy.deepcopy(B).double()
    return fit(A, B, Calibration(pairs), objectives)  # type: ignore[arg-type]


def variants() -> dict[str, Fit]:
    def with_(**settings: Any) -> Fit:
        return lambda A, B, prepared: fit(A, B, prepared.calibration, prepared.objectives, **settings)

    found: dict[str, Fit] = {"all tokens, float32": with_()}
    found |= {f"tolerance {t:g}": with_(tolerance=t) for t in TOLERANCES}
    return found | {"bfloat16 rows": _rounded, "float64": _double}


def distance(a: TaskVector, b: TaskVector) -> float:
    """‖a − b‖ / ‖a‖."""
    parts = [(as_dense(a.deltas[n]).double(), as_dense(b.deltas[n]).double()) for n in a.deltas]
    return math.sqrt(
        sum(float((x - y).square().sum()) for x, y in parts) / sum(float(x.square().sum()) for x, _ in parts)
    )


def study(bench: Bench, pair: tuple[str, str], task: str, seeds: range) -> dict[str, Any]:
    A, B = (bench.model(name) for name in pair)
    tau, oracle = bench.tuned(pair[0], task), bench.tuned(pair[1], task)
    test = bench.task(task).test_batches(pair[1], B)
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        prepared = bench.prepare(Cell(*pair, task, "random", 100, False, seed, ()))
        head = prepared.objectives[1]
        target, best = (score(B.model, test, head, tau) for tau in (TaskVector({}), oracle))
        reference = None
        for name, make in variants().items():
            alignment = make(A.model, B.model, prepared)
            moved = alignment.apply(tau)
            reference = reference or moved
            row = found.setdefault(name, {"share": [], "distance": [], "rows": []})
            row["share"].append(round((score(B.model, test, head, moved) - target) / (best - target), 4))
            row["distance"].append(round(distance(reference, moved), 5))
            row["rows"].append(max(q.rows for q in alignment.quality_in.values()))
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    bench = open_zoo(options.quick)
    results: dict[str, Any] = {}
    for pair in PAIRS[:1] if options.quick else PAIRS:
        for task in TASKS[:1] if options.quick else TASKS:
            torch.manual_seed(0)
            results[f"{pair[0]} → {pair[1]}: {task}"] = found = study(
                bench, pair, task, range(1 if options.quick else 2)
            )
            print(pair, task, {n: round(statistics.mean(r["share"]), 3) for n, r in found.items()}, flush=True)
    rows = []
    for name in variants():
        shares = [statistics.mean(cell[name]["share"]) for cell in results.values()]
        change = [
            a - b
            for cell in results.values()
            for a, b in zip(cell[name]["share"], cell["all tokens, float32"]["share"], strict=True)
        ]
        spread = statistics.stdev(change) / math.sqrt(len(change)) if len(change) > 1 else 0.0
        far = statistics.mean(d for cell in results.values() for d in cell[name]["distance"])
        most = max(r for cell in results.values() for r in cell[name]["rows"])
        points = f"{100 * statistics.mean(change):+.1f} ± {100 * spread:.1f}"
        rows.append([name, f"{statistics.mean(shares):.1%}", points, f"{far:.3g}", str(most)])
    header = ["maps from", "share of the oracle's gain", "against all tokens, points", "distance of τ", "rows of a map"]
    common.finish({"cells": results}, common.table(header, rows), options.json, [], started)


if __name__ == "__main__":
    main()
