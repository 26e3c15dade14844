"""What limits a transfer: scale, samples, rank, the objective, or the pair itself? One change at a time, on the zoo.

    python benchmarks/quality/limits.py [--quick] [--json benchmarks/results/limits.json]

For every task: the share of the oracle's gain that BiCo recovers at N = 100 and scale 1; at the scale that is best on
the *test* data (a diagnosis, not a method); with ten times the samples; with the paper's full-rank maps; with gradients
of prototypes instead of the zero-shot head; at the automatic scale with ten times the samples. Then the target's own
fine-tune in place of the moved one: only its linear layers, and only what the maps of N = 100 could have brought
(P_out τ_B P_in): the ceiling that rank sets. And what goes with it: how much of the task vector's length the maps keep,
and how much the moved one points where the target's own fine-tune went.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared import common
from benchmarks.zoo.zoo_bench import open_zoo, score
from taskferry import Alignment, TaskVector, fit
from taskferry.alignment import AlignedPair
from taskferry.bench.recipe import Cell
from taskferry.bench.running import Bench
from taskferry.collect.scale import choose_scale, losses_at
from taskferry.linalg.procrustes import Map
from taskferry.objectives.objectives import Prototypes
from taskferry.taskvector import as_dense

SCALES = (0.25, 0.5, 0.75, 1.5, 2.0, 3.0)
CHANGES = ("as it is", "best scale on test", "N = 1000", "N = 1000, automatic scale", "full-rank maps", "prototypes")
CHANGES += ("oracle, movable part", "oracle, within reach")


def cosine(a: TaskVector, b: TaskVector) -> float:
    """Of the changes that both have."""
    names = [name for name in a.deltas if name in b.deltas]
    pairs = [(as_dense(a.deltas[n]).flatten(), as_dense(b.deltas[n]).flatten()) for n in names]
    inner = sum(float(x @ y) for x, y in pairs)
    return inner / math.sqrt(sum(float(x @ x) for x, _ in pairs) * sum(float(y @ y) for _, y in pairs))


def movable(alignment: Alignment, tau: TaskVector, side: str) -> TaskVector:
    """The part of a fine-tune that linear layers hold: no normalisation gains, no embeddings, no class token."""
    names = {name for pair in alignment.pairs for s in [getattr(pair, side)] for name in (s.weight, s.bias)}
    return TaskVector({name: delta for name, delta in tau.deltas.items() if name in names})


def within_reach(alignment: Alignment, tau: TaskVector) -> TaskVector:
    """The target's own fine-tune, cut to what the maps could have brought: P_out τ_B P_in with P = Rᵀ R."""

    def reach(maps: Mapping[str, Map]) -> dict[str, Map]:
        return {name: Map(R=R.dense().T @ R.dense()) for name, R in maps.items()}

    onto_itself = replace(
        alignment,
        pairs=tuple(AlignedPair(pair.target, pair.target, pair.reads) for pair in alignment.pairs),
        R_in=reach(alignment.R_in),
        R_out=reach(alignment.R_out),
        source_parameters=alignment.target_parameters,
    )
    return onto_itself.apply(movable(alignment, tau, "target"))


def norm(tau: TaskVector, names: set[str] | None = None) -> float:
    return math.sqrt(
        sum(float(as_dense(d).square().sum()) for n, d in tau.deltas.items() if names is None or n in names)
    )


def study(bench: Bench, source_name: str, target_name: str, task: str, seeds: list[int]) -> dict[str, Any]:
    source, target, data = bench.model(source_name), bench.model(target_name), bench.task(task)
    tau, oracle = bench.tuned(source_name, task), bench.tuned(target_name, task)
    test = data.test_batches(target_name, target)
    found: dict[str, list[float]] = {}
    for seed in seeds:
        for count in (100, 1000):
            cell = Cell(source_name, target_name, task, "random", count, False, seed, ())
            prepared = bench.prepare(cell)
            head, shots = prepared.objectives[1], prepared.shots(1)

            def note(moved: TaskVector, scale: float, name: str) -> float:
                value = score(target.model, test, head, moved, scale)  # noqa: B023
                found.setdefault(name, []).append(round(value, 2))
                return value

            alignment = fit(source.model, target.model, prepared.calibration, prepared.objectives)
            moved = alignment.apply(tau)
            if count == 1000:
                note(moved, 1.0, "N = 1000")
                loss = head.bind(target.model, shots)
                curve = choose_scale(lambda scales: losses_at(target.model, moved, loss, shots, scales))  # noqa: B023
                note(moved, curve.best, "N = 1000, automatic scale")
                continue
            note(TaskVector({}), 0.0, "target")
            note(oracle, 1.0, "oracle")
            values = [note(moved, 1.0, "as it is"), *(note(moved, s, f"scale {s}") for s in SCALES)]
            found.setdefault("best scale on test", []).append(max(values))
            full = fit(source.model, target.model, prepared.calibration, prepared.objectives, map_rank="full")
            note(full.apply(tau), 1.0, "full-rank maps")
            other = fit(source.model, target.model, prepared.calibration, Prototypes())
            note(other.apply(tau), 1.0, "prototypes")
            note(within_reach(alignment, oracle), 1.0, "oracle, within reach")
            note(movable(alignment, oracle, "target"), 1.0, "oracle, movable part")
            found.setdefault("cosine with the oracle", []).append(round(cosine(moved, oracle), 4))
            reachable = {pair.source.weight for pair in alignment.pairs}
            kept = norm(moved) / norm(tau, reachable) if reachable else 0.0
            found.setdefault("norm kept", []).append(round(kept, 3))
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    bench = open_zoo(options.quick)
    tasks = ["mnist"] if options.quick else list(bench.recipe.tasks)
    results: dict[str, Any] = {}
    rows = []
    for task in tasks:
        torch.manual_seed(0)
        found = results[task] = study(bench, "narrow", "wide", task, [0] if options.quick else [0, 1])
        mean = {name: statistics.mean(values) for name, values in found.items()}
        possible = mean["oracle"] - mean["target"]
        shares = [f"{(mean[name] - mean['target']) / possible:.0%}" for name in CHANGES]
        extra = [f"{mean['cosine with the oracle']:.3f}", f"{mean['norm kept']:.0%}"]
        rows.append([task, f"{mean['target']:.1f}", f"{mean['oracle']:.1f}", *shares, *extra])
        print(rows[-1], flush=True)
    header = ["narrow → wide", "target", "oracle", *CHANGES, "cosine with the oracle's", "norm kept"]
    common.finish({"scores": results}, common.table(header, rows), options.json, [], started)


if __name__ == "__main__":
    main()
