"""The mathematics on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taskferry.linalg.procrustes import Map, bilinear, procrustes, procrustes_from_rows
from taskferry.linalg.sums import CrossCovariance
from tests.helpers.tiny import relative

SHAPES = [(6, 6), (6, 9), (9, 6)]


def rows(M: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(M, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("d_A", "d_B"), SHAPES)
def test_it_is_the_best_isometry(d_A: int, d_B: int) -> None:
    """No random isometry, and no small turn of the solution, comes closer (equations 6 and 7)."""
    X_A, X_B = rows(50, d_A, 0), rows(50, d_B, 1)
    R, spectrum = procrustes(X_A.T @ X_B)
    matrix = R.dense()
    gram = matrix @ matrix.T if d_A <= d_B else matrix.T @ matrix
    assert torch.allclose(gram, torch.eye(min(d_A, d_B), dtype=gram.dtype), atol=1e-12)
    best = torch.trace(matrix.T @ X_A.T @ X_B)  # ⟨X_A R, X_B⟩, what every isometry competes in
    assert torch.isclose(best, torch.tensor(spectrum.nuclear, dtype=best.dtype))
    for seed in range(50):
        other = (
            torch.linalg.qr(rows(d_B, d_A, seed + 2))[0].T if d_A <= d_B else torch.linalg.qr(rows(d_A, d_B, seed))[0]
        )
        assert torch.trace(other.T @ X_A.T @ X_B) < best
        skew = rows(d_B, d_B, seed + 100)
        turn = torch.matrix_exp(0.05 * (skew - skew.T))
        assert torch.trace((matrix @ turn).T @ X_A.T @ X_B) <= best + 1e-9


@pytest.mark.parametrize(("d_A", "d_B"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_planted_isometry_is_recovered(d_A: int, d_B: int, dtype: torch.dtype) -> None:
    wide, narrow = max(d_A, d_B), min(d_A, d_B)
    Q = torch.linalg.qr(rows(wide, wide, 3))[0][:narrow].to(dtype)  # [narrow, wide]
    X = rows(80, narrow, 4, dtype)
    X_A, X_B = (X, X @ Q) if d_A <= d_B else (X @ Q, X)
    R, _ = procrustes(X_A.T @ X_B)
    truth = Q if d_A <= d_B else Q.T
    assert relative(R.dense(), truth) < (1e-5 if dtype == torch.float32 else 1e-12)
    if d_A == d_B:
        assert relative(R.dense().T, truth) > 0.5


@settings(max_examples=60, deadline=None)
@given(
    d_A=st.integers(2, 24),
    d_B=st.integers(2, 24),
    M=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_path_gives_the_same_partial_isometry(d_A: int, d_B: int, M: int, seed: int, dtype: torch.dtype) -> None:
    """Rows or sum, eigenproblem or SVD, merged or whole: one map, an isometry on what was seen, zero elsewhere."""
    X_A, X_B = rows(M, d_A, seed, dtype), rows(M, d_B, seed + 1, dtype)
    S, left, right = (CrossCovariance(d_A, d_B) for _ in range(3))
    S.add(X_A, X_B)
    left.add(X_A[: M // 2], X_B[: M // 2])
    right.add(X_A[M // 2 :], X_B[M // 2 :])
    left.merge(right)
    exact = X_A.double().T @ X_B.double()
    reference, spectrum = procrustes(exact, tolerance=1e-4)
    condition = spectrum.largest / max(spectrum.smallest, 1e-30)
    bound = condition * (3e-6 if dtype == torch.float32 else 1e-13)
    for statistic in (S, left):
        R, quality = statistic.solve(tolerance=1e-4)
        assert torch.allclose(statistic.matrix().double(), exact, atol=1e-4)
        if bound < 1e-2:  # else a direction at the edge of the tolerance may go either way
            assert quality.rank == spectrum.rank
            assert relative(R.dense().double(), reference.dense()) < bound
        P = R.dense().double() @ R.dense().double().T
        assert torch.allclose(P @ P, P, atol=1e-4)  # a projection: partial isometry
        assert 0 <= quality.similarity <= 1
        assert 0 <= quality.residual <= 1


def test_rows_and_matrix_agree_on_deficient_rank() -> None:
    X_A, X_B = rows(10, 40, 0), rows(10, 30, 1)
    by_rows, spectrum = procrustes_from_rows(X_A, X_B)
    by_matrix, other = procrustes(X_A.T @ X_B)
    assert spectrum.rank == other.rank == 10
    assert by_rows.factors is not None
    assert by_rows.factors[0].shape == (40, 10)
    assert relative(by_rows.dense(), by_matrix.dense()) < 1e-9


def test_zero_rows_are_dropped_and_do_not_count() -> None:
    """In the last block of a class-token model one token a sample has a gradient."""
    X_A, X_B = rows(200, 16, 0), rows(200, 16, 1)
    X_A[torch.arange(200) % 50 != 0] = 0
    S = CrossCovariance(16, 16)
    S.add(X_A, X_B)
    R, quality = S.solve()
    assert quality.rows == quality.rank == 4
    assert R.factors is not None
    assert relative(R.dense(), procrustes(X_A.T @ X_B)[0].dense()) < 1e-9


def test_identical_spaces_have_no_residual() -> None:
    X = rows(100, 12, 0)
    S = CrossCovariance(12, 12)
    S.add(X, X)
    R, quality = S.solve()
    assert relative(R.dense(), torch.eye(12, dtype=torch.float64)) < 1e-12
    assert quality.similarity == pytest.approx(1)
    assert quality.residual < 1e-6


def test_the_bilinear_map() -> None:
    R_in, R_out = Map(R=rows(4, 6, 0)), Map(U=rows(5, 2, 1), V=rows(7, 2, 2))
    tau = rows(5, 4, 3)
    expected = R_out.dense().T @ tau @ R_in.dense()
    assert expected.shape == (7, 6)
    assert torch.allclose(bilinear(R_out, tau, R_in), expected)
    with pytest.raises(ValueError, match=r"\(4, 5\).*\(5, 4\)"):
        bilinear(R_out, tau.T, R_in)


def test_what_cannot_be_solved_says_so() -> None:
    with pytest.raises(ValueError, match="not finite"):
        procrustes(torch.full((3, 3), torch.nan))
    with pytest.raises(ValueError, match="matrix"):
        procrustes(torch.zeros(3))
    with pytest.raises(ValueError, match=r"dense .R. or factored"):
        Map()
    S = CrossCovariance(3, 4)
    assert S.solve()[1].rank == 0
    with pytest.raises(ValueError, match="same number of rows"):
        S.add(torch.zeros(2, 3), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="cannot merge"):
        S.merge(CrossCovariance(4, 4))


def test_half_precision_is_summed_in_float32() -> None:
    X = torch.full((4096, 2), 8.0, dtype=torch.float16)  # the sum, 262144, is beyond float16
    S = CrossCovariance(2, 2)
    S.add(X, X)
    assert S.matrix().dtype == torch.float32
    assert torch.equal(S.matrix(), torch.full((2, 2), 262144.0))


def test_a_decomposition_that_does_not_converge_has_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK gives up on some matrices whose singular values are nearly equal."""
    X_A, X_B = torch.randn(9, 20, dtype=torch.float64), torch.randn(9, 30, dtype=torch.float64)
    C = torch.randn(12, 16, dtype=torch.float64)
    expected = procrustes(C)[0].dense(), procrustes_from_rows(X_A, X_B)[0].dense()

    def fails(*given: object, **named: object) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    found = procrustes(C)[0].dense(), procrustes_from_rows(X_A, X_B)[0].dense()
    assert all(relative(a, b) < 1e-9 for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="'range'"):
        procrustes(C, rank="full")  # eigenvectors alone would leave holes where it must be an isometry
