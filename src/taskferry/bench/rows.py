"""The rows of a table: a method with its settings, or what a user would do instead.

>>> ROWS["few-shot, from bico"]
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from taskferry.fitting import both_objectives
from taskferry.methods import CannotMove, Job, run
from taskferry.objectives import Classifier, teacher_labels
from taskferry.scale import moved_by, scale_on_calibration
from taskferry.taskvector import TaskVector


@dataclass(frozen=True)
class RowKind:
    """How a row moves the task vector."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    auto_scale: bool = False
    costly: bool = False  # trains, so it takes many times longer than a transfer
    drawn: bool = True  # depends on the calibration samples
    teacher: bool = False  # labels from the tuned source, whatever the data says
    passes: tuple[float, float] = (1.0, 1.0)  # of the source and the target, in forward and backward passes


ROWS: dict[str, RowKind] = {
    "naive": RowKind("naive", drawn=False, passes=(0.0, 0.0)),
    "theseus": RowKind("theseus", passes=(1 / 3, 1 / 3)),
    "transfusion": RowKind("transfusion", drawn=False, passes=(0.0, 0.0)),
    "gradfix": RowKind("gradfix", passes=(0.0, 1.0)),
    "bico": RowKind("bico"),
    "bico, automatic scale": RowKind("bico", auto_scale=True, passes=(1.0, 5.0)),
    "bico, teacher": RowKind("bico", teacher=True, passes=(4 / 3, 1.0)),
    "bico, teacher, automatic scale": RowKind("bico", auto_scale=True, teacher=True, passes=(4 / 3, 5.0)),
    "theseus, automatic scale": RowKind("theseus", auto_scale=True, passes=(1 / 3, 4 + 1 / 3)),
    "twofold": RowKind("twofold", auto_scale=True, passes=(9.0, 54.0)),
    "twofold, teacher": RowKind("twofold", auto_scale=True, teacher=True, passes=(28 / 3, 54.0)),
    "bico, input-only": RowKind("bico", {"outputs": "identity"}),
    "bico, output-only": RowKind("bico", {"inputs": "identity"}),
    "bico, gradient-only": RowKind("bico", {"inputs": "gradients"}),
    "few-shot, one step": RowKind("few-shot", {"steps": 1}, passes=(0.0, 1.5)),
    "few-shot": RowKind("few-shot", costly=True, passes=(0.0, 180.0)),
    "few-shot, from bico": RowKind("few-shot", {"start": "bico"}, costly=True, passes=(1.0, 181.0)),
    "distil": RowKind("distil", costly=True, passes=(22.0, 68.0)),
    "distil, from the target": RowKind("distil", {"start": "target"}, costly=True, passes=(21.0, 64.0)),
}


class Mover:
    """Moves one job by one row after the other; what two rows share is computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._moved: dict[str, tuple[TaskVector, float]] = {}

    def move(self, row: str) -> tuple[TaskVector, float, float]:
        """The moved task vector, its scale, and the seconds that both took; a method may refuse (`CannotMove`)."""
        kind = ROWS[row]
        key = f"{kind.method} {kind.settings} {kind.teacher}"
        job = self._taught if kind.teacher else self.job
        if key not in self._moved:
            started = time.perf_counter()
            moved = run(kind.method, job, **kind.settings)
            self._moved[key] = moved, time.perf_counter() - started
        moved, seconds = self._moved[key]
        if not kind.auto_scale:
            return moved, 1.0, seconds
        started = time.perf_counter()
        scale = scale_on_calibration(job.target, moved, job.target_loss(), job.calibration.side(1)).best
        return moved, scale, seconds + time.perf_counter() - started

    @cached_property
    def _taught(self) -> Job:
        """The job under the labels that the tuned source gives."""
        job = self.job
        head = both_objectives(job.objective, job.source, job.target, job.calibration)[0]
        if not isinstance(head, Classifier):
            raise CannotMove("the teacher labels classes: language models have their own loss")
        with moved_by(job.source, job.tau) as set_scale:
            set_scale(1.0)
            labels = teacher_labels(job.source, job.calibration.side(0), head)
        return replace(job, calibration=job.calibration.with_labels(labels))
