"""Maps from two places: invariances, what each part does, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from taskferry import Calibration, LowRank, TaskVector
from taskferry.capture import Side, collect_into
from taskferry.finding import find_sites
from taskferry.fitting import both_objectives
from taskferry.methods import Job, run
from taskferry.methods.twofold import Even, EvenGradients, scaled_by_role
from taskferry.pairing import pair_sites
from taskferry.scale import calibration_loss, moved_by
from taskferry.statistics import CrossCovariance
from taskferry.taskvector import as_dense
from tests.test_methods import job
from tests.tiny import TINY, relative


def flat(tau: TaskVector) -> torch.Tensor:
    return torch.cat([delta.flatten() for _, delta in sorted(tau.dense().deltas.items())])


def loss_at(given: Job, tau: TaskVector, scale: float = 1.0) -> float:
    with moved_by(given.target, tau) as at:
        at(scale)
        return calibration_loss(given.target, given.target_loss(), given.calibration.side(1))


def test_every_gradient_row_counts_alike() -> None:
    """One row a thousand times larger changes nothing; rows of zeros stay out."""
    torch.manual_seed(0)
    X_A, X_B = torch.randn(50, 6), torch.randn(50, 8)
    plain, larger = Even(6, 8), Even(6, 8)
    plain.add(X_A, X_B)
    sizes = torch.ones(50, 1)
    sizes[3] = 1000.0
    larger.add(sizes * X_A, sizes * X_B)
    assert relative(larger.matrix(), plain.matrix()) < 1e-5
    unit = CrossCovariance(6, 8)
    unit.add(X_A / X_A.norm(dim=1, keepdim=True), X_B / X_B.norm(dim=1, keepdim=True))
    assert relative(plain.matrix(), unit.matrix()) < 1e-6
    as_they_are = CrossCovariance(6, 8)
    as_they_are.add(sizes * X_A, sizes * X_B)
    assert relative(as_they_are.matrix() / as_they_are.matrix().norm(), plain.matrix() / plain.matrix().norm()) > 0.1
    with_zeros = Even(6, 8)
    with_zeros.add(torch.cat([X_A, torch.zeros(2, 6)]), torch.cat([X_B, torch.ones(2, 8)]))
    assert with_zeros.rows == 50
    assert relative(with_zeros.matrix(), plain.matrix()) < 1e-6


def test_a_model_onto_itself_is_the_change_itself() -> None:
    """Identity pair: every map is the identity on what the samples show."""
    tiny = TINY["plain"]
    A = tiny.model(12, 2, 1)
    batch = tiny.batch(0, 400)
    torch.manual_seed(4)
    pairs = pair_sites(find_sites(A), find_sites(A))[0]
    tau = TaskVector({p.source.weight: 0.01 * torch.randn(A.get_parameter(p.source.weight).shape) for p in pairs})
    given = Job(A, A, tau, Calibration([(batch, batch)]), tiny.objective)
    for way in (0.0, 0.5):
        moved = run("twofold", given, way=way, scales="one")
        for name, delta in moved.deltas.items():
            change = as_dense(tau.deltas[name])
            # A direction that no gradient has (all logits up) is not moved; the others come back as they were.
            inside = torch.linalg.matrix_norm(delta.double() - change, 2) / torch.linalg.matrix_norm(change.double(), 2)
            lost = change.norm() ** 2 - delta.norm() ** 2
            assert inside < 1e-3 or float(((change - delta) * delta).sum()) == pytest.approx(0, abs=1e-4 * float(lost))


def test_without_its_parts_it_is_bico_with_even_gradients() -> None:
    given = job("vit")
    moved = run("twofold", given, way=0.0, scales="one")
    statistics = EvenGradients()
    objectives = both_objectives(given.objective, given.source, given.target, given.calibration)
    sides = [Side(m, o.bind(m, given.calibration.side(i)))
             for i, (m, o) in enumerate(zip((given.source, given.target), objectives, strict=True))]  # fmt: skip
    pairs, _ = pair_sites(find_sites(given.source), find_sites(given.target))
    collect_into(statistics, *sides, pairs, given.calibration)
    name = next(p.target.name for p in pairs if p.target.role == "mlp.up" and p.target.name in statistics.reads)
    pair = next(p for p in pairs if p.target.name == name)
    R_in, R_out = statistics.input_of(name)[1].solve()[0].dense(), statistics.outputs[name].solve()[0].dense()
    expected = R_out.T @ given.tau.deltas[pair.source.weight] @ R_in
    assert relative(moved.deltas[pair.target.weight], expected) < 1e-4
    assert relative(flat(run("bico", given)), flat(moved)) > 0.01  # and not the paper's


def test_the_second_capture_changes_the_maps_and_leaves_the_models_alone() -> None:
    given = job("vit")
    before = [p.detach().clone() for m in (given.source, given.target) for p in m.parameters()]
    once, twice = (run("twofold", given, way=way, scales="one") for way in (0.0, 0.5))
    assert relative(flat(twice), flat(once)) > 0.01
    after = [p for m in (given.source, given.target) for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_a_scale_for_each_role_lowers_the_loss_and_keeps_a_lora_low_rank() -> None:
    given = job("vit")
    moved = run("twofold", given, scales="one")
    scaled = scaled_by_role(given, moved, 1.0)
    assert loss_at(given, scaled) < loss_at(given, moved)
    roles = {site.weight: site.role for site in find_sites(given.target)}
    found: dict[str, set[float]] = {}
    for name, delta in scaled.deltas.items():
        if name in roles and moved.deltas[name].norm() > 0:
            found.setdefault(roles[name], set()).add(round(float(delta.norm() / moved.deltas[name].norm()), 4))
    assert all(len(values) == 1 for values in found.values())
    assert len({next(iter(values)) for values in found.values()}) > 1
    torch.manual_seed(1)
    sites = pair_sites(find_sites(given.source), find_sites(given.target))[0]
    site = next(pair.source for pair in sites if pair.source.role == "mlp.up")
    shape = given.source.get_parameter(site.weight).shape
    lora = TaskVector({site.weight: LowRank(torch.randn(shape[0], 2), torch.randn(2, shape[1]))})
    result = run("twofold", replace(given, tau=lora))
    assert result.low_rank
    assert all(delta.rank == 2 for delta in result.deltas.values() if isinstance(delta, LowRank))


def test_finished_groups_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import taskferry.methods.twofold as module

    given = replace(job("vit"), keep=tmp_path / "groups")
    small = {"statistics_memory": 1e-6, "scales": "one"}
    whole = run("twofold", given, **small)
    assert len(list((tmp_path / "groups" / "base").iterdir())) > 1
    assert len(list((tmp_path / "groups" / "halfway").iterdir())) > 1

    def not_again(*given: object, **named: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(module, "collect_into", not_again)
    again = run("twofold", given, **small)
    assert torch.equal(flat(again), flat(whole))
    with pytest.raises(AssertionError, match="captured again"):
        run("twofold", replace(given, tau=2.0 * given.tau), **small)  # halfway is elsewhere for another change
