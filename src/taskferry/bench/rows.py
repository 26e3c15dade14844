"""The rows of a table, as the methods declare them, and moving one job by one row after the other.

>>> rows()["few-shot, one step"]
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache, cached_property

from taskferry.bench.code import code_of
from taskferry.methods import CannotMove, Job, Method, Moved, TableRow, methods
from taskferry.objectives.objectives import Classifier
from taskferry.taskvector import TaskVector

SCORED = ("taskferry.objectives.preparation", "taskferry.evaluation.scoring")


@dataclass(frozen=True)
class RowKind:
    """A row with the method that declares it."""

    method: Method
    row: TableRow

    @property
    def costly(self) -> bool:
        """Trains for more than a step, so it takes many times longer than a transfer."""
        return self.method.needs.training and max(self.row.passes) > 10

    @property
    def drawn(self) -> bool:
        """Depends on the calibration samples."""
        return self.method.needs.samples

    @property
    def code(self) -> str:
        """A hash of the code that makes a score of it: of the method, of the samples' preparation, of the scoring."""
        return code_of(self.method.function.__module__, *SCORED)


@cache
def rows() -> dict[str, RowKind]:
    """All rows by name, in the order of a table."""
    known = sorted(methods().values(), key=lambda method: method.shown.place)
    return {row.name: RowKind(method, row) for method in known for row in method.shown.rows}


class Mover:
    """Moves one job by one row after the other; what two rows share is computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._moved: dict[str, tuple[Moved, float]] = {}
        self.without: tuple[TaskVector, ...] = ()  # of the row that was taken last: what each fold did not make

    def move(self, name: str) -> tuple[TaskVector, float, float]:
        """By a row of the tables: see `take`."""
        return self.take(rows()[name])

    def take(self, kind: RowKind) -> tuple[TaskVector, float, float]:
        """The moved task vector, its scale, and the seconds that both took; a method may refuse (`CannotMove`)."""
        row = kind.row
        key = f"{kind.method.name} {row.settings} {row.teacher}"
        job = self._taught if row.teacher else self.job
        if row.auto_scale and kind.method.needs.maps:
            job, key = job.in_folds(), f"{key} in folds"
        if key not in self._moved:
            started = time.perf_counter()
            moved = kind.method.move(job, row.settings)
            self._moved[key] = moved, time.perf_counter() - started
        moved, seconds = self._moved[key]
        self.without = moved.without
        if not row.auto_scale or moved.curve is not None:
            refused = moved.curve is not None and not moved.curve.helps
            return moved.tau, 0.0 if refused else 1.0, seconds
        started = time.perf_counter()
        return moved.tau, job.best_scale(moved.judged).best, seconds + time.perf_counter() - started

    @cached_property
    def _taught(self) -> Job:
        """The job under the labels that the tuned source gives."""
        job = self.job
        head = job.pair.objectives[0]
        if not isinstance(head, Classifier):
            raise CannotMove("the teacher labels classes: language models have their own loss")
        labels = job.pair.teacher(job.tau, head, job.calibration)
        return replace(job, pair=job.pair.with_calibration(job.calibration.with_labels(labels)))
