"""Sums of rows that can be whitened: every direction then counts alike, however much of the signal flows along it.

    >>> sums = Whitened(d_A, d_B)
    >>> sums.add(G_A, G_B)                            # rows are brought to length one first
    >>> R, quality = sums.solve()                     # the isometry of G_A (A + ε)^-½ and G_B (B + ε)^-½

With A = Σ g_Aᵀ g_A and B = Σ g_Bᵀ g_B. Orthogonal Procrustes listens to the few directions that carry most of the
gradient; what fine-tuning writes is spread over many more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from taskferry.choices import RankPolicy
from taskferry.linalg.decompositions import by_eigh, mirrored
from taskferry.linalg.procrustes import Map, check_finite, is_finite, partial_isometry
from taskferry.linalg.subspace import is_wide, products, spans
from taskferry.linalg.sums import CrossCovariance, Quality

Whitening = tuple[Tensor, Tensor, Tensor, tuple[float, float]]  # U, σ, V, and the energy of either side

ROUNDING = 1e-6  # of the largest variance: what float32 sums leave of a direction that is not there
SHRINK = 0.01  # ε, as a share of the mean variance of a direction: what lies below it is taken for noise


@dataclass
class UnitRows(CrossCovariance):
    """Of rows of length one: a few tokens with large gradients must not speak for all."""

    @staticmethod
    def alive(X: Tensor) -> Tensor:
        """Which rows [..., d] are more than rounding."""
        X = X.to(torch.promote_types(X.dtype, torch.float32))
        return ~_rounding(torch.linalg.vector_norm(X, dim=-1), X.dtype)

    def add(self, X_A: Tensor, X_B: Tensor, chosen: Tensor | None = None) -> None:
        """Add token rows."""
        super().add(unit(X_A), unit(X_B), chosen)


@dataclass
class Whitened(UnitRows):
    """With the second moments of either side, which whitening needs.

    Memory: at most d_A · d_B + d_A² + d_B² numbers.
    """

    moments: ClassVar[tuple[str, ...]] = ("C", "A", "B")

    A: Tensor | None = None  # [d_A, d_A]
    B: Tensor | None = None  # [d_B, d_B]

    @classmethod
    def numbers(cls, d_A: int, d_B: int) -> int:
        """How many it keeps at most."""
        return d_A * d_B + d_A**2 + d_B**2

    def plain(self) -> CrossCovariance:
        """The sums of the rows as they are, without the second moments."""
        plain = CrossCovariance(
            self.d_A, self.d_B, self.rows, self.energy_A, self.energy_B, self.C, self.exact, self.directions
        )
        plain._pending = list(self._pending)
        plain._parts = [part.plain() for part in self._parts]
        return plain

    def _solve(self, rank: RankPolicy, tolerance: float, factored: bool) -> tuple[Map, Quality]:
        """The map of the whitened rows, each side decomposed once, for whitening and map."""
        if rank == "full" or not self.rows:
            return super()._solve(rank, tolerance, factored)
        given = self._moments() or self._rows()
        check_finite(*given)
        if len(given) == 3:
            U, sigma, V, energies = of_narrowed_moments(*given, most=self.directions)
        elif self.rows > self.directions and is_wide(max(self.d_A, self.d_B), self.directions):
            U, sigma, V, energies = of_narrowed_rows(*given, most=self.directions)
        else:
            U, sigma, V, energies = of_whitened_rows(*given)
        dtype = given[0].dtype
        R, spectrum = partial_isometry(U, sigma, V, rank=rank, tolerance=tolerance, dtype=dtype, factored=factored)
        return R, CrossCovariance(self.d_A, self.d_B, self.rows, *energies)._quality(spectrum)

    def _few(self, rows: int) -> bool:
        """Decomposing a matrix of all pairs of rows is then less work than of all pairs of directions.

        Of a wide space the strongest directions are found by products, with rows as well as with moments: there it is
        what takes less room that is kept.
        """
        small = rows * (self.d_A + self.d_B) <= self.numbers(self.d_A, self.d_B)
        return rows <= min(self.d_A, self.d_B) or (small and is_wide(max(self.d_A, self.d_B), self.directions))

    def ready(self) -> CrossCovariance:
        """The plain sums of the whitened rows; numbers that are not finite stay, for the solver to refuse."""
        self.settle()
        plain = CrossCovariance(self.d_A, self.d_B)
        if self.C is None and self._pending and self.rows:
            X_A, X_B = self._rows()
            finite = is_finite(X_A) and is_finite(X_B)
            plain.add(*((whiten_rows(X_A), whiten_rows(X_B)) if finite else (X_A, X_B)))
        elif (moments := self._moments()) is not None:
            A, B, C = moments
            plain.rows, plain.C = self.rows, C
            if is_finite(A) and is_finite(B):
                (W_A, plain.energy_A), (W_B, plain.energy_B) = inverse_root(A), inverse_root(B)
                plain.C = (W_A @ C.double() @ W_B).to(C.dtype)
        return plain

    def _moments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """A, B and C, where rows are no longer kept: the second moments are summed below the diagonal alone."""
        if self.A is None or self.B is None or self.C is None:
            return None
        return mirrored(self.A), mirrored(self.B), self.C

    def _sides(self, X_A: Tensor, X_B: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """With those of the second moments."""
        return {"A": (X_A, X_A), "B": (X_B, X_B), **super()._sides(X_A, X_B)}


def unit(X: Tensor) -> Tensor:
    """Rows of length one in float32 at least; a row of zeros, or of nothing but rounding, becomes zero.

    The gradient of the first token's query in a causal model is zero, and 1e-9 of the others in float32.
    """
    X = X.to(torch.promote_types(X.dtype, torch.float32))
    norms = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    return torch.where(_rounding(norms, X.dtype), 0.0, X / norms.clamp_min(torch.finfo(X.dtype).tiny))


def _rounding(norms: Tensor, precision: torch.dtype) -> Tensor:
    """Which rows are no more than rounding, beside the longest; what is not finite stays, for the solver to refuse."""
    largest = torch.where(torch.isfinite(norms), norms, 0.0).amax() if len(norms) else norms.sum()
    # Of the arithmetic: a row of bfloat16 is rounded relative to itself alone.
    return norms <= 16 * torch.finfo(precision).eps * largest


def inverse_root(S: Tensor) -> tuple[Tensor, float]:
    """(S + ε I)^-½ of a second moment S [d, d] in float64, and the energy of the rows that it whitens.

    Zero on directions that no row has: whitening would make a signal of their rounding.
    """
    V, root, energy = _roots(S, float(S.double().diagonal().mean()))
    return (V * root) @ V.T, energy


def _roots(S: Tensor, mean: float) -> tuple[Tensor, Tensor, float]:
    """V [d, d] and the roots [d] of (S + ε I)^-½ = V diag(root) Vᵀ, and the energy; `mean` variance of a direction."""
    e, V = torch.linalg.eigh(S.double())
    e = e.clamp_min(0)
    root = torch.where(e > ROUNDING * e.max(), (e + SHRINK * mean).rsqrt(), 0.0)
    return V, root, float((e * root.square()).sum())


def of_whitened_moments(A: Tensor, B: Tensor, C: Tensor, mean_A: float, mean_B: float) -> Whitening:
    """U, σ, V of (A + ε)^-½ C (B + ε)^-½ and the energy of either side's whitened rows.

    With (A + ε)^-½ = V_A D_A V_Aᵀ: V_A (D_A V_Aᵀ C V_B D_B) V_Bᵀ, so that neither root is formed.
    """
    (V_A, D_A, energy_A), (V_B, D_B, energy_B) = _roots(A, mean_A), _roots(B, mean_B)
    P, sigma, Q = by_eigh(D_A[:, None] * (V_A.T @ C @ V_B) * D_B)
    return V_A @ P, sigma, V_B @ Q, (energy_A, energy_B)


def of_narrowed_moments(A: Tensor, B: Tensor, C: Tensor, *, most: int) -> Whitening:
    """The same within the strongest directions of a side that is wide (`is_wide`)."""
    times = products(A)[0], products(B)[0], products(C)[1]
    Q_A, Q_B = spans(*times, (A.shape[0], B.shape[0]), most, A)
    means = float(A.diagonal().double().mean()), float(B.diagonal().double().mean())
    return _widened(Q_A, Q_B, (_within(Q_A, A, Q_A), _within(Q_B, B, Q_B), _within(Q_A, C, Q_B)), means)


def of_narrowed_rows(X_A: Tensor, X_B: Tensor, *, most: int) -> Whitening:
    """The same from rows [M, d_A] and [M, d_B]: no d × d matrix is formed."""
    times = products(X_A, X_A)[0], products(X_B, X_B)[0], products(X_A, X_B)[1]
    Q_A, Q_B = spans(*times, (X_A.shape[1], X_B.shape[1]), most, X_A)
    mean_A, mean_B = (float(X.double().square().sum()) / X.shape[1] for X in (X_A, X_B))
    Y_A, Y_B = _within(None, X_A, Q_A), _within(None, X_B, Q_B)
    return _widened(Q_A, Q_B, (Y_A.T @ Y_A, Y_B.T @ Y_B, Y_A.T @ Y_B), (mean_A, mean_B))


def _within(P: Tensor | None, S: Tensor, Q: Tensor | None) -> Tensor:
    """Pᵀ S Q in float64; None is the identity."""
    S = S.double()
    S = S if P is None else P.T @ S
    return S if Q is None else S @ Q


def _widened(
    Q_A: Tensor | None, Q_B: Tensor | None, within: tuple[Tensor, Tensor, Tensor], means: tuple[float, float]
) -> Whitening:
    """From the moments A, B, C within the spans back to the coordinates of the spaces."""
    U, sigma, V, (energy_A, energy_B) = of_whitened_moments(*within, *means)
    energies = energy_A + _outside(Q_A, within[0], means[0]), energy_B + _outside(Q_B, within[1], means[1])
    return U if Q_A is None else Q_A @ U, sigma, V if Q_B is None else Q_B @ V, energies


def _outside(Q: Tensor | None, S: Tensor, mean: float) -> float:
    """The most energy that whitened rows can have outside of a span with second moment S; a residual counts it.

    Σ e / (e + ε) over variances of one sum is largest where all are alike.
    """
    left = 0 if Q is None else Q.shape[0] - Q.shape[1]
    each = 0.0 if Q is None or not left else max(0.0, Q.shape[0] * mean - float(S.diagonal().sum())) / left
    return left * each / (each + SHRINK * mean) if each > ROUNDING * mean else 0.0


def row_space(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U [M, r], s [r] and the whitening root [r] of X [M, d] = U diag(s) Vᵀ, by the Gram matrix of its rows in float64.

    X (XᵀX + ε I)^-½ = U diag(root) Uᵀ X: the d × d matrix is never formed.
    """
    X = X.double()
    e, U = torch.linalg.eigh(X @ X.T)
    # Rows were never squared in float32: their rounding is that of s, not of e.
    keep = e > ROUNDING**2 * e.max()
    e, U = e[keep], U[:, keep]
    return U, e.sqrt(), (e + SHRINK * e.sum() / X.shape[1]).rsqrt()


def of_whitened_rows(X_A: Tensor, X_B: Tensor) -> Whitening:
    """U, σ, V of the cross-covariance of whitened rows [M, d_A] and [M, d_B], and the energy of either.

    With X = U diag(s) Vᵀ and D = s · root: V_A D_A (U_Aᵀ U_B) D_B V_Bᵀ, so that all that is decomposed is M × M.
    """
    (U_A, s_A, root_A), (U_B, s_B, root_B) = row_space(X_A), row_space(X_B)
    D_A, D_B = s_A * root_A, s_B * root_B
    P, sigma, Q = by_eigh(D_A[:, None] * (U_A.T @ U_B) * D_B)
    U = X_A.double().T @ (U_A @ (P / s_A[:, None]))
    V = X_B.double().T @ (U_B @ (Q / s_B[:, None]))
    return U, sigma, V, (float(D_A.square().sum()), float(D_B.square().sum()))


def whiten_rows(X: Tensor) -> Tensor:
    """X (XᵀX + ε I)^-½ for fewer rows than columns, [M, d]."""
    U, _, root = row_space(X)
    whitened: Tensor = (U * root) @ (U.T @ X.double())
    return whitened.to(X.dtype)
