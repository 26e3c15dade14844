"""Cross-covariances as sums over tokens, one micro-batch after the other.

    >>> S = CrossCovariance(d_A, d_B)
    >>> S.add(X_A, X_B)                     # one micro-batch of token rows, same order on both sides
    >>> R, quality = S.solve()

While the rows seen take less room than the d_A × d_B matrix they are kept as they are: their rank is then
exact and the decomposition small. After that only the sum is kept. A zero row adds nothing and is dropped:
in the last block of a class-token model all tokens but one have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.linalg.precision import full_precision
from taskferry.linalg.procrustes import Map, procrustes, procrustes_from_rows


@dataclass(frozen=True)
class Quality:
    """How well one map relates two spaces.

    `similarity` is ⟨X_A R, X_B⟩ / (‖X_A‖ ‖X_B‖): 1 when the spaces differ by an isometry only.
    `residual` is √(1 − similarity²): 0 there, and at least the relative error that the best multiple of the map leaves.
    """

    rank: int
    rows: int
    similarity: float
    residual: float
    largest: float
    smallest: float | None


@dataclass
class CrossCovariance:
    """C = Σ x_Aᵀ x_B over tokens, [d_A, d_B], with the energies ‖X_A‖² and ‖X_B‖².

    Memory: at most d_A · d_B numbers of the activations' precision (float32 at least).
    """

    d_A: int
    d_B: int
    rows: int = 0  # rows that are not zero on either side
    energy_A: float = 0.0
    energy_B: float = 0.0
    C: Tensor | None = None
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # rows, while they are few

    @staticmethod
    def numbers(d_A: int, d_B: int, rows: int | None = None) -> int:
        """How many it keeps at most, or of so many rows."""
        return d_A * d_B if rows is None else min(d_A * d_B, rows * (d_A + d_B))

    @full_precision()
    def add(self, X_A: Tensor, X_B: Tensor) -> None:
        """Add token rows X_A [M, d_A] and X_B [M, d_B]."""
        if X_A.shape != (X_B.shape[0], self.d_A) or X_B.shape[1] != self.d_B:
            raise ValueError(
                f"rows {tuple(X_A.shape)} and {tuple(X_B.shape)} do not fit a cross-covariance of "
                f"{self.d_A} x {self.d_B}: both sides need the same number of rows"
            )
        dtype = torch.promote_types(torch.promote_types(X_A.dtype, X_B.dtype), torch.float32)
        X_A, X_B = X_A.to(dtype), X_B.to(X_A.device, dtype)  # half precision overflows and forgets in sums
        norms_A, norms_B = torch.linalg.vector_norm(X_A, dim=1), torch.linalg.vector_norm(X_B, dim=1)
        self.energy_A += float(norms_A.double().square().sum())
        self.energy_B += float(norms_B.double().square().sum())
        alive = (norms_A != 0) & (norms_B != 0)
        if not bool(alive.all()):
            X_A, X_B = X_A[alive], X_B[alive]
        self.rows += X_A.shape[0]
        if self.C is None and self._few():
            self.kept.append((X_A.clone(), X_B.clone()))  # views of activations must not outlive their micro-batch
        else:
            self._sum_kept()
            self._sum(X_A, X_B)

    def merge(self, other: CrossCovariance) -> None:
        """Add the sums of other tokens to this one."""
        if (self.d_A, self.d_B) != (other.d_A, other.d_B):
            raise ValueError(f"cannot merge {other.d_A} x {other.d_B} into {self.d_A} x {self.d_B}")
        self.energy_A += other.energy_A
        self.energy_B += other.energy_B
        self.rows += other.rows
        self.kept += other.kept
        if other.C is not None:
            self.C = other.C.clone() if self.C is None else self.C + other.C.to(self.C)
        if self.C is not None or not self._few():
            self._sum_kept()

    def matrix(self) -> Tensor:
        """C as one matrix [d_A, d_B]."""
        self._sum_kept()
        return torch.zeros(self.d_A, self.d_B) if self.C is None else self.C

    @full_precision()
    def solve(
        self, *, rank: RankPolicy = "range", tolerance: float = DEFAULT_TOLERANCE, factored: bool = False
    ) -> tuple[Map, Quality]:
        """The Procrustes map of what has been added, and how good it is."""
        if self.kept and rank == "range":
            X_A, X_B = (torch.cat(rows) for rows in zip(*self.kept, strict=True))
            R, spectrum = procrustes_from_rows(X_A, X_B, tolerance=tolerance, factored=factored)
        else:
            R, spectrum = procrustes(self.matrix(), rank=rank, tolerance=tolerance, factored=factored)
        energy = (self.energy_A * self.energy_B) ** 0.5
        similarity = min(1.0, spectrum.nuclear / energy) if energy > 0 else 0.0
        residual = (1.0 - similarity**2) ** 0.5
        return R, Quality(spectrum.rank, self.rows, similarity, residual, spectrum.largest, spectrum.smallest)

    def _few(self) -> bool:
        """Whether the rows take less room than the matrix."""
        return self.rows * (self.d_A + self.d_B) <= self.d_A * self.d_B

    def _sum_kept(self) -> None:
        while self.kept:
            self._sum(*self.kept.pop(0))

    @full_precision()
    def _sum(self, X_A: Tensor, X_B: Tensor) -> None:
        self.C = X_A.T @ X_B if self.C is None else self.C.addmm_(X_A.T, X_B)
