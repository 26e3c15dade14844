"""The scale λ of θ_B + λ τ_B, chosen on the calibration set: forward passes only, no test data, no training.

    >>> curve = choose_scale(lambda scale: calibration_loss(scale))
    >>> curve.best, curve.helps

The paper fixes λ = 1. The best λ was seen at 0.5 for one pair and between 2 and 3 for others, so both sides of 1
are searched. The search never returns a scale whose loss is not below the untouched target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from taskferry.calibration.batch import Batch
from taskferry.capture import Loss, device_of, frozen
from taskferry.taskvector import TaskVector, as_dense

LARGEST = 4.0
START = (0.0, 1.0, 2.0, 0.5, 4.0)


@dataclass(frozen=True)
class ScaleCurve:
    """Every loss that was looked at, and the scale with the lowest."""

    points: tuple[tuple[float, float], ...]  # (scale, loss), ascending
    best: float

    @property
    def helps(self) -> bool:
        """Whether some scale is better than the untouched target."""
        return self.best > 0

    def loss(self, scale: float) -> float:
        """The loss at a scale that was evaluated."""
        return dict(self.points)[scale]


def choose_scale(loss: Callable[[float], float], *, largest: float = LARGEST, evaluations: int = 12) -> ScaleCurve:
    """The minimum of loss(λ) on [0, largest] in at most `evaluations` calls.

    Five fixed points find the valley. Then a parabola through the best point and its neighbours gives the next one,
    unless the step before did not halve the valley, or the vertex says nothing new: then its wider side is cut.
    """
    known: dict[float, float] = {}

    def look(scale: float) -> None:
        value = loss(scale)
        known[scale] = value if value == value else float("inf")  # a model that breaks is no minimum

    for scale in START:
        look(min(scale, largest))
    previous = 2 * largest
    while len(known) < evaluations:
        scales = sorted(known)
        middle = min(range(len(scales)), key=lambda i: known[scales[i]])
        left, right = scales[max(middle - 1, 0)], scales[min(middle + 1, len(scales) - 1)]
        if right - left < 0.02:
            break
        halved = right - left <= previous / 2
        previous = right - left
        look(_next(left, scales[middle], right, known, parabola=halved))
    best = min(known, key=lambda scale: (known[scale], scale))
    if not known[best] < known[0.0]:
        best = 0.0
    return ScaleCurve(tuple(sorted(known.items())), best)


def _next(left: float, middle: float, right: float, known: dict[float, float], parabola: bool) -> float:
    if middle in (left, right):
        return (left + right) / 2
    wider_left = middle - left > right - middle
    section = middle - (middle - left) / 3 if wider_left else middle + (right - middle) / 3
    a, b = (middle - left) * (known[middle] - known[right]), (middle - right) * (known[middle] - known[left])
    if not parabola or a == b or not abs(a - b) < float("inf"):
        return section
    vertex = middle - ((middle - left) * a - (middle - right) * b) / (2 * (a - b))
    near = 0.02 * (right - left)  # a vertex on top of a known point teaches nothing
    if not left + near < vertex < right - near or abs(vertex - middle) < near:
        return section
    return vertex


def calibration_loss(model: nn.Module, loss: Loss, batches: Sequence[Batch]) -> float:
    """Mean loss a sample, forward passes only."""
    device = device_of(model)
    with torch.no_grad(), frozen(model):
        total = sum(float(loss(batch.to(device))) for batch in batches)
    return total / sum(len(batch) for batch in batches)


@contextmanager
def moved_by(model: nn.Module, tau: TaskVector) -> Iterator[Callable[[float], None]]:
    """Inside, the model's parameters are base + scale · τ for the scale last set; after, as they were.

    Memory: one copy of the parameters that move.
    """
    moving = [(parameter, parameter.detach().clone(), delta) for parameter, delta in tau.on(model)]

    @torch.no_grad()
    def set_scale(scale: float) -> None:
        for parameter, base, delta in moving:
            change = as_dense(delta)
            parameter.copy_(base + scale * change.to(base.device))

    try:
        yield set_scale
    finally:
        with torch.no_grad():
            for parameter, base, _ in moving:
                parameter.copy_(base)


def scale_on_calibration(
    model: nn.Module,
    tau: TaskVector,
    loss: Loss,
    batches: Sequence[Batch],
    on_evaluation: Callable[[float, float], None] | None = None,
) -> ScaleCurve:
    """The scale of `tau` on `model` with the lowest calibration loss."""
    with moved_by(model, tau) as set_scale:

        def evaluate(scale: float) -> float:
            set_scale(scale)
            value = calibration_loss(model, loss, batches)
            if on_evaluation is not None:
                on_evaluation(scale, value)
            return value

        return choose_scale(evaluate)
