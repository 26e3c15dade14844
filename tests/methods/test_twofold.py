"""Maps from two points: invariances, what each part does, resuming."""

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
from taskferry.collect.capture import Side, collect
from taskferry.collect.scale import calibration_loss, moved_by
from taskferry.collect.statistics import BASE, Capture, Point, Statistics
from taskferry.data.augmentation import Views
from taskferry.data.batch import Batch
from taskferry.engines import whole
from taskferry.engines.pair import Work
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import pair_sites
from taskferry.linalg.whitening import UnitRows, Whitened
from taskferry.methods import Job, run
from taskferry.methods.twofold import ALONE, PATCH, with_views
from taskferry.objectives.objectives import Classifier, Logits
from taskferry.taskvector import as_dense
from tests.helpers.tiny import TINY, job, rebuilt, relative


@pytest.fixture(autouse=True)
def _samples_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny jobs have 24 samples; all parts of the method are tried on them."""
    monkeypatch.setattr("taskferry.methods.registry.FEW", 24)


def flat(tau: TaskVector) -> torch.Tensor:
    return torch.cat([delta.flatten() for _, delta in sorted(tau.dense().deltas.items())])


def helpful(name: str = "vit") -> Job:
    """A change that lowers the loss of both models: a step down the source's gradient, and a target much like it."""
    given = job(name)
    with torch.no_grad():
        torch.manual_seed(0)
        for p, q in zip(given.target.parameters(), given.source.parameters(), strict=True):
            p.copy_(q + 0.02 * torch.randn_like(q))
    loss_A = given.pair.objectives[0].bind(given.source, given.calibration.side(0))
    names, weights = zip(*given.source.named_parameters(), strict=True)
    total = torch.stack([loss_A(batch) for batch in given.calibration.side(0)]).sum()
    found = torch.autograd.grad(total, weights, allow_unused=True)
    changed = given.tau.deltas.keys()
    return rebuilt(given, tau=TaskVector({n: -0.02 * g for n, g in zip(names, found, strict=True)
                                          if g is not None and n in changed}))  # fmt: skip


def loss_at(given: Job, tau: TaskVector, scale: float = 1.0) -> float:
    loss = given.pair.objectives[1].bind(given.target, given.calibration.side(1))  # its head is that of the base
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
    given = Job.of(A, A, tau, Calibration([(batch, batch)]), tiny.objective)
    for halfway, whiten in ((0.0, False), (0.5, False), (0.5, True)):
        moved = run("twofold", given, halfway=halfway, whiten=whiten)
        assert moved.curve is not None
        assert set(moved.tau.deltas) == set(tau.deltas)
        for name, scaled in moved.tau.deltas.items():
            change, delta = as_dense(tau.deltas[name]), scaled / (moved.curve.best if moved.curve.helps else 1.0)
            # A direction that no gradient has (all logits up) is not moved; the others come back as they were.
            lost = change - delta
            assert delta.norm() > 0.5 * change.norm(), name
            assert float((lost * delta).sum().abs()) < 1e-4 * float(change.norm() ** 2), name


def test_without_its_parts_it_is_bico_with_even_gradients() -> None:
    given = helpful()
    moved = run("twofold", given, halfway=0.0, whiten=False, views=0, patches=True)
    capture = Capture(sums=UnitRows)
    statistics, models = Statistics(capture=capture), (given.source, given.target)
    sides = [Side(m, o.bind(m, given.calibration.side(i)))
             for i, (m, o) in enumerate(zip(models, given.pair.objectives, strict=True))]  # fmt: skip
    collect(statistics, *sides, given.pair.pairs, given.calibration, capture)
    name = next(
        p.target.name for p in given.pair.pairs if p.target.role == "mlp.up" and p.target.name in statistics.reads
    )
    pair = next(p for p in given.pair.pairs if p.target.name == name)
    R_in, R_out = statistics.input_of(name)[1].solve()[0].dense(), statistics.outputs[name].solve()[0].dense()
    expected = R_out.T @ given.tau.deltas[pair.source.weight] @ R_in
    assert moved.curve is not None
    assert moved.curve.best not in (0, 1)
    assert relative(moved.tau.deltas[pair.target.weight], moved.curve.best * expected) < 1e-4
    assert relative(moved.curve.best * flat(run("bico", given).tau), flat(moved.tau)) > 0.01  # and not the paper's


def test_the_second_capture_changes_the_maps_and_leaves_the_models_alone() -> None:
    given = helpful()
    before = [p.detach().clone() for m in (given.source, given.target) for p in m.parameters()]
    once, twice = (run("twofold", given, halfway=way) for way in (0.0, 0.5))
    assert (once.provenance["captures"], twice.provenance["captures"]) == (1, 2)
    assert relative(flat(twice.tau) / twice.tau.norm(), flat(once.tau) / once.tau.norm()) > 0.01
    after = [p for m in (given.source, given.target) for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_it_stands_at_its_best_scale_and_keeps_a_lora_low_rank() -> None:
    given = helpful()
    moved = run("twofold", given)
    assert moved.curve is not None
    found = given.in_folds().losses(moved.without, [1.0])[0]
    assert found == pytest.approx(moved.curve.loss(moved.curve.best), rel=1e-6)
    assert found < moved.curve.loss(0.0)
    torch.manual_seed(1)
    site = next(pair.source for pair in given.pair.pairs if pair.source.role == "mlp.up")
    shape = given.source.get_parameter(site.weight).shape
    lora = TaskVector({site.weight: LowRank(torch.randn(shape[0], 2), torch.randn(2, shape[1]))})
    result = run("twofold", replace(given, tau=lora)).tau
    assert result.low_rank
    assert all(delta.rank == 2 for delta in result.deltas.values() if isinstance(delta, LowRank))


def test_its_maps_move_what_it_moved() -> None:
    """The scale is in the output maps: another change passes through them as this one did."""
    given = helpful()
    moved = run("twofold", given)
    assert moved.alignment is not None
    again = moved.alignment.apply(given.tau)
    assert relative(flat(again), flat(moved.tau)) < 1e-9
    assert [row["target"] for row in moved.sites] == [pair.target.name for pair in moved.alignment.pairs]


def test_first_maps_are_rough_and_not_taken_for_others() -> None:
    """Groups that a killed run has finished are known by the key of their capture."""
    capture = Capture(sums=Whitened)
    assert replace(capture, again=True).key() != capture.key()
    assert replace(capture, again=True).key() == replace(capture, again=True).key()


def test_what_does_not_help_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given = helpful()
    plain = run("twofold", given, halfway=0.0)
    assert plain.curve is not None
    monkeypatch.setattr(
        whole.WholePair,
        "losses",
        lambda self, changes, scales: [[1.0 + scale] * len(changes) for scale in scales],
    )
    uphill = run("twofold", given)
    assert uphill.curve is not None
    assert uphill.curve.best == 0.0
    assert not uphill.curve.helps
    assert uphill.alignment is not None
    assert uphill.provenance["captures"] == 1  # nowhere to go half of the way to
    assert relative(plain.curve.best * flat(uphill.tau), flat(plain.tau)) < 1e-9  # the same maps, and no scale


def test_without_a_task_vector_all_maps_are_those_of_the_first_capture() -> None:
    given = job("vit", (16, 2), (24, 3))
    fitted = run("twofold", Job(given.pair, TaskVector({}), every_site=True))
    once = run("twofold", Job(given.pair, given.tau, every_site=True), halfway=0.0)
    assert fitted.alignment is not None
    assert once.curve is not None
    assert fitted.curve is None
    assert fitted.provenance["without a task vector"] == ALONE
    scale = once.curve.best if once.curve.helps else 1.0
    moved = fitted.alignment.apply(given.tau)
    assert relative(scale * flat(moved), flat(once.tau)) < 1e-9
    assert fitted.alignment.reasons["embeddings.patch_embeddings.projection.weight"] == PATCH


def test_sums_are_taken_again_for_the_same_capture_alone() -> None:
    """Those of another capture (fewer directions, another first point) would give its maps."""
    given = job("llama", (16, 2), (24, 3))
    maps, half = given.maps(), Point(0.5 * given.tau, TaskVector({}))
    wanted = Capture(sums=Whitened, points=(BASE, half))
    fresh = flat(rebuilt(given).move(wanted, maps).tau)
    for other in (Capture(sums=Whitened, directions=3), Capture(sums=Whitened, points=(half,)), Capture(sums=Whitened)):
        again = rebuilt(given)
        again.move(replace(other, again=True), maps)
        assert relative(flat(again.move(wanted, maps).tau), fresh) < 1e-12


def test_finished_groups_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rebuilt(helpful(), work=Work(sums_memory=1000, resume=tmp_path / "groups"))
    moved = run("twofold", given)
    assert len(list((tmp_path / "groups" / "base").iterdir())) > 1
    assert len(list((tmp_path / "groups" / "halfway").iterdir())) > 1

    def not_again(*given: object, **named: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(whole, "collect", not_again)
    again = run("twofold", given)
    assert torch.equal(flat(again.tau), flat(moved.tau))
    with pytest.raises(AssertionError, match="captured again"):
        run("twofold", replace(given, tau=2.0 * given.tau))  # halfway is elsewhere for another change


class Fixed(Classifier):
    """Four classes by random directions about a centre that is given: a head that is made from no sample."""

    def __init__(self, given: Job) -> None:
        with torch.no_grad():
            views = Views(given.calibration, 1).pair(range(24, 48))[0]
            self.centre = family_of(given.source).features(given.source, views).mean(0)

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:
        planes = torch.randn(4, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return lambda batch: 20 * (family_of(model).features(model, batch) - self.centre) @ planes.T


def named_by_its_head() -> Job:
    """Samples under the names that a head gives them that is made from none."""
    given = helpful()
    given = rebuilt(given, tau=0.001 * given.tau, objective=Fixed(given))
    logits = Fixed(given).logits(given.source, [])
    with torch.no_grad():
        labels = torch.cat([logits(batch).argmax(-1) for batch in given.calibration.side(0)])
    return rebuilt(given, calibration=given.calibration.with_labels(labels))


def test_views_of_images_are_labelled_by_the_tuned_source() -> None:
    given = helpful()
    given = rebuilt(given, tau=0.001 * given.tau, objective=Fixed(given))
    logits = Fixed(given).logits(given.source, [])

    def named(batches: Sequence[Batch]) -> torch.Tensor:
        with moved_by(given.source, given.tau) as at, torch.no_grad():
            at(1.0)
            return torch.cat([logits(batch).argmax(-1) for batch in batches])

    assert with_views(given, 3) is given  # it does not know these labels
    labels = named(given.calibration.side(0))
    labels[:4] = torch.arange(4)  # every class is there; most are as the source says
    given = rebuilt(given, calibration=given.calibration.with_labels(labels))
    more = with_views(given, 3)
    assert more.calibration.samples == 4 * given.calibration.samples
    for old, new in zip(given.calibration, more.calibration, strict=False):  # the samples come first, as they were
        assert torch.equal(old[0].inputs["pixel_values"], new[0].inputs["pixel_values"])
        assert torch.equal(old[1].labels, new[1].labels)  # type: ignore[arg-type]
    views = [A for A, _ in more.calibration.pairs[len(given.calibration) :]]
    found = torch.cat([A.labels for A in views if A.labels is not None])
    assert torch.equal(found, named(views))
    assert len(set(found.tolist())) > 1
    one = int(found[0])
    only = given.calibration.with_labels(torch.full((24,), one))  # a class that no sample has is left out
    kept = with_views(rebuilt(given, calibration=only), 3).calibration.labels
    assert kept is not None
    assert set(kept.tolist()) == {one}
    assert with_views(given, 0) is given
    fitted = job("vit")  # prototypes would be made from the views as well
    assert with_views(fitted, 3) is fitted
    texts = job("bert-classifier")
    assert with_views(texts, 3) is texts


def test_the_record_tells_samples_from_views_and_the_scale() -> None:
    given = named_by_its_head()
    own: dict[str, Any] = {"halfway": 0.5, "whiten": True, "views": 2, "patches": False}
    moved = run("twofold", given, **own)
    known = moved.provenance
    assert known["method"] == "twofold"
    assert known["calibration"]["samples"] == 24
    assert known["calibration"]["sha256"] == given.calibration.identity()
    assert 0 < known["calibration"]["views"] <= 48
    assert own.items() <= known["settings"].items()
    assert moved.alignment is not None
    assert moved.alignment.provenance == known
    helps = run("twofold", helpful(), **own)
    assert helps.curve is not None
    assert helps.provenance["scale"] == pytest.approx(helps.curve.best)
    assert helps.provenance["calibration"]["views"] == 0  # its head is made from the samples
    for wrong in ({"views": -1}, {"directions": -1}, {"halfway": 1.5}):
        with pytest.raises(TaskferryError, match="views and directions are 0 or more"):
            run("twofold", given, **wrong)


def test_float32_gives_what_float64_gives() -> None:
    """Directions and tokens that carry nothing but rounding must not be whitened into a signal."""
    for name in ("vit", "bert", "gpt2"):
        given = job(name)
        fine = run("twofold", given, halfway=0.0)
        single = rebuilt(
            given,
            source=copy.deepcopy(given.source).float(),
            target=copy.deepcopy(given.target).float(),
            tau=TaskVector({n: as_dense(d).float() for n, d in given.tau.deltas.items()}),
            calibration=Calibration((as_float(A), as_float(B)) for A, B in given.calibration),
        )
        coarse = run("twofold", single, halfway=0.0)
        assert relative(flat(coarse.tau).double(), flat(fine.tau)) < 2e-3, name


def as_float(batch: Batch) -> Batch:
    return replace(batch, inputs={n: x.float() if x.is_floating_point() else x for n, x in batch.inputs.items()})


@pytest.mark.parametrize("target", [(16, 2), (24, 3)])
def test_bfloat16_changes_it_no_more_than_bico(target: tuple[int, int]) -> None:
    """Both see the same rounding of the same rows; small rows are rows, in whatever form they come."""
    half = job("qwen2", (16, 2), target)
    models = [copy.deepcopy(model).bfloat16() for model in (half.source, half.target)]
    half = rebuilt(half, source=models[0], target=models[1])
    single = rebuilt(half, source=copy.deepcopy(models[0]).float(), target=copy.deepcopy(models[1]).float())
    twofold, bico = (
        relative(flat(run(name, half, **own).tau), flat(run(name, single, **own).tau))
        for name, own in (("twofold", {"halfway": 0.0}), ("bico", {}))
    )
    assert bico < 0.05
    assert twofold < 1.2 * bico


def test_a_patch_embedding_stays_unless_asked_for_or_alone() -> None:
    given = helpful()
    name = "embeddings.patch_embeddings.projection.weight"
    assert name in given.tau.deltas
    moved = run("twofold", given).tau
    assert name not in moved.deltas
    assert moved.coverage is not None
    assert moved.coverage[name].status == "kept"
    assert moved.coverage[name].reason == PATCH
    assert set(moved.coverage.moved()) == set(moved.deltas)
    assert moved.coverage.unused[name] == PATCH
    assert name in run("twofold", given, patches=True).tau.deltas
    alone = TaskVector({name: given.tau.deltas[name]})
    assert len(run("twofold", replace(given, tau=alone)).tau)  # a change of it alone is still a change


def test_the_base_models_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reused sums give what new ones would."""
    given = helpful()
    seen = []
    real = whole.collect
    monkeypatch.setattr(whole, "collect", lambda *a, **k: (seen.append(1), real(*a, **k)))
    once = run("twofold", given)
    assert len(seen) == 2
    groups = run("twofold", rebuilt(given, work=Work(sums_memory=1000)))  # too many groups to be kept
    assert len(seen) > 6
    assert relative(flat(once.tau), flat(groups.tau)) < 1e-9


def test_the_untouched_target_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss on each fold is the same for both searches."""
    given = helpful()
    asked: list[float] = []
    real = whole.WholePair.losses

    def losses(pair: whole.WholePair, changes: Sequence[TaskVector], scales: Sequence[float]) -> list[list[float]]:
        asked.extend(scales)
        return real(pair, changes, scales)

    monkeypatch.setattr(whole.WholePair, "losses", losses)
    moved = run("twofold", given)
    assert moved.provenance["captures"] == 2
    assert asked.count(0.0) == 1
    assert moved.curve is not None
    folds = given.in_folds().pair.losses(moved.without, [0.0])[0]
    assert [before for before, _ in moved.curve.folds] == pytest.approx(folds, rel=1e-6)


def test_what_judges_a_fold_was_fitted_without_it() -> None:
    """The change for a fold is what the other samples alone give; all samples together give what is moved."""
    given = named_by_its_head()
    plain: dict[str, Any] = {"halfway": 0.0, "patches": True, "views": 0}
    moved = run("twofold", given, **plain)
    folded = given.in_folds().calibration
    assert folded.folds == len(moved.without) == 2
    for fold, judged in enumerate(moved.without):
        others = Calibration((replace(A, fold=0), replace(B, fold=0)) for A, B in folded if A.fold != fold)
        alone = run("twofold", rebuilt(given, calibration=others), **plain).tau
        assert relative(flat(judged) / judged.norm(), flat(alone) / alone.norm()) < 1e-6
        assert relative(flat(judged) / judged.norm(), flat(moved.tau) / moved.tau.norm()) > 0.01


@pytest.mark.parametrize("halfway", [0.0, 0.5])
def test_one_half_judges_where_it_has_samples_enough(halfway: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is then chosen on the first half, by maps of the second alone; what moves is by maps of both."""
    given = helpful()
    both = run("twofold", given, halfway=halfway)
    assert len(both.without) == 2
    monkeypatch.setattr("taskferry.methods.registry.FEW", given.calibration.samples // 2)
    one = run("twofold", given, halfway=halfway)
    assert one.curve is not None
    assert both.curve is not None
    assert len(one.without) == 1
    assert one.curve.folds  # shares of that half, for what they disagree in
    if not halfway:  # with it, the halfway point rests on the scale
        assert relative(flat(one.tau) / one.curve.best, flat(both.tau) / both.curve.best) < 1e-6
        assert relative(flat(one.without[0]) / one.curve.best, flat(both.without[0]) / both.curve.best) < 1e-6
    folded = given.in_folds()
    assert folded.calibration.judged == folded.judged == given.judged == 1
    assert not folded.few
    first = Calibration(
        (replace(A, judges=True), replace(B, judges=True)) for A, B in folded.calibration if A.fold == 0
    )
    assert [B.ids for B in first.side(1)] == [B.ids for B in folded.calibration.judging(1)[0]]
    loss = given.pair.objectives[1].bind(given.target, given.calibration.side(1))
    with moved_by(given.target, one.without[0]) as at:
        for scale, found in ((0.0, one.curve.loss(0.0)), (1.0, one.curve.loss(one.curve.best))):
            at(scale)
            assert calibration_loss(given.target, loss, first.side(1)) == pytest.approx(found, rel=1e-6)


def test_few_samples_choose_one_scale_of_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = helpful()
    assert not given.few
    monkeypatch.setattr("taskferry.methods.registry.FEW", 25)
    assert given.few
    moved = run("twofold", given)
    assert moved.curve is not None
    assert 0 < moved.curve.best <= 1
    assert len(moved.curve.folds) == 2
    assert moved.curve.loss(0.0) == pytest.approx(sum(before for before, _ in moved.curve.folds) / 2)
    assert moved.curve.points[-1][0] == 1.0


def test_how_samples_are_cut_into_micro_batches_does_not_matter() -> None:
    """With augmented views as well: of the same samples, under the same names, in the same folds."""
    given = named_by_its_head()
    found = []
    for size in (5, 8, 24):
        whole_pair = [(A, B) for A, B in given.calibration]
        singles = [(A.take([i]), B.take([i])) for A, B in whole_pair for i in range(len(A))]
        cut = [joined(singles[i : i + size]) for i in range(0, len(singles), size)]
        moved = run("twofold", rebuilt(given, calibration=Calibration(cut)), views=2)
        assert moved.provenance["calibration"]["views"] > 0
        found.append(moved)
    for other in found[1:]:
        assert other.provenance["calibration"]["views"] == found[0].provenance["calibration"]["views"]
        assert relative(flat(other.tau), flat(found[0].tau)) < 1e-6


def joined(pairs: Sequence[tuple[Batch, Batch]]) -> tuple[Batch, Batch]:
    def side(batches: Sequence[Batch]) -> Batch:
        inputs = {name: torch.cat([b.inputs[name] for b in batches]) for name in batches[0].inputs}
        return Batch(inputs, torch.cat([b.labels for b in batches if b.labels is not None]))

    return side([A for A, _ in pairs]), side([B for _, B in pairs])
