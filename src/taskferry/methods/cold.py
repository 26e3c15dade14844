"""No move at all: the target as it is, in the form of the source's change. Where training from scratch begins."""

from __future__ import annotations

from typing import Annotated

import torch

from taskferry.collect.scale import ScaleCurve
from taskferry.coverage import Coverage
from taskferry.methods import Job, Moved, Needs, Shown, method
from taskferry.models.lowrank import fresh
from taskferry.taskvector import Delta, LowRank, TaskVector


@method(
    needs=Needs(samples=False, whole=True, change=False), shown=Shown(9, "nothing was moved: the start of a training")
)
def cold(job: Job, *, seed: Annotated[int, "of the first factors of a new LoRA"] = 0) -> Moved:
    """Nothing moves: a change of zero wherever the source has one, to refine from (`--refine`)."""
    changed, deltas = job.tau.deltas, dict[str, Delta]()
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(job.target.named_parameters())
    for pair in job.pair.pairs:
        for mine, theirs in ((pair.source.weight, pair.target.weight), (pair.source.bias, pair.target.bias)):
            if mine is None or theirs is None or mine not in changed or theirs in deltas:
                continue
            value, delta = parameters[theirs].detach(), changed[mine]
            if isinstance(delta, LowRank):
                new = fresh(value.mT if pair.target.transposed else value, delta.rank, generator)
                deltas[theirs] = new.T if pair.target.transposed else new
            else:
                deltas[theirs] = torch.zeros_like(value)
    coverage = Coverage.of(parameters, deltas, "nothing moves")
    untouched = job.losses([TaskVector({})], [0.0])[0]
    return Moved(TaskVector(deltas, coverage), curve=ScaleCurve(((0.0, untouched),), 0.0))
