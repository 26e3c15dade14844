"""The scale λ of θ_B + λ τ_B, chosen on the calibration set: forward passes only, no test data, no training.

    >>> curve = choose_scale(lambda scales: pair.losses(tau, scales))
    >>> curve.best, curve.helps

The paper fixes λ = 1. The best λ was seen at 0.5 for one pair and between 2 and 3 for others, so both sides of 1
are searched. The search never returns a scale whose loss is not below the untouched target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from taskferry.collect.capture import Loss
from taskferry.collect.device import frozen, place_of
from taskferry.data.batch import Batch
from taskferry.linalg.precision import full_precision
from taskferry.taskvector import LowRank, TaskVector, as_dense, to_device

LARGEST = 4.0
START = (0.0, 0.5, 1.0, 2.0)  # the largest as well, where the loss still falls there
SMALLEST = 1 / 32  # a lowest scale that is larger, and next to 0, is cut further
ROUNDS = 2  # after the first
DIGITS = 2  # of a scale: what lies beyond is rounding of the loss, and differs from one engine to the other
EVALUATIONS = len(START) + 3 * ROUNDS  # at most, where the valley is not beyond the start
Losses = Callable[[Sequence[float]], Sequence[float]]  # scales -> the loss at each


@dataclass(frozen=True)
class ScaleCurve:
    """Every loss that was measured, and the scale with the lowest."""

    points: tuple[tuple[float, float], ...]  # (scale, loss), ascending
    best: float

    @property
    def helps(self) -> bool:
        """Whether some scale is better than the untouched target."""
        return self.best > 0

    def loss(self, scale: float) -> float:
        """The loss at a scale that was evaluated."""
        return dict(self.points)[scale]

    def times(self, factor: float) -> ScaleCurve:
        """The same curve in another unit, such as per token instead of per sample."""
        return replace(self, points=tuple((scale, factor * loss) for scale, loss in self.points))


def choose_scale(losses: Losses, *, largest: float = LARGEST) -> ScaleCurve:
    """The minimum of the loss over [0, largest], in rounds: all scales of a round are asked for together.

    Where a loss takes a walk over weights on disk, a round is one walk. The first round finds the valley, with the
    largest scale where the loss still falls at its end; each of the next cuts both sides of the valley in halves, and
    takes the vertex of the parabola through its three points as well. Where it lies next to 0 there are more of them: a
    change of narrow layers may be many times too long for wide ones.
    """
    known: dict[float, float] = {}

    def evaluate(scales: Sequence[float]) -> None:
        for scale, value in zip(scales, losses(scales), strict=True):
            known[scale] = value if value == value else float("inf")  # a model that breaks is no minimum

    def valley() -> tuple[float, float, float]:
        """The lowest, between its neighbours."""
        scales = sorted(known)
        middle = min(range(len(scales)), key=lambda i: known[scales[i]])
        return scales[max(middle - 1, 0)], scales[middle], scales[min(middle + 1, len(scales) - 1)]

    evaluate([scale for scale in START if scale <= largest])
    if min(known, key=lambda scale: known[scale]) == max(known) < largest:
        evaluate([largest])
    for _ in range(ROUNDS):
        left, middle, right = valley()
        if right - left < 0.02:
            break
        evaluate(_inside(left, middle, right, known))
    while (at := valley())[0] == 0.0 < SMALLEST < at[1]:
        evaluate(_inside(*at, known))
    best = min(known, key=lambda scale: (known[scale], scale))
    if not known[best] < known[0.0]:
        best = 0.0
    return ScaleCurve(tuple(sorted(known.items())), best)


def _inside(left: float, middle: float, right: float, known: dict[float, float]) -> list[float]:
    """Three scales between the neighbours of the lowest loss."""
    if middle in (left, right):
        return [left + (right - left) * share for share in (0.25, 0.5, 0.75)]
    halves = [(left + middle) / 2, (middle + right) / 2]
    a, b = (middle - left) * (known[middle] - known[right]), (middle - right) * (known[middle] - known[left])
    if a == b or not abs(a - b) < float("inf"):
        return halves
    vertex = round(middle - ((middle - left) * a - (middle - right) * b) / (2 * (a - b)), DIGITS)
    near = 0.01 * (right - left)  # a vertex on top of a known point teaches nothing
    if not left + near < vertex < right - near or any(abs(vertex - scale) < near for scale in (middle, *halves)):
        return halves
    return sorted([*halves, vertex])


def calibration_loss(model: nn.Module, loss: Loss, batches: Sequence[Batch]) -> float:
    """Mean loss per sample, forward passes only."""
    place = place_of(model)
    with torch.no_grad(), frozen(model):
        total = sum(float(loss(batch.to(*place))) for batch in batches)
    return total / sum(len(batch) for batch in batches)


@contextmanager
def moved_by(model: nn.Module | Mapping[str, nn.Parameter], tau: TaskVector) -> Iterator[Callable[[float], None]]:
    """Inside, the model's parameters are base + scale · τ for the scale last set; after, as they were.

    By their names from before where a model has changed them, as PEFT's layers do.

    Memory: one copy of the parameters that move, of half the size where they were stored in half precision.
    """
    moving = [
        (parameter, _copy(parameter.detach()), to_device(d, parameter.device) if isinstance(d, LowRank) else d)
        for _, parameter, d in tau.on(model)
    ]

    @torch.no_grad()
    @full_precision()
    def set_scale(scale: float) -> None:
        for parameter, copied, delta in moving:
            base = copied.to(parameter.dtype)
            if isinstance(delta, LowRank) and delta.left.ndim == 2 and delta.left.dtype == base.dtype:
                parameter.copy_(torch.addmm(base, delta.left, delta.right, alpha=scale))
            else:
                parameter.copy_(base + scale * as_dense(delta).to(base.device))

    try:
        yield set_scale
    finally:
        with torch.no_grad():
            for parameter, copied, _ in moving:
                parameter.copy_(copied)


def _copy(weights: Tensor) -> Tensor:
    """Weights that were read from a file in half precision are the same in it, and half as large."""
    for precision in (torch.bfloat16, torch.float16):
        half = weights.to(precision, copy=True)
        if torch.equal(half.to(weights.dtype), weights):
            return half
    return weights.clone()


def losses_at(
    model: nn.Module, tau: TaskVector, loss: Loss, batches: Sequence[Batch], scales: Sequence[float]
) -> list[float]:
    """The mean loss per sample of model + scale · τ, at each scale."""
    found = []
    with moved_by(model, tau) as set_scale:
        for scale in scales:
            set_scale(scale)
            found.append(calibration_loss(model, loss, batches))
    return found
