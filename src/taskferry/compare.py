"""Methods on one pair of models, with the same samples and test data: one table.

    >>> comparison = compare(CompareSettings(...))
    >>> print(comparison.markdown())

Test data is only looked at to score: answers where it has answers (generated), accuracy where it has classes (a head
that must be fitted is fitted on the calibration samples), else the loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from taskferry.collect.scale import moved_by
from taskferry.config import CompareSettings
from taskferry.data.language import segments_of
from taskferry.data.samples import choose, held_out_split, load_samples
from taskferry.disk.files import as_json
from taskferry.disk.staging import check_free
from taskferry.errors import TaskferryError
from taskferry.evaluation import Pool, evaluate
from taskferry.methods import Job, find, methods
from taskferry.models import load_model, load_tuned
from taskferry.objectives.answers import answers_of
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.taskvector import TaskVector

UNCHANGED = "unchanged target"


def at_scale(method: str, job: Job, settings: Mapping[str, Any], scale: float | Literal["auto"]) -> TaskVector:
    """Move a job's change by a method.

    Returns:
        The change of the target at its scale: zero where "auto" finds none that lowers the loss on held-out samples.
    """
    moved = find(method).move(job, settings)
    if scale == "auto":
        scale = job.best_scale(moved.tau).best if moved.curve is None else float(moved.curve.helps)
    return scale * moved.tau


@dataclass
class Comparison:
    """Scores by row, one for each seed, or the sentence of a method that cannot move the pair."""

    metric: str = ""  # "right answers, %", "accuracy, %" or "loss"
    scores: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of the move, in the mean over the seeds
    settings: dict[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table for people."""
        lines = [f"| method | {self.metric} | CPU-seconds |", "|---|---|---|"]
        for row, values in self.scores.items():
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            lines.append(f"| {row} | {statistics.mean(values):.2f}{spread} | {self.cpu_seconds[row]:.1f} |")
        return "\n".join([*lines, *(f"| {row} | {sentence} | |" for row, sentence in self.refused.items())])

    def write(self, out: Path) -> None:
        """Write JSON and Markdown beside each other."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(as_json(vars(self)) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(self.markdown() + "\n", encoding="utf-8")


def compare(settings: CompareSettings, tell: Callable[[str, float], None] | None = None) -> Comparison:
    """Run all rows.

    Args:
        settings: Models, samples, test data, methods and seeds.
        tell: Called with each row and its score.
    """
    if settings.out is not None:
        for end in (".json", ".md"):
            check_free(settings.out.with_suffix(end))
    rows: dict[str, tuple[str, float | Literal["auto"]]] = {}
    for method in [find(name) for name in settings.methods] or methods().values():
        if method.paper is not None:
            rows[f"{method.name}, scale 1"] = method.name, 1.0
        rows[method.name] = method.name, "auto"
    source, target = load_model(settings.source_base), load_model(settings.target_base)
    tuned = load_tuned(settings.source_tuned, source)
    column = settings.label_column
    classes = load_samples(settings.calibration, label_column=column).classes
    test = load_samples(settings.test, label_column=column, classes=classes, split=held_out_split(settings.test))
    test = test.take(sorted(choose(len(test), settings.test_samples)))
    batches = Pool(test, target, max_length=settings.max_length).batches(range(len(test)), settings.micro_batch)
    asked = [segments_of(row) for row in test.rows] if test.kind in ("prompt", "messages") else []
    result = Comparison(settings=settings.model_dump(mode="json"))

    def score(name: str, change: TaskVector, prepared: Prepared, seconds: float) -> None:
        with moved_by(target.model, change) as at:
            at(1.0)
            if asked:
                answers = answers_of(target.model, target.tokenizer(), asked, batch=settings.micro_batch)
                result.metric, value = "right answers, %", answers.exact
            else:
                found = evaluate(target.model, batches, prepared.objectives[1], prepared.calibration.side(1))
                result.metric, value = "loss" if found.accuracy is None else "accuracy, %", found.value
        result.scores.setdefault(name, []).append(value)
        result.cpu_seconds[name] = result.cpu_seconds.get(name, 0.0) + seconds / settings.seeds
        if tell is not None:
            tell(name, value)

    for seed in range(settings.seed, settings.seed + settings.seeds):
        prepared = prepare(settings.model_copy(update={"seed": seed}), source, target, tuned)
        score(UNCHANGED, TaskVector({}), prepared, 0.0)
        for name, (method_name, scale) in rows.items():
            fit, held_out = prepared.calibration.split(seed) if scale == "auto" else (prepared.calibration, None)
            job = Job.of(source.model, target.model, tuned.tau, fit, prepared.objectives, held_out=held_out)
            started = time.process_time()
            try:
                change = at_scale(method_name, job, {}, scale)
            except TaskferryError as error:
                result.refused[name] = str(error)
            else:
                score(name, change, prepared, time.process_time() - started)
    return result
