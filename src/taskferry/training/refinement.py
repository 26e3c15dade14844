"""Refine: a few training steps after a move that bring the target to the tuned source, in the form that came in.

    >>> refined = refine(pair, tau, moved, Refinement(steps=100))
    >>> refined.tau, refined.kept, refined.evaluations

No labels: the teacher is the tuned source. A part of the samples is kept aside; the step with the lowest loss there is
kept, and where none is better than the start nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from taskferry.calibration.augmentation import are_images
from taskferry.calibration.batch import Batch, Calibration
from taskferry.engines.pair import ModelPair
from taskferry.errors import TaskferryError
from taskferry.evaluation.pool import LazyBatches
from taskferry.fitting.models import evaluating
from taskferry.fitting.objectives import LanguageModel, Objective
from taskferry.fitting.scale import calibration_loss
from taskferry.settings import Settings
from taskferry.taskvector import TaskVector
from taskferry.training.finetuning import FineTuning, finetune
from taskferry.training.lessons import VIEWS, Lesson, class_heads, lesson_of
from taskferry.training.students import learning

LOOKS = 10  # at the samples kept aside
# Learning rates. That of factors is divided by the root of the width, because entries of wider weights are smaller;
# that of whole weights by the width, so that a step of AdamW changes what a layer says by a like share at any width.
LORA, DENSE = 0.03, 0.09
USUAL_WIDTH = 768  # of a change without matrices
SHORT = 20  # steps: fewer cannot make good what steps of the full rate break first in whole weights
STAGE = "refine"


class Refinement(Settings):
    """How a moved change is refined."""

    steps: int = Field(100, ge=1, description="optimiser steps")
    learning_rate: float | None = Field(
        None, gt=0, description="of AdamW, at the end of its warm-up; by form, width and steps unless given"
    )
    labels: float = Field(0.0, ge=0, le=1, description="share of the loss that the data's own labels get")
    batch: int | None = Field(None, ge=1, description="samples a step; 8 texts of a language model, 64 of all others")
    views: int = Field(
        VIEWS, ge=0, description="augmented views of each image, about as many as the steps show at most"
    )
    held_out: float = Field(0.2, gt=0, lt=1, description="share of the samples kept aside")
    seed: int = Field(0, description="of the samples kept aside, of views and of their order")

    def size(self, heads: tuple[Objective, Objective]) -> int:
        """Samples a step."""
        return self.batch or (8 if isinstance(heads[1], LanguageModel) else 64)

    def views_of(self, calibration: Calibration, heads: tuple[Objective, Objective]) -> int:
        """Augmented views of each image, about as many as the steps show; none where the labels alone teach."""
        if self.labels == 1 or class_heads(heads) is None or not are_images(calibration):
            return 0
        return min(self.views, self.steps * self.size(heads) // calibration.samples)

    def passes(self, calibration: Calibration, heads: tuple[Objective, Objective]) -> float:
        """Over all samples, with their gradients: of the steps; of the teacher and the evaluations, forward alone."""
        views = self.views_of(calibration, heads)
        inputs = self.steps * min(self.size(heads), calibration.samples * (1 + views))
        return inputs / calibration.samples + (1 + views + LOOKS * self.held_out) / 3


@dataclass(frozen=True)
class Refined:
    """A refined change, and what the samples kept aside say of it."""

    tau: TaskVector
    evaluations: tuple[tuple[int, float], ...]  # (step, loss on the samples kept aside), the start first
    kept: int  # the step that was taken; 0: the start, because nothing was better
    steps: int  # asked for
    samples: int  # kept aside
    unit: str  # of the loss
    lesson: str

    @property
    def sentence(self) -> str:
        """For people."""
        before, after = dict(self.evaluations)[0], dict(self.evaluations)[self.kept]
        if not self.kept:
            return (
                f"Refining for {self.evaluations[-1][0]} steps did not lower the loss to the tuned source on "
                f"{self.samples} samples kept aside ({before:.4g} {self.unit}): it was dropped."
            )
        return (
            f"Refined for {self.kept} steps: the loss to the tuned source on {self.samples} samples kept aside went "
            f"from {before:.4g} to {after:.4g} {self.unit}."
        )

    def record(self) -> dict[str, Any]:
        """For machines."""
        return {
            "steps": self.steps,
            "kept": self.kept,
            "held_out": self.samples,
            "unit": self.unit,
            "teacher": self.lesson,
            "evaluations": [list(evaluation) for evaluation in self.evaluations],
            "sentence": self.sentence,
        }


class _Part:
    """Some of a lesson's inputs, numbered anew."""

    def __init__(self, lesson: Lesson, indices: Sequence[int]) -> None:
        self.lesson, self.indices = lesson, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Sequence[int]) -> Batch:
        return self.lesson.batch([self.indices[i] for i in indices])


def refine(
    pair: ModelPair,
    tau: TaskVector,
    start: TaskVector,
    settings: Refinement,
    *,
    folder: Path | None = None,
) -> Refined:
    """Train `start` on the target towards the source with `tau`; `folder` keeps checkpoints of it."""
    if pair.calibration.samples < 2:
        raise TaskferryError("refining needs two samples at least: one to learn from, one kept aside")
    target, progress = pair.target, pair.work.progress
    with evaluating(target):
        views = settings.views_of(pair.calibration, pair.objectives)
        lesson = lesson_of(pair, tau, labels=settings.labels, views=views, seed=settings.seed)
        shuffled = torch.randperm(lesson.samples, generator=torch.Generator().manual_seed(settings.seed)).tolist()
        count = max(1, round(settings.held_out * lesson.samples))
        aside = shuffled[:count]
        unseen = set(aside)
        training = [i for i in range(len(lesson)) if i % lesson.samples not in unseen]
        size = settings.size(pair.objectives)
        judged = list(LazyBatches(lesson, aside, size))
        protocol = FineTuning(
            steps=settings.steps,
            batch=size,
            learning_rate=settings.learning_rate or usual_rate(start, settings.steps),
            weight_decay=0.0,
            warmup=min(10, settings.steps // 5),
            validation=0.0,
            every=max(1, settings.steps // LOOKS),
            seed=settings.seed,
        )
        with learning(target, start) as result:
            history = finetune(
                target,
                _Part(lesson, training),
                lesson,
                protocol,
                folder=folder,
                judge=lambda: calibration_loss(target, lesson.loss, judged),
                dropout=False,
                progress=None if progress is None else lambda done, steps, _: progress(STAGE, done, steps),
            )
            after = result() if history.best else start
    return Refined(
        after, tuple(history.judged), history.best, settings.steps, count, lesson.unit, type(lesson).__name__.lower()
    )


def usual_rate(start: TaskVector, steps: int) -> float:
    """A learning rate for a change: by its form, by the width of its layers, and less in a few steps."""
    widths = sorted(min(delta.shape) for delta in start.deltas.values() if len(delta.shape) > 1)
    width = widths[len(widths) // 2] if widths else USUAL_WIDTH
    found = LORA / math.sqrt(width) if start.low_rank else DENSE / width * min(1.0, steps / SHORT)
    return float(f"{found:.2g}")
