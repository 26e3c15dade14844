"""How alike the spaces of two models are, site by site, before and after alignment (paper, figure 1 and appendix C).

    >>> rows = similarity(A, B, alignment, calibration, objectives)
    >>> by_block(rows, "cka"), by_block(rows, "cosine_after")

Inputs are compared by their activations, outputs by their gradients, as they are aligned. Cosine compares coordinates,
so before the alignment it exists for equal widths alone; CKA compares the geometry of the tokens at any widths.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.alignment import Alignment
from taskferry.analysis.moments import Moments
from taskferry.collect.capture import BICO, Side, collect
from taskferry.collect.device import wide
from taskferry.collect.statistics import Capture, Paired
from taskferry.data.batch import Calibration
from taskferry.layers.pairing import Pair
from taskferry.layers.site import Site
from taskferry.linalg.procrustes import Map
from taskferry.objectives.objectives import Objective

Place = tuple[str, int | None]  # stack and block of the target


@dataclass(frozen=True)
class SiteSimilarity:
    """One side of one pair of sites."""

    side: str  # "in": activations, "out": gradients
    site: str  # of the target
    stack: str
    block: int | None
    role: str
    widths: tuple[int, int]
    tokens: int
    cka: float
    cka_after: float
    cosine: float | None  # mean over tokens; None where the widths differ
    cosine_after: float
    norms_kept: float  # ‖X_A R‖² / ‖X_A‖²: 1 where the map loses no length of these tokens (appendix D)
    angles_error: float  # ‖X_A R Rᵀ X_Aᵀ − X_A X_Aᵀ‖ / ‖X_A X_Aᵀ‖: 0 where all inner products stay


def similarity(
    source: nn.Module,
    target: nn.Module,
    alignment: Alignment,
    calibration: Calibration,
    objectives: tuple[Objective, Objective],
    capture: Capture = BICO,
) -> list[SiteSimilarity]:
    """All paired sites on these samples, which need not be those that the maps were fitted on."""
    sides = [
        Side(model, objective.bind(model, calibration.side(i)))
        for i, (model, objective) in enumerate(zip((source, target), objectives, strict=True))
    ]
    kept = _Kept(maps=_maps(alignment))
    pairs = [Pair(pair.source, pair.target) for pair in alignment.pairs]
    collect(kept, sides[0], sides[1], pairs, calibration, capture=capture)
    sites = {pair.target.name: pair.target for pair in pairs}
    return [
        sums.result("in" if sums_of is kept.inputs else "out", sites[key.partition("@")[0]])
        for sums_of in (kept.inputs, kept.outputs)
        for key, sums in sums_of.items()
        if sums.moments is not None
    ]


def by_block(rows: Iterable[SiteSimilarity], what: str, side: str = "in") -> dict[Place, float]:
    """The mean over the sites of each block, in the order of the target; sites outside of blocks are left out."""
    found: dict[Place, list[float]] = {}
    for row in rows:
        value = getattr(row, what)
        if row.side == side and row.block is not None and value is not None:
            found.setdefault((row.stack, row.block), []).append(value)
    return {place: statistics.mean(found[place]) for place in sorted(found)}


@dataclass
class _Sums:
    """What the rows of one place add up to."""

    R: Map
    moments: Moments | None = None
    cosine: float = 0.0
    cosine_after: float = 0.0

    def add(self, X_A: Tensor, X_B: Tensor) -> None:
        """One micro-batch; zero rows (padding, tokens without a gradient) have no direction and are left out."""
        X_A = wide(X_A)
        X_B = X_B.to(X_A)
        alive = X_A.any(1) & X_B.any(1)
        X_A, X_B = X_A[alive], X_B[alive]
        if not X_A.shape[0]:
            return
        if X_A.shape[1] == X_B.shape[1]:
            self.cosine += float(F.cosine_similarity(X_A, X_B).double().sum())
        self.cosine_after += float(F.cosine_similarity(self.R(X_A), X_B).double().sum())
        found = Moments.of(X_A, X_B)
        if self.moments is None:
            self.moments = found
        else:
            self.moments.merge(found)

    def result(self, side: str, site: Site) -> SiteSimilarity:
        """The measurements of a place."""
        if self.moments is None:
            raise ValueError(f"{site.name} has seen no tokens")
        moments, R = self.moments, self.R
        d_A, d_B = R.shape
        norms, angles = _kept(moments.second_moment(), R)
        return SiteSimilarity(
            side=side,
            site=site.name,
            stack=site.stack,
            block=site.block,
            role=site.role,
            widths=(d_A, d_B),
            tokens=moments.n,
            cka=moments.cka(),
            cka_after=moments.cka(R),
            cosine=self.cosine / moments.n if d_A == d_B else None,
            cosine_after=self.cosine_after / moments.n,
            norms_kept=norms,
            angles_error=angles,
        )


@dataclass
class _Kept(Paired[_Sums]):
    maps: dict[tuple[bool, str], Map] = field(default_factory=dict)

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> _Sums:  # noqa: ARG002
        """Empty sums with the map of this side."""
        return _Sums(self.maps[inputs, site])


def _maps(alignment: Alignment) -> dict[tuple[bool, str], Map]:
    found: dict[tuple[bool, str], Map] = {}
    for pair in alignment.pairs:
        found[True, pair.target.name] = alignment.R_in[pair.reads]
        found[False, pair.target.name] = alignment.R_out[pair.target.name]
    return found


def _kept(G: Tensor, R: Map) -> tuple[float, float]:
    """From G = X_Aᵀ X_A alone: the share of ‖X_A‖² that X_A R has, and the relative error of its inner products."""
    RG = R.columns(G)  # [d_B, d_A]
    total = float(G.trace())
    lost = G - R.dense().to(G) @ RG  # (I − R Rᵀ) G
    error = float((lost * lost.T).sum())  # tr of (I − P) G (I − P) G = ‖X (I − P) Xᵀ‖²
    kept = float((R.dense().to(G) * RG.T).sum()) / total if total else 0.0
    size = float(torch.linalg.matrix_norm(G))
    return kept, max(0.0, error) ** 0.5 / size if size else 0.0
