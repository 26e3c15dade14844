"""What makes a fit small: few rows kept as rows, maps left out or left factored, copies in half precision."""

from __future__ import annotations

import pytest
import torch

from taskferry import TaskVector, fit
from taskferry.collect.capture import collect
from taskferry.collect.maps import Maps, Sums
from taskferry.collect.scale import _copy, moved_by
from taskferry.engines.pair import Work
from taskferry.engines.whole import WholePair
from taskferry.linalg.sums import CrossCovariance
from taskferry.taskvector import LowRank
from tests.helpers.tiny import TINY, relative

LLAMA = TINY["llama"]


def test_a_lora_goes_through_maps_that_are_never_formed() -> None:
    A, B = LLAMA.model(32, 2, 0), LLAMA.model(48, 2, 1)
    generator = torch.Generator().manual_seed(0)
    tau = TaskVector(
        {
            name: LowRank(
                torch.randn(p.shape[0], 2, generator=generator), torch.randn(2, p.shape[1], generator=generator)
            )
            for name, p in A.named_parameters()
            if name.endswith(("q_proj.weight", "v_proj.weight"))
        }
    )
    assert tau.low_rank
    assert not tau.dense().low_rank
    calibration = LLAMA.calibration(samples=8)
    factored = fit(A, B, calibration, only=tau.deltas.keys(), maps=Maps(factored=tau.low_rank))
    formed = fit(A, B, calibration)
    assert all(R.R is None for R in [*factored.R_in.values(), *factored.R_out.values()])
    assert {key.rsplit(".", 1)[-1] for key in factored.R_out} == {"q_proj", "v_proj"}  # no MLP map is solved
    one, other = factored.apply(tau), formed.apply(tau)
    for name, delta in other.deltas.items():
        assert relative(one.dense().deltas[name], delta.dense()) < 1e-5


def test_weights_that_were_stored_in_half_precision_are_copied_in_it() -> None:
    """Half of the memory, and after trying scales the same bits; other weights are copied as they are."""
    generator = torch.Generator().manual_seed(0)
    for stored, precision, size in (
        (torch.bfloat16, torch.float32, 2),
        (torch.float16, torch.float32, 2),
        (torch.float32, torch.float32, 4),
        (torch.bfloat16, torch.bfloat16, 2),
    ):
        model = LLAMA.model(32, 2, 0).to(stored).to(precision)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        name = next(name for name in before if name.endswith("q_proj.weight"))
        rows, columns = before[name].shape
        change = LowRank(torch.randn(rows, 2, generator=generator), torch.randn(2, columns, generator=generator))
        assert _copy(before[name]).nbytes == size * rows * columns
        with moved_by(model, TaskVector({name: change})) as set_scale:
            for scale in (0.5, 2.0):
                set_scale(scale)
            wanted = before[name].double() + 2.0 * change.dense().double()
            assert relative(model.get_parameter(name).detach(), wanted) < (1e-6 if precision == torch.float32 else 5e-3)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_few_tokens_of_a_wide_model_are_captured_in_one_pass(name: str) -> None:
    """Their rows are what takes memory: matrices of all directions would not fit, and do not arise."""
    tiny = TINY[name]
    A, B, calibration = tiny.model(96, 2, 0), tiny.model(128, 2, 1), tiny.calibration(samples=3)
    rows = calibration.tokens()
    assert rows is not None
    pair = WholePair(A, B, calibration, tiny.objective)
    sides = [(p.source.shape[side], p.target.shape[side]) for p in pair.pairs for side in (0, 1)]
    foretold = sum(CrossCovariance.numbers(*side, rows) for side in sides)
    assert 2 * foretold < sum(CrossCovariance.numbers(*side) for side in sides)
    sums = Sums()
    collect(sums, *pair._sides(Maps()), pair.pairs, calibration, Maps())
    held = [S for some in (sums.inputs, sums.outputs) for S in some.values()]
    assert sum(t.numel() for S in held for rows in S.kept for t in rows) <= foretold
    assert all(S.C is None for S in held)
    pair = WholePair(A, B, calibration, tiny.objective, work=Work(sums_memory=4 * foretold))
    assert len(list(pair._groups(pair.pairs))) == 1
