"""Few-shot fine-tuning: what a user would do instead with the same samples. No transfer, but a row to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from taskferry.collect.capture import Loss
from taskferry.collect.device import device_of, evaluating
from taskferry.collect.scale import calibration_loss, moved_by
from taskferry.coverage import Coverage
from taskferry.data.batch import Batch
from taskferry.methods import CannotMove, Cost, Job, Moved, Needs, Shown, TableRow, method, run
from taskferry.objectives.objectives import Classifier, Objective
from taskferry.taskvector import TaskVector
from taskferry.training.finetuning import FineTuning, descend

CANDIDATES = (1, 2, 5, 10, 20, 40)


ROWS = (
    TableRow("few-shot, one step", {"steps": 1}, passes=(0.0, 1.5)),
    TableRow("few-shot", passes=(0.0, 180.0), curve=7),
    TableRow("few-shot, from bico", {"start": "bico"}, passes=(1.0, 181.0)),
)


def few_shot_cost(job: Job, *, steps: int | Literal["auto"], start: str, folds: int, **_: Any) -> Cost:  # noqa: ARG001
    """A pass a step; the search for their number takes most of its longest run in each fold."""
    moved = int(start == "bico")
    searched = (folds - 1) * CANDIDATES[-1] * 1.5 if steps == "auto" else 0.0
    return Cost(moved, moved, training=searched + (CANDIDATES[-1] if steps == "auto" else steps))


@method(
    costs=few_shot_cost,
    needs=Needs(gradients=True, training=True, dense=True, whole=True),
    shown=Shown(7, "the target was fine-tuned on the calibration samples", ROWS),
)
def few_shot(
    job: Job,
    *,
    steps: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"],
        "optimiser steps; auto is the best by cross-validation in the samples",
    ] = "auto",
    learning_rate: Annotated[float, "of AdamW", Field(gt=0)] = 1e-4,
    start: Annotated[Literal["target", "bico"], "from the target, or from BiCo's result (a warm start)"] = "target",
    folds: Annotated[int, "of the cross-validation", Field(ge=2)] = 3,
) -> Moved:
    """Fine-tune the target on the calibration samples: one step as in the paper, or the best number of steps."""
    warm = run("bico", job).tau if start == "bico" else TaskVector({})
    objective = job.pair.objectives[1]
    batches = job.calibration.side(1)
    base = {name: p.detach().clone() for name, p in job.target.named_parameters()}
    with moved_by(job.target, warm) as set_scale:
        set_scale(1.0)
        begin = {name: p.detach().clone() for name, p in job.target.named_parameters()}
        loss = objective.bind(job.target, batches)
        try:
            if steps == "auto":
                steps = best_steps(job.target, objective, batches, begin, learning_rate, folds)
            with training(job.target, loss, batches, learning_rate) as train:
                train(steps)
            after = {name: p.detach().clone() for name, p in job.target.named_parameters()}
        finally:
            restore(job.target, begin)
    moved = TaskVector.between(base, after)
    return Moved(TaskVector(moved.deltas, Coverage.of(base, moved.deltas, "no gradient")))


def best_steps(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    begin: dict[str, Tensor],
    learning_rate: float,
    folds: int,
) -> int:
    """The number of steps with the lowest loss on samples left out, over folds of the samples; 0 if none helps.

    Each fold's head is made from the samples it trains on alone. Counts behind the first fold's valley are not tried:
    its loss has risen twice in a row there.
    """
    fitted = isinstance(objective, Classifier) and objective.fitted
    fold_of = assign_folds([label for batch in batches for label in _classes(batch)], folds, keep_single=fitted)
    totals = dict.fromkeys((0, *CANDIDATES), 0.0)
    for fold in range(folds):
        held_out, rest = _cut(batches, [f == fold for f in fold_of]), _cut(batches, [f != fold for f in fold_of])
        if not held_out or not rest:
            raise CannotMove("choosing the steps needs more samples: give steps, or more of each class")
        loss = objective.bind(model, rest)
        samples = sum(len(batch) for batch in held_out)
        done, risen, before = 0, 0, float("inf")
        with training(model, loss, rest, learning_rate) as train:
            for count in list(totals):
                train(count - done)
                found = samples * calibration_loss(model, loss, held_out)
                totals[count] += found
                done, risen, before = count, risen + 1 if found > before else 0, found
                if fold == 0 and risen == 2:
                    totals = {known: total for known, total in totals.items() if known <= count}
                    break
        restore(model, begin)
    return min(totals, key=lambda count: (totals[count], count))


def assign_folds(labels: Sequence[int], folds: int, *, keep_single: bool, seed: int = 0) -> list[int]:
    """A fold for each sample, shuffled and even over the classes.

    With `keep_single`, the only sample of a class is never left out (−1): a head made without it could not know it.
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist()
    counts, chosen, next_fold = Counter(labels), [-1] * len(labels), 0
    for i in sorted(shuffled, key=lambda i: labels[i]):  # stable: shuffled within a class
        if counts[labels[i]] > 1 or not keep_single:
            chosen[i], next_fold = next_fold % folds, next_fold + 1
    return chosen


def _classes(batch: Batch) -> list[int]:
    return [0] * len(batch) if batch.labels is None else batch.labels.tolist()


def _cut(batches: Sequence[Batch], wanted: Sequence[bool]) -> list[Batch]:
    """The wanted samples, in micro-batches no larger than before."""
    parts, start = [], 0
    for batch in batches:
        kept = [i for i in range(len(batch)) if wanted[start + i]]
        start += len(batch)
        if kept:
            parts.append(batch.take(kept))
    return parts


@contextmanager
def training(
    model: nn.Module, loss: Loss, batches: Sequence[Batch], learning_rate: float
) -> Iterator[Callable[[int], None]]:
    """Full-batch AdamW on the mean loss a sample, in eval mode: the function trains for so many steps more."""
    # Dropout would make the chosen steps and the result depend on chance, and running means are no parameters: a task
    # vector could not carry them, and the target would not be left as it was. The same samples in other micro-batches
    # give the same result in eval mode alone. The vision transformers of the paper's tables have neither.
    before = [parameter.requires_grad for parameter in model.parameters()]
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    steps = descend(loss, repeat(batches), optimiser, lambda _: 1.0, device_of(model), FineTuning())

    def train(count: int) -> None:
        for _ in islice(steps, count):
            pass

    try:
        with evaluating(model.requires_grad_(True)):
            yield train
    finally:
        optimiser.zero_grad()
        for parameter, flag in zip(model.parameters(), before, strict=True):
            parameter.requires_grad_(flag)


@torch.no_grad()
def restore(model: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Put parameters back."""
    for name, parameter in model.named_parameters():
        parameter.copy_(parameters[name])
