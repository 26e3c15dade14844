"""How far activations wander from the base model along a fine-tuning run (paper, appendix B).

>>> trajectory = Trajectory(model, batches)                       # before training
>>> finetune(model, data, objective, progress=trajectory.follow(model, every=100))
>>> trajectory.measurements[100]                                         # block -> shift of its inputs
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from taskferry.analysis.agreement import Shift, agreement, by_block
from taskferry.data.batch import Batch

Blocks = dict[tuple[str, int], Shift]


class Trajectory:
    """Shifts of the inputs of every block, against the model as it was given; it keeps a copy of that."""

    def __init__(self, base: nn.Module, batches: Sequence[Batch]) -> None:
        self.base = copy.deepcopy(base)
        self.batches = batches
        self.measurements: dict[int, Blocks] = {}

    def measure(self, model: nn.Module, step: int) -> Blocks:
        """Measure a model at a step: one forward pass of it and of the base, nothing of it changes."""
        rows = agreement(self.base, model, self.batches)
        direction = by_block(rows, lambda row: row.inputs.direction)
        magnitude = by_block(rows, lambda row: row.inputs.magnitude)
        self.measurements[step] = {place: Shift(direction[place], magnitude[place]) for place in direction}
        return self.measurements[step]

    def follow(self, model: nn.Module, every: int = 100) -> Callable[[int, int, float], None]:
        """A progress function for `finetune`: measures every so many steps, and at the last."""

        def step_done(step: int, steps: int, loss: float) -> None:  # noqa: ARG001
            if step % every == 0 or step == steps:
                self.measure(model, step)

        return step_done

    def to_json(self) -> list[dict[str, Any]]:
        """One row a step and block."""
        return [
            {"step": step, "stack": stack, "block": block, "direction": s.direction, "magnitude": s.magnitude}
            for step, blocks in self.measurements.items()
            for (stack, block), s in blocks.items()
        ]
