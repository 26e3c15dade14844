"""Rows of one length, whitened: planted rotations of any spectrum, rows against sums, invariances."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.linalg.sums import CrossCovariance, solve_all
from taskferry.linalg.whitening import UnitRows, Whitened, inverse_root, unit, whiten_rows
from tests.helpers.tiny import relative


def rows(count: int, d: int, seed: int, steep: float = 0.0) -> Tensor:
    """Normal rows whose directions have falling variance."""
    X = torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X * torch.exp(-steep * torch.arange(d))


def rotation(d: int, seed: int) -> Tensor:
    X = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(X).Q


def test_every_gradient_row_counts_alike() -> None:
    """One row a thousand times larger changes nothing; rows of zeros stay out."""
    torch.manual_seed(0)
    X_A, X_B = torch.randn(50, 6), torch.randn(50, 8)
    plain, larger = UnitRows(6, 8), UnitRows(6, 8)
    plain.add(X_A, X_B)
    sizes = torch.ones(50, 1)
    sizes[3] = 1000.0
    larger.add(sizes * X_A, sizes * X_B)
    assert relative(larger.matrix(), plain.matrix()) < 1e-5
    by_hand = CrossCovariance(6, 8)
    by_hand.add(X_A / X_A.norm(dim=1, keepdim=True), X_B / X_B.norm(dim=1, keepdim=True))
    assert relative(plain.matrix(), by_hand.matrix()) < 1e-6
    as_they_are = CrossCovariance(6, 8)
    as_they_are.add(sizes * X_A, sizes * X_B)
    assert relative(as_they_are.matrix() / as_they_are.matrix().norm(), plain.matrix() / plain.matrix().norm()) > 0.1
    with_zeros = UnitRows(6, 8)
    with_zeros.add(torch.cat([X_A, torch.zeros(2, 6)]), torch.cat([X_B, torch.ones(2, 8)]))
    assert with_zeros.rows == 50
    assert relative(with_zeros.matrix(), plain.matrix()) < 1e-6


def test_the_inverse_root_whitens() -> None:
    X = rows(500, 12, 0, steep=0.2) @ rotation(12, 1)
    W, energy = inverse_root(X.T @ X)
    assert relative(W, W.T) < 1e-12
    moment = W @ X.T @ X @ W  # the identity but for ε, which shrinks weak directions
    assert float(torch.linalg.eigvalsh(moment).max()) < 1
    assert float(torch.linalg.eigvalsh(moment).min()) > 0.3
    assert energy == pytest.approx(float(moment.diagonal().sum()))
    assert torch.isfinite(inverse_root(torch.zeros(3, 3))[0]).all()


def test_rows_and_sums_give_the_same_whitened_covariance() -> None:
    """Fewer rows than columns go through their own decomposition; the result is that of the d × d matrices."""
    X_A, X_B = rows(9, 20, 0, 0.1), rows(9, 30, 1, 0.1)
    few = Whitened(20, 30)
    few.add(X_A, X_B)
    assert few.C is None
    summed = Whitened(20, 30)
    summed.add(X_A, X_B)
    summed.matrix()
    assert summed.C is not None
    a, b = few.ready(), summed.ready()
    assert relative(a.matrix(), b.matrix()) < 1e-8
    assert (a.energy_A, a.energy_B, a.rows) == pytest.approx((b.energy_A, b.energy_B, 9))
    (R, quality), (expected, told) = few.solve(), summed.solve()
    assert relative(R.dense(), expected.dense()) < 1e-7
    assert quality.rank == told.rank == 9
    assert quality.similarity == pytest.approx(told.similarity)
    assert relative(R.dense().T @ R.dense() @ R.dense().T, R.dense().T) < 1e-9  # a partial isometry
    plain, unit_rows = few.plain(), UnitRows(20, 30)
    unit_rows.add(X_A, X_B)
    assert relative(plain.solve()[0].dense(), unit_rows.solve()[0].dense()) < 1e-9
    assert relative(plain.solve()[0].dense(), R.dense()) > 1e-2
    W = inverse_root(unit(X_A).T @ unit(X_A))[0]
    assert relative(whiten_rows(unit(X_A)), unit(X_A) @ W) < 1e-8


def test_a_planted_rotation_comes_back_for_any_spectrum() -> None:
    X = rows(400, 10, 0, steep=0.3)
    Q = rotation(10, 3)
    sums = Whitened(10, 10)
    sums.add(X, X @ Q)
    R, quality = sums.solve()
    assert relative(R.dense(), Q) < 1e-6
    assert quality.similarity == pytest.approx(1.0)
    assert relative(R.dense(), Q.T) > 0.5


def test_a_rotation_is_found_behind_different_gains() -> None:
    """Both models see the same rows, each through its own stretching of space: only whitening takes that away."""
    Z, Q = rows(4000, 8, 0), rotation(8, 5)
    gains = [U @ torch.diag(torch.linspace(0.3, 3.0, 8, dtype=torch.float64)) @ U.T
             for U in (rotation(8, 1), rotation(8, 2))]  # fmt: skip
    plain, whitened = UnitRows(8, 8), Whitened(8, 8)
    for sums in (plain, whitened):
        sums.add(Z @ gains[0], Z @ gains[1] @ Q)
    errors = [relative(R.dense(), Q) for R in (plain.solve()[0], whitened.solve()[0])]
    assert errors[0] > 0.2
    assert errors[1] < 0.1


def test_directions_that_no_row_has_stay_out_in_float32() -> None:
    """Rows of rank 150 in 192 and 256 dimensions: the map has rank 150, and maps nothing outside of it."""
    latent = rows(4000, 150, 0)
    X_A, X_B = ((latent @ rotation(192, 1)[:150]).float(), (latent @ rotation(256, 2)[:150]).float())
    sums = Whitened(192, 256)
    sums.add(X_A, X_B)
    assert sums.C is not None
    R, quality = sums.solve()
    assert quality.rank == 150
    assert relative(R.dense().double(), rotation(192, 1)[:150].T @ rotation(256, 2)[:150]) < 1e-3


def test_rows_of_rounding_are_rows_of_zeros() -> None:
    X = rows(20, 6, 0).float()
    X[3] *= 1e-9
    assert not unit(X)[3].any()
    assert torch.allclose(unit(X)[:3].norm(dim=1), torch.ones(3))
    X[4, 0] = float("inf")
    assert not torch.isfinite(unit(X)[4]).all()  # for the solver to refuse
    assert unit(X[:0]).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_rows_are_no_rounding_in_any_dtype(dtype: torch.dtype) -> None:
    """What is lost depends on the arithmetic, which is float32 at least, not on how the rows are stored."""
    X = rows(20, 6, 0).to(dtype)
    X[3] *= 2**-10
    assert torch.allclose(unit(X).norm(dim=1), torch.ones(20))
    assert unit(X).dtype == torch.float32


class Together:
    """Processes of a job as threads of this one: what each gives waits until all have given theirs."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def run(self, parts: Sequence[CrossCovariance], owner: int) -> list[CrossCovariance]:
        with ThreadPoolExecutor(len(parts)) as threads:
            return list(threads.map(lambda each: each[1].reduce(Process(self, each[0]), owner), enumerate(parts)))


@dataclass
class Process:
    together: Together
    rank: int

    def _everyones(self, value: Any) -> list[Any]:
        self.together.given[self.rank] = value
        self.together.barrier.wait()
        found = list(self.together.given)
        self.together.barrier.wait()
        return found

    def sum_everywhere(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._everyones(tensor.clone())).sum(0)

    def sum_at(self, owner: int, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float64
        found = self._everyones(tensor.clone())
        return torch.stack(found).sum(0) if owner == self.rank else tensor

    def rows_at(self, owner: int, rows: Tensor | None) -> Tensor | None:
        found = [each for each in self._everyones(rows) if each is not None]
        return torch.cat(found) if found and owner == self.rank else None


def reduced(kind: type[CrossCovariance], *parts: tuple[Tensor, Tensor], owner: int = 1) -> CrossCovariance:
    """What the owner has of several processes' rows."""
    sums = []
    for X_A, X_B in parts:
        sums.append(kind(X_A.shape[1], X_B.shape[1], exact=True))
        sums[-1].add(X_A, X_B)
    return Together(len(parts)).run(sums, owner)[owner]


@pytest.mark.parametrize("kind", [CrossCovariance, UnitRows, Whitened])
def test_many_rows_of_several_processes_add_to_the_whole(kind: type[CrossCovariance]) -> None:
    """One process still has rows, the other sums already: the moments of both are added at the owner."""
    X_A, X_B = rows(200, 6, 0), rows(200, 8, 1)
    whole = kind(6, 8)
    whole.add(X_A, X_B)
    found = reduced(kind, (X_A[:3], X_B[:3]), (X_A[3:], X_B[3:]))
    assert type(found) is kind
    assert found.C is not None
    assert (found.rows, found.energy_A, found.energy_B) == pytest.approx((200, whole.energy_A, whole.energy_B))
    assert relative(found.ready().matrix(), whole.ready().matrix()) < 1e-5
    assert relative(found.solve()[0].dense(), whole.solve()[0].dense()) < 1e-4
    rest = kind(6, 8)
    rest.add(X_A[3:], X_B[3:])
    assert relative(rest.ready().matrix(), whole.ready().matrix()) > 1e-4  # the test can tell


def test_processes_that_have_too_many_rows_together_add_moments() -> None:
    """Neither has summed: twelve rows are fewer than the directions, twenty-four are more."""
    X_A, X_B = rows(24, 20, 0, 0.1), rows(24, 30, 1, 0.1)
    found = reduced(Whitened, (X_A[:12], X_B[:12]), (X_A[12:], X_B[12:]), owner=0)
    whole = Whitened(20, 30)
    whole.add(X_A, X_B)
    assert found.C is not None
    assert relative(found.ready().matrix(), whole.ready().matrix()) < 1e-4


@pytest.mark.parametrize("kind", [CrossCovariance, UnitRows, Whitened])
def test_few_rows_of_several_processes_stay_rows(kind: type[CrossCovariance]) -> None:
    """Gathered at the owner, so that their rank is exact; a process without a row is no obstacle."""
    X_A, X_B = rows(9, 20, 0, 0.1), rows(9, 30, 1, 0.1)
    none = (X_A[:0], X_B[:0])
    found = reduced(kind, (X_A[:4], X_B[:4]), none, (X_A[4:], X_B[4:]))
    whole = kind(20, 30)
    whole.add(X_A, X_B)
    assert found.C is None
    assert found.rows == 9
    (R, quality), (expected, told) = found.solve(), whole.solve()
    assert torch.equal(R.dense(), expected.dense())
    assert quality.rank == told.rank == 9
    assert quality.similarity == pytest.approx(told.similarity)


def test_nothing_of_several_processes_is_nothing() -> None:
    none = (rows(0, 20, 0), rows(0, 30, 1))
    found = reduced(Whitened, none, none)
    assert (found.rows, found.solve()[1].rank) == (0, 0)


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    for count in (3, 400):
        sums = Whitened(10, 10)
        X = rows(count, 10, 0)
        X[1, 1] = float("nan")
        sums.add(X, X)
        with pytest.raises(TaskferryError, match=r"layer\.7.*not finite"):
            list(solve_all({"layer.7": sums}))


@pytest.mark.parametrize("kind", [CrossCovariance, Whitened])
@pytest.mark.parametrize("count", [20, 300], ids=["rows", "sums"])
def test_a_total_is_added_up_when_it_is_used(kind: type[CrossCovariance], count: int) -> None:
    """Until then its parts take memory once; they stay as they are."""
    parts = [kind(40, 50) for _ in range(2)]
    merged, total = kind(40, 50), kind(40, 50)
    for i, part in enumerate(parts):
        part.add(rows(count, 40, i), rows(count, 50, 10 + i))
        merged.merge(part)
    before = [part.state() for part in parts]
    total.total_of(parts)
    assert total.C is None
    assert not total._pending
    assert relative(total.plain().matrix(), merged.plain().matrix()) < 1e-12
    R, quality = total.solve()
    expected, as_merged = merged.solve()
    assert relative(R.dense(), expected.dense()) < 1e-10
    assert quality == as_merged
    assert total.rows == 2 * count
    for part, state in zip(parts, before, strict=True):
        assert all(torch.equal(part.state()[name], value) for name, value in state.items())


def test_a_total_of_totals_and_of_tiny_sums() -> None:
    parts = [CrossCovariance(40, 50) for _ in range(3)]
    for i, part in enumerate(parts):
        part.add(rows(60, 40, i), rows(60, 50, 10 + i))
    two, all_three = CrossCovariance(40, 50), CrossCovariance(40, 50)
    two.total_of(parts[:2])
    all_three.total_of([two, parts[2]])
    assert relative(all_three.matrix(), sum(part.matrix() for part in parts)) < 1e-12
    tiny, other = CrossCovariance(4, 5), CrossCovariance(4, 5)
    other.add(rows(60, 4, 0), rows(60, 5, 1))
    tiny.total_of([other])
    assert tiny.C is not None  # solved in batches, which look at it


def test_empty_sums_are_of_the_same_kind() -> None:
    """What a process has that saw nothing of a site: it may be the one that solves it."""
    sums = Whitened(90, 120, exact=True, directions=20)
    sums.add(rows(400, 90, 0), rows(400, 120, 1))
    nothing = sums.empty()
    assert type(nothing) is Whitened
    assert (nothing.d_A, nothing.d_B, nothing.exact, nothing.directions) == (90, 120, True, 20)
    assert nothing.rows == 0
    found = Whitened.from_state(90, 120, sums.state(), nothing.directions)
    assert found.solve()[1].rank == sums.solve()[1].rank == 20


def test_second_moments_are_summed_below_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In strips, which do not divide the width: what is read is the whole matrix, and so is the map."""
    monkeypatch.setattr("taskferry.linalg.decompositions.STRIP", 5)
    X_A, X_B = (rows(200, d, seed, steep=0.1).float() for seed, d in enumerate((12, 13)))
    sums, whole, parts = Whitened(12, 13), Whitened(12, 13), [Whitened(12, 13), Whitened(12, 13)]
    for start in range(0, 200, 50):
        sums.add(X_A[start : start + 50], X_B[start : start + 50])
        parts[start // 100].add(X_A[start : start + 50], X_B[start : start + 50])
    monkeypatch.setattr("taskferry.linalg.decompositions.STRIP", 512)
    whole.add(X_A, X_B)
    assert sums.A is not None
    assert relative(sums.A, unit(X_A).T @ unit(X_A)) > 0.01  # half of it alone is summed
    stored = Whitened.from_state(12, 13, {name: S.clone() for name, S in sums.state().items()})
    total = sums.empty()
    total.total_of(parts)
    R, quality = whole.solve()
    monkeypatch.setattr("taskferry.linalg.decompositions.STRIP", 5)
    for some in (sums, stored, total):
        found, its = some.solve()
        assert relative(found.dense(), R.dense()) < 1e-4
        assert its.similarity == pytest.approx(quality.similarity, rel=1e-4)
        assert some.A is not None
        assert relative(some.A, unit(X_A).T @ unit(X_A)) < 1e-5
    assert relative(sums.ready().matrix(), whole.ready().matrix()) < 1e-4
