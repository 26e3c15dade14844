"""What limits a transfer: scale, samples, rank, the objective, or the pair itself? One change at a time, on the zoo.

    python benchmarks/limits.py [--quick] [--json benchmarks/results/limits.json]

For every task: the share of the oracle's gain that BiCo recovers at N = 100 and scale 1; at the scale that is best on
the *test* data (a diagnosis, not a method); with ten times the samples; with the paper's full-rank maps; with gradients
of prototypes instead of the zero-shot head; at the automatic scale with ten times the samples. And what goes with it:
the target's zero-shot accuracy, how well the maps fit, how much of the task vector they keep, and how much the moved
one points where the target's own fine-tune went.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import common
import torch
import zoo_data

from taskferry import TaskVector, fit
from taskferry.bench.recipe import Cell, load_recipe
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.evaluation import evaluate
from taskferry.objectives import Prototypes
from taskferry.scale import moved_by, scale_on_calibration
from taskferry.taskvector import as_dense

SCALES = (0.25, 0.5, 0.75, 1.5, 2.0, 3.0)
CHANGES = ("as it is", "best scale on test", "N = 1000", "N = 1000, automatic scale", "full-rank maps", "prototypes")


def cosine(a: TaskVector, b: TaskVector) -> float:
    """Of the changes that both have."""
    names = [name for name in a.deltas if name in b.deltas]
    pairs = [(as_dense(a.deltas[n]).flatten(), as_dense(b.deltas[n]).flatten()) for n in names]
    inner = sum(float(x @ y) for x, y in pairs)
    return inner / math.sqrt(sum(float(x @ x) for x, _ in pairs) * sum(float(y @ y) for _, y in pairs))


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

            def score(moved: TaskVector, scale: float, name: str) -> float:
                with moved_by(target.model, moved) as set_scale:
                    set_scale(scale)
                    value = evaluate(target.model, test, head).value  # noqa: B023
                found.setdefault(name, []).append(round(value, 2))
                return value

            alignment = fit(source.model, target.model, prepared.calibration, prepared.objectives)
            moved = alignment.apply(tau)
            if count == 1000:
                score(moved, 1.0, "N = 1000")
                curve = scale_on_calibration(target.model, moved, head.bind(target.model, shots), shots)
                score(moved, curve.best, "N = 1000, automatic scale")
                continue
            score(TaskVector({}), 0.0, "target")
            score(oracle, 1.0, "oracle")
            values = [score(moved, 1.0, "as it is"), *(score(moved, s, f"scale {s}") for s in SCALES)]
            found.setdefault("best scale on test", []).append(max(values))
            full = fit(source.model, target.model, prepared.calibration, prepared.objectives, map_rank="full")
            score(full.apply(tau), 1.0, "full-rank maps")
            other = fit(source.model, target.model, prepared.calibration, Prototypes())
            score(other.apply(tau), 1.0, "prototypes")
            found.setdefault("cosine with the oracle", []).append(round(cosine(moved, oracle), 4))
            reachable = {pair.source.weight for pair in alignment.pairs}
            kept = norm(moved) / norm(tau, reachable) if reachable else 0.0
            found.setdefault("norm kept", []).append(round(kept, 3))
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    recipe = load_recipe("zoo/tableE")
    tasks = ["mnist"] if options.quick else list(recipe.tasks)
    if options.quick:
        short = recipe.finetune.model_copy(update={"steps": 20, "every": 20, "warmup": 2})
        recipe = recipe.model_copy(update={"finetune": short, "test_samples": 100})
    work = zoo_data.DATA / ("work-quick" if options.quick else "work")
    places = Places(Path(__file__).parent / "zoo", zoo_data.DATA / "tasks", work)
    bench = Bench(recipe, places, Reporter())
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
