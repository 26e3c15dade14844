"""A scale for each role of layer (q, k, v, …) by the calibration loss: a handful of numbers, no weight is trained.

>>> tau, scales = scaled_by_role(model, tau, loss, batches, start=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from taskferry.calibration.batch import Batch
from taskferry.capture import Loss, device_of, frozen
from taskferry.finding import find_sites
from taskferry.scale import calibration_loss, moved_by
from taskferry.taskvector import TaskVector, as_dense, scale_delta

STEPS, RATE, HOLD = 20, 0.1, 0.01  # steps of Adam, its rate, how strongly the scales are held near the one scale


def scaled_by_role(
    model: nn.Module,
    tau: TaskVector,
    loss: Loss,
    batches: Sequence[Batch],
    start: float,
    samples_a_step: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[TaskVector, dict[str, float]]:
    """τ with a scale for each role, and the scales: the loss goes down along them, held near `start`, the best for all.

    Each step sees at least `samples_a_step` samples (all, unless told), one part of the batches after the other.
    Where that is no better than `start` for all, it is `start` for all. Parts of a packed matrix share a scale.

    Memory: what moves as dense matrices, twice.
    """
    roles = {name: site.role for site in find_sites(model) for name in (site.weight, site.bias) if name}
    order = sorted({roles[name] for name in tau.deltas})
    parts = _parts(batches, samples_a_step)
    scale = torch.full((len(order),), start, requires_grad=True)
    optimiser = torch.optim.Adam([scale], lr=RATE)
    device = device_of(model)
    moving = [(name, p.detach(), as_dense(tau.deltas[name]).to(p)) for name, p in model.named_parameters()
              if name in tau.deltas]  # fmt: skip
    latest: list[torch.Tensor] = []
    with frozen(model), torch.enable_grad():
        for step in range(STEPS):
            optimiser.zero_grad()
            part = parts[step % len(parts)]
            samples = sum(map(len, part))
            for batch in part:
                now = {name: base + scale[order.index(roles[name])].to(base) * d for name, base, d in moving}
                with torch.nn.utils.stateless._reparametrize_module(model, now, tie_weights=True):
                    (loss(batch.to(device)) / samples).backward()  # type: ignore[no-untyped-call]
            (HOLD * (scale - start).square().sum()).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            latest = [*latest, scale.detach().clone()][-len(parts) :]  # each part has its say
            if progress is not None:
                progress("scales", step + 1, STEPS)
    del moving, now
    chosen = dict(zip(order, torch.stack(latest).mean(0).tolist(), strict=True))
    by_role = TaskVector({n: scale_delta(d, chosen[roles[n]]) for n, d in tau.deltas.items()}, tau.coverage)
    if _loss_with(model, by_role, 1.0, loss, batches) < _loss_with(model, tau, start, loss, batches):
        return by_role, chosen
    return start * tau, dict.fromkeys(order, start)


def _loss_with(model: nn.Module, tau: TaskVector, scale: float, loss: Loss, batches: Sequence[Batch]) -> float:
    with moved_by(model, tau) as at:
        at(scale)
        return calibration_loss(model, loss, batches)  # NaN compares as false: then `start` stays


def _parts(batches: Sequence[Batch], samples: int | None) -> list[list[Batch]]:
    """The batches in order, in parts of at least so many samples; a remainder joins the last part."""
    if samples is None:
        return [list(batches)]
    parts: list[list[Batch]] = [[]]
    for batch in batches:
        if sum(map(len, parts[-1])) >= samples:
            parts.append([])
        parts[-1].append(batch)
    if len(parts) > 1 and sum(map(len, parts[-1])) < samples:
        parts[-2] += parts.pop()
    return parts
