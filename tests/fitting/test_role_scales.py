"""A scale for each role: slopes are derivatives of the loss, and second-order steps along them reach the minimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from taskferry import TaskVector
from taskferry.fitting.role_scales import HOLD, STEPS, quasi_newton, scales_by_role
from taskferry.fitting.scale import ScaleCurve
from taskferry.methods import Job
from taskferry.taskvector import LowRank, as_dense
from tests.helpers.tiny import job


def low_rank(given: Job) -> TaskVector:
    """A change of every second matrix in two factors, and of one bias."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    matrices = [(n, p.shape) for n, p in given.target.named_parameters() if "encoder" in n and p.ndim == 2][::2]
    deltas = {n: LowRank(0.05 * some(rows, 2), some(2, columns)) for n, (rows, columns) in matrices}
    bias = next(n for n, p in given.target.named_parameters() if n.endswith("query.bias"))
    return TaskVector({**deltas, bias: 0.05 * some(*given.target.get_parameter(bias).shape)})


@pytest.mark.parametrize("kind", ["dense", "low-rank"])
@pytest.mark.parametrize("folds", [1, 2])
def test_slopes_are_derivatives_of_the_mean_loss(kind: str, folds: int) -> None:
    """Against autograd through the scales themselves, and against finite differences of the loss."""
    given = job("bert-classifier", micro_batch=5)
    if folds > 1:
        given = replace(given, pair=given.pair.with_calibration(given.calibration.in_folds(folds)))
    pair, model = given.pair, given.target
    tau = low_rank(given) if kind == "low-rank" else given.tau
    changes = [tau * (1.0 + 0.5 * fold) for fold in range(folds)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scales = {name: 0.2 + 0.3 * number / len(tau) for number, name in enumerate(tau.deltas)}

    leaves = {name: torch.tensor(scale, dtype=torch.float64, requires_grad=True) for name, scale in scales.items()}
    losses = []
    for fold, change in enumerate(changes):
        moved = {name: before[name] + leaves[name] * as_dense(delta) for name, delta in change.deltas.items()}
        batches = [batch for batch in given.calibration.side(1) if batch.fold == fold]
        assert batches
        logits = torch.cat([functional_call(model, {**before, **moved}, (), dict(b.inputs)).logits for b in batches])
        labels = torch.cat([b.labels for b in batches])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    loss = torch.stack(losses).sum() / given.calibration.samples
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))

    found = pair.slopes(changes, scales)
    assert set(found) == set(tau.deltas)
    for name, value in expected.items():
        assert found[name] == pytest.approx(0.0 if value is None else float(value), rel=1e-6, abs=1e-12), name
    assert sum(abs(value) > 1e-6 for value in found.values()) >= 5

    step = 1e-5
    for name in sorted(found, key=lambda n: -abs(found[n]))[:3]:
        ends = [{**scales, name: scales[name] + sign * step} for sign in (1, -1)]
        up, down = (given.losses([change * end for change in changes], [1.0])[0] for end in ends)
        assert found[name] == pytest.approx((up - down) / (2 * step), rel=1e-5)

    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_gradients_that_a_training_left_behind_do_not_count() -> None:
    given = job("bert-classifier")
    scales = dict.fromkeys(given.tau.deltas, 0.5)
    clean = given.pair.slopes([given.tau], scales)
    for parameter in given.target.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert given.pair.slopes([given.tau], scales) == clean
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in given.target.parameters())


def test_slopes_of_one_scale_are_the_slope_of_the_curve() -> None:
    """All scales together: the derivative of what the search for one scale walks along."""
    given = job("vit")
    tau = given.tau
    slope = sum(given.pair.slopes([tau], dict.fromkeys(tau.deltas, 0.7)).values())
    down, up = given.losses([tau], [0.7 - 1e-5, 0.7 + 1e-5])
    assert slope == pytest.approx((up - down) / 2e-5, rel=1e-5)


MINIMUM, BENDS = torch.tensor([1.4, 0.7], dtype=torch.float64), torch.tensor([3.0, 1.0], dtype=torch.float64)


def valley(scales: torch.Tensor) -> torch.Tensor:
    return (BENDS * (scales - MINIMUM).square()).sum()


def curve_of_one() -> ScaleCurve:
    """Of the valley along both scales together; its best of all is at 1.225."""
    scales = (0.5, 1.0, 1.225, 2.0)
    return ScaleCurve(tuple((x, float(valley(torch.full((2,), x, dtype=torch.float64)))) for x in scales), 1.225)


def test_scales_reach_the_minimum_in_few_steps_and_are_held_near_the_one() -> None:
    """A quadratic of two roles: the minimum of loss and penalty; a role's slope is the sum over its parameters."""
    roles = {"a.weight": "k", "b.weight": "q", "a.bias": "k", "c.weight": "q"}
    told: list[tuple[str, int, int]] = []

    def slopes(scales: Mapping[str, float]) -> dict[str, float]:
        assert scales["a.weight"] == scales["a.bias"]
        assert scales["b.weight"] == scales["c.weight"]
        now = torch.tensor([scales["a.weight"], scales["b.weight"]], dtype=torch.float64)
        whole = 2 * BENDS * (now - MINIMUM)
        share = {"a.weight": 0.75, "a.bias": 0.25, "b.weight": 1.5, "c.weight": -0.5}
        return {name: part * float(whole[0 if name.startswith("a") else 1]) for name, part in share.items()}

    found = scales_by_role(slopes, roles, curve_of_one(), lambda *step: told.append(step))
    lowest = (BENDS * MINIMUM + HOLD * 1.225) / (BENDS + HOLD)
    assert found == pytest.approx(dict(zip(("k", "q"), lowest.tolist(), strict=True)), abs=0.02)
    assert told == [("scales", number, STEPS) for number in range(1, STEPS + 1)]


def test_scales_stay_in_bounds_and_a_broken_model_is_left() -> None:
    """A slope that never ends moves a scale by half of the one scale a step, and never below zero."""
    down = scales_by_role(lambda _: {"w": 1e6}, {"w": "q"}, curve_of_one())
    assert down == {"q": 0.0}
    up = scales_by_role(lambda _: {"w": -1e6}, {"w": "q"}, curve_of_one())
    assert up["q"] == pytest.approx(1.225 * (1 + 0.5 * STEPS), abs=0.01)
    seen: list[float] = []

    def breaks(scales: Mapping[str, float]) -> dict[str, float]:
        seen.append(scales["w"])
        return {"w": -1e6 if len(seen) < 2 else float("nan")}

    assert scales_by_role(breaks, {"w": "q"}, curve_of_one()) == {"q": pytest.approx(seen[0], abs=0.01)}


def test_steps_learn_curvature_across_coordinates() -> None:
    """A tilted quadratic in six unknowns with a guess of its curvature that is tenfold wrong."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    H = Q @ torch.diag(torch.linspace(1, 4, 6, dtype=torch.float64)) @ Q.T
    lowest = torch.randn(6, generator=generator, dtype=torch.float64)
    start = torch.zeros(6, dtype=torch.float64)

    def energy(x: torch.Tensor) -> float:
        return float((x - lowest) @ H @ (x - lowest))

    found = quasi_newton(lambda x: H @ (x - lowest), start, 10.0, 8, 10.0)
    assert energy(found) < 0.02 * energy(start)
    plain = start.clone()
    for _ in range(8):
        plain = plain - H @ (plain - lowest) / 10.0
    assert energy(found) < 0.5 * energy(plain)
