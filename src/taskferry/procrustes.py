"""The mathematics of BiCo: orthogonal Procrustes maps and the bilinear map (paper, equations 6 to 9).

    >>> C = X_A.T @ X_B                               # [d_A, d_B], summed over tokens
    >>> R, spectrum = procrustes(C)                   # R: d_A -> d_B
    >>> tau_B = bilinear(R_out, tau_A, R_in)          # R_outᵀ τ_A R_in

Pure functions of tensors: no model, no file and no command is known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RankPolicy = Literal["range", "full"]

DEFAULT_TOLERANCE = 1e-6
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

    def __call__(self, rows: Tensor) -> Tensor:
        """Source row vectors [n, d_A] in target coordinates [n, d_B]: rows @ R."""
        if self.R is not None:
            rows, R = _alike(rows, self.R)
            return rows @ R
        U, V = self._need_factors()
        rows, U = _alike(rows, U)
        return (rows @ U) @ V.to(rows).T

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
    smallest: float  # σ of the last direction kept
    nuclear: float  # Σ σ over the kept directions = ⟨X_A R, X_B⟩


def procrustes(C: Tensor, *, rank: RankPolicy = "range", tolerance: float = DEFAULT_TOLERANCE) -> tuple[Map, Spectrum]:
    """R = U Vᵀ for C = X_Aᵀ X_B = U Σ Vᵀ (equations 6 and 7), in float64, returned in C's precision.

    Of all isometries R it has the largest ⟨X_A R, X_B⟩. For d_A ≤ d_B (R Rᵀ = I) that minimises ‖X_A R − X_B‖_F;
    for d_A > d_B (Rᵀ R = I) it minimises ‖X_A − X_B Rᵀ‖_F: one formula for both.
    U Vᵀ is unique only on the range of C; what a decomposition returns outside of it is an accident of
    its implementation. "range" keeps the singular directions above `tolerance` · σ_1; "full" keeps
    all min(d_A, d_B) of them, which is the paper to the letter.

    Costs one decomposition of a min(d_A, d_B)² matrix and four float64 copies of C.
    """
    if C.ndim != 2:
        raise ValueError(f"a cross-covariance is a matrix [d_A, d_B], got shape {tuple(C.shape)}")
    if not bool(torch.isfinite(C).all()):
        raise ValueError(NOT_FINITE)
    # float32 statistics carry 1e-7 of rounding noise, above what squaring C loses in float64, so there the
    # symmetric eigenproblem (half the time of the SVD) gives the same map. "full" needs the null space too.
    if rank == "full" or C.dtype == torch.float64:
        U, sigma, Vh = torch.linalg.svd(C.double(), full_matrices=False)
        V = Vh.mT
    else:
        U, sigma, V = _svd_by_eigh(C.double())
    return _partial_isometry(U, sigma, V, rank=rank, tolerance=tolerance, dtype=C.dtype)


def procrustes_from_rows(X_A: Tensor, X_B: Tensor, *, tolerance: float = DEFAULT_TOLERANCE) -> tuple[Map, Spectrum]:
    """The "range" map of C = X_Aᵀ X_B from its rows [M, d_A] and [M, d_B], for M < d: C is never formed.

    QR of the two tall factors, X_Aᵀ = Q_A T_A and X_Bᵀ = Q_B T_B, leaves the SVD of the M × M matrix
    T_A T_Bᵀ. The rank is then at most M, exactly, and the map stays factored.
    """
    Q_A, T_A = torch.linalg.qr(X_A.double().T)
    Q_B, T_B = torch.linalg.qr(X_B.double().T)
    U, sigma, Vh = torch.linalg.svd(T_A @ T_B.T, full_matrices=False)
    return _partial_isometry(Q_A @ U, sigma, Q_B @ Vh.mT, rank="range", tolerance=tolerance, dtype=X_A.dtype)


def bilinear(R_out: Map, tau: Tensor, R_in: Map) -> Tensor:
    """τ_B = R_outᵀ τ_A R_in (equation 8): [out_A, in_A] to [out_B, in_B]."""
    if tau.shape != (R_out.shape[0], R_in.shape[0]):
        raise ValueError(f"the task vector is {tuple(tau.shape)}, the maps take {(R_out.shape[0], R_in.shape[0])}")
    return R_out(R_in(tau).T).T


def _alike(rows: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """In the finer of the two precisions: half-precision factors must not round the map."""
    dtype = torch.promote_types(rows.dtype, R.dtype)
    return rows.to(dtype), R.to(rows.device, dtype)


def _svd_by_eigh(C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V of C by the eigenproblem of its smaller Gram matrix; columns with σ = 0 are zero."""
    if C.shape[0] > C.shape[1]:
        V, sigma, U = _svd_by_eigh(C.T)
        return U, sigma, V
    _, U = torch.linalg.eigh(C @ C.T)
    U = U.flip(-1)  # eigh is ascending, singular values descend
    V = C.T @ U  # columns v_i σ_i: their lengths are σ_i, more exact than the roots of the eigenvalues
    sigma = torch.linalg.vector_norm(V, dim=0)
    return U, sigma, V / sigma.clamp_min(torch.finfo(sigma.dtype).tiny)


def _partial_isometry(
    U: Tensor, sigma: Tensor, V: Tensor, *, rank: RankPolicy, tolerance: float, dtype: torch.dtype
) -> tuple[Map, Spectrum]:
    largest = float(sigma.max()) if sigma.numel() else 0.0
    keep = torch.ones_like(sigma, dtype=torch.bool) if rank == "full" else sigma > tolerance * largest
    U, V, kept = U[:, keep], V[:, keep], sigma[keep]
    r, d_A, d_B = kept.numel(), U.shape[0], V.shape[0]
    spectrum = Spectrum(
        rank=r,
        largest=largest,
        smallest=float(kept.min()) if r else 0.0,
        nuclear=float(kept.sum()),
    )
    if r * (d_A + d_B) < d_A * d_B:
        return Map(U=U.to(dtype).contiguous(), V=V.to(dtype).contiguous()), spectrum
    return Map(R=(U @ V.T).to(dtype)), spectrum
