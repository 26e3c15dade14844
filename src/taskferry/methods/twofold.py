"""BiCo from two places: maps fitted on the base models and on both models halfway, with gradients of one length.

What it adds to the paper, each measured alone and together (docs/results.md): gradient rows of one length, a second
capture where both models have gone half of the way, and a scale for each role of layer. Nothing is trained: the numbers
that are chosen are one scale for each role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from taskferry.alignment import Alignment
from taskferry.calibration.batch import Batch
from taskferry.capture import Side, Signals, Statistics, collect_into, device_of, frozen
from taskferry.files import hash_tensor
from taskferry.finding import find_sites
from taskferry.fitting import fit
from taskferry.methods import Job, method
from taskferry.methods.bico import MapRank, Tolerance
from taskferry.pairing import Pair
from taskferry.procrustes import DEFAULT_TOLERANCE
from taskferry.scale import moved_by, scale_on_calibration
from taskferry.statistics import CrossCovariance
from taskferry.taskvector import LowRank, TaskVector, as_dense, scale_delta

WORK = {"captures": 3, "rounds": 2, "looks": 80}  # for a plan: two searches for a scale, twenty steps of one for roles
Halfway = tuple[TaskVector, TaskVector]  # what is added to the source and to the target at the second capture
STEPS, RATE, HOLD = 20, 0.1, 0.01  # of the search for scales: steps of Adam, its rate, how strongly near one scale


@method
def twofold(
    job: Job,
    *,
    way: Annotated[float, "how far both models have gone at the second capture; 0 takes none"] = 0.5,
    scales: Annotated[Literal["role", "one"], "a scale for each role of layer (q, k, v, …), or one for all"] = "role",
    map_rank: MapRank = "range",
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    tokens_per_width: Annotated[float | None, "tokens kept for each map, as a multiple of its width"] = None,
    statistics_memory: Annotated[float, "GiB of cross-covariances at once"] = 4.0,
) -> TaskVector:
    """BiCo with gradients of one length, a second capture halfway, and a scale for each role of layer."""
    chosen = {"map_rank": map_rank, "tolerance": tolerance, "tokens_per_width": tokens_per_width}
    return fit_twofold(job, way=way, scales=scales, statistics_memory=statistics_memory, **chosen)[1]


def fit_twofold(
    job: Job, *, way: float, scales: str, statistics_memory: float, **maps: Any
) -> tuple[Alignment, TaskVector]:
    """The last alignment, and the task vector that it moved with its scales; `maps` are options of `fit`."""
    loss, batches = job.target_loss(), job.calibration.side(1)
    maps["statistics_memory"] = int(statistics_memory * 2**30)
    alignment = _align(job, maps, None)
    moved = alignment.apply(job.tau)
    scale = scale_on_calibration(job.target, moved, loss, batches).best
    if way and scale:
        alignment = _align(job, maps, (way * job.tau, way * scale * moved))
        moved = alignment.apply(job.tau)
        scale = scale_on_calibration(job.target, moved, loss, batches).best
    if scales == "role" and scale:
        moved = scaled_by_role(job, moved, scale)
    return alignment, moved


def _align(job: Job, maps: Mapping[str, Any], halfway: Halfway | None) -> Alignment:
    """Maps of the base models' rows, and of those halfway where it is given."""
    place = "base" if halfway is None else "halfway"
    tell = job.progress
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
        capture=partial(_capture, halfway),
        capture_key=f"twofold {_hash(halfway)}",
    )
    return replace(alignment, provenance={**alignment.provenance, "method": "twofold"})


def _capture(
    halfway: Halfway | None,
    source: Side,
    target: Side,
    group: Sequence[Pair],
    share: Sequence[tuple[Batch, Batch]],
    on_batch: Callable[[], None],
    signals: Signals,
    tokens_per_width: float | None,
    **_: Any,  # of many processes: this method runs in one
) -> EvenGradients:
    statistics = EvenGradients()
    see = partial(collect_into, statistics, source, target, group, share, signals=signals)
    see(on_batch=on_batch, tokens_per_width=tokens_per_width)
    if halfway is not None:
        with ExitStack() as moves:
            for side, tau in zip((source, target), halfway, strict=True):
                moves.enter_context(moved_by(side.model, tau))(1.0)
            see(tokens_per_width=tokens_per_width)
    return statistics


@dataclass
class Even(CrossCovariance):
    """Of rows of length one: a few tokens with large gradients must not speak for all."""

    def add(self, X_A: Tensor, X_B: Tensor, keep: int | None = None) -> None:
        """Add token rows."""
        super().add(_unit(X_A), _unit(X_B), keep)


@dataclass
class EvenGradients(Statistics):
    """Activations as they are, gradients of one length."""

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> CrossCovariance:  # noqa: ARG002
        """An empty cross-covariance of the side's kind."""
        return CrossCovariance(d_A, d_B) if inputs else Even(d_A, d_B)


def _unit(X: Tensor) -> Tensor:
    """Rows of length one in float32 at least; a zero row stays zero."""
    X = X.to(torch.promote_types(X.dtype, torch.float32))
    norms = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    return torch.where(norms > 0, X / norms.clamp_min(torch.finfo(X.dtype).tiny), X)


def scaled_by_role(job: Job, tau: TaskVector, start: float) -> TaskVector:
    """τ with a scale for each role of layer: the calibration loss goes down along them, held near the one scale."""
    roles = {name: site.role for site in find_sites(job.target) for name in (site.weight, site.bias) if name}
    order = sorted({roles[name] for name in tau.deltas})
    loss, batches = job.target_loss(), job.calibration.side(1)
    scale = torch.full((len(order),), start, requires_grad=True)
    optimiser = torch.optim.Adam([scale], lr=RATE)
    samples, device = sum(len(batch) for batch in batches), device_of(job.target)
    best: tuple[float, list[float]] = (float("inf"), [start] * len(order))
    moving = [(name, p.detach(), as_dense(tau.deltas[name]).to(p)) for name, p in job.target.named_parameters()
              if name in tau.deltas]  # fmt: skip
    with frozen(job.target), torch.enable_grad():
        for step in range(STEPS):
            optimiser.zero_grad()
            total = 0.0
            for batch in batches:
                now = {name: base + scale[order.index(roles[name])].to(base) * d for name, base, d in moving}
                with torch.nn.utils.stateless._reparametrize_module(job.target, now):
                    value = loss(batch.to(device)) / samples
                    value.backward()  # type: ignore[no-untyped-call]
                total += float(value.detach())
            if total < best[0]:
                best = (total, scale.detach().tolist())
            (HOLD * (scale - start).square().sum()).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if job.progress is not None:
                job.progress("scales", step + 1, STEPS)
    chosen = dict(zip(order, best[1], strict=True))
    deltas = {name: scale_delta(delta, chosen[roles[name]]) for name, delta in tau.deltas.items()}
    return TaskVector(deltas, tau.coverage)


def _hash(halfway: Halfway | None) -> str:
    """What the second capture rests on."""
    digest = hashlib.sha256()
    for tau in halfway or ():
        for name, delta in tau.deltas.items():
            for part in (delta.left, delta.right) if isinstance(delta, LowRank) else (delta,):
                hash_tensor(digest, name, part)
    return digest.hexdigest()
