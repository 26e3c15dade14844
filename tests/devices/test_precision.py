"""Weights in half precision: sums in float32, the fine-tune with all its digits, no rounding that nobody asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry import Alignment, TaskVector, fit
from taskferry.collect.maps import Maps
from taskferry.config import ApplySettings, FitSettings, TransferSettings, load_settings
from taskferry.jobs import apply as apply_alignment
from taskferry.jobs import fit as fit_alignment
from taskferry.jobs import transfer
from taskferry.linalg.sums import CrossCovariance
from taskferry.models import load_model, load_tuned
from tests.devices import pretend
from tests.devices.test_jobs import APART, language, texts, weights, world  # noqa: F401
from tests.helpers.often import often
from tests.helpers.tiny import TINY, relative, tuned


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.every)])
@pytest.mark.parametrize("name", ["bert", "clip", "llama", "t5"])
def test_maps_of_half_precision_are_close_to_those_of_float32(name: str, dtype: torch.dtype) -> None:
    tiny = TINY[name]
    A, B, calibration = tiny.model(16, 2, seed=1), tiny.model(16, 2, seed=2), tiny.calibration(12, 6)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    exact = fit(A, B, calibration, tiny.objective, maps=Maps(tolerance=0.05)).apply(tau)
    half = fit(A.to(dtype), B.to(dtype), calibration, tiny.objective, maps=Maps(tolerance=0.05))
    assert all(R.dense().dtype == torch.float32 for R in (*half.R_in.values(), *half.R_out.values()))
    moved = half.apply(tau)
    assert set(moved.deltas) == set(exact.deltas)
    part = [name for name, delta in exact.deltas.items() if delta.ndim == 2]
    errors = sorted(relative(moved.deltas[name], exact.deltas[name]) for name in part)
    assert errors[len(errors) // 2] < 0.3  # of random models; a transposed or permuted map is at 1.4


def test_sums_of_half_precision_are_of_float32() -> None:
    X, Y = torch.randn(4000, 6), torch.randn(4000, 5)
    wide, half = CrossCovariance(6, 5), CrossCovariance(6, 5)
    for start in range(0, 4000, 500):
        x, y = X[start : start + 500].bfloat16(), Y[start : start + 500].bfloat16()
        half.add(x, y)
        wide.add(x.float(), y.float())
    assert half.C is not None
    assert wide.C is not None
    assert half.C.dtype == torch.float32
    assert torch.equal(half.C, wide.C)


@pytest.mark.parametrize("engine", ["whole", "blockwise"])
@pytest.mark.parametrize("dtype", often(["bfloat16", "auto"], ["auto"]))
def test_a_transfer_in_half_precision(world: Path, tmp_path: Path, dtype: str, engine: str) -> None:  # noqa: F811
    settings = TransferSettings(
        **texts(world, scale=1.0), **APART, dtype=dtype, engine=engine, method="bico", out=tmp_path / "out"
    )
    outcome = transfer(settings, command="test")
    assert outcome is not None
    stored = "float32" if dtype == "auto" else dtype
    assert outcome.record["placement"]["target"] == {"device": "pretend:1", "dtype": stored}
    # The model that is written has the digits of its base, and the change too.
    before, after = weights(world / "other"), weights(tmp_path / "out")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "encoder.layer.0.attention.self.query.weight" in moved
    assert "embeddings.word_embeddings.weight" not in moved


def test_a_fine_tune_keeps_the_digits_that_are_stored(world: Path) -> None:  # noqa: F811
    """Its change is smaller than the rounding of the weights that it is added to."""
    exact = load_tuned(str(world / "tuned"), load_model(world / "one")).tau
    rounded = load_tuned(str(world / "tuned"), load_model(world / "one", dtype="bfloat16")).tau
    assert all(torch.equal(delta, rounded.deltas[name]) for name, delta in exact.deltas.items())


def test_an_alignment_in_half_precision_knows_its_models(world: Path, tmp_path: Path) -> None:  # noqa: F811
    given = texts(world, method="bico")
    fit_alignment(FitSettings(**given, dtype="bfloat16", out=tmp_path / "x.alignment"))
    alignment = Alignment.load(tmp_path / "x.alignment")
    assert alignment.model("target")["dtype"] == "bfloat16"
    settings = {"alignment": tmp_path / "x.alignment", "source_tuned": given["source_tuned"]}
    apply_alignment(
        ApplySettings(**settings, source_base=given["source_base"], target_base=given["target_base"],
                      out=tmp_path / "out"), command="test",
    )  # fmt: skip
    record = json.loads((tmp_path / "out" / "taskferry.json").read_text())
    assert record["verdict"]["moved"]
    with pytest.raises(ValueError, match="is not the source that this alignment was fitted on"):
        apply_alignment(
            ApplySettings(**settings, source_base=given["target_base"], out=tmp_path / "no"), command="test"
        )


@pytest.mark.parametrize(
    ("more", "words"),
    [({"dtype": "int8"}, "dtype: Input should be 'float32', 'bfloat16', 'float16' or 'auto'"),
     ({"dtypes": "float16"}, "unknown setting 'dtypes'")],
)  # fmt: skip
def test_unknown_values_fail(world: Path, tmp_path: Path, more: dict[str, Any], words: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="settings") as told:
        load_settings(TransferSettings, None, {**language(world), "out": tmp_path / "out", **more})
    assert words in str(told.value)


def test_training_is_refused_before_any_work(world: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="trains, which needs weights in float32"):
        TransferSettings(**texts(world), dtype="bfloat16", out=tmp_path / "out")


def test_sums_are_not_rounded_where_products_of_models_may_be() -> None:
    x, y = (torch.randn(40, n).to("pretend:0") for n in (6, 5))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        pretend.rounded.clear()
        x.T @ y
        assert len(pretend.rounded) == 1  # a model's own product: as its user wants it
        sums = CrossCovariance(6, 5)
        sums.add(x, y)
        sums.add(x, y)
        R, _ = sums.solve()
        assert R.shape == (6, 5)
        assert len(pretend.rounded) == 1
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
