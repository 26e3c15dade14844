"""BiCo from two points: maps fitted on the base models and on both models halfway, over whitened gradients.

What it adds to the paper, each measured alone and together (docs/results.md): gradient rows of one length, whitened;
augmented views of images, which the tuned source labels; a second capture where both models have gone half of the way.
A patch embedding stays as it is. Nothing is trained: the one number that is chosen is a scale. Without a task vector
(to fit maps for any) only what needs none is left: the first capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from taskferry.choices import DEFAULT_TOLERANCE
from taskferry.collect.scale import EVALUATIONS, ROUNDS, START
from taskferry.collect.statistics import BASE, Capture, Point, Tokens
from taskferry.coverage import Coverage
from taskferry.data.augmentation import Views, are_images
from taskferry.data.batch import Calibration
from taskferry.errors import TaskferryError
from taskferry.linalg.whitening import UnitRows, Whitened
from taskferry.methods import FOLDS, Cost, Job, MapRank, Moved, Needs, Shown, TableRow, Tolerance, method
from taskferry.objectives.objectives import Classifier
from taskferry.taskvector import TaskVector

PATCH = "a patch embedding: the target is better off with its own on the benchmarks (patches=true moves it)"
ALONE = "fitted without a task vector: one capture at the base models, no second one halfway, no scales"
EFFORTS: dict[str, dict[str, Any]] = {"fast": {"halfway": 0.0}, "thorough": {"views": 3}}
ROWS = (
    TableRow("twofold", auto_scale=True, passes=(2.0, 6.3), beats=("target", "theseus"), reaches=("bico",), curve=5),
    TableRow("twofold, teacher", auto_scale=True, teacher=True, passes=(7 / 3, 6.3)),
    TableRow("twofold, fast", EFFORTS["fast"], auto_scale=True, passes=(1.0, 4.3)),
    TableRow("twofold, thorough", EFFORTS["thorough"], auto_scale=True, passes=(9.0, 12.3)),
)


def costs(job: Job, *, halfway: float, views: int, whiten: bool, directions: int, tokens: Tokens, **_: Any) -> Cost:
    """Captures grow with the augmented views; whitening decomposes about as much again as the maps do."""
    solves, sums = 2 if whiten else 1, Whitened if whiten else UnitRows
    if not len(job.tau):
        return Cost(1, solves, sums=sums, directions=directions, tokens=job.met(tokens))
    inputs = 1 if naming_head(job) is None else 1 + views
    captures = 1 + (halfway > 0)
    looked_at = (len(START) - 1 if halfway else 0) + EVALUATIONS  # the untouched target once
    judged = job.judged
    return Cost(
        captures * inputs,
        solves,
        looked_at * judged / FOLDS,
        FOLDS,
        judged,
        captures - 1,
        sums,
        directions,
        job.met(tokens),
    )


@method(
    needs=Needs(gradients=True, captures=2, maps=True),
    shown=Shown(
        6, "nothing was trained: two orthogonal maps a layer carried the change over, fitted at two points", ROWS
    ),
    costs=costs,
    efforts=EFFORTS,
)
def twofold(
    job: Job,
    *,
    halfway: Annotated[float, "how far both models have gone at the second capture; 0 takes none"] = 0.5,
    whiten: Annotated[bool, "whiten the gradients, so that every direction counts alike"] = True,
    views: Annotated[int, "augmented views of each image, which the tuned source labels"] = 0,
    patches: Annotated[bool, "move a patch embedding too"] = False,
    tokens: Annotated[Tokens, "of prompts with answers: whose rows make the maps"] = "all",
    directions: Annotated[int, "strongest directions that maps of more than twice as wide layers keep; 0: all"] = 512,
    map_rank: MapRank = "range",
    tolerance: Tolerance = DEFAULT_TOLERANCE,
) -> Moved:
    """BiCo with whitened gradients, a second capture halfway, and augmented views of images."""
    if not 0 <= halfway <= 1 or views < 0 or directions < 0:
        raise TaskferryError(
            "twofold: halfway is between 0 and 1, views and directions are 0 or more, "
            f"got {halfway:g}, {views} and {directions}"
        )
    given, left_out = job, {} if patches else patch_changes(job)
    sites = {p.target.name: PATCH for p in job.pair.pairs if p.target.weight in left_out}
    if len(job.tau):
        job = with_views(job.in_folds(), views)
    if any(name in left_out for name in job.tau.deltas):
        tau = TaskVector({name: delta for name, delta in job.tau.deltas.items() if name not in left_out})
        job = replace(job, tau=tau)
    maps = job.maps(map_rank, tolerance)
    capture = Capture(sums=Whitened if whiten else UnitRows, directions=directions, tokens=tokens)
    if not len(job.tau):
        return replace(job.move(capture, maps, "base", sites), notes={"without a task vector": ALONE})

    again = bool(halfway)
    moved, point = job.move(replace(capture, again=again), maps, "base", sites), 1
    # Where halfway is need not be known well, and nothing else rests on it: by the maps of all samples.
    curve = job.best_scale(moved.judged, rounds=0 if again else ROUNDS)
    if again and curve.helps:
        both = (BASE, Point(halfway * job.tau, halfway * curve.best * moved.tau))
        del moved  # its maps go before the next are made
        moved, point = job.move(replace(capture, points=both), maps, "halfway", sites), 2
        curve = job.best_scale(moved.judged)
    elif again:  # the first maps are rough: what does not help by them may still help by those of one point
        del moved
        moved = job.move(capture, maps, "base", sites)
        curve = job.best_scale(moved.judged)
    scale = curve.best if curve.helps else 1.0  # what does not help is left as it is: the verdict refuses it
    notes = {
        "captures": point,
        "calibration": {
            "samples": given.calibration.samples,
            "sha256": given.calibration.identity(),
            "views": job.calibration.samples - given.calibration.samples,
        },
        "scale": round(curve.best, 6),
    }
    alignment = moved.alignment
    return replace(
        moved,
        tau=_with_reasons(moved.tau * scale, left_out, given.tau),
        without=tuple(each * scale for each in moved.without),
        alignment=None if alignment is None else alignment.times(scale),
        curve=curve,
        notes=notes,
    )


def naming_head(job: Job) -> Classifier | None:
    """The head that says what augmented views of the job's images show; None where there can be none.

    Texts have none, and neither has a head that is made from the samples: it would be made from the views as well.
    """
    heads = job.pair.objectives
    head = heads[0]
    if not isinstance(head, Classifier) or any(getattr(each, "fitted", False) for each in heads):
        return None
    return head if are_images(job.calibration) else None


def with_views(job: Job, views: int) -> Job:
    """The job with augmented views of its images, each with the class that the tuned source gives it.

    Only classes that the samples have, and only by a source that names most samples as they are labelled: a head that
    was not tuned, or that a file did not bring along, knows nothing.
    """
    head, labels = naming_head(job), job.calibration.labels
    if not views or not len(job.tau) or head is None or labels is None:
        return job
    made = Views(job.calibration, views, strength=0.5, blended=0.0)  # still clear enough to be named
    if (job.pair.teacher(job.tau, head, job.calibration) == labels).double().mean() < 0.5:
        return job
    size = max(map(len, job.calibration.side(0)))
    fold_of = [A.fold for A, _ in job.calibration for _ in range(len(A))]
    pairs = []
    for fold in range(job.calibration.folds):
        numbers = [i for i in range(made.samples, len(made)) if fold_of[i % made.samples] == fold]
        for start in range(0, len(numbers), size):
            A, B = made.pair(numbers[start : start + size])
            pairs.append((replace(A, fold=fold, judges=False), replace(B, fold=fold, judges=False)))
    more = Calibration(pairs)
    named = []
    for A, B in more.with_labels(job.pair.teacher(job.tau, head, more)):
        good = [i for i, label in enumerate(() if A.labels is None else A.labels) if bool((labels == label).any())]
        if good:
            named.append((A.take(good), B.take(good)))
    return replace(job, pair=job.pair.with_calibration(Calibration([*job.calibration, *named])))


def patch_changes(job: Job) -> dict[str, str]:
    """The changes of patch embeddings by name, and the target's parameters that they would go to, with the reason.

    None where the task vector changes nothing else.
    """
    source, target = ({name for site in sites if site.role == "patch" for name in (site.weight, site.bias) if name}
                      for sites in (job.pair.source_sites, job.pair.target_sites))  # fmt: skip
    changed = source & set(job.tau.deltas)
    if not len(job.tau):
        return dict.fromkeys(sorted(source | target), PATCH)
    return dict.fromkeys(sorted(changed | target), PATCH) if changed and changed != set(job.tau.deltas) else {}


def _with_reasons(moved: TaskVector, left_out: Mapping[str, str], tau: TaskVector) -> TaskVector:
    """With the reason of what was left out in its coverage."""
    if not left_out or moved.coverage is None:
        return moved
    rows = [replace(row, reason=left_out.get(row.parameter, row.reason)) if row.status == "kept" else row
            for row in moved.coverage]  # fmt: skip
    unused = {name: why for name, why in left_out.items() if name in tau.deltas}
    return TaskVector(moved.deltas, Coverage(tuple(rows), {**moved.coverage.unused, **unused}))
