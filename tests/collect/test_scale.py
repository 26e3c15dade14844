"""The scale search: near the fine grid's minimum in three rounds, on both sides of 1, and never to harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from taskferry import Batch, TaskVector
from taskferry.collect.scale import EVALUATIONS, calibration_loss, choose_scale, losses_at, moved_by
from tests.helpers.tiny import TINY, tuned

SHAPES = {
    "parabola": lambda x, m, a: a * (x - m) ** 2,
    "steep on one side": lambda x, m, a: math.exp(a * (x - m)) - a * (x - m),
    "flat far away": lambda x, m, a: -math.exp(-(((x - m) / a) ** 2)),
    "kink": lambda x, m, a: abs(x - m) ** 1.3,
}
NEAR = {"parabola": 0.03, "steep on one side": 0.18, "flat far away": 0.08, "kink": 0.06}  # of the scale


@settings(max_examples=200, deadline=None)
@given(shape=st.sampled_from(sorted(SHAPES)), m=st.floats(0.2, 3.8), a=st.floats(0.3, 5))
def test_it_finds_what_a_fine_grid_finds(shape: str, m: float, a: float) -> None:
    """Within a few percent of the scale, and almost all of what the loss can gain, also in very lopsided valleys."""
    asked: list[list[float]] = []

    def loss(x: float) -> float:
        return SHAPES[shape](x, m, a)

    curve = choose_scale(lambda scales: (asked.append(list(scales)), [loss(x) for x in scales])[1])
    calls = [x for scales in asked for x in scales]
    falling = loss(2.0) < min(map(loss, (0.0, 0.5, 1.0)))
    assert asked[: 1 + falling] == [[0.0, 0.5, 1.0, 2.0], *([[4.0]] if falling else [])]
    assert len(asked) <= 3 + falling
    assert all(len(scales) <= 3 for scales in asked[1:])
    assert len(calls) == len(set(calls)) <= EVALUATIONS + 1 == 11
    assert list(curve.points) == sorted((x, loss(x)) for x in calls)
    grid = min((i / 1000 for i in range(4001)), key=loss)
    assert abs(curve.best - grid) <= NEAR[shape] * max(grid, 0.2)
    assert loss(0) - loss(curve.best) >= 0.85 * (loss(0) - loss(grid))
    assert loss(curve.best) == min(loss(x) for x in calls)


@pytest.mark.parametrize("m", [0.05, 0.08, 0.12, 0.16])
def test_a_valley_next_to_zero_is_found(m: float) -> None:
    """As between a narrow and a wide language model: the first scales are all many times too large."""
    asked: list[float] = []

    def loss(x: float) -> float:
        asked.append(x)
        return 8.0 - 6.0 * math.exp(-(math.log(max(x, 1e-9) / m) ** 2))

    curve = choose_scale(lambda scales: [loss(x) for x in scales])
    assert curve.helps
    assert len(asked) == len(set(asked)) <= 20
    assert 0.8 <= curve.best / m <= 1.25


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan), st.just(math.inf)), min_size=20, max_size=20))
def test_it_never_ends_worse_than_it_began(values: list[float]) -> None:
    """Whatever the losses are: the best of those that were seen, and scale 0 where none is below its own."""
    at = dict(zip((0.0, 0.5, 1.0, 2.0, 4.0), values, strict=False))
    rest = iter(values[5:])
    curve = choose_scale(lambda scales: [at[x] if x in at else at.setdefault(x, next(rest)) for x in scales])
    seen = {x: at[x] for x, _ in curve.points}
    finite = [value for value in seen.values() if not math.isnan(value)]
    assert not curve.helps or (not math.isnan(at[curve.best]) and at[curve.best] == min(finite))
    assert curve.helps == any(value < (math.inf if math.isnan(at[0.0]) else at[0.0]) for value in finite)


def each(loss: Callable[[float], float]) -> Callable[[Sequence[float]], list[float]]:
    return lambda scales: [loss(scale) for scale in scales]


def test_harm_is_refused() -> None:
    for loss in (lambda x: x, lambda x: 1.0, lambda x: math.nan if x else 1.0, lambda x: math.inf if x else 1.0):
        curve = choose_scale(each(loss))
        assert curve.best == 0.0
        assert not curve.helps
    assert choose_scale(each(lambda x: -x)).best == 4.0
    assert choose_scale(each(lambda x: -x), largest=1.5).best == 1.5
    assert choose_scale(each(lambda x: math.nan if x > 1.2 else -x)).best <= 1.2  # no minimum where a model breaks


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

    curve = choose_scale(lambda scales: losses_at(layer, tau, loss, batches, scales))
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
