"""GradFix: keep the entries of the change whose sign the target's own gradient agrees with (Rinaldi et al., 2026)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from taskferry.alignment import NO_CHANGE
from taskferry.collect.capture import Loss
from taskferry.collect.device import evaluating, place_of
from taskferry.coverage import Coverage, Row
from taskferry.data.batch import Batch
from taskferry.methods import CannotMove, Job, Moved, Needs, method, need_equal_shapes
from taskferry.taskvector import Delta, TaskVector, as_dense


@method(needs=Needs(gradients=True, dense=True, whole=True))
def gradfix(
    job: Job,
    *,
    vote: Annotated[
        Literal["mean", "majority"], "sign of the mean gradient, or majority of the samples' signs"
    ] = "mean",
) -> Moved:
    """Mask the change by the sign of one descent step of the target: only agreeing entries are added.

    Needs equal shapes, but for a head. An entry stays where it points against the gradient of the target's loss on the
    calibration set.
    """
    stay = need_equal_shapes("gradfix", job)
    changes = {name: delta for name, delta in job.tau.deltas.items() if name not in stay}
    parameters = dict(job.target.named_parameters())
    batches = job.calibration.side(1)
    loss = job.pair.objectives[1].bind(job.target, batches)
    direction = descent_signs(job.target, loss, batches, list(changes), vote)
    deltas: dict[str, Delta] = {}
    rows = []
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        if name not in changes:
            rows.append(Row(name, shape, "kept", stay.get(name, NO_CHANGE)))
            continue
        change = as_dense(changes[name])
        deltas[name] = change * (change.sign() == direction[name].to(change))
        rows.append(Row(name, shape, "moved", "", (name,)))
    return Moved(TaskVector(deltas, Coverage(tuple(rows), stay)))


def descent_signs(model: nn.Module, loss: Loss, batches: list[Batch], names: list[str], vote: str) -> dict[str, Tensor]:
    """sign(−∇L) of the named parameters: of the summed loss, or by a majority vote of single samples."""
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in names]
    before = [parameter.requires_grad for parameter in chosen]
    place = place_of(model)
    total = [
        torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)) for parameter in chosen
    ]
    try:
        for parameter in chosen:
            parameter.requires_grad_(True)
        voters = batches if vote == "mean" else [one for batch in batches for one in singles(batch)]
        with evaluating(model):
            for batch in voters:
                gradients = torch.autograd.grad(loss(batch.to(*place)), chosen, allow_unused=True)
                for sum_, gradient in zip(total, gradients, strict=True):
                    if gradient is not None:
                        sum_ -= gradient.sign() if vote == "majority" else gradient
    finally:
        for parameter, flag in zip(chosen, before, strict=True):
            parameter.requires_grad_(flag)
    return {name: sum_.sign() for name, sum_ in zip(names, total, strict=True)}


def singles(batch: Batch) -> list[Batch]:
    """A micro-batch as batches of one sample."""
    if batch.texts > 1:
        raise CannotMove("a pair alone has nothing to be told apart from: take vote=mean")
    return [
        Batch(
            {name: tensor[i : i + 1] for name, tensor in batch.inputs.items()},
            None if batch.labels is None else batch.labels[i : i + 1],
            batch.ids[i : i + 1],
        )
        for i in range(len(batch))
    ]
