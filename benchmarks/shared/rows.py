"""The rows of tables, by data: a name, a method with settings, its scale, and steps of training after it.

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
from taskferry.models.lowrank import fresh
from taskferry.objectives.preparation import Prepared
from taskferry.objectives.teacher import lesson_of
from taskferry.taskvector import Delta, LowRank
from taskferry.training.refine import refine

Score = Callable[[TaskVector], dict[str, float]]  # of the target with a change: "score" and what stands beside it


@dataclass(frozen=True)
class Row:
    """One way to bring a fine-tune to another base."""

    method: str = ""  # nothing is moved where it is empty
    settings: Mapping[str, Any] = field(default_factory=dict)
    scale: float | Literal["auto"] = "auto"
    steps: int = 0  # of AdamW towards the tuned source's answers, after the move
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
    **{f"AdamW, {steps} steps": Row(steps=steps) for steps in (10, 30, 100)},
    **{f"natural, AdamW, {steps} steps": Row("natural", steps=steps) for steps in (10, 30, 100)},
}
FRONTIER = [name for name in ROWS if "only" not in name]  # what quality is held against cost for


def move(row: Row, models: tuple[nn.Module, nn.Module], tau: TaskVector, prepared: Prepared, seed: int) -> TaskVector:
    """The change of the target by one row; a fifth of the samples is held out where something is chosen on them."""
    fit, held_out = prepared.calibration, None
    if row.scale == "auto" or row.steps:
        fit, held_out = fit.split(seed)
    job = Job.of(*models, tau, fit, prepared.objectives, held_out=held_out)
    change = at_scale(row.method, job, row.settings, row.scale) if row.method else nothing(job)
    if row.sides != "in out":
        change = one_sided(row, job)
    if not row.steps:
        return change
    lessons = [lesson_of(models, tau, part, prepared.objectives) for part in (job.calibration, job.judging)]
    return refine(models[1], change, lessons[0], lessons[1], row.steps, seed=seed).change


def nothing(job: Job) -> TaskVector:
    """No change, in the form of the source's: the start of training from scratch."""
    generator, deltas = torch.Generator().manual_seed(0), dict[str, Delta]()
    parameters = dict(job.target.named_parameters())
    for pair in job.pair.pairs:
        for mine, theirs in ((pair.source.weight, pair.target.weight), (pair.source.bias, pair.target.bias)):
            delta = job.tau.deltas.get(mine or "")
            if delta is None or theirs is None or theirs in deltas:
                continue
            value = parameters[theirs].detach()
            if isinstance(delta, LowRank):
                new = fresh(value.mT if pair.target.transposed else value, delta.rank, generator)
                deltas[theirs] = new.T if pair.target.transposed else new
            else:
                deltas[theirs] = torch.zeros_like(value)
    return TaskVector(deltas)


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

    Its CPU-seconds are those of the move and the training in this process, without loading and scoring.
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
