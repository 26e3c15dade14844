"""The mathematics of BiCo: orthogonal Procrustes maps and the bilinear map (paper, equations 6 to 9).

    >>> C = X_A.T @ X_B                               # [d_A, d_B], summed over tokens
    >>> R, spectrum = procrustes(C)                   # R: d_A -> d_B
    >>> tau_B = bilinear(R_out, tau_A, R_in)          # R_outᵀ τ_A R_in

Pure functions of tensors: no model, no file and no command is known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.linalg.decompositions import Solver, by_eigh, by_svd, choose_solver, of_rows
from taskferry.linalg.polar import polar

NOT_FINITE = "activations or gradients are not finite: load the models in float32, or scale the loss down"


@dataclass(frozen=True)
class Map:
    """R: [d_A, d_B], from source to target coordinates, dense or as R = U Vᵀ when its rank is small.

    With the rank policy "range" R is a partial isometry: it keeps lengths and angles on the directions
    that the calibration set has seen, and sends every other direction to zero.
    """

    R: Tensor | None = None  # [d_A, d_B]
    U: Tensor | None = None  # [d_A, r]
    V: Tensor | None = None  # [d_B, r]

    def __post_init__(self) -> None:
        if (self.R is None) == (self.U is None or self.V is None):
            raise ValueError("a Map is either dense (R) or factored (U and V)")

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """(U, V) of a factored map, None for a dense one."""
        return None if self.U is None or self.V is None else (self.U, self.V)

    @property
    def shape(self) -> tuple[int, int]:
        """(d_A, d_B)."""
        if self.R is not None:
            return self.R.shape[0], self.R.shape[1]
        U, V = self._need_factors()
        return U.shape[0], V.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its numbers."""
        return self.R.dtype if self.R is not None else self._need_factors()[0].dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.R.device if self.R is not None else self._need_factors()[0].device

    def __call__(self, rows: Tensor) -> Tensor:
        """Source row vectors [n, d_A] in target coordinates [n, d_B]: rows @ R."""
        if self.R is not None:
            rows, R = _alike(rows, self.R)
            return rows @ R
        U, V = self._need_factors()
        rows, U = _alike(rows, U)
        return (rows @ U) @ V.to(rows).T

    def columns(self, columns: Tensor) -> Tensor:
        """Source column vectors [d_A, n] in target coordinates [d_B, n]: Rᵀ @ columns."""
        if self.R is not None:
            return self(columns.T).T  # thin rows times R are faster than Rᵀ times thin columns
        U, V = self._need_factors()
        columns, U = _alike(columns, U)
        return V.to(columns) @ (U.T @ columns)

    def cost(self, vectors: int) -> int:
        """Multiply-adds to carry so many vectors over."""
        d_A, d_B = self.shape
        return vectors * (d_A * d_B if self.U is None else self.U.shape[1] * (d_A + d_B))

    def dense(self) -> Tensor:
        """R as one matrix [d_A, d_B]."""
        if self.R is not None:
            return self.R
        U, V = self._need_factors()
        return U @ V.T

    def _need_factors(self) -> tuple[Tensor, Tensor]:
        if self.U is None or self.V is None:  # cannot happen after __post_init__; tells the type checker
            raise ValueError("this map is dense")
        return self.U, self.V


@dataclass(frozen=True)
class Spectrum:
    """What the decomposition of a cross-covariance says about its map."""

    rank: int  # directions kept
    largest: float  # σ_1
    smallest: float | None  # σ of the last direction kept; None where the solver does not see it
    nuclear: float  # Σ σ over the kept directions = ⟨X_A R, X_B⟩


def procrustes(
    C: Tensor,
    *,
    rank: RankPolicy = "range",
    tolerance: float = DEFAULT_TOLERANCE,
    factored: bool = False,
    solver: Solver = "auto",
) -> tuple[Map, Spectrum]:
    """R = U Vᵀ for C = X_Aᵀ X_B = U Σ Vᵀ (equations 6 and 7), decomposed in float64, returned in C's precision.

    Of all isometries R it has the largest ⟨X_A R, X_B⟩. For d_A ≤ d_B (R Rᵀ = I) that minimises ‖X_A R − X_B‖_F;
    for d_A > d_B (Rᵀ R = I) it minimises ‖X_A − X_B Rᵀ‖_F: one formula for both.
    U Vᵀ is unique only on the range of C; what a decomposition returns outside of it is an accident of
    its implementation. "range" keeps the singular directions above `tolerance` · σ_1; "full" keeps
    all min(d_A, d_B) of them, exactly as in the paper.
    `factored` leaves U and V unmultiplied, for low-rank task vectors, which pass through them for less.

    Costs one decomposition of a min(d_A, d_B)² matrix and four float64 copies of C.
    """
    return procrustes_batch(_matrix(C)[None], rank=rank, tolerance=tolerance, factored=factored, solver=solver)[0]


def procrustes_batch(
    C: Tensor,
    *,
    rank: RankPolicy = "range",
    tolerance: float = DEFAULT_TOLERANCE,
    factored: bool = False,
    solver: Solver = "auto",
) -> list[tuple[Map, Spectrum]]:
    """The same for matrices of one shape, [batch, d_A, d_B], in one decomposition call."""
    check_finite(C)
    full = rank == "full"
    solver = choose_solver(C, full) if solver == "auto" else solver
    if solver == "products":
        if full:
            raise ValueError("matrix products cannot see the null space: rank policy 'full' needs the svd solver")
        R, largest = polar(C, tolerance=tolerance)
        return [_from_products(*each) for each in zip(C, R, largest.tolist(), strict=True)]
    parts = by_svd(C, full) if solver == "svd" else by_eigh(C)
    return [
        partial_isometry(U, sigma, V, rank=rank, tolerance=tolerance, dtype=C.dtype, factored=factored)
        for U, sigma, V in zip(*parts, strict=True)
    ]


def procrustes_from_rows(
    X_A: Tensor, X_B: Tensor, *, tolerance: float = DEFAULT_TOLERANCE, factored: bool = False
) -> tuple[Map, Spectrum]:
    """The "range" map of C = X_Aᵀ X_B from its rows [M, d_A] and [M, d_B], for M < d: C is never formed.

    The rank is then at most M, exactly, and the map stays factored.
    """
    return partial_isometry(*of_rows(X_A, X_B), rank="range", tolerance=tolerance, dtype=X_A.dtype, factored=factored)


def bilinear(R_out: Map, tau: Tensor, R_in: Map) -> Tensor:
    """τ_B = R_outᵀ τ_A R_in (equation 8): [out_A, in_A] to [out_B, in_B]."""
    if tau.shape != (R_out.shape[0], R_in.shape[0]):
        raise ValueError(f"the task vector is {tuple(tau.shape)}, the maps take {(R_out.shape[0], R_in.shape[0])}")
    rows_first = R_in.cost(tau.shape[0]) + R_out.cost(R_in.shape[1])
    columns_first = R_out.cost(tau.shape[1]) + R_in.cost(R_out.shape[1])
    return R_out.columns(R_in(tau)) if rows_first <= columns_first else R_in(R_out.columns(tau))


def check_finite(*tensors: Tensor) -> None:
    """Refuse what overflowed on its way here."""
    if not all(is_finite(tensor) for tensor in tensors):
        raise ValueError(NOT_FINITE)


def is_finite(X: Tensor) -> bool:
    """Whether every number is; a finite sum has finite terms, and takes no second tensor to find."""
    return bool(torch.isfinite(X.sum())) or bool(torch.isfinite(X).all())


def _alike(rows: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """In the finer of the two precisions: half-precision factors must not round the map."""
    dtype = torch.promote_types(rows.dtype, R.dtype)
    return rows.to(dtype), R.to(rows.device, dtype)


def _matrix(C: Tensor) -> Tensor:
    if C.ndim != 2:
        raise ValueError(f"a cross-covariance is a matrix [d_A, d_B], got shape {tuple(C.shape)}")
    return C


def _from_products(C: Tensor, R: Tensor, largest: float) -> tuple[Map, Spectrum]:
    """What the polar iteration knows: its rank is ‖R‖², its nuclear norm ⟨R, C⟩, its smallest value nothing."""
    spectrum = Spectrum(
        rank=round(float(R.square().sum())),
        largest=largest,
        smallest=None,
        nuclear=float((R * C).sum()),
    )
    return Map(R=R.to(C.dtype)), spectrum


def partial_isometry(
    U: Tensor,
    sigma: Tensor,
    V: Tensor,
    *,
    rank: RankPolicy,
    tolerance: float,
    dtype: torch.dtype,
    factored: bool,
) -> tuple[Map, Spectrum]:
    """U Vᵀ over the directions that the rank policy keeps, in the precision of the statistics."""
    largest = float(sigma.max()) if sigma.numel() else 0.0
    keep = torch.ones_like(sigma, dtype=torch.bool) if rank == "full" else sigma > tolerance * largest
    U, V = U.to(dtype), V.to(dtype)  # rounded once, then multiplied: the result is rounded to that precision anyway
    if not bool(keep.all()):
        U, V, sigma = U[:, keep], V[:, keep], sigma[keep]
    r, d_A, d_B = sigma.numel(), U.shape[0], V.shape[0]
    spectrum = Spectrum(
        rank=r,
        largest=largest,
        smallest=float(sigma.min()) if r else 0.0,
        nuclear=float(sigma.sum()),
    )
    if factored or r * (d_A + d_B) < d_A * d_B:
        return Map(U=U.contiguous(), V=V.contiguous()), spectrum
    return Map(R=U @ V.T), spectrum
