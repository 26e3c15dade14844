"""Every method on one pair, with the same samples, seeds and test data: one table.

    >>> comparison = compare(CompareSettings(...))
    >>> print(comparison.markdown())

Each row's head is made from its own model's features of the calibration samples; test data is only looked at to score.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.calibration.batch import Batch
from taskferry.calibration.data import load_samples
from taskferry.capture import device_of
from taskferry.checkpoints import Loaded, load_model, load_tuned
from taskferry.checkpoints.output import check_free
from taskferry.errors import TaskferryError
from taskferry.methods import Job, find, methods, run
from taskferry.objectives import Classifier, Objective
from taskferry.preparing import Prepared, prepare
from taskferry.scale import calibration_loss, moved_by, scale_on_calibration
from taskferry.settings import CompareSettings
from taskferry.taskvector import TaskVector

# Rows beside the methods at their defaults: the paper's ablations, the automatic scale, one step, a warm start.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bico, input-only": ("bico", {"outputs": "identity"}),
    "bico, output-only": ("bico", {"inputs": "identity"}),
    "bico, gradient-only": ("bico", {"inputs": "gradients"}),
    "few-shot, one step": ("few-shot", {"steps": 1}),
    "few-shot, from bico": ("few-shot", {"start": "bico"}),
}


@dataclass
class Comparison:
    """Scores by row, one for each seed, or the sentence of a method that cannot handle the pair."""

    metric: str  # "accuracy" or "loss"
    scores: dict[str, list[float]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
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
        out.with_suffix(".json").write_text(json.dumps(vars(self), indent=1, default=str) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(self.markdown() + "\n", encoding="utf-8")


def compare(settings: CompareSettings, tell: Callable[[str, float], None] | None = None) -> Comparison:
    """Run all rows; `tell` hears of each score."""
    if settings.out is not None:
        for end in (".json", ".md"):
            check_free(settings.out.with_suffix(end))
    rows = _rows(settings.methods)
    source, target = load_model(settings.source_base), load_model(settings.target_base)
    tau = load_tuned(settings.source_tuned, source).tau
    test = _test_batches(settings, source, target)
    result = Comparison("", settings=settings.model_dump(mode="json"))
    for seed in range(settings.seed, settings.seed + settings.seeds):
        prepared = prepare(settings.model_copy(update={"seed": seed}), source, target, settings.source_tuned)
        objective = prepared.objectives[1]
        result.metric = "accuracy" if isinstance(objective, Classifier) else "loss"
        job = Job(source.model, target.model, tau, prepared.calibration, prepared.objectives)

        def keep(row: str, moved: TaskVector, started: float, scale: float = 1.0) -> None:
            score = _score(job, prepared, objective, moved, scale, test)  # noqa: B023
            result.scores.setdefault(row, []).append(score)
            result.seconds[row] = result.seconds.get(row, 0.0) + time.perf_counter() - started
            if tell is not None:
                tell(row, score)

        keep("target as it is", TaskVector({}), time.perf_counter())
        for row, (name, more) in rows.items():
            started = time.perf_counter()
            try:
                moved = run(name, job, **more)
            except TaskferryError as error:
                result.refusals[row] = str(error)
                continue
            keep(row, moved, started)
            if row == "bico":
                loss = objective.bind(target.model, prepared.calibration.side(1))
                curve = scale_on_calibration(target.model, moved, loss, prepared.calibration.side(1))
                keep("bico, automatic scale", moved, started, curve.best)
    return result


def _rows(names: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    chosen = [find(name).name for name in names] or list(methods())
    rows: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in chosen}
    return rows | {row: variant for row, variant in VARIANTS.items() if variant[0] in chosen}


def _test_batches(settings: CompareSettings, source: Loaded, target: Loaded) -> list[Batch]:
    held_out = settings.model_copy(
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
    return prepare(held_out, source, target, None, classes=classes).calibration.side(1)


def _score(
    job: Job, prepared: Prepared, objective: Objective, moved: TaskVector, scale: float, test: Sequence[Batch]
) -> float:
    with moved_by(job.target, moved) as set_scale:
        set_scale(scale)
        if not isinstance(objective, Classifier):
            return calibration_loss(job.target, objective.bind(job.target, prepared.calibration.side(1)), test)
        return accuracy(job.target, objective, prepared.calibration.side(1), test)


@torch.no_grad()
def accuracy(model: nn.Module, classifier: Classifier, shots: Sequence[Batch], test: Sequence[Batch]) -> float:
    """Per cent of the test samples whose class is the head's first choice."""
    logits, device = classifier.logits(model, shots), device_of(model)
    right = total = 0
    for batch in test:
        if batch.labels is not None:
            right += int((logits(batch.to(device)).argmax(1).cpu() == batch.labels.cpu()).sum())
            total += len(batch)
    return 100.0 * right / max(1, total)
