"""Naive transfer: the change copied directly, zero-padded or cropped where shapes differ."""

from __future__ import annotations

import torch
from torch import Tensor

from taskferry.alignment import AlignedPair, Alignment
from taskferry.collect.device import device_of
from taskferry.coverage import Coverage, Row
from taskferry.engines.pair import ModelPair, parameter_reasons, shapes
from taskferry.linalg.procrustes import Map
from taskferry.methods import Job, Moved, Needs, method
from taskferry.taskvector import Delta, LowRank, TaskVector


@method(needs=Needs(samples=False, whole=True))
def naive(job: Job) -> Moved:
    """Copy the source's change to the target directly; padded with zeros or cropped where widths differ.

    Linear layers are paired as for every method, so depth may differ; other parameters (normalisation gains,
    embeddings) move where both models have one of the same name and shape.
    """
    moved = identity_alignment(job.pair).apply(job.tau)
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
    return Moved(TaskVector(deltas, Coverage(tuple(rows), unused)))


def identity_alignment(pair: ModelPair) -> Alignment:
    """Maps that change no coordinate: a narrower space is padded with zeros, a wider one cropped."""

    device = device_of(pair.source)

    def same(side: int) -> dict[str, Map]:
        sizes = {p.target.name: (p.source.shape[side], p.target.shape[side]) for p in pair.pairs}
        return {name: Map(R=torch.eye(a, b, device=device)) for name, (a, b) in sizes.items()}

    return Alignment(
        pairs=tuple(AlignedPair(p.source, p.target, p.target.name, p.note) for p in pair.pairs),
        R_in=same(1),
        R_out=same(0),
        quality_in={},
        quality_out={},
        source_parameters=shapes(pair.source),
        target_parameters=shapes(pair.target),
        reasons=parameter_reasons(pair.target, pair.target_sites, pair.reasons),
        provenance={},
    )
