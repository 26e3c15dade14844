"""Planted truth: B is A in other bases, so the transferred task vector is known exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from taskferry import Alignment, fit
from taskferry.linalg.procrustes import Map
from tests.properties.equivariant import (
    Embedding,
    Equivariant,
    Widths,
    calibration,
    distance,
    loss,
    random_task_vector,
)

NARROW = Widths()
WIDE = Widths(residual=18, attention=13, value=11, hidden=20)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def planted(narrow: Widths, wide: Widths, dtype: torch.dtype) -> tuple[Equivariant, Equivariant, Embedding]:
    torch.manual_seed(7)
    A = Equivariant(narrow).to(dtype)
    embedding = Embedding(narrow, wide, depth=3)
    return A, embedding.model(A, wide), embedding


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [NARROW, WIDE], ids=["equal", "wider"])
def test_rotated_and_widened(wide: Widths, dtype: torch.dtype) -> None:
    A, B, embedding = planted(NARROW, wide, dtype)
    x = calibration(dtype=dtype).pairs[0][0].inputs["x"]
    assert torch.allclose(A(x), B(x), rtol=1e-3 if dtype == torch.float32 else 1e-9)  # the same function
    tau = random_task_vector(A)
    moved = fit(A, B, calibration(dtype=dtype), loss).apply(tau)
    assert distance(moved, embedding.task_vector(tau)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_narrowed(dtype: torch.dtype) -> None:
    """The reverse: a wide source that is a narrow target in disguise."""
    B, A, embedding = planted(NARROW, WIDE, dtype)
    tau = random_task_vector(B)
    moved = fit(A, B, calibration(dtype=dtype), loss).apply(embedding.task_vector(tau))
    assert distance(moved, tau) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_identity_pair_gives_tau_back(dtype: torch.dtype) -> None:
    A, _, _ = planted(NARROW, NARROW, dtype)
    tau = random_task_vector(A)
    alignment = fit(A, A, calibration(dtype=dtype), loss)
    assert distance(alignment.apply(tau), tau) < TOLERANCE[dtype]
    for quality in (*alignment.quality_in.values(), *alignment.quality_out.values()):
        assert quality.residual < 1e-3


def corrupted(alignment: Alignment, change_in: object, change_out: object) -> Alignment:
    def all_maps(maps, change):
        return {key: Map(R=change(R.dense())) for key, R in maps.items()}

    return replace(alignment, R_in=all_maps(alignment.R_in, change_in), R_out=all_maps(alignment.R_out, change_out))


def test_a_transposed_or_one_sided_map_fails_the_same_test() -> None:
    A, B, embedding = planted(NARROW, NARROW, torch.float64)
    tau = random_task_vector(A)
    truth = embedding.task_vector(tau)
    alignment = fit(A, B, calibration(), loss)

    def same(R):
        return R

    def transposed(R):
        return R.T

    def identity(R):
        return torch.eye(*R.shape, dtype=R.dtype)

    assert distance(corrupted(alignment, same, same).apply(tau), truth) < 1e-9
    for change_in, change_out in [(transposed, same), (same, transposed), (identity, same), (same, identity)]:
        assert distance(corrupted(alignment, change_in, change_out).apply(tau), truth) > 0.5


def test_where_nonlinearity_breaks_exactness() -> None:
    """With GELU the residual stream may still be rotated; rotating the hidden basis changes the function."""
    torch.manual_seed(7)
    A = Equivariant(NARROW, gelu=True).double()
    x = calibration().pairs[0][0].inputs["x"]
    tau = random_task_vector(A)

    residual_only = Embedding(NARROW, NARROW, 3, hidden=False)
    B = residual_only.model(A, NARROW, gelu=True)
    assert torch.allclose(A(x), B(x), rtol=1e-9)
    moved = fit(A, B, calibration(), loss).apply(tau)
    assert distance(moved, residual_only.task_vector(tau)) < 1e-9

    everything = Embedding(NARROW, NARROW, 3)
    B = everything.model(A, NARROW, gelu=True)
    assert not torch.allclose(A(x), B(x), rtol=1e-2)
    moved = fit(A, B, calibration(), loss).apply(tau)
    assert distance(moved, everything.task_vector(tau)) > 1e-3


def test_depth_takes_the_paper_s_blocks() -> None:
    """A target with every block doubled: block j of it is block round(j (D_A − 1) / (D_B − 1)) of the source."""
    torch.manual_seed(7)
    A = Equivariant(NARROW, depth=2).double()
    B = Equivariant(NARROW, depth=4).double()
    alignment = fit(A, B, calibration(), loss)
    chosen = {(pair.target.block, pair.source.block) for pair in alignment.pairs if pair.target.block is not None}
    assert chosen == {(0, 0), (1, 0), (2, 1), (3, 1)}
    back = fit(B, A, calibration(), loss)
    assert {(p.target.block, p.source.block) for p in back.pairs if p.target.block is not None} == {(0, 0), (1, 3)}
    unused = back.apply(random_task_vector(B)).coverage.unused  # type: ignore[union-attr]
    assert {name.split(".")[1] for name in unused} == {"1", "2"}
