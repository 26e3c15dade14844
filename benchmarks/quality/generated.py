"""No data at all: samples that the tuned source writes itself, against real ones, with a LoRA on scripture.

    python benchmarks/quality/generated.py [--quick] [--json benchmarks/results/generated.json]
        [--pair A:B] [--counts N …] [--seeds N] [--models FOLDER]

The LoRA moves on so many samples of each kind; the loss per token is that of passages of books that nothing was trained
on (200 for the models of `taskferry example`, 100 for a pair of real language models, as in `language_models.py`), and
nothing is chosen on them, except that it is a half: `transfer` takes half of the scale that is best on generated texts,
which the rows at half of it show. The first of many generated samples are those of fewer. The example has 128 real
passages, which stand for 400. A run goes on where an earlier one stopped.

Bound: with a hundred generated samples BiCo has at least half of what it gains with a hundred real ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality import language_models
from benchmarks.quality.language_tasks import TASKS, batches_of
from benchmarks.shared import common
from benchmarks.zoo import zoo_data
from benchmarks.zoo.example_models import moved_loss
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.bench.rows import Mover
from taskferry.data.batch import Batch
from taskferry.data.data import Samples
from taskferry.evaluation import Pool
from taskferry.example import FILES
from taskferry.jobs.settings import PlanSettings
from taskferry.methods import Job
from taskferry.models import Loaded, Tuned
from taskferry.objectives.generation import draw
from taskferry.objectives.preparation import prepare

COUNTS = (25, 50, 100, 400)
REAL, FREE = "real passages", "free text"
KINDS: dict[str, dict[str, Any]] = {
    FREE: {},
    "free text, temperature 0.7": {"temperature": 0.7},
    "from prompts of its own": {"prompts": "own"},
}
ROWS = ("bico, automatic scale", "twofold")
HALF = ", at half of its scale"
MANY = 100  # samples of the kinds that are looked at beside, and of the costlier method
CUT = 48  # tokens of a passage that a pair of real models sees, or writes: the test has whole ones
SHARE = 0.5  # of the gain with real samples


@dataclass(frozen=True)
class Place:
    """A pair of models with the LoRA that moves, real passages to draw from, and what scores."""

    models: tuple[Loaded, Loaded]
    tuned: Tuned
    passages: Samples
    test: Sequence[Batch]
    kinds: Mapping[str, dict[str, Any]]
    length: int | None = None  # tokens of a passage at most

    def score(self, change: TaskVector, scale: float) -> float:
        """The loss per token of the target with a change."""
        return moved_loss(self.models[1], self.test, change, scale)

    def samples(self, kind: str, most: int, seed: int) -> tuple[Samples, float]:
        """All that the largest number asks for, and the seconds that it took to write them."""
        if kind == REAL:
            return self.passages, 0.0
        started = time.perf_counter()
        settings = self.settings(most, seed, "generate", source_tuned="tuned", **KINDS[kind])
        drawn = draw(settings, *self.models, self.tuned)
        return drawn.samples, round(time.perf_counter() - started, 1)

    def settings(self, count: int, seed: int, calibration: str, **more: Any) -> PlanSettings:
        """Of so many samples."""
        if self.length is not None:
            more["max_length"] = self.length
        given = {"source_base": "source", "target_base": "target", "samples": count, "seed": seed, **more}
        return PlanSettings(calibration=calibration, **given)


def example(quick: bool) -> Place:
    """The models that come with the package."""
    A, B = (load_model(str(FILES / name)) for name in ("base-a", "base-b"))
    test = Pool(load_samples(str(FILES / "test.jsonl")), B)
    batches = test.batches(range(20 if quick else len(test)), 50)
    return Place((A, B), load_tuned(str(FILES / "my-lora"), A), load_samples(str(FILES / "data.jsonl")), batches, KINDS)


def real_pair(pair: str, folder: Path) -> Place:
    """Real language models; a LoRA that `language_models.py` trains."""
    A, B = (load_model(str(at) if (at := folder / name).exists() else name) for name in pair.split(":"))
    kept = zoo_data.DATA / "language"
    kept.mkdir(parents=True, exist_ok=True)
    lora = language_models.tuned(A, kept, "scripture", language_models.TRAINED)
    task = TASKS["scripture"]
    test = batches_of(B, task.questions(task.most))
    return Place((A, B), load_tuned(str(lora), A), task.samples("train"), test, {FREE: KINDS[FREE]}, CUT)


def table(target: float, losses: dict[str, list[float]], counts: Sequence[int]) -> str:
    """The loss, and of what real samples gain at the same number, the share."""
    lines = []
    for base, row in ((each, each + part) for each in ROWS for part in ("", HALF)):
        for kind in (REAL, *KINDS):
            cells = []
            for count in counts:
                found, real = losses.get(f"{row}: {kind}, {count}"), losses.get(f"{base}: {REAL}, {count}")
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


def study(place: Place, counts: tuple[int, ...], seed: int, found: dict[str, dict[str, float]]) -> Iterator[None]:
    """One draw of every kind: the losses that are not known yet, and the seconds that writing took."""
    A, B = place.models
    for kind in (REAL, *place.kinds):
        rows = [(row, count) for count in counts if count <= MANY or kind in (REAL, FREE)
                for row in (ROWS if count == MANY and kind in (REAL, FREE) and not place.length else ROWS[:1])
                if f"{row}: {kind}, {count}" not in found["losses"]]  # fmt: skip
        if not rows:
            continue
        samples, found["seconds to write"][kind] = place.samples(kind, max(count for _, count in rows), seed)
        for row, count in rows:
            some = samples if kind == REAL else samples.take(range(count))
            prepared = prepare(place.settings(count, seed, "given"), A, B, place.tuned, samples=some)
            mover = Mover(Job.of(A.model, B.model, place.tuned.tau, prepared.calibration, prepared.objectives))
            change, scale, _ = mover.move(row)
            key = f"{row}: {kind}, {count}"
            found["losses"][key] = round(place.score(change, scale), 4)
            if kind != REAL:
                found["losses"][f"{row}{HALF}: {kind}, {count}"] = round(place.score(change, scale / 2), 4)
            print(f"{key}, seed {seed}: {found['losses'][key]}", flush=True)
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one draw of sixteen samples")
    parser.add_argument("--json", type=Path, help="write the results here; what it holds already is kept")
    parser.add_argument("--pair", default="", metavar="A:B", help="real language models, in place of the example")
    parser.add_argument("--models", type=Path, default=language_models.HOME, help="where their folders are")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    known = common.kept(options.json, {})
    counts, seeds = ((16,), 1) if options.quick else (tuple(options.counts), options.seeds)
    if not options.shown:
        place = real_pair(options.pair, options.models) if options.pair else example(options.quick)
        known.setdefault("targets", {})[options.pair] = round(place.score(TaskVector({}), 1.0), 4)
        for seed in range(seeds):
            key = f"{options.pair} seed {seed}".strip()
            cell = known.setdefault(key, {"losses": {}, "seconds to write": {}})
            for _ in study(place, counts, seed, cell):
                common.kept(options.json, {key: cell, "targets": known["targets"]})
    tables, missed = [], []
    for pair, target in known["targets"].items():
        losses: dict[str, list[float]] = {}
        for draw_of in (cell for key, cell in known.items() if key.rpartition("seed ")[0].strip() == pair):
            for key, loss in draw_of.get("losses", {}).items():
                losses.setdefault(key, []).append(loss)
        told = "The models of `taskferry example`" if not pair else pair.replace(":", " → ")
        every = sorted({int(key.rpartition(", ")[2]) for key in losses})
        tables.append(f"{told}. {table(target, losses, every)}")
        taken = f"{ROWS[0]}{HALF}: {FREE}, {MANY}"
        both = [losses.get(f"{ROWS[0]}: {REAL}, {MANY}"), losses.get(taken, losses.get(f"{ROWS[0]}: {FREE}, {MANY}"))]
        gains = [target - statistics.mean(each) for each in both if each]
        if len(gains) == 2 and gains[1] < SHARE * gains[0]:
            missed.append(f"{told}: generated samples gain {gains[1]:.3f}, real ones {gains[0]:.3f}")
    common.finish(known, "\n\n".join(tables), options.json, missed, started)


if __name__ == "__main__":
    main()
