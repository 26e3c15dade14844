"""A move, then training towards the tuned source: no labels, but no longer free of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from taskferry.collect.scale import EVALUATIONS
from taskferry.methods import Cost, Job, Moved, Needs, Shown, TableRow, find, method, run
from taskferry.training.lessons import VIEWS
from taskferry.training.refinement import Refinement, refine

ROWS = (
    TableRow("distil", passes=(6.3, 68.0), curve=8),
    TableRow("distil, from the target", {"start": "cold"}, passes=(5.3, 64.0)),
)


def distil_cost(job: Job, *, start: str, **settings: Any) -> Cost:
    """The move, the search for its scale, and the training."""
    moved = find(start)
    own = moved.cost(job, moved.checked({}))
    trained = Refinement(**settings).passes(job.calibration, job.pair.objectives)
    searched = EVALUATIONS if moved.needs.change and not own.evaluations else 0
    return replace(own, evaluations=own.evaluations + searched, training=trained)


@method(
    costs=distil_cost,
    needs=Needs(gradients=True, captures=1, training=True, whole=True),
    shown=Shown(
        8, "moved by bico, then trained for a few steps towards the tuned source on the calibration samples", ROWS
    ),
)
def distil(
    job: Job,
    *,
    steps: Annotated[int, "optimiser steps", Field(ge=1)] = 100,
    learning_rate: Annotated[float | None, "of AdamW, at the end of the warm-up", Field(gt=0)] = None,
    batch: Annotated[int | None, "inputs a step", Field(ge=1)] = None,
    views: Annotated[int, "augmented views of each image, made for both models alike", Field(ge=0)] = VIEWS,
    labels: Annotated[float, "share of the loss that the data's own labels get", Field(ge=0, le=1)] = 0.0,
    start: Annotated[Literal["bico", "twofold", "cold"], "the method whose result is refined"] = "bico",
    seed: Annotated[int, "of the views and their order"] = 0,
) -> Moved:
    """A move, refined: `--refine` as a method, for tables. The tuned source answers every input; no labels needed."""
    job = job.in_folds() if start != "cold" else job
    moved = run(start, job)
    if moved.curve is None:
        scale = job.best_scale(moved.judged).best
    else:  # its change has the scale that it found; one that was refused is no start
        scale = float(moved.curve.helps)
    settings = Refinement(steps=steps, learning_rate=learning_rate, batch=batch, views=views, labels=labels, seed=seed)
    refined = refine(job.pair, job.tau, scale * moved.tau, settings, without=[scale * each for each in moved.without])
    return Moved(refined.tau, notes={"refined": refined.record()})
