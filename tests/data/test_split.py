"""Samples that a change is made from, and those held out to judge it."""

from __future__ import annotations

import pytest
import torch

from taskferry import Batch, Calibration


def samples(labels: list[int] | None, count: int = 100, size: int = 8) -> Calibration:
    def batch(start: int) -> Batch:
        ids = tuple(range(start, min(start + size, count)))
        known = None if labels is None else torch.tensor([labels[i] for i in ids])
        return Batch({"x": torch.tensor(ids)[:, None].float()}, known, ids)

    return Calibration((batch(start), batch(start)) for start in range(0, count, size))


def ids(calibration: Calibration) -> list[int]:
    return [i for batch in calibration.side(1) for i in batch.ids]


@pytest.mark.parametrize("classes", [None, 3, 10])
def test_a_fifth_is_held_out_of_every_class(classes: int | None) -> None:
    labels = None if classes is None else [i % classes for i in range(100)]
    fit, held_out = samples(labels).split(seed=1)
    assert sorted(ids(fit) + ids(held_out)) == list(range(100))
    assert len(ids(held_out)) == 20
    if labels is not None and classes is not None:
        counts = [sum(labels[i] == c for i in ids(held_out)) for c in range(classes)]
        assert max(counts) - min(counts) <= 1
    assert all(A.ids == B.ids for A, B in [*fit, *held_out])
    assert max(map(len, fit.side(0))) <= 8


def test_the_seed_chooses() -> None:
    whole = samples(None)
    assert ids(whole.split(seed=1)[1]) == ids(whole.split(seed=1)[1]) != ids(whole.split(seed=2)[1])


def test_the_only_sample_of_a_class_is_never_held_out() -> None:
    labels = [0] * 10 + [1] * 2 + [2]
    for seed in range(10):
        fit, _ = samples(labels, len(labels)).split(seed)
        assert {labels[i] for i in ids(fit)} == {0, 1, 2}


def test_too_few_to_split() -> None:
    whole = samples([0, 1, 0, 1], 4)
    assert whole.split() == (whole, whole)
    fit, held_out = samples(None, 5).split()
    assert len(ids(fit)) == 4
    assert len(ids(held_out)) == 1
