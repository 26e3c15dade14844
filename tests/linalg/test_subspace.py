"""Maps of the strongest directions alone: equal to all where there are no others, close where those are weak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from taskferry.linalg.subspace import by_strongest, products, strongest
from taskferry.linalg.sums import CrossCovariance, solve_all
from taskferry.linalg.whitening import Whitened
from tests.helpers.tiny import relative
from tests.linalg.test_whitening import rotation, rows

KINDS = (CrossCovariance, Whitened)


def spread(count: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of one latent in 90 and 120 dimensions."""
    latent = rows(count, rank, seed, steep=0.02)
    return latent @ rotation(90, 1)[:rank], latent @ rotation(120, 2)[:rank]


def solved(kind: type[CrossCovariance], X_A: Tensor, X_B: Tensor, directions: int) -> tuple[Tensor, int]:
    sums = kind(X_A.shape[1], X_B.shape[1], directions=directions)
    sums.add(X_A, X_B)
    R, quality = sums.solve(tolerance=1e-5)
    return R.dense(), quality.rank


def test_the_span_of_the_strongest_directions_is_found() -> None:
    X = rows(300, 40, 0) @ rotation(90, 1)[:40]
    S = X.T @ X
    Q = strongest(lambda Y: S @ Y, 90, 40, S)
    assert relative(Q.T @ Q, torch.eye(40, dtype=torch.float64)) < 1e-12
    assert relative(Q @ (Q.T @ S), S) < 1e-10
    assert relative(strongest(lambda Y: S @ Y, 90, 40, S), Q) == 0  # no chance in it
    few = strongest(lambda Y: S @ Y, 90, 20, S)
    assert relative(few @ (few.T @ S), S) > 1e-2  # the test can tell


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [60, 400], ids=["rows", "sums"])
def test_where_there_are_no_others_the_map_is_that_of_all_directions(kind: type[CrossCovariance], count: int) -> None:
    X_A, X_B = spread(count, 30)
    whole, rank = solved(kind, X_A, X_B, 0)
    narrow, again = solved(kind, X_A, X_B, 35)
    assert rank == again == 30
    assert relative(narrow, whole) < 1e-6
    assert relative(narrow, rotation(90, 1)[:30].T @ rotation(120, 2)[:30]) < 1e-6
    turned, _ = solved(kind, X_B, X_A, 35)
    assert relative(turned.T, narrow) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_moved_hardly_changes_where_the_others_are_weak(kind: type[CrossCovariance]) -> None:
    """Columns of a change are sums of rows: they have little of what is weak."""
    latent = rows(500, 90, 0, steep=0.1)
    noise = rows(500, 90, 3, steep=0.1)
    X_A, X_B = latent @ rotation(90, 1), (latent + 0.1 * noise) @ rotation(120, 2)[:90]
    change = X_A[:30].T @ rows(30, 4, 5)
    moved = [solved(kind, X_A, X_B, directions)[0].T @ change for directions in (0, 44, 22, 4)]
    errors = [relative(each, moved[0]) for each in moved[1:]]
    assert errors[0] < 0.03
    assert errors[0] < errors[1] < errors[2]
    assert errors[2] > 0.1


def test_rows_and_sums_say_the_same() -> None:
    X_A, X_B = spread(88, 60)
    few, many = Whitened(90, 120, directions=40), Whitened(90, 120, directions=40)
    few.add(X_A, X_B)
    many.add(X_A, X_B)
    assert few.C is None
    many.matrix()
    assert many.C is not None
    assert relative(few.solve()[0].dense(), many.solve()[0].dense()) < 1e-8
    assert few.solve()[1].rank == many.solve()[1].rank == 40


@pytest.mark.parametrize("directions", [20, 50])
def test_rows_of_a_wide_space_stay_while_they_take_less_room_than_moments(directions: int) -> None:
    """Also where they are more than directions: then both sides are narrowed (20), or the wider one (50)."""
    limit = Whitened.numbers(90, 120) // 210
    assert limit > 120
    X_A, X_B = spread(limit + 1, 60)
    few, many = Whitened(90, 120, directions=directions), Whitened(90, 120, directions=directions)
    few.add(X_A[:limit], X_B[:limit])
    many.add(X_A[:limit], X_B[:limit])
    many.matrix()
    assert few.C is None
    assert many.C is not None
    for given, same in ((few, many), (few.plain(), many.plain())):
        for rank in ("range", "full"):
            (R, quality), (expected, told) = given.solve(rank=rank), same.solve(rank=rank)
            # What no row has, a full map fills up at will.
            assert relative(X_A @ R.dense(), X_A @ expected.dense()) < 1e-6
            assert quality.rank == told.rank
            assert quality.similarity == pytest.approx(told.similarity, rel=1e-6)
    assert few.C is None  # nobody made it
    assert Whitened.numbers_of(limit, 90, 120, directions) == limit * 210
    assert Whitened.numbers_of(limit, 90, 120) == Whitened.numbers(90, 120)
    few.add(X_A[limit:], X_B[limit:])
    assert few.C is not None
    assert Whitened.numbers_of(limit + 1, 90, 120, directions) == Whitened.numbers(90, 120)


def test_a_side_that_is_no_wider_stays_whole() -> None:
    X_A, X_B = spread(400, 40)
    whole, _ = solved(Whitened, X_A, X_B, 0)
    one_side, _ = solved(Whitened, X_A, X_B, 50)
    assert relative(one_side, whole) < 1e-6
    assert not CrossCovariance(90, 120, directions=45).wide
    assert CrossCovariance(90, 120, directions=44).wide


def test_all_directions_are_kept_where_they_are_asked_for() -> None:
    X_A, X_B = spread(400, 90)
    sums = Whitened(90, 120, directions=20)
    sums.add(X_A, X_B)
    assert sums.solve(rank="full")[1].rank == 90
    assert sums.plain().solve()[1].rank == 20
    assert [quality.rank for _, _, quality in solve_all({"a": sums, "b": sums.plain()})] == [20, 20]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_are_refused(kind: type[CrossCovariance]) -> None:
    X_A, X_B = spread(400, 40)
    X_A[3, 4] = float("nan")
    sums = kind(90, 120, directions=20)
    sums.add(X_A, X_B)
    with pytest.raises(ValueError, match="not finite"):
        sums.solve()


def test_the_decomposition_is_that_of_the_matrix() -> None:
    C = rows(90, 120, 0, steep=0.3)
    U, sigma, V = by_strongest(products(C), (90, 120), 60, C)
    assert relative((U * sigma) @ V.T, C) < 1e-6
    assert relative(U.T @ U, torch.eye(60, dtype=torch.float64)) < 1e-8
    V_2, sigma_2, U_2 = by_strongest(products(C.T), (120, 90), 60, C)
    assert relative((U_2 * sigma_2) @ V_2.T, C) < 1e-6
    X, Y = rows(70, 90, 1), rows(70, 120, 2)
    for width, of_rows, of_matrix in zip((120, 90), products(X, Y), products(X.T @ Y), strict=True):
        Z = rows(width, 3, 3)
        assert relative(of_rows(Z), of_matrix(Z)) < 1e-12


@pytest.mark.parametrize("count", [200, 2000], ids=["rows", "sums"])
def test_a_strong_mean_hides_no_directions(count: int) -> None:
    """Activations are not centred, and sums are in float32: what a map keeps of the rest must not drown in rounding."""
    latent = torch.cat([torch.full((count, 1), 100.0, dtype=torch.float64), rows(count, 60, 0, steep=0.0)], 1)
    X_A = (latent @ rotation(300, 1)[:61]).float()
    X_B = (latent @ rotation(320, 2)[:61]).float()
    narrow, rank = solved(CrossCovariance, X_A, X_B, 100)
    other = X_A - X_A.mean(0)
    assert rank >= 61
    assert relative(other @ narrow, X_B - X_B.mean(0)) < 0.02


@pytest.mark.parametrize("count", [80, 500], ids=["rows", "sums"])
def test_models_that_differ_by_a_rotation_have_spans_that_differ_by_it(count: int) -> None:
    turn = rotation(90, 4)
    X = rows(count, 90, 0, steep=0.02) @ rotation(90, 1)
    R, rank = solved(Whitened, X, X @ turn, 30)
    P = R @ turn.T
    assert rank == 30
    assert relative(P, P.T) < 1e-6
    assert relative(P @ P, P) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_rows_does_not_say_how_many_directions_a_map_has(kind: type[CrossCovariance]) -> None:
    """Maps of a fold are judged in place of those of all samples: they are of one kind."""
    for count in (15, 25, 45, 85, 400):
        X_A, X_B = spread(count, 88)
        assert solved(kind, X_A, X_B, 20)[1] == min(count, 20)


def test_a_residual_counts_what_lies_outside_of_the_span() -> None:
    latent = rows(600, 90, 0, steep=0.02)
    X_A, X_B = latent @ rotation(90, 1), (latent + rows(600, 90, 3, steep=0.02)) @ rotation(120, 2)[:90]
    found = []
    for directions in (0, 30):
        sums = Whitened(90, 120, directions=directions)
        sums.add(X_A, X_B)
        found.append((sums.ready().matrix(), *sums.solve()))
    (C, whole, quality), (_, narrow, told) = found
    exact = quality.similarity * float((narrow.dense() * C).sum() / (whole.dense() * C).sum())
    assert told.similarity <= exact
    assert told.similarity == pytest.approx(exact, rel=0.3)
    assert told.residual > quality.residual
