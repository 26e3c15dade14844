"""What must not matter: loss scale, sample order, micro-batch size, grouping of sites, padding, save and load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from taskferry import Alignment, Batch, Calibration, LowRank, TaskVector, fit
from taskferry.collect.maps import Maps
from taskferry.engines.pair import Work
from taskferry.linalg.sums import CrossCovariance
from tests.helpers.tiny import TINY, relative, tuned
from tests.properties.equivariant import (
    Equivariant,
    Widths,
    calibration,
    distance,
    loss,
    random_task_vector,
)

BOUND = 1e-5


@pytest.fixture(scope="module")
def pair() -> tuple[Equivariant, Equivariant]:
    """Two unrelated models of different width and depth, in float32."""
    torch.manual_seed(1)
    return Equivariant(Widths(), 2), Equivariant(Widths(14, 11, 10, 13), 3)


@pytest.fixture(scope="module")
def moved(pair: tuple[Equivariant, Equivariant]) -> TaskVector:
    return fit(*pair, calibration(dtype=torch.float32), loss).apply(random_task_vector(pair[0]))


def test_loss_scale(pair: tuple[Equivariant, Equivariant], moved: TaskVector) -> None:
    def scaled(model, batch):
        return (1000.0 if model is pair[0] else 1e-3) * loss(model, batch)

    other = fit(*pair, calibration(dtype=torch.float32), scaled).apply(random_task_vector(pair[0]))
    assert distance(other, moved) < BOUND


def test_sample_order(pair: tuple[Equivariant, Equivariant], moved: TaskVector) -> None:
    batches = [batch for batch, _ in calibration(dtype=torch.float32)]
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in ("x", "y")}
    order = torch.randperm(100, generator=torch.Generator().manual_seed(4))
    shuffled = [Batch({k: v[order[i : i + 8]] for k, v in inputs.items()}) for i in range(0, 100, 8)]
    other = fit(*pair, Calibration((b, b) for b in shuffled), loss).apply(random_task_vector(pair[0]))
    assert distance(other, moved) < BOUND


@pytest.mark.parametrize("size", [1, 7, 100])
def test_micro_batch_size(size: int, pair: tuple[Equivariant, Equivariant], moved: TaskVector) -> None:
    other = fit(*pair, calibration(micro_batch=size, dtype=torch.float32), loss)
    assert distance(other.apply(random_task_vector(pair[0])), moved) < BOUND


@pytest.mark.parametrize("memory", [1, 6000])
def test_grouping_of_sites(memory: int, pair: tuple[Equivariant, Equivariant], moved: TaskVector) -> None:
    passes: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "capture":
            passes.append(total)

    other = fit(*pair, calibration(dtype=torch.float32), loss, work=Work(sums_memory=memory), progress=progress)
    assert passes[0] > len(calibration())  # it did go over the calibration set more than once
    assert len(passes) == passes[0]
    assert distance(other.apply(random_task_vector(pair[0])), moved) < BOUND


def test_fit_save_load_apply_is_bit_for_bit(
    pair: tuple[Equivariant, Equivariant], moved: TaskVector, tmp_path: Path
) -> None:
    alignment = fit(*pair, calibration(dtype=torch.float32), loss)
    alignment.save(tmp_path / "a.alignment")
    loaded = Alignment.load(tmp_path / "a.alignment")
    assert loaded.provenance == alignment.provenance
    assert loaded.quality_in == alignment.quality_in
    assert loaded.pairs == alignment.pairs
    again = loaded.apply(random_task_vector(pair[0]))
    assert again.deltas.keys() == moved.deltas.keys()
    assert all(torch.equal(again.deltas[name], moved.deltas[name]) for name in moved.deltas)
    alignment.save(tmp_path / "b.alignment")
    assert (tmp_path / "a.alignment").read_bytes() == (tmp_path / "b.alignment").read_bytes()


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5"])
def test_padding_never_matters(name: str) -> None:
    """More padding, and other tokens under it: the same maps."""
    tiny = TINY[name]
    A, B = tiny.model(16, 2, 1).double(), tiny.model(24, 2, 2).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    plain = tiny.calibration(48)

    def padded(batch: Batch) -> Batch:
        inputs = dict(batch.inputs)
        n = len(batch)
        junk = torch.full((n, 3), 9)
        inputs["input_ids"] = torch.cat([inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 11), junk], 1)
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.zeros(n, 3, dtype=torch.long)], 1)
        if "labels" in inputs:
            inputs["labels"] = torch.cat([inputs["labels"], torch.full((n, 3), -100)], 1)
        return replace(batch, inputs=inputs)

    more = Calibration((padded(a), padded(b)) for a, b in plain)
    one, two = (fit(A, B, c, tiny.objective) for c in (plain, more))
    assert [q.rows for q in one.quality_in.values()] == [q.rows for q in two.quality_in.values()]
    first, second = one.apply(tau), two.apply(tau)
    for parameter, delta in first.deltas.items():
        assert relative(second.deltas[parameter], delta) < 1e-6, parameter


# Rank deficiency: fewer tokens than dimensions.


def deficient_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    X_A, X_B = torch.randn(20, 64, generator=g, dtype=dtype), torch.randn(20, 80, generator=g, dtype=dtype)
    return X_A, X_B, torch.randperm(20, generator=g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_permuting_the_samples_leaves_the_default_map(dtype: torch.dtype) -> None:
    X_A, X_B, order = deficient_rows(dtype)
    maps = []
    for rows in (torch.arange(20), order):
        S = CrossCovariance(64, 80)
        S.add(X_A[rows], X_B[rows])
        R, quality = S.solve()
        assert quality.rank == 20
        maps.append(R.dense())
    assert relative(maps[1], maps[0]) < 1e-6


def test_full_rank_policy_does_not_have_this_property() -> None:
    X_A, X_B, order = deficient_rows(torch.float64)
    maps = []
    for rows in (torch.arange(20), order):
        S = CrossCovariance(64, 80)
        S.add(X_A[rows], X_B[rows])
        R, quality = S.solve(rank="full")
        assert quality.rank == 64
        maps.append(R.dense())
    eye = torch.eye(64, dtype=torch.float64)
    assert all(torch.allclose(R @ R.T, eye, atol=1e-9) for R in maps)  # both are isometries …
    assert relative(maps[1], maps[0]) > 0.1  # … and differ where no token says anything


def test_rank_deficient_fit_does_not_depend_on_sample_order() -> None:
    """The same through a model: five samples, fewer tokens than dimensions in every space."""
    torch.manual_seed(1)
    widths = Widths(48, 40, 40, 44)
    A, B = Equivariant(widths, 2).double(), Equivariant(widths, 2).double()
    tau = random_task_vector(A)
    batch = calibration(5, 5).pairs[0][0]
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = Batch({name: value[order] for name, value in batch.inputs.items()})
    by_default = [fit(A, B, Calibration([(b, b)]), loss) for b in (batch, permuted)]
    assert max(q.rank for q in by_default[0].quality_in.values()) <= 30
    assert distance(by_default[1].apply(tau), by_default[0].apply(tau)) < 1e-6
    in_full = [fit(A, B, Calibration([(b, b)]), loss, maps=Maps(rank="full")).apply(tau) for b in (batch, permuted)]
    assert distance(in_full[1], in_full[0]) > 0.1


# Low-rank task vectors.


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "openclip", "timm", "t5"])
def test_lora_equals_dense_and_keeps_its_rank(name: str) -> None:
    tiny = TINY[name]
    A, B = tiny.model(16, 2, 1), tiny.model(24, 3, 2)
    alignment = fit(A, B, tiny.calibration(), tiny.objective)
    g = torch.Generator().manual_seed(6)
    weights = {pair.source.weight for pair in alignment.pairs if pair.source.role != "patch"}
    deltas = {}
    for weight in sorted(weights):
        rows, columns = alignment.source_parameters[weight]
        deltas[weight] = LowRank(torch.randn(rows, 4, generator=g), torch.randn(4, columns, generator=g))
    tau = TaskVector(deltas)
    low, dense = alignment.apply(tau), alignment.apply(tau.dense())
    assert low.deltas.keys() == dense.deltas.keys()
    for weight, delta in low.deltas.items():
        assert isinstance(delta, LowRank)
        assert delta.rank == 4
        assert relative(delta.dense(), dense.deltas[weight]) < BOUND
    assert abs(low.norm() - dense.norm()) < BOUND * dense.norm()


def test_lora_between_packed_and_split_families() -> None:
    """timm packs q, k and v, Hugging Face splits them: a LoRA goes both ways, exactly."""
    packed, split = TINY["timm"], TINY["vit"]
    A, B = packed.model(16, 2, 1), split.model(24, 2, 2)
    samples = packed.calibration()
    renamed = [(a, replace(b, inputs={"pixel_values": b.inputs["x"]})) for a, b in samples]
    g = torch.Generator().manual_seed(6)

    there = fit(A, B, Calibration(renamed), packed.objective)
    tau = TaskVector(
        {"blocks.1.attn.qkv.weight": LowRank(torch.randn(48, 4, generator=g), torch.randn(4, 16, generator=g))}
    )
    low, dense = there.apply(tau), there.apply(tau.dense())
    assert set(low.deltas) == {f"layers.1.attention.{part}_proj.weight" for part in "qkv"}
    assert all(relative(low.dense().deltas[n], d) < BOUND for n, d in dense.deltas.items())

    back = fit(B, A, Calibration((b, a) for a, b in renamed), packed.objective)
    tau = TaskVector(
        {
            f"layers.1.attention.{part}_proj.weight": LowRank(
                torch.randn(24, 4, generator=g), torch.randn(4, 24, generator=g)
            )
            for part in "qv"
        }
    )
    low, dense = back.apply(tau), back.apply(tau.dense())
    assert list(low.deltas) == ["blocks.1.attn.qkv.weight"]
    assert low.deltas["blocks.1.attn.qkv.weight"].rank == 8  # two adapters side by side in one matrix
    assert relative(low.dense().deltas["blocks.1.attn.qkv.weight"], dense.deltas["blocks.1.attn.qkv.weight"]) < BOUND
    row = low.coverage["blocks.1.attn.qkv.weight"]  # type: ignore[index]
    assert row.status == "partly"
    assert "attn.k" in row.reason
