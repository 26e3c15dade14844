"""Every solver equals the reference on the directions it keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.layers.tokens import GridResize
from taskferry.linalg.decompositions import STRIP, choose_solver, gram
from taskferry.linalg.polar import CUT, CUTS, best_quintic, schedule
from taskferry.linalg.procrustes import Map, bilinear, procrustes, procrustes_batch, procrustes_from_rows
from taskferry.linalg.sums import CrossCovariance, solve_all
from tests.helpers.tiny import relative


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def planted(d_A: int, d_B: int, sigma: Tensor, seed: int = 0) -> Tensor:
    """A float32 matrix with these singular values."""
    U = torch.linalg.qr(random(d_A, len(sigma), seed=seed))[0]
    V = torch.linalg.qr(random(d_B, len(sigma), seed=seed + 1))[0]
    return (U * sigma @ V.T).float()


@pytest.mark.parametrize("solver", ["eigh", "products"])
@pytest.mark.parametrize(("d_A", "d_B"), [(90, 90), (90, 130), (130, 90)])
@pytest.mark.parametrize("decades", [1.0, 3.0, 5.3])
def test_a_solver_equals_the_reference_on_the_kept_directions(solver: str, d_A: int, d_B: int, decades: float) -> None:
    """The spectrum falls to 5e-6 of its largest value: close to the tolerance, where squaring costs most."""
    C = planted(d_A, d_B, torch.logspace(0, -decades, min(d_A, d_B), dtype=torch.float64))
    reference, spectrum = procrustes(C, solver="svd")
    R, found = procrustes(C, solver=solver)  # type: ignore[arg-type]
    assert found.rank == spectrum.rank == min(d_A, d_B)
    assert relative(R.dense(), reference.dense()) < 1e-4
    assert found.nuclear == pytest.approx(spectrum.nuclear, rel=1e-5)
    assert found.largest == pytest.approx(spectrum.largest, rel=2e-2)


@pytest.mark.parametrize("solver", ["eigh", "products"])
def test_directions_below_the_tolerance_are_sent_to_zero(solver: str) -> None:
    sigma = torch.cat([torch.logspace(0, -2, 40, dtype=torch.float64), torch.logspace(-4, -5, 20, dtype=torch.float64)])
    C = planted(60, 80, sigma)
    reference, spectrum = procrustes(C, solver="svd", tolerance=1e-3)
    R, found = procrustes(C, solver=solver, tolerance=1e-3)  # type: ignore[arg-type]
    assert found.rank == spectrum.rank == 40
    assert relative(R.dense(), reference.dense()) < 1e-5
    everything, _ = procrustes(C, solver="svd", tolerance=1e-7)
    assert relative(R.dense(), everything.dense()) > 0.3  # the test can tell


def test_wide_gram_matrices_are_made_in_strips() -> None:
    C = random(STRIP + 100, 50)
    assert torch.allclose(gram(C).tril(), (C @ C.T).tril(), atol=1e-12)
    wide = planted(STRIP + 100, STRIP + 130, torch.logspace(0, -3, STRIP + 100, dtype=torch.float64))
    assert relative(procrustes(wide)[0].dense(), procrustes(wide, solver="svd")[0].dense()) < 1e-4


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-4, 1e-6, 1e-8])
def test_the_chain_of_polynomials_cuts_at_the_tolerance(tolerance: float) -> None:
    def value(x: float) -> float:
        for a, b, c in (*schedule(tolerance), *[CUT] * CUTS):
            x = a * x + b * x**3 + c * x**5
        return x

    for times in (0.01, 0.3, 0.8):
        assert abs(value(times * tolerance)) < 1e-4
    for x in [1.25 * tolerance, 2 * tolerance, *torch.linspace(10 * tolerance, 1, 50).tolist()]:
        assert value(x) == pytest.approx(1, abs=1e-6)


def test_the_best_quintic_has_equal_ripples() -> None:
    a, b, c = best_quintic(0.1, 1.0)
    x = torch.linspace(0.1, 1.0, 20_001, dtype=torch.float64)
    error = 1 - (a * x + b * x**3 + c * x**5)
    ripple = error.abs().max()
    ends = error[0], error[-1]
    assert ends[0] == pytest.approx(float(ripple), rel=1e-6)
    assert ends[1] == pytest.approx(-float(ripple), rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):  # and nothing near it is better
        da, db, dc = (1e-3 * torch.randn(3, generator=generator, dtype=torch.float64)).tolist()
        assert (1 - ((a + da) * x + (b + db) * x**3 + (c + dc) * x**5)).abs().max() > ripple


@pytest.mark.parametrize("solver", ["svd", "eigh", "products"])
def test_a_batch_equals_one_at_a_time(solver: str) -> None:
    spectra = [torch.logspace(0, -d, 20, dtype=torch.float64) for d in (1.0, 2.0, 4.0)]
    C = torch.stack([planted(20, 24, sigma, seed=5 * i) for i, sigma in enumerate(spectra)])
    for (R, spectrum), each in zip(procrustes_batch(C, solver=solver), C, strict=True):  # type: ignore[arg-type]
        alone, other = procrustes(each, solver=solver)  # type: ignore[arg-type]
        assert relative(R.dense(), alone.dense()) < 1e-5
        assert spectrum.rank == other.rank


def test_solvers_are_chosen_by_precision_policy_and_device() -> None:
    assert choose_solver(torch.zeros(2, 2), full=False) == "eigh"
    assert choose_solver(torch.zeros(2, 2), full=True) == "svd"
    assert choose_solver(torch.zeros(2, 2, dtype=torch.float64), full=False) == "svd"
    with pytest.raises(ValueError, match="null space"):
        procrustes(torch.eye(3), rank="full", solver="products")


def test_all_sums_are_solved_and_let_go() -> None:
    """Tiny ones of one shape in a batch, the others alone, each equal to its own solution."""
    sums, alone = {}, {}
    for i, (d_A, d_B, M) in enumerate([(8, 10, 60), (8, 10, 60), (8, 10, 3), (40, 40, 200), (8, 10, 60)]):
        X_A, X_B = random(M, d_A, seed=i).float(), random(M, d_B, seed=100 + i).float()
        for into in (sums, alone):
            into[f"site {i}"] = CrossCovariance(d_A, d_B)
            into[f"site {i}"].add(X_A, X_B)
    found = {key: (R, quality) for key, R, quality in solve_all(sums)}
    assert not sums
    assert set(found) == set(alone)
    for key, S in alone.items():
        R, quality = S.solve()
        assert relative(found[key][0].dense(), R.dense()) < 1e-5
        assert found[key][1].rank == quality.rank
        assert found[key][1].similarity == pytest.approx(quality.similarity, rel=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_a_sum_that_is_not_finite_names_its_site(count: int) -> None:
    sums = {f"site {i}": CrossCovariance(4, 4) for i in range(count)}
    for i, S in enumerate(sums.values()):
        X = random(20, 4, seed=i).float()
        S.add(X, X * (float("nan") if i == count - 1 else 1.0))
    with pytest.raises(TaskferryError, match=f"site {count - 1}: .*not finite"):
        list(solve_all(sums))


def test_factored_maps_are_the_same_maps() -> None:
    C = planted(30, 40, torch.logspace(0, -2, 30, dtype=torch.float64))
    dense, factored = procrustes(C)[0], procrustes(C, factored=True)[0]
    assert dense.R is not None
    assert factored.R is None
    assert relative(factored.dense(), dense.dense()) < 1e-6
    X_A, X_B = random(25, 30).float(), random(25, 40, seed=1).float()
    assert procrustes_from_rows(X_A, X_B, factored=True)[0].R is None


@pytest.mark.parametrize(("out_A", "in_A", "out_B", "in_B"), [(48, 12, 56, 14), (12, 48, 14, 56), (9, 9, 4, 30)])
def test_both_orders_of_the_bilinear_map_agree(out_A: int, in_A: int, out_B: int, in_B: int) -> None:
    """The cheaper order is taken; wide outputs and wide inputs take different ones."""
    tau = random(out_A, in_A, seed=2)
    for R_out in (Map(R=random(out_A, out_B)), Map(U=random(out_A, 3), V=random(out_B, 3, seed=1))):
        R_in = Map(R=random(in_A, in_B, seed=3))
        assert relative(bilinear(R_out, tau, R_in), R_out.dense().T @ tau @ R_in.dense()) < 1e-12
        assert relative(R_out.columns(tau), R_out.dense().T @ tau) < 1e-12


def test_a_grid_is_resized_as_torch_resizes_it() -> None:
    """Against the matrix of the resize, which is linear: the picture of the identity."""
    for prefix_A, prefix_B in ((1, 1), (2, 1), (1, 3)):
        x = random(2, prefix_A + 12, 5)
        tokens = GridResize(prefix_A, prefix_B, (3, 4), (5, 6))(x)
        eye = torch.eye(12, dtype=torch.float64).reshape(12, 1, 3, 4)
        weights = F.interpolate(eye, size=(5, 6), mode="bilinear", align_corners=False).reshape(12, 30)
        assert torch.allclose(tokens[:, prefix_B:], weights.T @ x[:, prefix_A:], atol=1e-12)
        shared = min(prefix_A, prefix_B)
        assert torch.equal(tokens[:, :shared], x[:, :shared])
        assert not tokens[:, shared:prefix_B].any()
