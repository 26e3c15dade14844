"""Samples in folds: every class in every one, none in two, whatever the micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from taskferry import Batch, Calibration


def samples(labels: list[int] | None, size: int, count: int = 12) -> Calibration:
    pairs = []
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        own = None if labels is None else torch.tensor([labels[i] for i in numbers])
        x = torch.tensor([[float(i)] for i in numbers])
        pairs.append((Batch({"x": x}, own, tuple(numbers)), Batch({"x": 10 * x}, own, tuple(numbers))))
    return Calibration(pairs)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_every_class_is_spread_over_the_folds(size: int) -> None:
    labels = [0, 1, 2] * 4
    found = samples(labels, size).in_folds(2)
    assert found.folds == 2
    ids = [[i for A, _ in found if A.fold == fold for i in A.ids] for fold in range(2)]
    assert sorted(ids[0] + ids[1]) == list(range(12))
    for fold in ids:
        assert sorted(labels[i] for i in fold) == [0, 0, 1, 1, 2, 2]
    assert [i for A, _ in found for i in A.ids] == [i for A, _ in samples(labels, 12).in_folds(2) for i in A.ids]
    for A, B in found:
        assert torch.equal(10 * A.inputs["x"], B.inputs["x"])
        assert A.inputs["x"].flatten().tolist() == list(map(float, A.ids))
    assert [sum(map(len, batches)) for batches in found.judging(2)] == [6, 6]
    assert sum(map(len, found.judging(1)[0])) == 12


def test_one_sample_a_class_and_texts_without_classes() -> None:
    alone = samples(list(range(12)), 4).in_folds(2)
    assert [sum(len(A) for A, _ in alone if A.fold == fold) for fold in range(2)] == [6, 6]
    plain = samples(None, 5).in_folds(3)
    assert [sum(len(A) for A, _ in plain if A.fold == fold) for fold in range(3)] == [4, 4, 4]
    assert samples(None, 1, count=1).in_folds(2).folds == 1


def test_the_first_part_alone_judges_where_it_has_enough() -> None:
    """All samples stay in their parts; only what losses are taken on changes."""
    given = samples([0, 1] * 6, 4)
    both, one = given.in_folds(2, enough=7), given.in_folds(2, enough=6)
    assert (both.judged, one.judged) == (2, 1)
    assert [(A.ids, A.fold) for A, _ in both] == [(A.ids, A.fold) for A, _ in one]
    assert [i for B in one.judging(1)[0] for i in B.ids] == [i for A, _ in both if A.fold == 0 for i in A.ids]
    assert [i for batches in both.judging(2) for B in batches for i in B.ids] == [i for A, _ in both for i in A.ids]
    assert one.identity() == both.identity()
    shares = one.judging(2)  # of the one part, which may say otherwise
    assert sorted(i for B in (*shares[0], *shares[1]) for i in B.ids) == sorted(
        i for B in one.judging(1)[0] for i in B.ids
    )
    assert all(shares)
    assert samples([0, 1, 2, 3] * 3, 4).in_folds(2, enough=6).judged == 2  # less than two of each class
    some = Calibration(
        (replace(A, judges=i == 0), replace(B, judges=i == 0)) for i, (A, B) in enumerate(samples(None, 4))
    )
    assert some.in_folds(2, enough=3).judged == 2  # what does not judge does not count
    assert [i for B in some.in_folds(2, enough=2).judging(1)[0] for i in B.ids] == [0, 2]
