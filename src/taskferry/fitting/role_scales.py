"""A scale for each role of layer (q, k, v, …) by the calibration loss: a handful of numbers, no weight is trained.

    >>> scales = scales_by_role(slopes, roles, curve)

∂ loss / ∂ λ of a role is the sum of ⟨∂ loss / ∂ θ, τ⟩ over its parameters, so an engine need only give those. Few
unknowns allow second-order steps: the search for one scale has shown the curvature along all roles together, each step
adds what it has seen of the others (BFGS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from taskferry.fitting.progress import Progress
from taskferry.fitting.scale import DIGITS, LARGEST, ScaleCurve

STEPS = 4  # forward and backward passes
HOLD = 0.01  # how strongly the scales are held near the one scale
LONGEST = 0.5  # the most that a scale changes in one step, as a share of the one scale
Slopes = Callable[[Mapping[str, float]], Mapping[str, float]]  # scale of each parameter's change -> ∂ loss / ∂ it


def scales_by_role(
    slopes: Slopes, roles: Mapping[str, str], curve: ScaleCurve, progress: Progress | None = None
) -> dict[str, float]:
    """A scale for each role: the loss goes down along them, held near the best for all.

    `roles`: parameter that moves -> its role. `curve`: the losses at one scale for all.
    """
    order = sorted(set(roles.values()))

    def gradient(scale: Tensor) -> Tensor:
        """[roles] of the loss with the penalty."""
        now = dict(zip(order, scale.tolist(), strict=True))
        found = torch.zeros(len(order), dtype=torch.float64)
        for name, slope in slopes({name: now[role] for name, role in roles.items()}).items():
            found[order.index(roles[name])] += slope
        return found + 2 * HOLD * (scale - curve.best)

    start = torch.full((len(order),), curve.best, dtype=torch.float64)
    bend = max(curve.bend() / len(order), 0.0) + 2 * HOLD  # of each role, were they all alike
    scale = quasi_newton(gradient, start, bend, STEPS, LONGEST * curve.best, progress)
    return {role: round(value, DIGITS) for role, value in zip(order, scale.clamp(0.0, LARGEST).tolist(), strict=True)}


def quasi_newton(
    gradient: Callable[[Tensor], Tensor],
    x: Tensor,
    bend: float,
    steps: int,
    longest: float,
    progress: Progress | None = None,
) -> Tensor:
    """Towards the minimum from x [n], by so many gradients; `bend` is the first guess of every second derivative.

    B, the Hessian as far as it is known, starts as bend · I and is updated by BFGS wherever the slope has risen along
    the step. No number changes by more than `longest` in a step.
    """
    B = bend * torch.eye(len(x), dtype=x.dtype)
    before: tuple[Tensor, Tensor] | None = None
    for step in range(steps):
        g = gradient(x)
        if not bool(torch.isfinite(g).all()):
            return x if before is None else before[0]  # a model that breaks: back to where it did not
        if before is not None:
            s, y = x - before[0], g - before[1]
            if s @ y > 1e-9 * s.norm() * y.norm():
                Bs = B @ s
                B = B - torch.outer(Bs, Bs) / (s @ Bs) + torch.outer(y, y) / (s @ y)
        before = x, g
        x = x - torch.linalg.solve(B, g).clamp(-longest, longest)
        if progress is not None:
            progress("scales", step + 1, steps)
    return x
