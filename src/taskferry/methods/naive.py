"""Naive transfer: the change added as it is, zero-padded or cropped where shapes differ."""

from __future__ import annotations

from torch import Tensor

from taskferry.coverage import Coverage, Row
from taskferry.fitting import identity_alignment
from taskferry.methods import Job, method
from taskferry.taskvector import Delta, LowRank, TaskVector


@method
def naive(job: Job) -> TaskVector:
    """Add the source's change to the target: as it is, padded with zeros, or cropped.

    Linear layers are paired as for every method, so depth may differ; other parameters (normalisation gains,
    embeddings) move where both models have one of the same name and shape.
    """
    moved = identity_alignment(job.source, job.target).apply(job.tau)
    deltas: dict[str, Delta] = dict(moved.deltas)
    rows = []
    for row in moved.coverage or ():
        change = job.tau.deltas.get(row.parameter)
        fits = isinstance(change, Tensor | LowRank) and tuple(change.shape) == tuple(row.shape)
        if row.status == "kept" and fits and change is not None:
            deltas[row.parameter] = change
            rows.append(Row(row.parameter, row.shape, "moved", "", (row.parameter,)))
        else:
            rows.append(row)
    unused = {} if moved.coverage is None else {n: r for n, r in moved.coverage.unused.items() if n not in deltas}
    return TaskVector(deltas, Coverage(tuple(rows), unused))
