"""No data at all: samples that the tuned source writes itself, against real ones, on the models of `taskferry example`.

    python benchmarks/quality/generated.py [--quick] [--json benchmarks/results/generated.json]

The LoRA of base-a on scripture moves to base-b on so many samples of each kind; the loss per token is that of 200
passages of books that nothing was trained on, and nothing is chosen on them. The first of many generated samples are
those of fewer. The package has 128 real passages, which stand for 400. A run goes on where an earlier one stopped.

Bound: with a hundred generated samples BiCo has at least half of what it gains with a hundred real ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common
from benchmarks.zoo.example_models import moved_loss
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.bench.rows import Mover
from taskferry.calibration.data import Samples
from taskferry.checkpoints import Loaded, Tuned
from taskferry.evaluation import Pool
from taskferry.example import FILES
from taskferry.fitting.generation import draw
from taskferry.fitting.preparation import prepare
from taskferry.jobs.settings import PlanSettings
from taskferry.methods import Job

COUNTS, SEEDS = (25, 50, 100, 400), 3
REAL, FREE = "real passages", "free text"
KINDS: dict[str, dict[str, Any]] = {
    FREE: {},
    "free text, temperature 0.7": {"temperature": 0.7},
    "from prompts of its own": {"prompts": "own"},
}
ROWS = ("bico, automatic scale", "twofold")
MANY = 100  # samples of the kinds that are looked at beside, and of the costlier method
SHARE = 0.5  # of the gain with real samples
Score = Callable[[TaskVector, float], float]


def samples_of(kind: str, models: tuple[Loaded, Loaded], tuned: Tuned, most: int, seed: int) -> tuple[Samples, float]:
    """All that the largest number asks for, and the seconds that it took to write them."""
    if kind == REAL:
        return load_samples(str(FILES / "data.jsonl")), 0.0
    given = {"source_base": "base-a", "target_base": "base-b", "source_tuned": "my-lora", "samples": most, "seed": seed}
    started = time.perf_counter()
    drawn = draw(PlanSettings(calibration="generate", **given, **KINDS[kind]), *models, tuned)
    return drawn.samples, time.perf_counter() - started


def table(target: float, losses: dict[str, list[float]], counts: tuple[int, ...]) -> str:
    """The loss, and of what real samples gain at the same number, the share."""
    lines = []
    for row in ROWS:
        for kind in (REAL, *KINDS):
            cells = []
            for count in counts:
                found, real = (losses.get(f"{row}: {each}, {count}") for each in (kind, REAL))
                if not found or not real:
                    cells.append("")
                    continue
                gain, best = (target - statistics.mean(each) for each in (found, real))
                share = "" if kind == REAL else f" ({gain / best:.0%})"
                cells.append(common.mean_spread(found, 3) + share)
            if any(cells):
                lines.append([row, kind, *cells])
    header = ["method", "samples", *(f"N = {count}" for count in counts)]
    return f"Loss per token of the target as it is: {target:.3f}.\n\n" + common.table(header, lines)


def study(
    models: tuple[Loaded, Loaded], tuned: Tuned, counts: tuple[int, ...], seed: int, score: Score
) -> dict[str, dict[str, float]]:
    """One draw of every kind: the losses, and the seconds that writing took."""
    A, B = models
    found: dict[str, dict[str, float]] = {"losses": {}, "seconds to write": {}}
    for kind in (REAL, *KINDS):
        mine = counts if kind in (REAL, FREE) else tuple(count for count in counts if count <= MANY)
        samples, seconds = samples_of(kind, models, tuned, max(mine), seed)
        found["seconds to write"][kind] = round(seconds, 1)
        for count in mine:
            some = samples if kind == REAL else samples.take(range(count))
            settings = PlanSettings(calibration="given", source_base="", target_base="", samples=count, seed=seed)
            prepared = prepare(settings, A, B, tuned, samples=some)
            mover = Mover(Job.of(A.model, B.model, tuned.tau, prepared.calibration, prepared.objectives))
            for row in ROWS if count == MANY and kind in (REAL, FREE) else ROWS[:1]:
                change, scale, _ = mover.move(row)
                key = f"{row}: {kind}, {count}"
                found["losses"][key] = round(score(change, scale), 4)
                print(f"{key}, seed {seed}: {found['losses'][key]}", flush=True)
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    counts, seeds = ((16,), 1) if options.quick else (COUNTS, SEEDS)
    A, B = (load_model(str(FILES / name)) for name in ("base-a", "base-b"))
    tuned = load_tuned(str(FILES / "my-lora"), A)
    test = Pool(load_samples(str(FILES / "test.jsonl")), B)
    batches = test.batches(range(20 if options.quick else len(test)), 50)

    def score(change: TaskVector, scale: float) -> float:
        return moved_loss(B, batches, change, scale)

    target, known = score(TaskVector({}), 1.0), common.kept(options.json, {})
    for seed in range(seeds):
        if (key := f"seed {seed}") not in known:
            known[key] = study((A, B), tuned, counts, seed, score)
            common.kept(options.json, {key: known[key]})
    losses: dict[str, list[float]] = {}
    for draw_of in known.values():
        for key, loss in draw_of["losses"].items():
            losses.setdefault(key, []).append(loss)
    missed = []
    if not options.quick:
        gains = [target - statistics.mean(losses[f"{ROWS[0]}: {kind}, {MANY}"]) for kind in (REAL, FREE)]
        if gains[1] < SHARE * gains[0]:
            missed.append(f"generated samples gain {gains[1]:.3f}, real ones {gains[0]:.3f}")
    results = {**known, "target": round(target, 4)}
    common.finish(results, table(target, losses, counts), options.json, missed, started)


if __name__ == "__main__":
    main()
