"""Few-shot fine-tuning: what a user would do instead with the same samples. No transfer, but the honest comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from taskferry.calibration.batch import Batch
from taskferry.capture import Loss, device_of
from taskferry.coverage import Coverage, Row
from taskferry.fitting import both_objectives
from taskferry.methods import CannotMove, Job, method, run
from taskferry.scale import calibration_loss, moved_by
from taskferry.taskvector import TaskVector

CANDIDATES = (1, 2, 5, 10, 20, 40)


@method
def few_shot(
    job: Job,
    *,
    steps: Annotated[
        int | Literal["auto"], "optimiser steps; auto is the best by cross-validation in the samples"
    ] = "auto",
    learning_rate: Annotated[float, "of AdamW"] = 1e-4,
    start: Annotated[Literal["target", "bico"], "from the target, or from BiCo's result (a warm start)"] = "target",
    folds: Annotated[int, "of the cross-validation"] = 3,
) -> TaskVector:
    """Fine-tune the target on the calibration samples: one step as in the paper, or the best number of steps."""
    warm = run("bico", job) if start == "bico" else TaskVector({})
    objective = both_objectives(job.objective, job.source, job.target, job.calibration)[1]
    batches = job.calibration.side(1)
    base = {name: p.detach().clone() for name, p in job.target.named_parameters()}
    with moved_by(job.target, warm) as set_scale:
        set_scale(1.0)
        begin = {name: p.detach().clone() for name, p in job.target.named_parameters()}
        loss = objective.bind(job.target, batches)
        if steps == "auto":
            steps = best_steps(job.target, loss, batches, begin, learning_rate, folds)
        train(job.target, loss, batches, steps, learning_rate)
        after = {name: p.detach().clone() for name, p in job.target.named_parameters()}
        restore(job.target, begin)
    moved = TaskVector.between(base, after)
    rows = [
        Row(
            name,
            tuple(p.shape),
            "moved" if name in moved.deltas else "kept",
            "" if name in moved.deltas else "no gradient",
        )
        for name, p in base.items()
    ]
    return TaskVector(moved.deltas, Coverage(tuple(rows)))


def best_steps(
    model: nn.Module, loss: Loss, batches: Sequence[Batch], begin: dict[str, Tensor], learning_rate: float, folds: int
) -> int:
    """The number of steps with the lowest loss on samples left out, over folds of the samples; 0 if none helps.

    Counts behind the first fold's valley are not tried: its loss has risen twice in a row there.
    """
    folds = min(folds, len(batches))
    if folds < 2:
        raise CannotMove("choosing the steps needs two micro-batches at least: lower --micro-batch, or give steps")
    totals = dict.fromkeys((0, *CANDIDATES), 0.0)
    for fold in range(folds):
        held_out = list(batches[fold::folds])
        rest = [batch for i, batch in enumerate(batches) if i % folds != fold]
        done, risen, before = 0, 0, float("inf")
        optimiser = None
        for count in list(totals):
            optimiser = train(model, loss, rest, count - done, learning_rate, optimiser)
            found = calibration_loss(model, loss, held_out)
            totals[count] += found
            done, risen, before = count, risen + 1 if found > before else 0, found
            if fold == 0 and risen == 2:
                totals = {known: total for known, total in totals.items() if known <= count}
                break
        restore(model, begin)
    return min(totals, key=lambda count: (totals[count], count))


def train(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Batch],
    steps: int,
    learning_rate: float,
    optimiser: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    """Full-batch AdamW on the mean loss a sample, in eval mode: few samples, no noise beside their own."""
    before = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(True)
    samples, device = sum(len(batch) for batch in batches), device_of(model)
    optimiser = optimiser or torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            for batch in batches:
                (loss(batch.to(device)) / samples).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    optimiser.zero_grad()
    for parameter, flag in zip(model.parameters(), before, strict=True):
        parameter.requires_grad_(flag)
    return optimiser


@torch.no_grad()
def restore(model: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Put parameters back."""
    for name, parameter in model.named_parameters():
        parameter.copy_(parameters[name])
