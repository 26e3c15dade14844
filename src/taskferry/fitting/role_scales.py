"""A scale for each role of layer (q, k, v, …) by the calibration loss: a handful of numbers, no weight is trained.

    >>> scales = scales_by_role(slopes, roles, start=1.0, parts=parts)

∂ loss / ∂ λ of a role is the sum of ⟨∂ loss / ∂ θ, τ⟩ over its parameters, so an engine need only give those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from taskferry.calibration.batch import Batch
from taskferry.fitting.progress import Progress

STEPS, RATE, HOLD = 20, 0.1, 0.01  # steps of Adam, its rate, how strongly the scales are held near the one scale
Slopes = Callable[[Mapping[str, float], Sequence[int]], Mapping[str, float]]  # (scale of each change, batches)


def scales_by_role(
    slopes: Slopes,
    roles: Mapping[str, str],
    start: float,
    parts: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> dict[str, float]:
    """A scale for each role: the loss goes down along them, held near `start`, the best for all.

    `roles`: parameter that moves -> its role. Each step sees one part of the micro-batches after the other.
    """
    order = sorted(set(roles.values()))
    scale = torch.full((len(order),), start, requires_grad=True)
    optimiser = torch.optim.Adam([scale], lr=RATE)
    latest: list[torch.Tensor] = []
    for step in range(STEPS):
        now = dict(zip(order, scale.tolist(), strict=True))
        found = slopes({name: now[role] for name, role in roles.items()}, parts[step % len(parts)])
        gradient = torch.zeros(len(order), dtype=torch.float64)
        for name, slope in found.items():
            gradient[order.index(roles[name])] += slope
        scale.grad = gradient.float() + 2 * HOLD * (scale.detach() - start)
        optimiser.step()
        latest = [*latest, scale.detach().clone()][-len(parts) :]  # each part has its say
        if progress is not None:
            progress("scales", step + 1, STEPS)
    return dict(zip(order, torch.stack(latest).mean(0).tolist(), strict=True))


def parts_of(batches: Sequence[Batch], samples: int) -> list[list[int]]:
    """Numbers of the batches in order, in parts of at least so many samples; a remainder joins the last part."""
    parts: list[list[int]] = [[]]
    sizes = [0]
    for number, batch in enumerate(batches):
        if sizes[-1] >= samples:
            parts.append([])
            sizes.append(0)
        parts[-1].append(number)
        sizes[-1] += len(batch)
    if len(parts) > 1 and sizes[-1] < samples:
        rest = parts.pop()
        parts[-1] += rest
    return parts
