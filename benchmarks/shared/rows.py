"""The rows of tables, by data: a name, a method with settings, and its scale.

    for _ in run_rows(models, tau, prepared, ["BiCo", "natural, 1 step"], score, known): ...

To add a row, add a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from taskferry import TaskferryError, TaskVector
from taskferry.compare import at_scale
from taskferry.linalg.procrustes import Map
from taskferry.methods import CannotMove, Job, find
from taskferry.objectives.preparation import Prepared

Score = Callable[[TaskVector], dict[str, float]]  # of the target with a change: "score" and what stands beside it


@dataclass(frozen=True)
class Row:
    """One way to bring a fine-tune to another base."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    scale: float | Literal["auto"] = "auto"
    sides: str = "in out"  # whose maps are used, the other side's are the identity (the paper's ablations)


ROWS: dict[str, Row] = {
    "copied": Row("naive", scale=1.0),
    "copied, best scale": Row("naive"),
    "TransFusion": Row("transfusion", scale=1.0),
    "GradFix": Row("gradfix", scale=1.0),
    "THESEUS": Row("theseus", scale=1.0),
    "BiCo, input-only": Row("bico", scale=1.0, sides="in"),
    "BiCo, output-only": Row("bico", scale=1.0, sides="out"),
    "BiCo, gradient-only": Row("bico", {"inputs": "gradients"}, scale=1.0),
    "BiCo": Row("bico", scale=1.0),
    "BiCo, best scale": Row("bico"),
    "natural, 1 step": Row("natural", {"steps": 1}),
    "natural, 2 steps": Row("natural", {"steps": 2}),
    "natural, 4 steps": Row("natural", {"steps": 4}),
    **{f"distil, {steps} steps": Row("distil", {"steps": steps, "start": "nothing"}) for steps in (10, 20, 40, 100)},
    "natural, distil, 40 steps": Row("distil", {"steps": 40, "start": "natural"}),
    "BiCo, distil, 40 steps": Row("distil", {"steps": 40, "start": "bico"}),
    "copied, distil, 40 steps": Row("distil", {"steps": 40, "start": "naive"}),
    "default": Row("distil"),
}
FRONTIER = [
    name for name in ROWS if "only" not in name and name != "copied, distil, 40 steps"
]  # what quality is held against cost for


def move(row: Row, models: tuple[nn.Module, nn.Module], tau: TaskVector, prepared: Prepared, seed: int) -> TaskVector:
    """The change of the target by one row; a fifth of the samples is held out where something is chosen on them."""
    fit, held_out = prepared.calibration, None
    if row.scale == "auto":
        fit, held_out = fit.split(seed)
    job = Job.of(*models, tau, fit, prepared.objectives, held_out=held_out)
    change = at_scale(row.method, job, row.settings, row.scale)
    return change if row.sides == "in out" else one_sided(row, job)


def one_sided(row: Row, job: Job) -> TaskVector:
    """The change by the maps of one side alone."""
    alignment = find(row.method).move(job, row.settings).alignment
    assert alignment is not None
    left_out = alignment.R_out if row.sides == "in" else alignment.R_in
    if any(R.shape[0] != R.shape[1] for R in left_out.values()):
        raise CannotMove("one side alone needs models of equal widths")
    same = {name: Map(R=torch.eye(R.shape[0])) for name, R in left_out.items()}
    return replace(alignment, **{"R_out" if row.sides == "in" else "R_in": same}).apply(job.tau)


def run_rows(
    models: tuple[nn.Module, nn.Module], tau: TaskVector, prepared: Prepared, names: Sequence[str], score: Score,
    known: dict[str, Any], seed: int = 0,
) -> Iterator[str]:  # fmt: skip
    """Run the rows that are not known yet, each alone; yields after each.

    Its CPU-seconds are those of the method in this process, without loading and scoring.
    """
    for name in names:
        if name in known:
            continue
        started = time.process_time()
        try:
            change = move(ROWS[name], models, tau, prepared, seed)
        except TaskferryError as error:
            known[name] = {"refused": str(error)}
        else:
            seconds = time.process_time() - started
            known[name] = {**score(change), "cpu": round(seconds, 2)}
        yield name
