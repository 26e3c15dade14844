"""A scale for each role: slopes are derivatives of the loss, and descent along them sees every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch.func import functional_call

from taskferry import Batch, TaskVector
from taskferry.fitting.role_scales import HOLD, RATE, STEPS, parts_of, scales_by_role
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
def test_slopes_are_derivatives_of_the_mean_loss(kind: str) -> None:
    """Against autograd through the scales themselves, and against finite differences of the loss."""
    given = job("bert-classifier", micro_batch=5)
    pair, model = given.pair, given.target
    tau = low_rank(given) if kind == "low-rank" else given.tau
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scales = {name: 0.2 + 0.3 * number / len(tau) for number, name in enumerate(tau.deltas)}
    some = [0, 2, 4]  # the last one has fewer samples

    leaves = {name: torch.tensor(scale, dtype=torch.float64, requires_grad=True) for name, scale in scales.items()}
    moved = {name: before[name] + leaves[name] * as_dense(delta) for name, delta in tau.deltas.items()}
    batches = [given.calibration.side(1)[number] for number in some]
    assert len({len(batch) for batch in batches}) == 2
    logits = torch.cat([functional_call(model, {**before, **moved}, (), dict(b.inputs)).logits for b in batches])
    loss = torch.nn.functional.cross_entropy(logits, torch.cat([b.labels for b in batches]))
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))

    found = pair.slopes(tau, scales, some)
    assert set(found) == set(tau.deltas)
    for name, value in expected.items():
        assert found[name] == pytest.approx(0.0 if value is None else float(value), rel=1e-6, abs=1e-12), name
    assert sum(abs(value) > 1e-6 for value in found.values()) > 5
    everything = pair.slopes(tau, scales, range(len(given.calibration)))
    assert everything != pytest.approx(found, rel=1e-3)  # other batches, other slopes

    step = 1e-5
    for name in sorted(found, key=lambda n: -abs(found[n]))[:3]:
        up, down = (pair.losses(tau * {**scales, name: scales[name] + sign * step}, [1.0])[0] for sign in (1, -1))
        assert everything[name] == pytest.approx((up - down) / (2 * step), rel=1e-5)

    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_gradients_that_a_training_left_behind_do_not_count() -> None:
    given = job("bert-classifier")
    scales = dict.fromkeys(given.tau.deltas, 0.5)
    clean = given.pair.slopes(given.tau, scales, [0])
    for parameter in given.target.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert given.pair.slopes(given.tau, scales, [0]) == clean
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in given.target.parameters())


def test_slopes_of_one_scale_are_the_slope_of_the_curve() -> None:
    """All scales together: the derivative of what the search for one scale walks along."""
    given = job("vit")
    tau = given.tau
    slope = sum(given.pair.slopes(tau, dict.fromkeys(tau.deltas, 0.7), range(len(given.calibration))).values())
    down, up = given.pair.losses(tau, [0.7 - 1e-5, 0.7 + 1e-5])
    assert slope == pytest.approx((up - down) / 2e-5, rel=1e-5)


def valley(scales: torch.Tensor) -> torch.Tensor:
    return (torch.tensor([3.0, 1.0]) * (scales - torch.tensor([1.6, 0.7])).square()).sum()


def test_scales_go_down_the_loss_and_are_held_near_the_one() -> None:
    """The same steps as Adam takes on the loss itself; a role's slope is the sum over its parameters."""
    roles = {"a.weight": "k", "b.weight": "q", "a.bias": "k", "c.weight": "q"}
    told: list[tuple[str, int, int]] = []

    def slopes(scales: Mapping[str, float], batches: Sequence[int]) -> dict[str, float]:
        assert list(batches) == [0, 1]
        assert scales["a.weight"] == scales["a.bias"]
        assert scales["b.weight"] == scales["c.weight"]
        now = torch.tensor([scales["a.weight"], scales["b.weight"]], requires_grad=True)
        (whole,) = torch.autograd.grad(valley(now), now)
        share = {"a.weight": 0.75, "a.bias": 0.25, "b.weight": 1.5, "c.weight": -0.5}
        return {name: part * float(whole[0 if name.startswith("a") else 1]) for name, part in share.items()}

    found = scales_by_role(slopes, roles, 1.0, [[0, 1]], lambda *step: told.append(step))
    scale = torch.ones(2, requires_grad=True)
    optimiser = torch.optim.Adam([scale], lr=RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        (valley(scale) + HOLD * (scale - 1).square().sum()).backward()
        optimiser.step()
    assert found == pytest.approx(dict(zip(("k", "q"), scale.tolist(), strict=True)), rel=1e-4)
    assert valley(torch.tensor([found["k"], found["q"]])) < 0.2 * valley(torch.ones(2))
    assert told == [("scales", number, STEPS) for number in range(1, STEPS + 1)]


def test_each_part_has_its_turn_and_its_say() -> None:
    """Two parts that want the opposite: the scales end between, however the last step went."""
    seen: list[int] = []

    def slopes(scales: Mapping[str, float], batches: Sequence[int]) -> dict[str, float]:
        seen.extend(batches)
        return {"w": 1.0 if batches[0] == 0 else -1.0}

    found = scales_by_role(slopes, {"w": "q"}, 1.0, [[0], [1]])
    assert seen == [0, 1] * (STEPS // 2)
    assert found["q"] == pytest.approx(1.0, abs=0.2)
    alone = scales_by_role(slopes, {"w": "q"}, 1.0, [[0]])
    assert alone["q"] < 0


def test_parts_have_enough_samples_each() -> None:
    def batches(*sizes: int) -> list[Batch]:
        return [Batch({"x": torch.zeros(size, 1)}, None, tuple(range(size))) for size in sizes]

    assert parts_of(batches(4, 4, 4, 4, 2), 8) == [[0, 1], [2, 3, 4]]  # a remainder joins the last part
    assert parts_of(batches(4, 4, 4, 4), 8) == [[0, 1], [2, 3]]
    assert parts_of(batches(4, 4, 4), 4) == [[0], [1], [2]]
    assert parts_of(batches(3, 3), 100) == [[0, 1]]
    assert parts_of(batches(8, 2), 8) == [[0, 1]]
