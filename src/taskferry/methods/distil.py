"""BiCo, then a short training of the target towards the tuned source: no labels, but no longer free of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.calibration.augmentation import Views
from taskferry.calibration.batch import Batch
from taskferry.coverage import Coverage, Row
from taskferry.fitting.capture import Loss, device_of, evaluating
from taskferry.fitting.objectives import Classifier, Logits, Objective
from taskferry.fitting.progress import Progress
from taskferry.fitting.scale import choose_scale, losses_at, moved_by
from taskferry.methods import CannotMove, Job, Moved, Needs, Shown, TableRow, method, run
from taskferry.methods.few_shot import restore
from taskferry.sites.discovery import find_sites
from taskferry.taskvector import TaskVector

ROWS = (
    TableRow("distil", passes=(22.0, 68.0), curve=8),
    TableRow("distil, from the target", {"start": "target"}, passes=(21.0, 64.0)),
)


@method(
    needs=Needs(gradients=True, captures=1, training=True, whole=True),
    shown=Shown(
        8, "moved by bico, then trained for a few steps towards the tuned source on the calibration samples", ROWS
    ),
)
def distil(
    job: Job,
    *,
    steps: Annotated[int, "optimiser steps"] = 100,
    learning_rate: Annotated[float, "of AdamW, at the end of the warm-up"] = 3e-4,
    batch: Annotated[int, "inputs a step"] = 64,
    views: Annotated[int, "augmented views of each image, made for both models alike"] = 3,
    start: Annotated[Literal["bico", "target"], "from BiCo's result, or from the target (a cold start)"] = "bico",
    seed: Annotated[int, "of the views and their order"] = 0,
) -> Moved:
    """BiCo, then a few training steps that bring the target's outputs to the tuned source's: no labels needed.

    The tuned source answers every input with its probabilities, augmented views of the samples as well; the linear
    layers learn.
    """
    heads = job.pair.objectives
    if not (isinstance(heads[0], Classifier) and isinstance(heads[1], Classifier)):
        raise CannotMove("distil needs models that score classes: the two vocabularies of language models differ")
    moved = run("bico", job).tau if start == "bico" else TaskVector({})
    target = job.target
    base = {name: p.detach().clone() for name, p in target.named_parameters()}
    asked = {name: p.requires_grad for name, p in target.named_parameters()}
    with ExitStack() as moves:
        for model in (job.source, target):
            moves.enter_context(evaluating(model))
        moves.enter_context(moved_by(job.source, job.tau))(1.0)
        teacher = heads[0].logits(job.source, job.calibration.side(0))
        taught = Taught(Views(job.calibration, views, seed), teacher, device_of(job.source))
        towards = Towards(heads[1].logits(target, job.calibration.side(1)))
        if len(moved):
            samples = [taught.batch(range(i, min(i + batch, taught.samples))) for i in range(0, taught.samples, batch)]
            loss = towards.bind(target, ())
            scale = choose_scale(lambda scales: losses_at(target, moved, loss, samples, scales)).best
            moves.enter_context(moved_by(target, moved))(scale)
        learns = {name for site in find_sites(target) if site.fixed is None for name in (site.weight, site.bias)}
        try:
            for name, parameter in target.named_parameters():
                parameter.requires_grad_(name in learns)
            learn(target, taught, towards.bind(target, ()), steps, learning_rate, batch, seed, job.pair.work.progress)
            after = {name: p.detach().clone() for name, p in target.named_parameters()}
        finally:
            restore(target, base)
            for name, parameter in target.named_parameters():
                parameter.requires_grad_(asked[name])
    result = TaskVector.between(base, after)
    rows = [_row(name, tuple(p.shape), name in result.deltas, name in learns) for name, p in base.items()]
    return Moved(TaskVector(result.deltas, Coverage(tuple(rows))))


class Taught:
    """Inputs of the target by number, each with the probabilities that the teacher gives it."""

    def __init__(self, views: Views, teacher: Logits, device: torch.device) -> None:
        self.views, self.teacher, self.device = views, teacher, device
        self.samples = views.samples

    def __len__(self) -> int:
        return len(self.views)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These inputs, with soft labels [n, classes]."""
        A, B = self.views.pair(indices)
        with torch.no_grad():
            answers = self.teacher(A.to(self.device)).softmax(-1)
        return replace(B, labels=answers)


class Towards(Objective):
    """Summed cross-entropy against soft labels."""

    def __init__(self, logits: Logits) -> None:
        self.logits = logits

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """The head is bound already."""

        def loss(batch: Batch) -> Tensor:
            scores = self.logits(batch)
            labels = batch.labels
            if labels is None:
                raise CannotMove("distil needs the teacher's answers")
            return F.cross_entropy(scores, labels.to(scores), reduction="sum")

        return loss


def learn(
    model: nn.Module,
    taught: Taught,
    loss: Loss,
    steps: int,
    learning_rate: float,
    batch: int,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """AdamW on what asks for a gradient; ten steps of warm-up, then half a cosine down to nothing."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    device = device_of(model)
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    for step in range(steps):
        while len(waiting) < min(batch, len(taught)):
            waiting += torch.randperm(len(taught), generator=generator).tolist()
        chosen, waiting = waiting[:batch], waiting[batch:]
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10) * (1 + math.cos(math.pi * step / steps)) / 2
        with torch.enable_grad():
            value = loss(taught.batch(chosen).to(device)) / len(chosen)
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if progress is not None:
            progress("distil", step + 1, steps)
    optimiser.zero_grad()


def _row(name: str, shape: tuple[int, ...], moved: bool, learns: bool) -> Row:
    if moved:
        return Row(name, shape, "moved")
    return Row(name, shape, "kept", "no gradient reaches it" if learns else "not a linear layer")
