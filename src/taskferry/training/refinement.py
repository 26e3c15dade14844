"""Refine: a few training steps after a move that bring the target to the tuned source, in the form that came in.

    >>> refined = refine(pair, tau, moved, Refinement(steps=100))
    >>> refined.tau, refined.kept, refined.evaluations

No labels: the teacher is the tuned source. A part of the samples is kept aside; where the last step is no better there
than the start, nothing changes. No step between is chosen: twenty samples cannot tell which is best, and the rate falls
to nothing at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from taskferry.collect.device import evaluating
from taskferry.collect.scale import calibration_loss
from taskferry.data.augmentation import are_images
from taskferry.data.batch import Batch, Calibration
from taskferry.engines.pair import ModelPair
from taskferry.errors import TaskferryError
from taskferry.evaluation.pool import LazyBatches
from taskferry.objectives.objectives import LanguageModel, Objective
from taskferry.settings import Settings
from taskferry.taskvector import TaskVector, as_dense
from taskferry.training.finetuning import Diverged, FineTuning, finetune
from taskferry.training.lessons import VIEWS, Lesson, Likeness, class_heads, kind_of, lesson_of
from taskferry.training.students import learning

LOOKS = 10  # at the samples kept aside, about
# Learning rates. That of factors is divided by the root of the width, because entries of wider weights are smaller;
# that of whole weights by the width, so that a step of AdamW changes what a layer says by a like share at any width.
LORA, DENSE = 0.03, 0.09
USUAL_WIDTH = 768  # of a change without matrices
# Steps, of whole weights: fewer cannot make good what steps of the full rate break first; more of a moved start, which
# has something to break.
SHORT, SHORT_MOVED = 20, 40
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

    @property
    def every(self) -> int:
        """Steps from one look at the samples kept aside to the next."""
        return max(1, self.steps // LOOKS)

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
        looks = 2 + math.ceil(self.steps / self.every)  # the untouched target and the start among them
        return inputs / calibration.samples + (1 + views + looks * self.held_out) / 3


@dataclass(frozen=True)
class Refined:
    """A refined change, and what the samples kept aside say of it."""

    tau: TaskVector
    evaluations: tuple[tuple[int, float], ...]  # (step, loss on the samples kept aside), the start first
    kept: int  # the steps that were taken; 0: the start, because the last was no better
    settings: Refinement
    samples: int  # kept aside
    unit: str  # of the loss
    lesson: str
    untouched: float  # the loss of the target without any change
    broken: str = ""  # why it ended early
    aside: tuple[int, ...] = ()  # numbers of the samples kept aside

    @property
    def better(self) -> bool:
        """Whether what was trained is better than the target without any change."""
        return self.kept > 0 and self.evaluations[-1][1] < self.untouched

    @property
    def sentence(self) -> str:
        """For people."""
        before, after = self.evaluations[0][1], self.evaluations[-1][1]
        if self.broken:
            return f"Refining was dropped: {self.broken}."
        share = self.settings.labels
        to = {0.0: "the tuned source", 1.0: "the labels"}.get(
            share, f"the tuned source and (by {share:.0%}) the labels"
        )
        if not self.kept:
            return (
                f"Refining for {self.settings.steps} steps did not lower the loss to {to} on {self.samples} samples "
                f"kept aside ({before:.4g} {self.unit} before, {after:.4g} after): it was dropped."
            )
        return (
            f"Refined for {self.kept} steps: the loss to {to} on {self.samples} samples kept aside went from "
            f"{before:.4g} to {after:.4g} {self.unit} (the untouched target has {self.untouched:.4g})."
        )

    def record(self) -> dict[str, Any]:
        """For machines."""
        return {
            "steps": self.settings.steps,
            "kept": self.kept,
            "labels": self.settings.labels,
            "held_out": self.samples,
            "unit": self.unit,
            "teacher": self.lesson,
            "untouched": self.untouched,
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
    held_out: Calibration | None = None,
    folder: Path | None = None,
) -> Refined:
    """Train `start` on the target towards the source with `tau`; `folder` keeps checkpoints of it.

    `held_out` are samples that did not make `start`; where there are none, a part of the pair's is kept aside.
    """
    least, calibration = least_of(pair, settings), pair.calibration
    if held_out is not None and held_out is not calibration:
        calibration = Calibration([*calibration, *held_out], calibration.tokenizers)
        unseen = list(range(pair.calibration.samples, calibration.samples))
    else:
        unseen = kept_aside(calibration, settings, least)
    target, progress = pair.target, pair.work.progress
    with evaluating(target):
        views = settings.views_of(calibration, pair.objectives)
        lesson = lesson_of(pair, tau, calibration, labels=settings.labels, views=views, seed=settings.seed)
        size = settings.size(pair.objectives)
        training = [i for i in range(len(lesson)) if not lesson.views.samples_in(i) & set(unseen)]
        judging = list(LazyBatches(lesson, unseen, size))

        def aside() -> float:
            return calibration_loss(target, lesson.loss, judging)

        untouched = aside()
        protocol = FineTuning(
            steps=settings.steps,
            batch=size,
            learning_rate=settings.learning_rate or usual_rate(start, settings.steps),
            weight_decay=0.0,
            warmup=min(10, settings.steps // 5),
            validation=0.0,
            every=settings.every,
            seed=settings.seed,
        )
        after, broken = start, ""
        with learning(target, start) as result:
            evaluations = [(0, aside())]
            lesson.begins = torch.tensor(evaluations[0][1])  # what a run was judged by is part of it: see `describe`
            try:
                history = finetune(
                    target,
                    _Part(lesson, training),
                    lesson,
                    protocol,
                    folder=folder,
                    anew=True,
                    judge=aside,
                    dropout=False,
                    progress=None if progress is None else lambda done, steps, _: progress(STAGE, done, steps),
                )
            except Diverged as error:
                broken = f"{error}, by --refine-rate"
                if not math.isfinite(evaluations[0][1]):
                    broken = "the loss of what was moved is no number before the first step"
            else:
                evaluations += history.judged
                after = result() if evaluations[-1][1] < evaluations[0][1] else start
    kept = 0 if after is start else settings.steps
    kind = type(lesson).__name__.lower()
    ids = [i for batch in calibration.side(1) for i in batch.ids]
    numbers = tuple(ids[i] for i in unseen) if ids else ()
    return Refined(
        after, tuple(evaluations), kept, settings, len(unseen), lesson.unit, kind, untouched, broken, numbers
    )


def least_of(pair: ModelPair, settings: Refinement) -> int:
    """Samples that say something together: of one encoder's features two, because one alone is always like itself."""
    least = 2 if kind_of(pair.objectives, settings.labels) is Likeness else 1
    if pair.calibration.samples < 2 * least:
        raise TaskferryError(f"refining needs {2 * least} samples at least: {least} to learn from, {least} kept aside")
    return least


def kept_aside(calibration: Calibration, settings: Refinement, least: int = 1) -> list[int]:
    """Sample numbers that never train."""
    shuffled = torch.randperm(calibration.samples, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    return shuffled[: max(least, round(settings.held_out * len(shuffled)))]


def usual_rate(start: TaskVector, steps: int) -> float:
    """A learning rate for a change: by its form, by the width of its layers, and less in a few steps."""
    widths = sorted(min(delta.shape) for delta in start.deltas.values() if len(delta.shape) > 1)
    width = widths[len(widths) // 2] if widths else USUAL_WIDTH
    if start.low_rank:
        return float(f"{LORA / math.sqrt(width):.2g}")
    short = SHORT_MOVED if any(bool(as_dense(delta).any()) for delta in start.deltas.values()) else SHORT
    return float(f"{DENSE / width * min(1.0, steps / short):.2g}")
