"""The step against a dense K-FAC in float64, exact Gauss-Newton solutions, and what must not change it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from taskferry.linalg.natural import Factor, cut, fisher_root, full_step, lowest_rank, whitened, whitened_product
from tests.helpers.tiny import relative

OUT, IN, SAMPLES = 9, 14, 7
DAMPING = 0.1
EXACT = 1e-9


def rotation(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


def rows(count: int, d: int, seed: int, steep: float = 0.0) -> Tensor:
    """Gaussian rows whose coordinates shrink by e^-steep one after the other."""
    made = torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made * torch.exp(-steep * torch.arange(d, dtype=torch.float64))


def layer(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients g, inputs x and probes e of a layer, uneven in turned spaces, so that a transposed factor shows."""
    g = rows(count, OUT, 0, steep=0.3) @ rotation(OUT, 1)
    x = rows(count, IN, 2, steep=0.2) @ rotation(IN, 3)
    return g, x, rows(count, OUT, 4, steep=0.2) @ rotation(OUT, 5)


def damped(C: Tensor, damping: float = DAMPING) -> Tensor:
    return C + damping * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype)


def metrics(x: Tensor, e: Tensor, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    return damped(e.T @ e / SAMPLES, damping), damped(x.T @ x / len(x), damping)


def dense(g: Tensor, x: Tensor, e: Tensor, damping: float = DAMPING) -> Tensor:
    """K-FAC by the full Kronecker product: vec(ΔW) = −(Ŝ ⊗ Â)⁻¹ vec(gᵀx), row by row."""
    solved = torch.linalg.solve(torch.kron(*metrics(x, e, damping)), (g.T @ x).flatten())
    return -solved.reshape(g.shape[1], x.shape[1])


def factors(g: Tensor, x: Tensor, e: Tensor, damping: float = DAMPING) -> tuple[Factor, Factor]:
    return Factor.of_rows(e, damping, count=SAMPLES, span=g), Factor.of_rows(x, damping)


def moved(g: Tensor, x: Tensor, e: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    S, A = factors(g, x, e)
    return lowest_rank(whitened(g, x, S, A), S, A, rank)


def length(change: Tensor, x: Tensor, e: Tensor) -> float:
    """tr(Ŝ ΔW Â ΔWᵀ): the square of a change in the metric of the step."""
    S, A = metrics(x, e)
    return float((S @ change @ A * change).sum())


@pytest.mark.parametrize("count", [1, 2, 4, 6, 11, 60])
@pytest.mark.parametrize("damping", [0.01, 0.1, 1.0])
def test_it_is_a_dense_kfac(count: int, damping: float) -> None:
    g, x, e = layer(count)
    S, A = factors(g, x, e, damping)
    assert (A.basis is None) == (2 * count > IN)  # in a basis of few rows, and in all directions
    assert relative(full_step(whitened(g, x, S, A), S, A), dense(g, x, e, damping)) < EXACT


def test_products_are_as_good_as_rows() -> None:
    g, x, e = layer(60)
    S, A = Factor.of(e.T @ e / SAMPLES, DAMPING), Factor.of(x.T @ x / 60, DAMPING)
    assert relative(whitened_product(g.T @ x, S, A), whitened(g, x, *factors(g, x, e))) < EXACT


def test_few_rows_never_need_a_square_of_the_width() -> None:
    g, x, e = (torch.randn(5, d) for d in (3_000, 4_000, 3_000))
    S, A = factors(g, x, e)
    assert S.root.shape == (10, 10)  # the probes and the gradients span them
    assert A.root.shape == (5, 5)
    left, right, _ = lowest_rank(whitened(g, x, S, A), S, A, rank=2)
    assert (left.shape, right.shape) == ((3_000, 2), (2, 4_000))


@pytest.mark.parametrize("count", [3, 60])
def test_a_linear_layer_of_a_squared_loss_is_solved_in_one_step(count: int) -> None:
    """½ ‖x Wᵀ − y‖² has the metric 1 at its outputs: without damping the step lands on the least squares solution."""
    x, y, W = rows(count, IN, 0), rows(count, OUT, 1), rows(OUT, IN, 2)
    g, outputs = x @ W.T - y, torch.eye(OUT, dtype=torch.float64)
    # Where samples are fewer than directions, the least change that fits them.
    wanted = torch.linalg.lstsq(x, -g, driver="gelsd").solution.T
    S, A = Factor.of(outputs, 0.0), Factor.of_rows(x, 1e-13)
    assert relative(full_step(whitened(g, x, S, A) / count, S, A), wanted) < EXACT


def test_a_softmax_layer_takes_the_exact_gauss_newton_step() -> None:
    """At W = 0 all samples share diag p − p pᵀ, so the curvature is a Kronecker product: nothing is approximated."""
    x = rows(40, IN, 0)
    labels = torch.nn.functional.one_hot(torch.arange(40) % OUT, OUT).double()
    p = torch.full((40, OUT), 1 / OUT, dtype=torch.float64)
    g, fisher = p - labels, torch.diag(p[0]) - p[0][:, None] * p[0]
    wanted = -(torch.linalg.pinv(torch.kron(fisher, x.T @ x)) @ (g.T @ x).flatten()).reshape(OUT, IN)
    S, A = Factor.of(fisher, 1e-8), Factor.of_rows(x, 0.0)
    # The sum of all outputs is free: damping alone holds it.
    assert relative(full_step(whitened(g, x, S, A) / 40, S, A), wanted) < 1e-7


@pytest.mark.parametrize("count", [4, 60])
def test_a_turned_target_takes_the_turned_step(count: int) -> None:
    g, x, e = layer(count)
    P, Q = rotation(OUT, 7), rotation(IN, 8)
    left, right, slope = moved(g, x, e, 3)
    left_turned, right_turned, again = moved(g @ P, x @ Q, e @ P, 3)
    assert relative(left_turned @ right_turned, P.T @ left @ right @ Q) < EXACT
    assert again == pytest.approx(slope, rel=EXACT)


@pytest.mark.parametrize("count", [6, 60])
def test_the_cut_is_the_best_of_its_rank_in_the_metric_of_the_step(count: int) -> None:
    g, x, e = layer(count)
    whole = dense(g, x, e)
    left, right, slope = moved(g, x, e, rank=2)
    assert left.shape[1] == 2
    lost = length(left @ right - whole, x, e)
    U, sigma, Vh = torch.linalg.svd(whole)
    assert lost < 0.9 * length((U[:, :2] * sigma[:2]) @ Vh[:2] - whole, x, e)
    # What is kept stands at a right angle to what is lost, and is as steep as it is long.
    assert lost + length(left @ right, x, e) == pytest.approx(length(whole, x, e), rel=EXACT)
    assert slope == pytest.approx(float((g.T @ x * (left @ right)).sum()), rel=EXACT)
    assert -slope == pytest.approx(length(left @ right, x, e), rel=EXACT)


def test_a_cut_to_more_than_there_is_changes_nothing() -> None:
    g, x, e = layer(3)
    left, right, _ = moved(g, x, e, rank=8)
    assert relative(left @ right, dense(g, x, e)) < EXACT


@pytest.mark.parametrize("count", [4, 60])
def test_two_changes_are_cut_together_in_the_metric(count: int) -> None:
    """By Gram matrices of the factors alone: as good as a decomposition of L_Sᵀ ΔW L_A."""
    g, x, e = layer(count)
    left, right = rows(OUT, 5, 10), rows(5, IN, 11)
    S = Factor.of_rows(e, DAMPING, count=SAMPLES, span=torch.cat([g, left.T]))
    A = Factor.of_rows(x, DAMPING, span=right)
    short_left, short_right = cut(left, right, S.gram(left.T), A.gram(right), 2)
    assert short_left.shape[1] == 2
    L_S, L_A = (torch.linalg.cholesky(C) for C in metrics(x, e))
    U, sigma, Vh = torch.linalg.svd(L_S.T @ left @ right @ L_A)
    best = torch.linalg.solve(L_S.T, (U[:, :2] * sigma[:2]) @ Vh[:2]) @ torch.linalg.inv(L_A)
    assert relative(short_left @ short_right, best) < EXACT
    whole_left, whole_right = cut(left, right, S.gram(left.T), A.gram(right), 5)
    assert relative(whole_left @ whole_right, left @ right) < EXACT


def test_nothing_that_reaches_a_layer_is_no_change() -> None:
    g, x, e = (torch.zeros(20, d) for d in (OUT, IN, OUT))
    left, right, slope = moved(g, x, e, rank=2)
    assert not (left @ right).any()
    assert slope == 0


def test_probes_have_the_curvature_of_a_softmax() -> None:
    """Over all signs of three outputs exactly: E[v vᵀ] = diag p − p pᵀ, the Hessian of a cross-entropy."""
    z = torch.tensor([[0.3, -1.2, 0.9]], dtype=torch.float64)
    signs = torch.tensor([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], dtype=torch.float64)
    v = fisher_root(z.expand(8, 3), signs)
    hessian = torch.autograd.functional.hessian(lambda s: -s.log_softmax(-1)[0, 1], z)[0, :, 0]
    assert relative(v.T @ v / 8, hessian) < EXACT
