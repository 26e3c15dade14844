"""Rows of one length, whitened: planted rotations of any spectrum, rows against sums, invariances."""

from __future__ import annotations

import pytest
import torch

from taskferry.errors import TaskferryError
from taskferry.statistics import CrossCovariance, solve_all
from taskferry.whitening import Even, Whitened, inverse_root, unit, whiten_rows
from tests.tiny import relative


def rows(count: int, d: int, seed: int, steep: float = 0.0) -> torch.Tensor:
    """Normal rows whose directions have falling variance."""
    X = torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X * torch.exp(-steep * torch.arange(d))


def rotation(d: int, seed: int) -> torch.Tensor:
    X = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(X).Q


def test_every_gradient_row_counts_alike() -> None:
    """One row a thousand times larger changes nothing; rows of zeros stay out."""
    torch.manual_seed(0)
    X_A, X_B = torch.randn(50, 6), torch.randn(50, 8)
    plain, larger = Even(6, 8), Even(6, 8)
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
    with_zeros = Even(6, 8)
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
    a, b = few.whitened(), summed.whitened()
    assert relative(a.matrix(), b.matrix()) < 1e-8
    assert (a.energy_A, a.energy_B, a.rows) == pytest.approx((b.energy_A, b.energy_B, 9))
    W = inverse_root(unit(X_A).T @ unit(X_A))[0]
    assert relative(whiten_rows(unit(X_A)), unit(X_A) @ W) < 1e-8


def test_a_planted_rotation_comes_back_for_any_spectrum() -> None:
    X = rows(400, 10, 0, steep=0.3)
    Q = rotation(10, 3)
    sums = Whitened(10, 10)
    sums.add(X, X @ Q)
    R, quality = sums.whitened().solve()
    assert relative(R.dense(), Q) < 1e-6
    assert quality.similarity == pytest.approx(1.0)
    assert relative(R.dense(), Q.T) > 0.5


def test_a_rotation_is_found_behind_different_gains() -> None:
    """Both models see the same rows, each through its own stretching of space: only whitening takes that away."""
    Z, Q = rows(4000, 8, 0), rotation(8, 5)
    gains = [U @ torch.diag(torch.linspace(0.3, 3.0, 8, dtype=torch.float64)) @ U.T
             for U in (rotation(8, 1), rotation(8, 2))]  # fmt: skip
    plain, whitened = Even(8, 8), Whitened(8, 8)
    for sums in (plain, whitened):
        sums.add(Z @ gains[0], Z @ gains[1] @ Q)
    errors = [relative(R.dense(), Q) for R in (plain.solve()[0], whitened.whitened().solve()[0])]
    assert errors[0] > 0.2
    assert errors[1] < 0.1


def test_directions_that_no_row_has_stay_out_in_float32() -> None:
    """Rows of rank 150 in 192 and 256 dimensions: the map has rank 150, and maps nothing outside of it."""
    latent = rows(4000, 150, 0)
    X_A, X_B = ((latent @ rotation(192, 1)[:150]).float(), (latent @ rotation(256, 2)[:150]).float())
    sums = Whitened(192, 256)
    sums.add(X_A, X_B)
    assert sums.C is not None
    R, quality = sums.whitened().solve()
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


def test_parts_merge_to_the_whole() -> None:
    X_A, X_B = rows(200, 6, 0), rows(200, 8, 1)
    whole, first, second = Whitened(6, 8), Whitened(6, 8), Whitened(6, 8)
    whole.add(X_A, X_B)
    first.add(X_A[:3], X_B[:3])  # still rows
    second.add(X_A[3:], X_B[3:])
    first.merge(second)
    assert relative(first.whitened().matrix(), whole.whitened().matrix()) < 1e-10
    assert relative(first.whitened().matrix(), second.whitened().matrix()) > 1e-4


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    for count in (3, 400):
        sums = Whitened(10, 10)
        X = rows(count, 10, 0)
        X[1, 1] = float("nan")
        sums.add(X, X)
        with pytest.raises(TaskferryError, match=r"layer\.7.*not finite"):
            list(solve_all({"layer.7": sums.whitened()}))
