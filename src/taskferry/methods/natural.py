"""Natural-gradient steps of the target towards what the tuned source answers: no maps, no labels, no optimiser.

The tuned source answers the calibration samples once. One forward and two backward passes of the target then give, at
every layer that learns, its inputs x, the gradients g of the cross-entropy to those answers and probes e of its
curvature: the target's own bilinear sum gᵀx (paper, equation 5), taken in the metric of its two spaces
(`linalg/natural.py`). Samples held out choose the size of each step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from taskferry.collect.device import frozen, place_of, wide
from taskferry.collect.recorder import Call, Recorder
from taskferry.collect.scale import ScaleCurve, moved_by
from taskferry.coverage import Coverage
from taskferry.data.batch import Batch
from taskferry.layers.site import Site, depths
from taskferry.linalg.natural import Factor, cut, full_step, lowest_rank, whitened, whitened_product
from taskferry.linalg.precision import full_precision
from taskferry.methods import CannotMove, Job, Moved, Needs, method
from taskferry.objectives.teacher import Lesson, lesson_of
from taskferry.taskvector import Delta, LowRank, TaskVector, as_dense

Layers = Literal["residual", "all"]
ROLES: dict[str, str] = {"residual": r".*\.(o|down)", "all": ".*"}  # by the roles of the layers
NOT_LEARNED = "not among the layers that learn"
BATCH = 20  # samples of about one length
TRIALS = 9  # sizes of a step that are tried at most


@method(
    needs=Needs(gradients=True, whole=True),
    card="no optimiser ran: the target took natural-gradient steps towards what the tuned source answers",
)
def natural(
    job: Job,
    *,
    steps: Annotated[int, "steps, each with one forward and two backward passes of the target", Field(ge=1)] = 2,
    damping: Annotated[float, "of both factors, relative to the mean of their diagonals", Field(gt=0)] = 0.1,
    layers: Annotated[Layers, "which learn: those that write to the residual stream, or all"] = "residual",
    depth: Annotated[float, "share of the blocks that learn, the last ones", Field(gt=0, le=1)] = 0.5,
    seed: Annotated[int, "of the probes"] = 0,
) -> Moved:
    """K-FAC steps towards the tuned source's answers: ΔW = −Ŝ⁻¹ (gᵀx) Â⁻¹ in the target's own coordinates."""
    sites = learning_sites(job.pair.target_sites, layers, depth)
    models, heads = (job.source, job.target), job.pair.objectives
    fit, held_out = (lesson_of(models, job.tau, some, heads) for some in (job.calibration, job.judging))
    rank = job.tau.rank if job.tau.low_rank else None
    generator = torch.Generator().manual_seed(seed)
    change, losses = TaskVector({}), [mean_loss(job.target, held_out, TaskVector({}))]
    for number in range(steps):
        if job.pair.work.progress is not None:
            job.pair.work.progress("natural", number, steps)
        moves = moves_from(job.target, fit, sites, change, damping, rank, generator)
        slope = sum(move.slope for move in moves.values())
        if not slope < 0:
            raise CannotMove("the loss of the target does not depend on any layer that learns: --set layers=all")

        def loss(size: float, moves: dict[str, Move] = moves) -> float:
            return mean_loss(job.target, held_out, changed(moves, size))

        # At the optimum of a parabola through the loss 0 the size is 2 loss / slope; real ones lie there or above.
        size, after = line_search(loss, -2 * losses[-1] / slope)
        if number and not after < losses[-1]:
            break
        change = changed(moves, size)
        losses.append(after)
    if job.pair.work.progress is not None:
        job.pair.work.progress("natural", steps, steps)
    before, after = job.losses(change, [0.0, 1.0])  # in the words of the samples, as every method is shown
    curve = ScaleCurve(((0.0, before), (1.0, after)), float(losses[-1] < losses[0]))
    coverage = Coverage.of(dict(job.target.named_parameters()), change.deltas, NOT_LEARNED)
    return Moved(TaskVector(change.deltas, coverage), curve=curve, notes={"losses after steps": losses})


def learning_sites(sites: Sequence[Site], layers: Layers, depth: float) -> list[Site]:
    """The layers that learn, packed ones as whole matrices; experts of mixtures, which see few tokens each, stay."""
    found, blocks = {}, depths(list(sites))
    for site in sites:
        if site.block is None or site.fixed is not None:
            continue
        late = site.block >= math.floor((1 - depth) * blocks[site.stack])
        if late and re.fullmatch(ROLES[layers], site.role):
            found[site.weight] = replace(site, name=site.weight, bias=None, rows=None)
    if not found:
        raise CannotMove(
            "no layer of the target writes to a residual stream as far as its names tell: --set layers=all"
        )
    return list(found.values())


@dataclass
class Sums:
    """What the step of one layer is made of: rows while they are few, their products from then on."""

    width: int
    tokens: int = 0
    rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # x, g, e
    products: list[Tensor] = field(default_factory=list)  # xᵀx, eᵀe, gᵀx

    @full_precision()
    def add(self, x: Tensor, g: Tensor, e: Tensor) -> None:
        """Add the inputs, gradients and probes of some tokens."""
        self.tokens += len(x)
        self.rows.append((x, g, e))
        if 2 * self.tokens > self.width:
            x, g, e = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
            new = [x.T @ x, e.T @ e, g.T @ x]
            self.products = [a + b for a, b in zip(self.products, new, strict=True)] if self.products else new
            self.rows.clear()

    @full_precision()
    def move(self, site: Site, samples: int, damping: float, rank: int | None, before: Delta | None) -> Move:
        """The step of this layer for losses summed over so many samples, from the change that it has already."""
        before = before.T if before is not None and site.transposed else before
        known = before if isinstance(before, LowRank) else None
        if self.products:
            A, S = Factor.of(self.products[0] / self.tokens, damping), Factor.of(self.products[1] / samples, damping)
            K = whitened_product(self.products[2] / samples, S, A)
        else:
            x, g, e = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
            A = Factor.of_rows(x, damping, span=None if known is None else known.right)
            S = Factor.of_rows(e, damping, count=samples, span=g if known is None else torch.cat([g, known.left.T]))
            K = whitened(g / samples, x, S, A)
        if rank is None:
            return Move(site, full_step(K, S, A), -float(K.square().sum()), before)
        left, right, slope = lowest_rank(K, S, A, rank)
        if known is None:
            return Move(site, LowRank(left, right), slope, None)
        both = LowRank(torch.cat([known.left, left], 1), torch.cat([known.right, right]))
        return Move(site, both, slope, known, (S.gram(both.left.T), A.gram(both.right)))


@dataclass(frozen=True)
class Move:
    """The step of one layer, of any size."""

    site: Site
    step: Delta  # of size 1; where the layer has a low-rank change already, the factors of both side by side
    slope: float  # of the mean loss, at size 0
    before: Delta | None
    metric: tuple[Tensor, ...] = ()  # Gram matrices of the columns and of the rows of both

    def at(self, size: float) -> Delta:
        """The layer's whole change after a step of a size, of the rank that it had, as the weight is stored."""
        if isinstance(self.step, LowRank) and isinstance(self.before, LowRank):
            sizes = torch.full((self.step.rank,), size, dtype=torch.float64)
            sizes[: self.before.rank] = 1.0
            S, A = (gram.cpu() for gram in self.metric)
            left = self.step.left * sizes.to(self.step.left)
            found: Delta = LowRank(*cut(left, self.step.right, sizes[:, None] * S * sizes, A, self.before.rank))
        elif isinstance(self.step, LowRank):
            found = LowRank(self.step.left * size, self.step.right)
        else:
            found = self.step * size if self.before is None else as_dense(self.before) + self.step * size
        return found.T if self.site.transposed else found


def changed(moves: dict[str, Move], size: float) -> TaskVector:
    """The whole change after a step of a size."""
    return TaskVector({name: move.at(size) for name, move in moves.items()})


def moves_from(
    target: nn.Module,
    lesson: Lesson,
    sites: Sequence[Site],
    change: TaskVector,
    damping: float,
    rank: int | None,
    generator: torch.Generator,
) -> dict[str, Move]:
    """The step of every layer from the target with a change; layers that do not reach the loss have none."""
    with moved_by(target, change) as set_scale:
        set_scale(1.0)
        sums = collect(target, lesson, sites, generator)
    known = {site.weight: site for site in sites}
    return {
        name: some.move(known[name], len(lesson), damping, rank, change.deltas.get(name)) for name, some in sums.items()
    }


def collect(target: nn.Module, lesson: Lesson, sites: Sequence[Site], generator: torch.Generator) -> dict[str, Sums]:
    """One forward and two backward passes over the samples: of the loss, then of a probe of its curvature."""
    sums: dict[str, Sums] = {}
    inputs: dict[tuple[str, int], Tensor] = {}
    gradients: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def forward(call: Call, x: Tensor, _: Tensor) -> None:
        inputs[call.site.name, call.index] = x

    def backward(call: Call, g: Tensor) -> None:
        key = call.site.name, call.index
        if key not in inputs:
            return
        if key not in gradients:
            reached = torch.linalg.vector_norm(g, dim=-1) != 0  # no padding, no token behind the last that counts
            gradients[key] = reached, wide(g[reached])
            return
        reached, of_loss = gradients.pop(key)
        layer = sums.setdefault(call.site.name, Sums(max(call.site.shape)))
        layer.add(wide(inputs.pop(key)[reached]), of_loss, wide(g[reached]))

    with frozen(target), torch.enable_grad():
        for batch in batches(target, lesson):
            with Recorder(target, sites, samples=batch.rows, on_forward=forward, on_gradient=backward):
                logits, answers = lesson.scores(batch)
            lesson.loss_of(logits, answers).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            lesson.probe(logits, generator).backward()  # type: ignore[no-untyped-call]
            inputs.clear()
            gradients.clear()
    return sums


def batches(target: nn.Module, lesson: Lesson) -> Iterator[Batch]:
    """Micro-batches of samples of about one length, so that little of them is padding."""
    lengths = lesson.lengths
    order = sorted(range(len(lesson)), key=lambda i: lengths[i])
    for start in range(0, len(order), BATCH):
        yield lesson.batch(order[start : start + BATCH]).to(*place_of(target))


def mean_loss(target: nn.Module, lesson: Lesson, change: TaskVector) -> float:
    """The loss of the target with a change."""
    with moved_by(target, change) as set_scale, frozen(target), torch.no_grad():
        set_scale(1.0)
        total = sum(float(lesson.loss(batch)) for batch in batches(target, lesson))
    return total / len(lesson)


def line_search(loss: Callable[[float], float], start: float) -> tuple[float, float]:
    """A size near the lowest loss, and that loss: doubled or halved while it falls, then the vertex of a parabola."""
    known: dict[float, float] = {}

    def at(size: float) -> float:
        if size not in known:
            value = loss(size) if len(known) < TRIALS else math.inf
            known[size] = value if math.isfinite(value) else math.inf  # a model that breaks is no minimum
        return known[size]

    best = start
    while at(best * 2) < at(best):
        best *= 2
    while best <= start and at(best / 2) <= at(best) and len(known) < TRIALS:
        best /= 2
    below, above = at(best / 2) - at(best), at(best * 2) - at(best)
    if 0 < below + above < math.inf:
        at(best * 2 ** ((below - above) / (2 * (below + above))))
    size = min(known, key=lambda each: known[each])
    return size, known[size]
