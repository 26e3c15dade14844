"""Maps from two places: invariances, what each part does, resuming."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from taskferry import Calibration, LowRank, TaskVector
from taskferry.calibration.batch import Batch
from taskferry.calibration.views import Views
from taskferry.capture import Side, collect_into
from taskferry.errors import TaskferryError
from taskferry.families import family_of
from taskferry.finding import find_sites
from taskferry.fitting import both_objectives
from taskferry.methods import Job, run
from taskferry.methods.twofold import PATCH, EvenGradients, fit_twofold, with_copies
from taskferry.objectives import Classifier, Logits
from taskferry.pairing import pair_sites
from taskferry.rolescales import STEPS, scaled_by_role
from taskferry.scale import calibration_loss, moved_by
from taskferry.taskvector import as_dense
from tests.test_methods import job
from tests.tiny import TINY, relative


def flat(tau: TaskVector) -> torch.Tensor:
    return torch.cat([delta.flatten() for _, delta in sorted(tau.dense().deltas.items())])


def helpful(name: str = "vit") -> Job:
    """A change that lowers the loss of both models: a step down the source's gradient, and a target much like it."""
    given = job(name)
    with torch.no_grad():
        torch.manual_seed(0)
        for p, q in zip(given.target.parameters(), given.source.parameters(), strict=True):
            p.copy_(q + 0.02 * torch.randn_like(q))
    loss = both_objectives(given.objective, given.source, given.target, given.calibration)[0]
    loss_A = loss.bind(given.source, given.calibration.side(0))
    names, weights = zip(*given.source.named_parameters(), strict=True)
    total = torch.stack([loss_A(batch) for batch in given.calibration.side(0)]).sum()
    found = torch.autograd.grad(total, weights, allow_unused=True)
    changed = given.tau.deltas.keys()
    return replace(given, tau=TaskVector({n: -0.02 * g for n, g in zip(names, found, strict=True)
                                          if g is not None and n in changed}))  # fmt: skip


def loss_at(given: Job, tau: TaskVector, scale: float = 1.0) -> float:
    loss = given.target_loss()  # its head is that of the base
    with moved_by(given.target, tau) as at:
        at(scale)
        return calibration_loss(given.target, loss, given.calibration.side(1))


def test_a_model_onto_itself_is_the_change_itself() -> None:
    """Identity pair: every map is the identity on what the samples show."""
    tiny = TINY["plain"]
    A = tiny.model(12, 2, 1)
    batch = tiny.batch(0, 400)
    torch.manual_seed(4)
    pairs = pair_sites(find_sites(A), find_sites(A))[0]
    tau = TaskVector({p.source.weight: 0.01 * torch.randn(A.get_parameter(p.source.weight).shape) for p in pairs})
    given = Job(A, A, tau, Calibration([(batch, batch)]), tiny.objective)
    for way, whiten in ((0.0, False), (0.5, False), (0.5, True)):
        moved = run("twofold", given, way=way, scales="one", whiten=whiten)
        assert set(moved.deltas) == set(tau.deltas)
        for name, delta in moved.deltas.items():
            change = as_dense(tau.deltas[name])
            # A direction that no gradient has (all logits up) is not moved; the others come back as they were.
            lost = change - delta
            assert delta.norm() > 0.5 * change.norm(), name
            assert float((lost * delta).sum().abs()) < 1e-4 * float(change.norm() ** 2), name


def test_without_its_parts_it_is_bico_with_even_gradients() -> None:
    given = job("vit")
    moved = run("twofold", given, way=0.0, scales="one", whiten=False, copies=0, patches=True)
    statistics = EvenGradients(whiten=False)
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
    given = helpful()
    before = [p.detach().clone() for m in (given.source, given.target) for p in m.parameters()]
    once, twice = (run("twofold", given, way=way, scales="one") for way in (0.0, 0.5))
    assert relative(flat(twice), flat(once)) > 0.01
    after = [p for m in (given.source, given.target) for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_a_scale_for_each_role_lowers_the_loss_and_keeps_a_lora_low_rank() -> None:
    given = helpful()
    moved = run("twofold", given, scales="one")
    scaled, _ = scaled_by_role(given.target, moved, given.target_loss(), given.calibration.side(1), 1.0)
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

    given = replace(helpful(), keep=tmp_path / "groups")
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


class Fixed(Classifier):
    """Four classes by random directions about a centre that is given: a head that is made from no sample."""

    def __init__(self, given: Job) -> None:
        with torch.no_grad():
            copies = Views(given.calibration, 1).pair(range(24, 48))[0]
            self.centre = family_of(given.source).features(given.source, copies).mean(0)

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:
        planes = torch.randn(4, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return lambda batch: 20 * (family_of(model).features(model, batch) - self.centre) @ planes.T


def test_copies_of_images_are_labelled_by_the_tuned_source() -> None:
    given = helpful()
    given = replace(given, tau=0.001 * given.tau, objective=Fixed(given))
    logits = Fixed(given).logits(given.source, [])

    def named(batches: Sequence[Batch]) -> torch.Tensor:
        with moved_by(given.source, given.tau) as at, torch.no_grad():
            at(1.0)
            return torch.cat([logits(batch).argmax(-1) for batch in batches])

    assert with_copies(given, 3) is given  # it does not know these labels
    labels = named(given.calibration.side(0))
    labels[:4] = torch.arange(4)  # every class is there; most are as the source says
    given = replace(given, calibration=given.calibration.with_labels(labels))
    more = with_copies(given, 3)
    assert more.calibration.samples == 4 * given.calibration.samples
    for old, new in zip(given.calibration, more.calibration, strict=False):  # the samples come first, as they were
        assert torch.equal(old[0].inputs["pixel_values"], new[0].inputs["pixel_values"])
        assert torch.equal(old[1].labels, new[1].labels)  # type: ignore[arg-type]
    copies = [A for A, _ in more.calibration.pairs[len(given.calibration) :]]
    found = torch.cat([A.labels for A in copies if A.labels is not None])
    assert torch.equal(found, named(copies))
    assert len(set(found.tolist())) > 1
    one = int(found[0])
    only = given.calibration.with_labels(torch.full((24,), one))  # a class that no sample has is left out
    kept = with_copies(replace(given, calibration=only), 3).calibration.labels
    assert kept is not None
    assert set(kept.tolist()) == {one}
    assert with_copies(given, 0) is given
    fitted = job("vit")  # prototypes would be made from the copies as well
    assert with_copies(fitted, 3) is fitted
    texts = job("bert-classifier")
    assert with_copies(texts, 3) is texts


def test_the_record_tells_samples_from_copies_and_the_scales() -> None:
    given = helpful()
    given = replace(given, tau=0.001 * given.tau, objective=Fixed(given))
    logits = Fixed(given).logits(given.source, [])
    with torch.no_grad():
        labels = torch.cat([logits(batch).argmax(-1) for batch in given.calibration.side(0)])
    given = replace(given, calibration=given.calibration.with_labels(labels))
    own: dict[str, Any] = {"way": 0.5, "whiten": True, "copies": 2, "scales": "role", "patches": False}
    alignment, _ = fit_twofold(given, **own, statistics_memory=4.0)
    known = alignment.provenance
    assert known["calibration"]["samples"] == 24
    assert known["calibration"]["sha256"] == given.calibration.identity()
    assert 0 < known["calibration"]["copies"] <= 48
    assert own.items() <= known["settings"].items()
    helps, _ = fit_twofold(helpful(), **own, statistics_memory=4.0)
    assert set(helps.provenance["role scales"]) == {p.target.role for p in helps.pairs}
    assert helps.provenance["calibration"]["copies"] == 0  # its head is made from the samples
    with pytest.raises(TaskferryError, match="copies is 0 or more"):
        run("twofold", given, copies=-1)


def test_float32_gives_what_float64_gives() -> None:
    """Directions and tokens that carry nothing but rounding must not be whitened into a signal."""
    for name in ("vit", "bert", "gpt2"):
        given = job(name)
        fine = run("twofold", given, scales="one", way=0.0)
        single = replace(
            given,
            source=copy.deepcopy(given.source).float(),
            target=copy.deepcopy(given.target).float(),
            tau=TaskVector({n: as_dense(d).float() for n, d in given.tau.deltas.items()}),
            calibration=Calibration((as_float(A), as_float(B)) for A, B in given.calibration),
        )
        coarse = run("twofold", single, scales="one", way=0.0)
        assert relative(flat(coarse).double(), flat(fine)) < 2e-3, name


def as_float(batch: Batch) -> Batch:
    return replace(batch, inputs={n: x.float() if x.is_floating_point() else x for n, x in batch.inputs.items()})


def test_a_patch_embedding_stays_unless_asked_for_or_alone() -> None:
    given = helpful()
    name = "embeddings.patch_embeddings.projection.weight"
    assert name in given.tau.deltas
    moved = run("twofold", given)
    assert name not in moved.deltas
    assert moved.coverage is not None
    assert moved.coverage[name].status == "kept"
    assert moved.coverage[name].reason == PATCH
    assert set(moved.coverage.moved()) == set(moved.deltas)
    assert moved.coverage.unused[name] == PATCH
    assert name in run("twofold", given, patches=True).deltas
    alone = TaskVector({name: given.tau.deltas[name]})
    assert len(run("twofold", replace(given, tau=alone)))  # a change of it alone is still a change


def test_the_base_models_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reused sums give what new ones would."""
    import taskferry.methods.twofold as module

    given = helpful()
    seen = []
    real = module.collect_into
    monkeypatch.setattr(module, "collect_into", lambda *a, **k: (seen.append(1), real(*a, **k)))
    once = run("twofold", given, scales="one")
    assert len(seen) == 2
    groups = run("twofold", given, scales="one", statistics_memory=1e-6)  # too many groups to be kept
    assert len(seen) > 6
    assert relative(flat(once), flat(groups)) < 1e-9


def test_scales_see_every_part_and_never_end_worse() -> None:
    given = helpful()
    loss, batches = given.target_loss(), given.calibration.side(1)
    moved = run("twofold", given, scales="one")
    shown: list[int] = []

    def watched(batch: Batch) -> torch.Tensor:
        if torch.is_grad_enabled():
            shown.append(batch.ids[0])
        return loss(batch)

    scaled, chosen = scaled_by_role(given.target, moved, watched, batches, 1.0, samples_a_step=len(batches[0]))
    assert len(set(chosen.values())) > 1
    assert len(shown) == STEPS  # one batch a step
    assert set(shown) == {batch.ids[0] for batch in batches}
    assert loss_at(given, scaled) < loss_at(given, moved)

    def contrary(batch: Batch) -> torch.Tensor:  # its gradient leads away from what it measures
        value = loss(batch)
        return 2 * value.detach() - value

    same, chosen = scaled_by_role(given.target, moved, contrary, batches, 1.0)
    assert set(chosen.values()) == {1.0}
    assert all(torch.equal(as_dense(same.deltas[n]), as_dense(d)) for n, d in moved.deltas.items())
