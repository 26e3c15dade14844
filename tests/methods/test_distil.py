"""Copies of images that both models see alike, and a target that is brought to the tuned source's outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry import Batch, Calibration, TaskVector
from taskferry.calibration.augmentation import Views, warp
from taskferry.fitting.objectives import Classifier
from taskferry.fitting.scale import moved_by
from taskferry.methods import CannotMove, Job, run
from tests.helpers.tiny import job, rebuilt


def smooth(n: int, size: int, seed: int = 0) -> Tensor:
    """Images that mean the same at any resolution."""
    coarse = torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=False)


def images(n: int, size_A: int = 32, size_B: int = 48, micro_batch: int = 4) -> Calibration:
    A, B = smooth(n, size_A), smooth(n, size_B)
    return Calibration(
        (Batch({"x": A[i : i + micro_batch]}), Batch({"x": B[i : i + micro_batch]})) for i in range(0, n, micro_batch)
    )


def test_the_samples_come_first_and_unchanged() -> None:
    views = Views(images(10), views=3)
    assert len(views) == 40
    A, B = views.pair([2, 7])
    assert torch.equal(A.inputs["x"], smooth(10, 32)[[2, 7]])
    assert torch.equal(B.inputs["x"], smooth(10, 48)[[2, 7]])


def test_a_copy_is_the_same_picture_at_both_resolutions_and_not_the_sample() -> None:
    views = Views(images(10), views=3)
    for number in range(10, 40):
        A, B = (batch.inputs["x"] for batch in views.pair([number]))
        at_A = F.interpolate(B, size=(32, 32), mode="bilinear", align_corners=False, antialias=True)
        assert float((A - at_A).norm() / A.norm()) < 0.1
        original = smooth(10, 32)[[number % 10]]
        assert float((A - original).norm() / original.norm()) > 0.15


def test_a_copy_does_not_depend_on_what_it_is_asked_for_with() -> None:
    views = Views(images(10), views=3)
    alone, together = views.pair([23])[0].inputs["x"], views.pair([5, 38, 23])[0].inputs["x"]
    assert torch.allclose(alone[0], together[2], atol=1e-6)
    other = Views(images(10), views=3, seed=1).pair([23])[0].inputs["x"]
    assert not torch.allclose(alone, other, atol=1e-2)


def test_the_middle_of_every_range_changes_nothing_and_a_shift_shifts() -> None:
    x = smooth(3, 32)
    numbers = torch.full((3, 6), 0.5)
    assert torch.allclose(warp(x, numbers), x, atol=1e-4)
    numbers[:, 3] = 1.0  # to the right by 0.2 of half the side: 3.2 pixels
    shifted = warp(x, numbers)[..., :28]
    assert torch.allclose(shifted, 0.8 * x[..., 3:31] + 0.2 * x[..., 4:32], atol=1e-4)


def test_texts_have_no_copies_and_keep_their_padding() -> None:
    short, long = (
        Batch({"input_ids": torch.full((2, n), n), "attention_mask": torch.ones(2, n, dtype=torch.long)})
        for n in (3, 5)
    )
    views = Views(Calibration([(short, short), (long, long)]), views=7)
    assert len(views) == 4
    inputs = views.pair([1, 2])[0].inputs
    assert inputs["input_ids"].tolist() == [[3, 3, 3, 0, 0], [5] * 5]
    assert inputs["attention_mask"].sum(1).tolist() == [3, 5]


def distance_to_teacher(given: Job, tau: TaskVector) -> float:
    """Mean cross-entropy of the target's answers against the tuned source's, on the samples."""
    heads = given.pair.objectives
    answers = []
    for model, change, side, head in (
        (given.source, given.tau, 0, heads[0]),
        (given.target, tau, 1, heads[1]),
    ):
        assert isinstance(head, Classifier)
        with moved_by(model, change) as set_scale, torch.no_grad():
            set_scale(1.0)
            logits = head.logits(model, given.calibration.side(side))
            answers.append(torch.cat([logits(batch) for batch in given.calibration.side(side)]))
    return float(F.cross_entropy(answers[1], answers[0].softmax(-1)))


def test_the_target_answers_more_as_the_tuned_source_does() -> None:
    given = job("vit", (16, 2), (24, 3))
    before = distance_to_teacher(given, TaskVector({}))
    moved = distance_to_teacher(given, run("bico", given).tau)
    after = distance_to_teacher(given, run("distil", given, steps=60, learning_rate=1e-2, views=2).tau)
    own = distance_to_teacher(rebuilt(given, target=given.source), given.tau)  # the entropy: no less is possible
    assert after - own < 0.5 * (min(before, moved) - own)


def test_labels_do_not_matter_from_a_cold_start() -> None:
    given = job("bert-classifier")
    wrong = rebuilt(given, calibration=given.calibration.with_labels(torch.zeros(24, dtype=torch.long)))
    first, second = (run("distil", j, steps=3, start="target").tau for j in (given, wrong))
    assert all(torch.equal(delta, second.deltas[name]) for name, delta in first.deltas.items())


def test_only_linear_layers_learn_and_the_rest_has_its_reason() -> None:
    given = job("vit")
    moved = run("distil", given, steps=2, views=0).tau
    assert moved.coverage is not None
    kept = {row.parameter: row.reason for row in moved.coverage if row.status == "kept"}
    assert any("layernorm" in name.lower() for name in kept)
    assert set(kept.values()) <= {"not a linear layer", "no gradient reaches it"}
    assert all(p.requires_grad for p in given.target.parameters())


def test_language_models_are_refused_with_a_reason() -> None:
    with pytest.raises(CannotMove, match="score classes"):
        run("distil", job("llama"))
