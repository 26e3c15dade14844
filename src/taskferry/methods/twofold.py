"""BiCo from two places: maps fitted on the base models and on both models halfway, over whitened gradients.

What it adds to the paper, each measured alone and together (docs/results.md): gradient rows of one length, whitened;
changed copies of images, which the tuned source labels; a second capture where both models have gone half of the way; a
scale for each role of layer. A patch embedding stays as it is. Nothing is trained: the numbers that are chosen are one
scale for each role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from taskferry.alignment import Alignment
from taskferry.calibration.batch import Batch, Calibration
from taskferry.calibration.views import Views, are_images
from taskferry.capture import Side, Signals, Statistics, collect_into
from taskferry.coverage import Coverage
from taskferry.errors import TaskferryError
from taskferry.files import hash_tensor
from taskferry.finding import find_sites
from taskferry.fitting import both_objectives, fit, numbers_of
from taskferry.methods import Job, method
from taskferry.methods.bico import MapRank, Tolerance
from taskferry.objectives import Classifier, teacher_labels
from taskferry.pairing import Pair
from taskferry.procrustes import DEFAULT_TOLERANCE
from taskferry.rolescales import STEPS, scaled_by_role
from taskferry.scale import moved_by, scale_on_calibration
from taskferry.statistics import CrossCovariance
from taskferry.taskvector import LowRank, TaskVector
from taskferry.whitening import Even, Whitened

PATCH = "a patch embedding: the target is better off with its own on the benchmarks (patches=true moves it)"
Halfway = tuple[TaskVector, TaskVector]  # what is added to the source and to the target at the second capture


@method
def twofold(
    job: Job,
    *,
    way: Annotated[float, "how far both models have gone at the second capture; 0 takes none"] = 0.5,
    whiten: Annotated[bool, "whiten the gradients, so that every direction counts alike"] = True,
    copies: Annotated[int, "changed copies of each image, which the tuned source labels"] = 3,
    scales: Annotated[Literal["role", "one"], "a scale for each role of layer, or one for all"] = "role",
    patches: Annotated[bool, "move a patch embedding too"] = False,
    map_rank: MapRank = "range",
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    tokens_per_width: Annotated[
        float | None, "tokens kept for each map and capture, as a multiple of its width"
    ] = None,
    statistics_memory: Annotated[float, "GiB of sums at once"] = 4.0,
) -> TaskVector:
    """BiCo with whitened gradients, copies of images, a second capture halfway, and a scale for each role of layer."""
    return fit_twofold(
        job,
        way=way,
        whiten=whiten,
        copies=copies,
        scales=scales,
        patches=patches,
        statistics_memory=statistics_memory,
        map_rank=map_rank,
        tolerance=tolerance,
        tokens_per_width=tokens_per_width,
    )[1]


def fit_twofold(
    job: Job,
    *,
    way: float,
    whiten: bool,
    copies: int,
    scales: str,
    patches: bool,
    statistics_memory: float,
    **maps: Any,
) -> tuple[Alignment, TaskVector]:
    """The last alignment, and the task vector that it moved with its scales; `maps` are options of `fit`."""
    if not 0 <= way <= 1 or copies < 0:
        raise TaskferryError(f"twofold: way is between 0 and 1, copies is 0 or more, got {way:g} and {copies}")
    given = job
    left_out = {} if patches else patch_changes(job)
    tau = TaskVector({name: delta for name, delta in job.tau.deltas.items() if name not in left_out})
    job = replace(with_copies(job, copies), tau=tau)
    loss, batches = job.target_loss(), job.calibration.side(1)
    maps["statistics_memory"] = int(statistics_memory * 2**30)
    capture = Captures(whiten)

    def look(halfway: Halfway | None) -> tuple[float, float, Alignment, TaskVector]:
        """(loss, the best scale, maps, what they move)."""
        alignment = _align(job, maps, capture, halfway)
        moved = alignment.apply(tau)
        curve = scale_on_calibration(job.target, moved, loss, batches)
        return curve.loss(curve.best), curve.best, alignment, moved

    found = look(None)
    if way and found[1]:
        found = min(found, look((way * tau, way * found[1] * found[3])), key=lambda each: each[0])
    capture.seen = None
    _, scale, alignment, moved = found
    by_role: dict[str, float] = {}
    if scales == "role" and scale:
        few = given.calibration.samples
        moved, by_role = scaled_by_role(job.target, moved, loss, batches, scale, few, job.progress)
    known = alignment.provenance
    own = {"way": way, "whiten": whiten, "copies": copies, "scales": scales, "patches": patches}
    record = {
        "settings": {**known["settings"], **own},
        "calibration": {
            "samples": given.calibration.samples,
            "sha256": given.calibration.identity(),
            "copies": job.calibration.samples - given.calibration.samples,
        },
        "role scales": {role: round(value, 6) for role, value in by_role.items()},
    }
    return replace(alignment, provenance={**known, **record}), _with_reasons(moved, left_out, given.tau)


def work(job: Job, *, copies: int, whiten: bool, **_: Any) -> dict[str, int]:
    """For a plan, in passes over the samples: two captures, and two searches for a scale, see the copies as well.

    Whitening an output map takes two decompositions more, so a round costs about twice as much.
    """
    inputs = 1 if naming_head(job) is None else 1 + copies
    return {"captures": 2 * inputs, "rounds": 4 if whiten else 2, "looks": 2 * 8 * inputs + 3 * STEPS}


def naming_head(job: Job) -> Classifier | None:
    """The head that says what copies of the job's images show; None where there can be none.

    Texts have none, and neither has a head that is made from the samples: it would be made from the copies as well.
    """
    heads = both_objectives(job.objective, job.source, job.target, job.calibration)
    head = heads[0]
    if not isinstance(head, Classifier) or any(getattr(each, "fitted", False) for each in heads):
        return None
    return head if are_images(job.calibration) else None


def with_copies(job: Job, copies: int) -> Job:
    """The job with changed copies of its images, each with the class that the tuned source gives it.

    Only classes that the samples have, and only by a source that names most samples as they are labelled: a head that
    was not tuned, or that a file did not bring along, knows nothing.
    """
    head, labels = naming_head(job), job.calibration.labels
    if not copies or head is None or labels is None:
        return job
    views = Views(job.calibration, copies, strength=0.5, blended=0.0)  # still clear enough to be named
    size = max(map(len, job.calibration.side(0)))
    numbers = range(views.samples, len(views))
    more = Calibration(views.pair(numbers[i : i + size]) for i in range(0, len(numbers), size))
    with moved_by(job.source, job.tau) as at:
        at(1.0)
        known = teacher_labels(job.source, job.calibration.side(0), head)
        named = teacher_labels(job.source, more.side(0), head)
    if (known == labels).double().mean() < 0.5:
        return job
    pairs = []
    for A, B in more.with_labels(named):
        good = [i for i, label in enumerate(() if A.labels is None else A.labels) if bool((labels == label).any())]
        if good:
            pairs.append((A.take(good), B.take(good)))
    return replace(job, calibration=Calibration([*job.calibration, *pairs]))


def patch_changes(job: Job) -> dict[str, str]:
    """The changes of patch embeddings by name, and the target's parameters that they would go to, with the reason.

    None where the task vector changes nothing else.
    """
    source, target = ({name for site in find_sites(model) if site.role == "patch" for name in (site.weight, site.bias)
                       if name} for model in (job.source, job.target))  # fmt: skip
    changed = source & set(job.tau.deltas)
    return dict.fromkeys(sorted(changed | target), PATCH) if changed and changed != set(job.tau.deltas) else {}


def _with_reasons(moved: TaskVector, left_out: Mapping[str, str], tau: TaskVector) -> TaskVector:
    """With the reason of what was left out in its coverage."""
    if not left_out or moved.coverage is None:
        return moved
    rows = [replace(row, reason=left_out.get(row.parameter, row.reason)) if row.status == "kept" else row
            for row in moved.coverage]  # fmt: skip
    unused = {name: why for name, why in left_out.items() if name in tau.deltas}
    return TaskVector(moved.deltas, Coverage(tuple(rows), {**moved.coverage.unused, **unused}))


def _align(job: Job, maps: Mapping[str, Any], capture: Captures, halfway: Halfway | None) -> Alignment:
    """Maps of the base models' rows, and of those halfway where it is given."""
    place = "base" if halfway is None else "halfway"
    tell = job.progress
    capture.halfway = halfway
    alignment = fit(
        job.source,
        job.target,
        job.calibration,
        job.objective,
        **maps,
        only=job.tau.deltas.keys(),
        factored=job.tau.low_rank,
        keep=None if job.keep is None else job.keep / place,
        progress=None if tell is None else lambda what, done, total: tell(f"{what}, {place}", done, total),
        capture=capture,
        capture_key=f"twofold whiten={capture.whiten} {_hash(halfway)}",
        sums=capture.numbers,
    )
    return replace(alignment, provenance={**alignment.provenance, "method": "twofold"})


class Captures:
    """Sums of a group at the base models, and with those halfway; the last base group is not captured again."""

    def __init__(self, whiten: bool) -> None:
        self.whiten = whiten
        self.halfway: Halfway | None = None
        self.seen: tuple[list[str], EvenGradients] | None = None  # one group's, to stay within the memory

    def numbers(self, pair: Pair) -> int:
        """Of the sums of a pair: whitening keeps d_A² and d_B² of the outputs as well."""
        out_A, out_B = pair.source.shape[0], pair.target.shape[0]
        return numbers_of(pair) + (out_A**2 + out_B**2 if self.whiten else 0)

    def __call__(
        self,
        source: Side,
        target: Side,
        group: Sequence[Pair],
        share: Sequence[tuple[Batch, Batch]],
        on_batch: Callable[[], None],
        signals: Signals,
        tokens_per_width: float | None,
        **_: Any,  # of many processes: this method runs in one
    ) -> Statistics:
        """As `collect`."""
        names = [pair.target.name for pair in group]

        def see(sums: EvenGradients, told: Callable[[], None] | None) -> None:
            collect_into(sums, source, target, group, share, told, signals, tokens_per_width)

        known, self.seen = self.seen, None  # two groups never exist at once
        if known is not None and known[0] == names:
            sums = known[1]
        else:
            del known
            sums = EvenGradients(whiten=self.whiten)
            see(sums, on_batch if self.halfway is None else None)
        if self.halfway is None:
            self.seen = (names, sums)
        if self.halfway is not None:
            with ExitStack() as moves:
                for side, tau in zip((source, target), self.halfway, strict=True):
                    moves.enter_context(moved_by(side.model, tau))(1.0)
                see(sums, on_batch)
        return sums.ready()


@dataclass
class EvenGradients(Statistics):
    """Activations as they are, gradients of one length, and whitened in the end."""

    whiten: bool = True

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> CrossCovariance:  # noqa: ARG002
        """An empty sum of the side's kind."""
        if inputs:
            return CrossCovariance(d_A, d_B)
        return Whitened(d_A, d_B) if self.whiten else Even(d_A, d_B)

    def ready(self) -> Statistics:
        """To be solved; these sums stay as they are."""
        outputs = {key: sums.whitened() if isinstance(sums, Whitened) else sums for key, sums in self.outputs.items()}
        return Statistics(dict(self.inputs), outputs, self.reads)


def _hash(halfway: Halfway | None) -> str:
    """What the second capture rests on."""
    digest = hashlib.sha256()
    for tau in halfway or ():
        for name, delta in tau.deltas.items():
            for part in (delta.left, delta.right) if isinstance(delta, LowRank) else (delta,):
                hash_tensor(digest, name, part)
    return digest.hexdigest()
