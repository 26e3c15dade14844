"""The scale search: near the fine grid's minimum in twelve looks, on both sides of 1, and never to harm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from taskferry import Batch, TaskVector
from taskferry.scale import calibration_loss, choose_scale, moved_by, scale_on_calibration
from tests.tiny import TINY, tuned

SHAPES = {
    "parabola": lambda x, m, a: a * (x - m) ** 2,
    "steep on one side": lambda x, m, a: math.exp(a * (x - m)) - a * (x - m),
    "flat far away": lambda x, m, a: -math.exp(-(((x - m) / a) ** 2)),
    "kink": lambda x, m, a: abs(x - m) ** 1.3,
}


@settings(max_examples=200, deadline=None)
@given(shape=st.sampled_from(sorted(SHAPES)), m=st.floats(0.2, 3.8), a=st.floats(0.3, 5))
def test_it_finds_what_a_fine_grid_finds(shape: str, m: float, a: float) -> None:
    calls = []

    def loss(x: float) -> float:
        calls.append(x)
        return SHAPES[shape](x, m, a)

    curve = choose_scale(loss)
    assert len(calls) <= 12
    grid = min((i / 1000 for i in range(4001)), key=lambda x: SHAPES[shape](x, m, a))
    assert abs(curve.best - grid) <= 0.05 * max(grid, 0.2)
    assert [x for x, _ in curve.points] == sorted(set(calls))


def test_harm_is_refused() -> None:
    for loss in (lambda x: x, lambda x: 1.0, lambda x: math.nan if x else 1.0, lambda x: math.inf if x else 1.0):
        curve = choose_scale(loss)
        assert curve.best == 0.0
        assert not curve.helps
    assert choose_scale(lambda x: -x).best == 4.0


def toy() -> tuple[nn.Module, TaskVector, list[Batch]]:
    """A layer whose best multiple of the change is 1.7, by construction."""
    layer = nn.Linear(3, 3, bias=False).double()
    change = torch.randn(3, 3, dtype=torch.float64)
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ (layer.weight + 1.7 * change).T.detach() + 0.1 * torch.randn(40, 3, dtype=torch.float64)
    return (
        layer,
        TaskVector({"weight": change}),
        [Batch({"input": x[i : i + 9], "y": y[i : i + 9]}) for i in range(0, 40, 9)],
    )


def test_on_a_model_against_a_fine_grid() -> None:
    layer, tau, batches = toy()
    before = layer.weight.detach().clone()

    def loss(batch: Batch) -> torch.Tensor:
        return (layer(batch.inputs["input"]) - batch.inputs["y"]).square().sum()

    curve = scale_on_calibration(layer, tau, loss, batches)
    assert torch.equal(layer.weight, before)
    with moved_by(layer, tau) as set_scale:
        grid = {}
        for i in range(401):
            set_scale(i / 100)
            grid[i / 100] = calibration_loss(layer, loss, batches)
    best = min(grid, key=lambda s: grid[s])
    assert curve.best == pytest.approx(best, rel=0.05)
    assert curve.loss(curve.best) <= 1.001 * grid[best]
    assert torch.equal(layer.weight, before)


def test_the_model_is_restored_after_an_error() -> None:
    model = TINY["gpt2"].model(16, 1, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tau = TaskVector.between(dict(model.named_parameters()), tuned(model))

    def fail_half_way() -> None:
        with moved_by(model, tau) as set_scale:
            set_scale(2.0)
            assert not torch.equal(model.transformer.wte.weight, before["transformer.wte.weight"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
