"""Every method on one pair, with the same samples, seeds and test data: one table.

    >>> comparison = compare(CompareSettings(...))
    >>> print(comparison.markdown())

Each row's head is made from its own model's features of the calibration samples; test data is only looked at to score.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taskferry.bench.rows import Mover, rows
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch
from taskferry.data.data import held_out, load_samples
from taskferry.disk.records import as_json
from taskferry.disk.staging import check_free
from taskferry.errors import TaskferryError
from taskferry.evaluation.scoring import evaluate
from taskferry.methods import Job, find
from taskferry.models import Loaded, load_model, load_tuned
from taskferry.objectives.preparation import prepare
from taskferry.settings import CompareSettings
from taskferry.taskvector import TaskVector


@dataclass
class Comparison:
    """Scores by row, one for each seed, or the sentence of a method that cannot handle the pair."""

    metric: str  # "accuracy" or "loss"
    scores: dict[str, list[float]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of moving, a seed, without the scoring
    settings: dict[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        """The table for people."""
        lines = [f"| method | {self.metric} | seconds |", "|---|---|---|"]
        for row in [*self.scores, *self.refusals]:
            if row in self.refusals:
                lines.append(f"| {row} | {self.refusals[row]} | |")
                continue
            values = self.scores[row]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            lines.append(f"| {row} | {statistics.mean(values):.2f}{spread} | {self.seconds.get(row, 0):.1f} |")
        return "\n".join(lines)

    def write(self, out: Path) -> None:
        """JSON and Markdown beside each other."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(as_json(vars(self)) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(self.markdown() + "\n", encoding="utf-8")


def compare(settings: CompareSettings, tell: Callable[[str, float], None] | None = None) -> Comparison:
    """Run all rows; `tell` hears of each score."""
    if settings.out is not None:
        for end in (".json", ".md"):
            check_free(settings.out.with_suffix(end))
    chosen = {find(name).name for name in settings.methods}
    wanted = [row for row, kind in rows().items() if not chosen or kind.method.name in chosen]
    source, target = load_model(settings.source_base), load_model(settings.target_base)
    tuned = load_tuned(settings.source_tuned, source)
    test = _test_batches(settings, source, target)
    result = Comparison("", settings=settings.model_dump(mode="json"))
    for seed in range(settings.seed, settings.seed + settings.seeds):
        prepared = prepare(settings.model_copy(update={"seed": seed}), source, target, tuned)
        objective, shots = prepared.objectives[1], prepared.calibration.side(1)
        mover = Mover(Job.of(source.model, target.model, tuned.tau, prepared.calibration, prepared.objectives))
        for row in ["unchanged target", *wanted]:
            try:
                moved, scale, seconds = (TaskVector({}), 0.0, 0.0) if row == "unchanged target" else mover.move(row)
            except TaskferryError as error:
                result.refusals[row] = str(error)
                continue
            with moved_by(target.model, moved) as set_scale:
                set_scale(scale)
                found = evaluate(target.model, test, objective, shots)
            score, result.metric = found.value, "loss" if found.accuracy is None else "accuracy"
            result.scores.setdefault(row, []).append(score)
            result.seconds[row] = result.seconds.get(row, 0.0) + seconds / settings.seeds
            if tell is not None:
                tell(row, score)
    return result


def _test_batches(settings: CompareSettings, source: Loaded, target: Loaded) -> Sequence[Batch]:
    given = settings.model_copy(
        update={
            "calibration": settings.test,
            "samples": settings.test_samples,
            "per_class": None,
            "sampler": "random",
            "labels": "data",
            "seed": 0,
        }
    )
    classes = load_samples(settings.calibration, label_column=settings.label_column).classes
    split = held_out(settings.test)
    samples = load_samples(settings.test, label_column=settings.label_column, classes=classes, split=split)
    return prepare(given, source, target, None, samples=samples).calibration.side(1)
