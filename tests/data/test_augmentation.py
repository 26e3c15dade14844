"""Augmented views of images, which both models see alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry import Batch, Calibration
from taskferry.data.augmentation import Views, warp


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


def test_what_is_known_of_samples_is_blended_as_their_pictures_are() -> None:
    views = Views(images(10), views=3, strength=0.0)  # nothing but blending is left
    pictures = views.side(0, range(40)).inputs["x"].flatten(1)
    assert torch.allclose(views.blend(smooth(10, 32).flatten(1), range(40)), pictures, atol=1e-4)
    assert not torch.allclose(pictures[10:20], pictures[:10], atol=0.1)


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
