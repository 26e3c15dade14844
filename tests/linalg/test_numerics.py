"""Numbers at their limits: the result is finite, or a refusal names the site. The same inputs give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from taskferry import Alignment, Batch, Calibration, TaskferryError, TaskVector, fit
from taskferry.collect.maps import NO_SIGNAL
from taskferry.disk.files import is_finite
from taskferry.linalg.procrustes import procrustes
from taskferry.linalg.sums import CrossCovariance
from tests.helpers.tiny import TINY, relative, tuned

LLAMA, BERT = TINY["llama"], TINY["bert"]


def finite(alignment: Alignment, A: nn.Module) -> TaskVector:
    """Apply a change of every parameter; every map and every moved number must be finite."""
    moved = alignment.apply(TaskVector.between(dict(A.named_parameters()), tuned(A)))
    tensors = [
        t for R in [*alignment.R_in.values(), *alignment.R_out.values()] for t in (R.R, R.U, R.V) if t is not None
    ]
    assert all(map(is_finite, tensors))
    assert all(is_finite(delta) for delta in moved.dense().deltas.values())  # type: ignore[arg-type]
    for quality in [*alignment.quality_in.values(), *alignment.quality_out.values()]:
        assert 0.0 <= quality.similarity <= 1.0
        assert 0.0 <= quality.residual <= 1.0
    return moved


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_do_not_overflow_or_forget(dtype: torch.dtype) -> None:
    """In float16 the sum of 4,096 products of 8 · 8 would be infinite, and 1 added to 4,096 in bfloat16 be lost."""
    generator = torch.Generator().manual_seed(0)
    X_A, X_B = (8 + torch.randn(4096, d, generator=generator) for d in (5, 7))
    sums, exact = CrossCovariance(5, 7), torch.zeros(5, 7, dtype=torch.float64)
    for a, b in zip(X_A.to(dtype).split(64), X_B.to(dtype).split(64), strict=True):
        sums.add(a, b)
        exact += a.double().T @ b.double()
    assert float(exact.min()) > torch.finfo(torch.float16).max
    assert relative(sums.matrix().double(), exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_other_precisions(dtype: torch.dtype) -> None:
    A, B = LLAMA.model(16, 2, 1).to(dtype), LLAMA.model(24, 2, 2).to(dtype)
    moved = finite(fit(A, B, LLAMA.calibration(samples=8), LLAMA.objective), A)
    assert len(moved) == 14


def test_gradients_that_overflow_name_the_site() -> None:
    """A float16 model whose loss is finite and whose gradients are not."""
    A, B = LLAMA.model(16, 2, 1).half(), LLAMA.model(24, 2, 2).half()

    def loud(model: nn.Module, batch: Batch) -> torch.Tensor:
        return 1e8 * LLAMA.objective.bind(model, [batch])(batch).float()

    with pytest.raises(TaskferryError, match=r"layers\.\d.*not finite.*float32"):
        fit(A, B, LLAMA.calibration(), loud)


def test_a_loss_that_is_no_number_names_the_model() -> None:
    A, B = LLAMA.model(16, 2, 1), LLAMA.model(24, 2, 2)
    with torch.no_grad():
        B.lm_head.weight.mul_(1e38)  # type: ignore[union-attr,operator]
    with pytest.raises(TaskferryError, match="one finite number is needed"):
        fit(A, B, LLAMA.calibration(), LLAMA.objective)


def test_a_dead_site_is_left_out_with_its_reason() -> None:
    """Its outputs are multiplied by zero: no gradient comes back, and no map can be made."""
    A, B = LLAMA.model(16, 2, 1), LLAMA.model(24, 2, 2)
    with torch.no_grad():
        B.get_submodule("model.layers.1.mlp.down_proj").weight.zero_()
    alignment = fit(A, B, LLAMA.calibration(), LLAMA.objective)
    moved = finite(alignment, A)
    kept = moved.coverage.kept()  # type: ignore[union-attr]
    for name in ("up_proj", "gate_proj"):
        assert kept[f"model.layers.1.mlp.{name}.weight"] == NO_SIGNAL
    assert "model.layers.1.mlp.down_proj.weight" in moved.deltas


def test_all_gradients_zero() -> None:
    A, B = LLAMA.model(16, 2, 1), LLAMA.model(24, 2, 2)
    alignment = fit(A, B, LLAMA.calibration(), lambda model, batch: 0.0 * LLAMA.objective.bind(model, [batch])(batch))
    assert not alignment.pairs
    assert not len(alignment.apply(TaskVector.between(dict(A.named_parameters()), tuned(A))))
    assert set(alignment.reasons.values()) >= {NO_SIGNAL}


def test_constant_activations_have_one_direction() -> None:
    """Every token the same: maps of rank one, exactly, and nothing made up beside it."""
    A, B = LLAMA.model(16, 2, 1), LLAMA.model(24, 2, 2)
    ids = torch.full((6, 8), 5)
    batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, None, tuple(range(6)))
    alignment = fit(A, B, Calibration([(batch, batch)]), LLAMA.objective)
    finite(alignment, A)
    assert alignment.quality_in["model.layers.0.self_attn.q_proj"].rank == 1


def test_one_token() -> None:
    A, B = BERT.model(16, 2, 1), BERT.model(24, 2, 2)
    ids = torch.tensor([[5], [9], [7]])
    batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.tensor([0, 1, 2]), (0, 1, 2))
    alignment = fit(A, B, Calibration([(batch, batch)]), BERT.objective)
    finite(alignment, A)
    assert max(q.rank for q in alignment.quality_in.values()) <= 3


def test_duplicated_samples_change_nothing() -> None:
    """Ten times the same samples: sums ten times as large, the same maps."""
    A, B = LLAMA.model(16, 2, 1).double(), LLAMA.model(24, 2, 2).double()
    once = LLAMA.calibration(samples=16)
    often = Calibration([pair for _ in range(10) for pair in once])
    one, ten = (finite(fit(A, B, c, LLAMA.objective), A).dense() for c in (once, often))
    for name, delta in one.deltas.items():
        assert relative(ten.deltas[name], delta) < 1e-9  # type: ignore[arg-type]


def test_a_huge_outlier_token() -> None:
    """Finite as long as float32 can hold its square; a refusal that names the site beyond."""
    generator = torch.Generator().manual_seed(0)
    X_A, X_B = (torch.randn(400, d, generator=generator) for d in (6, 8))
    for size in (1e3, 1e9, 1e18):
        X_A[7], X_B[7] = size, size
        sums = CrossCovariance(6, 8)
        sums.add(X_A, X_B)
        R, quality = sums.solve()
        assert is_finite(R.dense())
        assert 1 <= quality.rank <= 6
        assert 0 <= quality.similarity <= 1
    A, B = LLAMA.model(16, 2, 1), LLAMA.model(24, 2, 2)
    with torch.no_grad():
        for model in (A, B):
            model.get_submodule("model.layers.0.mlp.up_proj").weight.fill_(1e18)
            model.get_submodule("model.layers.0.mlp.gate_proj").weight.fill_(1e3)
            model.get_submodule("model.layers.0.mlp.down_proj").weight.mul_(1e-18)
    with pytest.raises(TaskferryError, match=r"layers\.0\.mlp.*not finite"):
        fit(A, B, LLAMA.calibration(samples=24), LLAMA.objective)


def test_sums_that_are_zero_or_tiny_or_of_rank_one() -> None:
    for C in (torch.zeros(5, 7), torch.full((5, 7), 1e-38), torch.full((5, 7), 1e-44), torch.full((5, 7), 3e38)):
        for dtype in (torch.float32, torch.float64):
            R, spectrum = procrustes(C.to(dtype))
            assert is_finite(R.dense())
            assert spectrum.rank == (1 if C.any() else 0), (C[0, 0], dtype)
    with pytest.raises(ValueError, match="not finite"):
        procrustes(torch.full((2, 2), torch.nan))


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_the_same_bytes_again_and_on_two_threads_nearly(tmp_path: Path) -> None:
    """One thread count: the same bytes. One and two threads: equal up to the order of float32 sums."""
    A, B = LLAMA.model(64, 2, 1), LLAMA.model(96, 3, 2)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    moved, files = [], []
    for threads in (1, 1, 2):
        torch.set_num_threads(threads)
        moved.append(fit(A, B, LLAMA.calibration(samples=48, micro_batch=16), LLAMA.objective).apply(tau))
        moved[-1].save(tmp_path / "tau.safetensors")
        files.append((tmp_path / "tau.safetensors").read_bytes())
    assert files[0] == files[1]
    worst = max(relative(moved[2].deltas[name], delta) for name, delta in moved[0].deltas.items())  # type: ignore[arg-type]
    assert worst < 1e-5
    print(f"one and two threads: {'the same bytes' if files[0] == files[2] else f'{worst:.1e}'}")
