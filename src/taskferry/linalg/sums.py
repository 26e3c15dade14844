"""Cross-covariances as sums over tokens: streaming, mergeable, serialisable.

    >>> S = CrossCovariance(d_A, d_B)
    >>> S.add(X_A, X_B)                     # one micro-batch of token rows, same order on both sides
    >>> S = S.reduce(ranks, owner)          # the sums of all processes, at one of them
    >>> R, quality = S.solve()

While the rows seen take less room than the d_A × d_B matrix they are kept as they are: their rank is then
exact and the decomposition small. After that only the sum is kept. A zero row adds nothing and is dropped:
in the last block of a class-token model all tokens but one have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.errors import TaskferryError
from taskferry.linalg.precision import full_precision
from taskferry.linalg.procrustes import (
    NOT_FINITE,
    Map,
    Spectrum,
    check_finite,
    procrustes,
    procrustes_batch,
    procrustes_from_rows,
)

BATCH = 16  # maps in one batched decomposition
TINY = 32  # the width up to which a CPU gains by it (measured; above, each LAPACK call fills the cores)


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
    smallest: float | None  # None where the solver does not see it


class Collective(Protocol):
    """What sums need of other processes to become one."""

    def sum_everywhere(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, on every one of them."""

    def sum_at(self, owner: int, tensor: Tensor) -> Tensor:
        """The sum over all processes, on its owner."""

    def rows_at(self, owner: int, rows: Tensor | None) -> Tensor | None:
        """The rows of all processes, on their owner."""


@dataclass
class CrossCovariance:
    """C = Σ x_Aᵀ x_B over tokens, [d_A, d_B], with the energies ‖X_A‖² and ‖X_B‖².

    Memory: at most d_A · d_B numbers of the activations' precision (float32 at least).
    """

    d_A: int
    d_B: int
    rows: int = 0  # rows that are not zero on either side
    energy_A: float | Tensor = 0.0
    energy_B: float | Tensor = 0.0
    C: Tensor | None = None
    exact: bool = False  # add the micro-batches' products in float64, so that their order does not show
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def alive(X: Tensor) -> Tensor:
        """Which rows [..., d] say anything."""
        norms: Tensor = torch.linalg.vector_norm(X.to(torch.promote_types(X.dtype, torch.float32)), dim=-1)
        return norms != 0

    @staticmethod
    def numbers(d_A: int, d_B: int, rows: int | None = None) -> int:
        """How many it keeps at most, or of so many rows."""
        few = rows is not None and rows * (d_A + d_B) <= d_A * d_B
        return rows * (d_A + d_B) if few and rows is not None else d_A * d_B

    def add(self, X_A: Tensor, X_B: Tensor, chosen: Tensor | None = None) -> None:
        """Add token rows X_A [M, d_A] and X_B [M, d_B].

        `chosen` are the rows that are not zero, where the rows lie on a device: looking would make the host wait.
        """
        if X_A.shape != (X_B.shape[0], self.d_A) or X_B.shape[1] != self.d_B:
            raise ValueError(
                f"rows {tuple(X_A.shape)} and {tuple(X_B.shape)} do not fit a cross-covariance of "
                f"{self.d_A} x {self.d_B}: both sides need the same number of rows"
            )
        dtype = torch.promote_types(torch.promote_types(X_A.dtype, X_B.dtype), torch.float32)
        X_A, X_B = X_A.to(dtype), X_B.to(X_A.device, dtype)  # half precision overflows and forgets in sums
        norms_A, norms_B = torch.linalg.vector_norm(X_A, dim=1), torch.linalg.vector_norm(X_B, dim=1)
        energies: list[Tensor | float] = [norms.double().square().sum() for norms in (norms_A, norms_B)]
        if chosen is not None:
            X_A, X_B = X_A.index_select(0, chosen), X_B.index_select(0, chosen)
        elif X_A.device.type == "cpu":
            alive = (norms_A != 0) & (norms_B != 0)
            if not bool(alive.all()):
                X_A, X_B = X_A[alive], X_B[alive]
            energies = [float(energy) for energy in energies]
        # All of it or nothing: where memory runs out, these rows come again. An energy stays on its device till asked.
        energy_A, energy_B = self.energy_A + energies[0], self.energy_B + energies[1]
        if self.C is None and self._few(self.rows + X_A.shape[0]):
            # Views of the model's activations must not outlive the micro-batch.
            self._pending.append((X_A.clone(), X_B.clone()))
        else:
            self._sum_pending()
            self._pending.append((X_A, X_B))
            try:
                self._sum_pending()
            except torch.OutOfMemoryError:
                self._pending.clear()
                raise
        self.energy_A, self.energy_B = energy_A, energy_B
        self.rows += X_A.shape[0]

    def merge(self, other: CrossCovariance) -> None:
        """Add another part's sums to this one."""
        if (self.d_A, self.d_B) != (other.d_A, other.d_B):
            raise ValueError(f"cannot merge {other.d_A} x {other.d_B} into {self.d_A} x {self.d_B}")
        self.energy_A = self.energy_A + other.energy_A
        self.energy_B = self.energy_B + other.energy_B
        self.rows += other.rows
        self._pending.extend(other._pending)
        if self.C is None and other.C is None and self._few(self.rows):
            return
        self._sum_pending()
        if other.C is not None:
            self.C = other.C.clone() if self.C is None else self.C + other.C.to(self.C)

    def matrix(self) -> Tensor:
        """C as one matrix [d_A, d_B]."""
        self._sum_pending()
        return torch.zeros(self.d_A, self.d_B) if self.C is None else self.C

    @full_precision()
    def solve(
        self, *, rank: RankPolicy = "range", tolerance: float = DEFAULT_TOLERANCE, factored: bool = False
    ) -> tuple[Map, Quality]:
        """The Procrustes map of what has been added, and how good it is."""
        if self._pending and rank == "range":
            X_A, X_B = self._rows()
            check_finite(X_A, X_B)
            R, spectrum = procrustes_from_rows(X_A, X_B, tolerance=tolerance, factored=factored)
        else:
            R, spectrum = procrustes(self.matrix(), rank=rank, tolerance=tolerance, factored=factored)
        return R, self._quality(spectrum)

    def reduce(self, across: Collective, owner: int) -> CrossCovariance:
        """The sums of all processes at their owner; rows, where few, are gathered, so that the rank stays exact."""
        mine = [self.rows, float(self.energy_A), float(self.energy_B), float(self.C is not None)]
        numbers = across.sum_everywhere(torch.tensor(mine, dtype=torch.float64))
        rows, energy_A, energy_B = numbers[:3].tolist()
        total = CrossCovariance(self.d_A, self.d_B, int(rows), energy_A, energy_B)
        if not numbers[3] and self._few(int(rows)):
            sides = self._rows() if self._pending else (None, None)
            X_A, X_B = (across.rows_at(owner, side) for side in sides)
            if X_A is not None and X_B is not None:
                total._pending.append((X_A, X_B))
        else:
            # On the host: a process that saw nothing of a site has no device to say.
            total.C = across.sum_at(owner, self.matrix().to("cpu", torch.float64, copy=True).contiguous()).float()
        return total

    def _rows(self) -> tuple[Tensor, Tensor]:
        X_A, X_B = (torch.cat(rows) for rows in zip(*self._pending, strict=True))
        return X_A, X_B

    def _few(self, rows: int) -> bool:
        """Whether so many rows are kept as they are: they take less room than the matrix."""
        return rows * (self.d_A + self.d_B) <= self.d_A * self.d_B

    @full_precision()
    def _sum_pending(self) -> None:
        while self._pending:
            X_A, X_B = self._pending[0]
            if self.exact:
                product = (X_A.T @ X_B).double()
                self.C = product if self.C is None else self.C.add_(product)
            elif self.C is None:
                self.C = X_A.T @ X_B
            else:
                self.C.addmm_(X_A.T, X_B)  # one call a micro-batch, no temporary
            del self._pending[0]

    def _quality(self, spectrum: Spectrum) -> Quality:
        energy = (float(self.energy_A) * float(self.energy_B)) ** 0.5
        similarity = min(1.0, spectrum.nuclear / energy) if energy > 0 else 0.0
        return Quality(
            rank=spectrum.rank,
            rows=self.rows,
            similarity=similarity,
            residual=(1.0 - similarity**2) ** 0.5,
            largest=spectrum.largest,
            smallest=spectrum.smallest,
        )


def solve_all(
    sums: dict[str, CrossCovariance],
    *,
    rank: RankPolicy = "range",
    tolerance: float = DEFAULT_TOLERANCE,
    factored: bool = False,
) -> Iterator[tuple[str, Map, Quality]]:
    """Every map, and each sum let go the moment its map is there: sums and maps never stand side by side.

    Sums of one shape go through one batched decomposition where that pays: on a GPU, or when they are tiny.
    """
    while sums:
        key, first = next(iter(sums.items()))
        alike = [other for other, S in sums.items() if _batch_together(first, S)][:BATCH] if rank == "range" else []
        if len(alike) < 2:
            try:
                R, quality = sums.pop(key).solve(rank=rank, tolerance=tolerance, factored=factored)
            except ValueError as error:
                raise TaskferryError(f"{key}: {error}") from error
            yield key, R, quality
            continue
        batch = [sums.pop(other) for other in alike]
        C = torch.stack([S.matrix() for S in batch])
        wrong = [
            other for other, finite in zip(alike, torch.isfinite(C).all(-1).all(-1).tolist(), strict=True) if not finite
        ]
        if wrong:
            raise TaskferryError(f"{wrong[0]}: {NOT_FINITE}")
        with full_precision():
            solved = procrustes_batch(C, rank=rank, tolerance=tolerance, factored=factored)
        for other, S, (R, spectrum) in zip(alike, batch, solved, strict=True):
            yield other, R, S._quality(spectrum)


def _batch_together(first: CrossCovariance, other: CrossCovariance) -> bool:
    a, b = first.C, other.C
    if a is None or b is None or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return a.device.type == "cuda" or min(a.shape) <= TINY
