"""The rows of a table: a method with its settings, or what a user would do instead.

>>> ROWS["few-shot, from bico"]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from taskferry.methods import Job, run
from taskferry.scale import scale_on_calibration
from taskferry.taskvector import TaskVector


@dataclass(frozen=True)
class RowKind:
    """How a row moves the task vector."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    auto_scale: bool = False
    costly: bool = False  # trains, so it takes many times longer than a transfer
    drawn: bool = True  # depends on the calibration samples


ROWS: dict[str, RowKind] = {
    "naive": RowKind("naive", drawn=False),
    "theseus": RowKind("theseus"),
    "transfusion": RowKind("transfusion", drawn=False),
    "gradfix": RowKind("gradfix"),
    "bico": RowKind("bico"),
    "bico, automatic scale": RowKind("bico", auto_scale=True),
    "theseus, automatic scale": RowKind("theseus", auto_scale=True),
    "bico, input-only": RowKind("bico", {"outputs": "identity"}),
    "bico, output-only": RowKind("bico", {"inputs": "identity"}),
    "bico, gradient-only": RowKind("bico", {"inputs": "gradients"}),
    "few-shot, one step": RowKind("few-shot", {"steps": 1}),
    "few-shot": RowKind("few-shot", costly=True),
    "few-shot, from bico": RowKind("few-shot", {"start": "bico"}, costly=True),
}


class Mover:
    """Moves one job by one row after the other; what two rows share is computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._moved: dict[str, TaskVector] = {}

    def move(self, row: str) -> tuple[TaskVector, float]:
        """The moved task vector and its scale; a method that cannot handle the pair says so (`CannotMove`)."""
        kind = ROWS[row]
        key = f"{kind.method} {kind.settings}"
        if key not in self._moved:
            self._moved[key] = run(kind.method, self.job, **kind.settings)
        moved = self._moved[key]
        if not kind.auto_scale:
            return moved, 1.0
        batches = self.job.calibration.side(1)
        return moved, scale_on_calibration(self.job.target, moved, self.job.target_loss(), batches).best
