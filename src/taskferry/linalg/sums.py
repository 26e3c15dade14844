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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.errors import TaskferryError
from taskferry.linalg.decompositions import add_gram
from taskferry.linalg.precision import full_precision
from taskferry.linalg.procrustes import (
    NOT_FINITE,
    Map,
    Spectrum,
    check_finite,
    partial_isometry,
    procrustes,
    procrustes_batch,
    procrustes_from_rows,
)
from taskferry.linalg.subspace import by_strongest, is_wide, products

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


Self = TypeVar("Self", bound="CrossCovariance")


@dataclass
class CrossCovariance:
    """C = Σ x_Aᵀ x_B over tokens, [d_A, d_B], with the energies ‖X_A‖² and ‖X_B‖².

    Memory: at most d_A · d_B numbers of the activations' precision (float32 at least).
    """

    moments: ClassVar[tuple[str, ...]] = ("C",)  # the matrices that a sum is made of

    d_A: int
    d_B: int
    rows: int = 0  # rows that are not zero on either side
    energy_A: float | Tensor = 0.0
    energy_B: float | Tensor = 0.0
    C: Tensor | None = None
    exact: bool = False  # add the micro-batches' products in float64, so that their order does not show
    directions: int = 0  # the most that the map of a wide space has; 0: as many as there are
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _parts: list[CrossCovariance] = field(default_factory=list)  # sums that this one is the total of, when it is used

    @staticmethod
    def alive(X: Tensor) -> Tensor:
        """Which rows [..., d] say anything."""
        norms: Tensor = torch.linalg.vector_norm(X.to(torch.promote_types(X.dtype, torch.float32)), dim=-1)
        return norms != 0

    @classmethod
    def numbers(cls, d_A: int, d_B: int) -> int:
        """How many it keeps at most."""
        return d_A * d_B

    @classmethod
    def numbers_of(cls, rows: int, d_A: int, d_B: int, directions: int = 0) -> int:
        """How many it keeps of so many rows."""
        few = cls(d_A, d_B, directions=directions)._few(rows)
        return rows * (d_A + d_B) if few else cls.numbers(d_A, d_B)

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
        other.settle()
        self.energy_A = self.energy_A + other.energy_A
        self.energy_B = self.energy_B + other.energy_B
        self.rows += other.rows
        self._pending.extend(other._pending)
        if self.C is None and other.C is None and self._few(self.rows):
            return
        self._sum_pending()
        for name in self.moments:
            mine, its = getattr(self, name), getattr(other, name)
            if its is not None:
                setattr(self, name, its.clone() if mine is None else mine + its.to(mine))

    def empty(self: Self) -> Self:
        """Sums of the same kind that have seen nothing."""
        return type(self)(self.d_A, self.d_B, exact=self.exact, directions=self.directions)

    def total_of(self, parts: Sequence[CrossCovariance]) -> None:
        """Be the total of other sums from the moment that it is used: until then they take memory once."""
        self._parts = list(parts)
        if min(self.d_A, self.d_B) <= TINY:
            self.settle()

    def settle(self) -> None:
        """Add up what it is the total of."""
        while self._parts:
            self.merge(self._parts.pop(0))

    def ready(self) -> CrossCovariance:
        """The plain sums to decompose; these stay as they are."""
        self.settle()
        return self

    def plain(self) -> CrossCovariance:
        """The same rows without whatever is done to them before they are decomposed."""
        return self

    def matrix(self) -> Tensor:
        """C as one matrix [d_A, d_B]."""
        self.settle()
        self._sum_pending()
        return torch.zeros(self.d_A, self.d_B) if self.C is None else self.C

    def solve(
        self, *, rank: RankPolicy = "range", tolerance: float = DEFAULT_TOLERANCE, factored: bool = False
    ) -> tuple[Map, Quality]:
        """The Procrustes map of what has been added, and how good it is."""
        self.settle()
        with full_precision():
            return self._solve(rank, tolerance, factored)

    def _solve(self, rank: RankPolicy, tolerance: float, factored: bool) -> tuple[Map, Quality]:
        S = self.ready()
        if rank == "range" and S.wide and (not S._pending or S.rows > S.directions):
            given = S._rows() if S._pending else (S.matrix(),)
            check_finite(*given)
            parts = by_strongest(products(*given), (S.d_A, S.d_B), S.directions, given[0])
            dtype = given[0].dtype
            R, spectrum = partial_isometry(*parts, rank=rank, tolerance=tolerance, dtype=dtype, factored=factored)
        elif S._pending and rank == "range":
            X_A, X_B = S._rows()
            check_finite(X_A, X_B)
            R, spectrum = procrustes_from_rows(X_A, X_B, tolerance=tolerance, factored=factored)
        else:
            R, spectrum = procrustes(S.matrix(), rank=rank, tolerance=tolerance, factored=factored)
        return R, S._quality(spectrum)

    @property
    def wide(self) -> bool:
        """Whether both spaces have many more directions than the map will."""
        return is_wide(min(self.d_A, self.d_B), self.directions)

    def state(self) -> dict[str, Tensor]:
        """Tensors that hold all of it, for a safetensors file."""
        self.settle()
        numbers = [self.rows, float(self.energy_A), float(self.energy_B)]
        state = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        if self.C is not None:
            state |= {name: getattr(self, name) for name in self.moments}
        elif self._pending:
            state["X_A"], state["X_B"] = self._rows()
        return state

    @classmethod
    def from_state(cls: type[Self], d_A: int, d_B: int, state: Mapping[str, Tensor], directions: int = 0) -> Self:
        """The inverse of `state`."""
        rows, energy_A, energy_B = state["numbers"].tolist()
        S = cls(d_A, d_B, rows=int(rows), energy_A=energy_A, energy_B=energy_B, directions=directions)
        for name in set(cls.moments) & set(state):
            setattr(S, name, state[name])
        if "X_A" in state:
            S._pending.append((state["X_A"], state["X_B"]))
        return S

    def reduce(self: Self, across: Collective, owner: int) -> Self:
        """The sums of all processes at their owner; rows, where few, are gathered, so that the rank stays exact.

        Moments are added in float64 and rounded once, after the sum: the number of processes does not show.
        """
        self.settle()
        mine = [self.rows, float(self.energy_A), float(self.energy_B), float(self.C is not None)]
        numbers = across.sum_everywhere(torch.tensor(mine, dtype=torch.float64))
        state = {"numbers": numbers[:3]}
        if not numbers[3] and self._few(int(numbers[0])):
            for name, rows in zip(("X_A", "X_B"), self._rows() if self._pending else (None, None), strict=True):
                gathered = across.rows_at(owner, rows)
                state |= {} if gathered is None else {name: gathered}
        else:
            self._sum_pending()
            for name in self.moments:
                moment = getattr(self, name)
                moment = torch.zeros(self._shape(name)) if moment is None else moment
                # On the host: a process that saw nothing of a site has no device to say.
                moment = moment.to("cpu", torch.float64, copy=True).contiguous()
                state[name] = across.sum_at(owner, moment).float()
        return type(self).from_state(self.d_A, self.d_B, state, self.directions)

    def _shape(self, moment: str) -> tuple[int, int]:
        return {"C": (self.d_A, self.d_B), "A": (self.d_A, self.d_A), "B": (self.d_B, self.d_B)}[moment]

    def _rows(self) -> tuple[Tensor, Tensor]:
        X_A, X_B = (torch.cat(rows) for rows in zip(*self._pending, strict=True))
        return X_A, X_B

    def _few(self, rows: int) -> bool:
        """Whether so many rows are kept as they are: they take less room than the matrix."""
        return rows * (self.d_A + self.d_B) <= self.d_A * self.d_B

    @full_precision()
    def _sum_pending(self) -> None:
        while self._pending:
            sides = self._sides(*self._pending[0])
            # What needs memory comes first: sums that there is no room for stay as they are.
            made = {
                name: (X.T @ Y).double() if self.exact else X.T @ Y
                for name, (X, Y) in sides.items()
                if self.exact or getattr(self, name) is None
            }
            for name, (X, Y) in sides.items():
                total = getattr(self, name)
                if total is None:
                    setattr(self, name, made[name])
                elif self.exact:
                    total.add_(made[name])
                elif name != "C":  # a second moment is symmetric: its lower triangle is enough
                    add_gram(total, X)
                else:
                    total.addmm_(X.T, Y)  # one call a micro-batch, no temporary
            del self._pending[0]

    def _sides(self, X_A: Tensor, X_B: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The rows that each moment is a sum of products of."""
        return {"C": (X_A, X_B)}

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
        batch = [sums.pop(other).ready() for other in alike]
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
    if (
        type(first) is not type(other)
        or is_wide(max(first.d_A, first.d_B), first.directions)
        or a is None
        or b is None
        or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device)
    ):
        return False
    return a.device.type == "cuda" or min(a.shape) <= TINY
