"""Orthogonal Procrustes maps and the bilinear map (paper, equations 6 to 9).

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
    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.R, self.U, self.V) if tensor is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """(d_A, d_B)."""
        first, last = self._parts[0], self._parts[-1]
        return first.shape[0], last.shape[1] if self.R is not None else last.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._parts[0].device

    def __call__(self, rows: Tensor) -> Tensor:
        """Source row vectors [n, d_A] in target coordinates [n, d_B]: rows @ R."""
        rows, *parts = _alike(rows, *self._parts)
        return rows @ parts[0] if self.R is not None else (rows @ parts[0]) @ parts[1].T

    def columns(self, columns: Tensor) -> Tensor:
        """Source column vectors [d_A, n] in target coordinates [d_B, n]: Rᵀ @ columns."""
        return self(columns.T).T  # thin rows times R are faster than Rᵀ times thin columns

    def cost(self, vectors: int) -> int:
        """Multiply-adds to carry so many vectors over."""
        d_A, d_B = self.shape
        return vectors * (d_A * d_B if self.U is None else self.U.shape[1] * (d_A + d_B))

    def dense(self) -> Tensor:
        """R as one matrix [d_A, d_B]."""
        return self._parts[0] if self.R is not None else self._parts[0] @ self._parts[1].T


@dataclass(frozen=True)
class Spectrum:
    """What the decomposition of a cross-covariance says about its map."""

    rank: int  # directions kept
    largest: float  # σ_1
    smallest: float  # σ of the last direction kept
    nuclear: float  # Σ σ over the kept directions = ⟨X_A R, X_B⟩


def procrustes(
    C: Tensor, *, rank: RankPolicy = "range", tolerance: float = DEFAULT_TOLERANCE, factored: bool = False
) -> tuple[Map, Spectrum]:
    """R = U Vᵀ for C = X_Aᵀ X_B = U Σ Vᵀ (equations 6 and 7), decomposed in float64, returned in C's precision.

    Of all isometries R it has the largest ⟨X_A R, X_B⟩. For d_A ≤ d_B (R Rᵀ = I) that minimises ‖X_A R − X_B‖_F;
    for d_A > d_B (Rᵀ R = I) it minimises ‖X_A − X_B Rᵀ‖_F: one formula for both.
    U Vᵀ is unique only on the range of C; what a decomposition returns outside of it is an accident of
    its implementation. "range" keeps the singular directions above `tolerance` · σ_1; "full" keeps
    all min(d_A, d_B) of them, exactly as in the paper.
    `factored` leaves U and V unmultiplied, for low-rank task vectors, which pass through them for less.
    """
    if C.ndim != 2:
        raise ValueError(f"a cross-covariance is a matrix [d_A, d_B], got shape {tuple(C.shape)}")
    check_finite(C)
    # Sums in float32 carry 1e-7 of rounding, above what squaring C loses in float64: there the symmetric eigenproblem
    # gives the same map in half of the time. "full" needs the null space too.
    exact = rank == "full" or C.dtype == torch.float64
    parts = _by_svd(C.double(), rank == "full") if exact else _by_eigh(C.double())
    return _partial_isometry(*parts, rank, tolerance, C.dtype, factored)


def procrustes_from_rows(
    X_A: Tensor, X_B: Tensor, *, tolerance: float = DEFAULT_TOLERANCE, factored: bool = False
) -> tuple[Map, Spectrum]:
    """The "range" map of C = X_Aᵀ X_B from its rows [M, d_A] and [M, d_B], for M < d: C is never formed.

    With X_Aᵀ = Q_A T_A and X_Bᵀ = Q_B T_B the SVD of the small T_A T_Bᵀ is that of C. The rank is at most M, exactly.
    """
    check_finite(X_A, X_B)
    Q_A, T_A = torch.linalg.qr(X_A.double().mT)
    Q_B, T_B = torch.linalg.qr(X_B.double().mT)
    U, sigma, V = _by_svd(T_A @ T_B.mT)
    return _partial_isometry(Q_A @ U, sigma, Q_B @ V, "range", tolerance, X_A.dtype, factored)


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


def _alike(rows: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """In the finer of the two precisions, where the rows lie: half-precision factors must not round the map."""
    dtype = torch.promote_types(rows.dtype, parts[0].dtype)
    return rows.to(dtype), *(part.to(rows.device, dtype) for part in parts)


def _by_svd(C: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V by the SVD; `full` asks for orthonormal columns where σ = 0 as well."""
    try:
        U, sigma, Vh = torch.linalg.svd(C, full_matrices=False)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        # LAPACK's divide and conquer may fail on many equal singular values, as near-isometries have them.
        if full:
            raise ValueError(
                "the SVD does not converge: take the rank policy 'range', which has another way"
            ) from error
        return _by_eigh(C)
    return U, sigma, Vh.mT


def _by_eigh(C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V by the eigenproblem of the smaller Gram matrix; columns with σ = 0 are zero."""
    if C.shape[0] > C.shape[1]:
        V, sigma, U = _by_eigh(C.mT)
        return U, sigma, V
    U = torch.linalg.eigh(C @ C.mT)[1].flip(-1)  # eigh is ascending, singular values descend
    V = C.mT @ U  # columns v_i σ_i: their lengths are σ_i, more exact than the roots of the eigenvalues
    sigma = torch.linalg.vector_norm(V, dim=0)
    return U, sigma, V.div_(sigma.clamp_min(torch.finfo(sigma.dtype).tiny))


def _partial_isometry(
    U: Tensor, sigma: Tensor, V: Tensor, rank: RankPolicy, tolerance: float, dtype: torch.dtype, factored: bool
) -> tuple[Map, Spectrum]:
    """U Vᵀ over the directions that the rank policy keeps, in the precision of the sums."""
    largest = float(sigma.max()) if sigma.numel() else 0.0
    if rank == "range":
        keep = sigma > tolerance * largest
        U, V, sigma = U[:, keep], V[:, keep], sigma[keep]
    r, d_A, d_B = sigma.numel(), U.shape[0], V.shape[0]
    spectrum = Spectrum(r, largest, float(sigma.min()) if r else 0.0, float(sigma.sum()))
    U, V = U.to(dtype), V.to(dtype)  # rounded once, then multiplied: the result is rounded to that precision anyway
    if factored or r * (d_A + d_B) < d_A * d_B:
        return Map(U=U.contiguous(), V=V.contiguous()), spectrum
    return Map(R=U @ V.T), spectrum
