"""The eigenproblem equals the SVD on the directions it keeps; maps in both forms, and both orders of a bilinear map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry.layers.tokens import GridResize
from taskferry.linalg.procrustes import Map, bilinear, procrustes, procrustes_from_rows
from tests.helpers.tiny import relative


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def planted(d_A: int, d_B: int, sigma: Tensor, seed: int = 0) -> Tensor:
    """A float32 matrix with these singular values."""
    U = torch.linalg.qr(random(d_A, len(sigma), seed=seed))[0]
    V = torch.linalg.qr(random(d_B, len(sigma), seed=seed + 1))[0]
    return (U * sigma @ V.T).float()


@pytest.mark.parametrize(("d_A", "d_B"), [(90, 90), (90, 130), (130, 90)])
@pytest.mark.parametrize("decades", [1.0, 3.0, 5.3])
def test_single_precision_equals_the_reference_on_the_kept_directions(d_A: int, d_B: int, decades: float) -> None:
    """The spectrum falls to 5e-6 of its largest value: close to the tolerance, where squaring costs most."""
    C = planted(d_A, d_B, torch.logspace(0, -decades, min(d_A, d_B), dtype=torch.float64))
    reference, spectrum = procrustes(C.double())
    R, found = procrustes(C)
    assert found.rank == spectrum.rank == min(d_A, d_B)
    assert relative(R.dense().double(), reference.dense()) < 1e-4
    assert found.nuclear == pytest.approx(spectrum.nuclear, rel=1e-5)
    assert found.largest == pytest.approx(spectrum.largest, rel=1e-5)


def test_directions_below_the_tolerance_are_sent_to_zero() -> None:
    sigma = torch.cat([torch.logspace(0, -2, 40, dtype=torch.float64), torch.logspace(-4, -5, 20, dtype=torch.float64)])
    C = planted(60, 80, sigma)
    reference, spectrum = procrustes(C.double(), tolerance=1e-3)
    R, found = procrustes(C, tolerance=1e-3)
    assert found.rank == spectrum.rank == 40
    assert relative(R.dense().double(), reference.dense()) < 1e-5
    everything, _ = procrustes(C.double(), tolerance=1e-7)
    assert relative(R.dense().double(), everything.dense()) > 0.3  # the test can tell


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
