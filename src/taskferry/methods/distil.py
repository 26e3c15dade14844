"""Distillation: the target learns for a few steps what the tuned source answers on the samples, without a label.

It starts from nothing, or from what another method has moved. Where the source's change fits the target as it is and
lowers the held-out loss, as between a base and its next version, the copy is the start, and all of it where it is near
enough. Else language models start from nothing and models that score classes from BiCo, each from where it got
furthest. The tuned source answers once; then AdamW trains a LoRA of the rank that came in (weights, of a full
fine-tune), and held-out samples keep the best of about four looks.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field

from taskferry.collect.scale import ScaleCurve
from taskferry.coverage import Coverage
from taskferry.engines.pair import shapes
from taskferry.layers.site import Site
from taskferry.methods import Job, Moved, Needs, method, run
from taskferry.methods.natural import NOT_LEARNED, mean_loss
from taskferry.models import Skeleton
from taskferry.objectives.teacher import Lesson, Tokens, lesson_of
from taskferry.taskvector import Delta, LowRank, TaskVector
from taskferry.training.refine import refine

Start = Literal["auto", "nothing", "naive", "bico", "natural"]

STRENGTHS = (0.5, 1.0, 1.5)  # of a copied change: what people turn by hand
CLOSED = 0.95  # of the gap to the tuned source: training on top gained nothing where it was tried (docs/results.md)
SPREAD = 2.0  # of the random factor of a new LoRA, in units of 1/√width


@method(
    needs=Needs(gradients=True, whole=True),
    card="the target learned for a few steps what the tuned source answers on the samples; no label was used",
)
def distil(
    job: Job,
    *,
    steps: Annotated[int, "optimiser steps", Field(ge=0)] = 40,
    start: Annotated[
        Start, "what they begin with; auto: the copied change where it helps, else nothing (bico for classes)"
    ] = "auto",
    learning_rate: Annotated[float | None, "of AdamW; by the width of the layers unless given", Field(gt=0)] = None,
    batch: Annotated[int | None, "samples a step: 16 texts, 64 images", Field(ge=1)] = None,
    seed: Annotated[int, "of the order of the samples, and of new LoRAs"] = 0,
) -> Moved:
    """Let the target learn what the tuned source answers: a few training steps without labels."""
    models, heads = (job.source, job.target), job.pair.objectives
    fit, held_out = (lesson_of(models, job.tau, some, heads) for some in (job.calibration, job.judging))
    begun, first, moved = None, str(start), None
    if start == "auto":
        begun, closed = helpful_copy(job, held_out)
        first, steps = "the copied change", steps if closed < CLOSED else 0
        if begun is None:
            first = "nothing" if isinstance(fit, Tokens) else "bico"
    if begun is None and first != "nothing":
        moved = run(first, job)
        begun = moved.tau
    progress = job.pair.work.progress
    refined = refine(
        job.target,
        nothing(job, seed) if begun is None else begun,
        fit,
        held_out,
        steps,
        learning_rate=learning_rate,
        batch=batch,
        seed=seed,
        progress=None if progress is None else lambda done, every: progress("distil", done, every),
    )
    change = refined.change
    coverage = change.coverage or Coverage.of(dict(job.target.named_parameters()), change.deltas, NOT_LEARNED)
    before, after = job.losses(change, [0.0, 1.0])  # in the words of the samples, as every method is shown
    better = dict(refined.losses)[refined.kept] < refined.untouched
    curve = ScaleCurve(((0.0, before), (1.0, after)), float(better))
    notes = {"start": first, "distilled": refined.record()}
    return Moved(TaskVector(change.deltas, coverage), sites=moved.sites if moved else (), curve=curve, notes=notes)


def helpful_copy(job: Job, held_out: Lesson) -> tuple[TaskVector | None, float]:
    """The source's change as it is, at the strength that is best on held-out samples, and how far it gets.

    Returns:
        The change, or None where it does not fit or does not help; the share that it closes of the gap between the
        untouched target and what the tuned source itself would have.
    """
    found = shapes(job.target)
    if not all(tuple(delta.shape) == found.get(name) for name, delta in job.tau.deltas.items()):
        return None, 0.0
    copied = run("naive", job).tau
    losses = {scale: mean_loss(job.target, held_out, scale * copied) for scale in (0.0, *STRENGTHS)}
    best = min(losses, key=lambda scale: losses[scale])
    gap = losses[0.0] - held_out.floor
    return (best * copied, (losses[0.0] - losses[best]) / gap) if best else (None, 0.0)


def nothing(job: Job, seed: int) -> TaskVector:
    """A change of zero in every layer that can learn, in the form of the source's: AdamW fills it."""
    rank = job.tau.rank if job.tau.low_rank else None
    linear = Skeleton.of(job.target).linear
    generator = torch.Generator().manual_seed(seed)
    deltas: dict[str, Delta] = {}
    for site in job.pair.target_sites:
        learns = site.block is not None and site.fixed is None
        if not learns or site.weight in deltas or (rank is not None and site.weight not in linear):
            continue
        deltas[site.weight] = zero(job, site, rank, generator)
    return TaskVector(deltas)


def zero(job: Job, site: Site, rank: int | None, generator: torch.Generator) -> Delta:
    """No change of one layer: a dense one, or a LoRA whose right factor is drawn and whose left one is zero."""
    weight = job.target.get_parameter(site.weight)
    if rank is None:
        return torch.zeros_like(weight, dtype=torch.float32)
    rows, columns = weight.flatten(1).shape
    out, into = (columns, rows) if site.transposed else (rows, columns)
    right = (2 * torch.rand(rank, into, generator=generator) - 1) * SPREAD / math.sqrt(into)
    change = LowRank(torch.zeros(out, rank), right).T if site.transposed else LowRank(torch.zeros(out, rank), right)
    return LowRank(change.left.to(weight.device), change.right.to(weight.device))
