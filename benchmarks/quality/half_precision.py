"""How much of a move is lost where the models run in half precision: maps, changes and scores beside float32's.

    python benchmarks/quality/half_precision.py [--quick] [--json benchmarks/results/half_precision.json]

Two real pairs: encoders of texts (all-MiniLM-L6-v2 → gte-small, a full fine-tune on TREC, scored by a head that is
fitted on the same samples), and, where they are there, language models (SmolLM2-135M → Gemma-3-270M, the LoRA of TREC
that `language_models.py` trains, scored by right answers). Each is moved on 100 samples with weights in float32,
bfloat16 and float16: BiCo at scale 1, which shows the rounding alone, and the default, whose scale is chosen.

Bound: in bfloat16 BiCo's change lies within 10 % of float32's, and no score below float32's by more than three points.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality import head, language_models
from benchmarks.quality.language_tasks import BATCH, LENGTH, TASKS
from benchmarks.shared import common
from benchmarks.zoo import zoo_data
from taskferry import Alignment, Pool, TaskVector, load_model, load_tuned
from taskferry.collect.scale import moved_by
from taskferry.evaluation import evaluate
from taskferry.linalg.procrustes import Map
from taskferry.methods import Job, run
from taskferry.models import Loaded
from taskferry.objectives.objectives import LanguageModel, Prototypes
from taskferry.objectives.preparation import prepare
from taskferry.settings import CalibrationSettings

PRECISIONS = ("float32", "bfloat16", "float16")
METHODS = {"BiCo at scale 1": "bico", "the default": "twofold"}
FURTHEST, WORST = 0.10, 3.0
Score = Callable[[TaskVector], float]  # of the target in float32 with a change
Maker = Callable[[str], Job]  # a job in one precision


def texts(quick: bool) -> tuple[Maker, Score]:
    """Encoders; the fine-tune is made in float32 and read by every precision."""
    source, target = head.pair()
    task, (steps, count, held) = head.Texts.load("trec"), (5, 20, 40) if quick else (150, 100, 500)
    tau, _, _ = head.tuned(source, task.pool(source), task.classes, steps, 0)
    own, tests = task.calibration((source, target), count, 0).side(1), task.tests(target, held)

    def job(precision: str) -> Job:
        A, B = (load_model(each.given, dtype=precision) for each in (source, target))
        return Job.of(A.model, B.model, tau, task.calibration((A, B), count, 0), Prototypes())

    def score(change: TaskVector) -> float:
        return head.probed(target.model, change, own, tests, task.classes)

    return job, score


def language() -> tuple[Maker, Score] | None:
    """Language models, where their folders and the LoRA are there."""
    places = [language_models.HOME / name for name in (language_models.SMOL, language_models.GEMMA)]
    lora = zoo_data.DATA / "language" / f"{language_models.SMOL}-trec-{language_models.TRAINED}-sft"
    if not all(place.exists() for place in (*places, lora)):
        print("no language models: see language_models.py", flush=True)
        return None
    settings = CalibrationSettings(calibration="trec", samples=100, micro_batch=BATCH, max_length=LENGTH)
    train, test = (TASKS["trec"].samples(split) for split in ("train", "test"))
    test = test.take(range(language_models.TEST))
    target: Loaded = load_model(str(places[1]))

    def job(precision: str) -> Job:
        A, B = (load_model(str(place), dtype=precision) for place in places)
        tuned = load_tuned(str(lora), A)
        prepared = prepare(settings, A, B, tuned, samples=train)
        return Job.of(A.model, B.model, tuned.tau, prepared.calibration, prepared.objectives)

    def score(change: TaskVector) -> float:
        batches = Pool(test, target, max_length=LENGTH).batches(range(len(test)), 20)
        with moved_by(target.model, change) as at:
            at(1.0)
            return float(evaluate(target.model, batches, LanguageModel()).right or 0.0)

    return job, score


def apart(found: Mapping[str, Map], expected: Mapping[str, Map]) -> float:
    """The mean over maps of ‖R − R'‖ / ‖R'‖, both brought to one length: a scale is folded into the output maps."""
    distances = []
    for name, map_ in expected.items():
        R, other = (each.dense().double() for each in (map_, found[name]))
        distances.append(float((other / other.norm() - R / R.norm()).norm()))
    return sum(distances) / len(distances)


def study(pair: str, make: Maker, score: Score) -> list[dict[str, Any]]:
    """Every method in every precision, each beside float32's."""
    rows: list[dict[str, Any]] = []
    for name, method in METHODS.items():
        expected: tuple[TaskVector, Alignment] | None = None
        for precision in PRECISIONS:
            started = time.process_time()
            row: dict[str, Any] = {"pair": pair, "method": name, "precision": precision}
            moved = run(method, make(precision))
            change = moved.tau.dense()
            assert moved.alignment is not None
            if expected is None:
                expected = change, moved.alignment
            reference, maps = expected
            row |= {
                "maps in": round(apart(moved.alignment.R_in, maps.R_in), 5),
                "maps out": round(apart(moved.alignment.R_out, maps.R_out), 5),
                "change": round((change - reference).norm() / reference.norm(), 5),
                "scale": 1.0 if moved.curve is None else round(moved.curve.best, 2),
                "score": round(score(change), 2),
                "cpu": round(time.process_time() - started, 1),
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def report(rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The table, and the bounds that were missed."""
    failures = []
    for row in rows:
        beside = next(r for r in rows if r["pair"] == row["pair"] and r["method"] == row["method"])
        where = f"{row['pair']}, {row['method']}, {row['precision']}"
        if row["precision"] == "bfloat16" and row["method"] == next(iter(METHODS)) and row["change"] > FURTHEST:
            failures.append(f"{where}: the change is {row['change']:.3f} away, the bound is {FURTHEST}")
        if row["score"] < beside["score"] - WORST:
            failures.append(f"{where}: {row['score']:.1f} right, {beside['score']:.1f} in float32")
    header = ["pair", "method", "weights in", "input maps", "output maps", "change", "scale", "right answers"]
    distances = ("maps in", "maps out", "change")
    shown = [[r["pair"], r["method"], r["precision"], *(f"{100 * r[k]:.1f} %" for k in distances),
              f"{r['scale']:g}", f"{r['score']:.1f}"] for r in rows]  # fmt: skip
    return common.table(header, shown), failures


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    torch.set_num_threads(1)
    rows = study("MiniLM-L6 → gte-small", *texts(options.quick))
    models = None if options.quick else language()
    if models is not None:
        rows += study("SmolLM2-135M → Gemma-3-270M", *models)
    table, failures = report(rows)
    common.finish({"rows": rows}, table, options.json, [] if options.quick else failures, started)


if __name__ == "__main__":
    main()
