"""Making two token sequences comparable."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from taskferry import TaskferryError
from taskferry.layers.tokens import Layout, match


def test_grids_are_resized_as_torch_resizes_images_and_class_tokens_stay() -> None:
    x = torch.randn(2, 1 + 4 * 6, 5)
    pairs = match(Layout(prefix=1, grid=(4, 6)), Layout(prefix=1, grid=(3, 5)), 25, 16)
    rows = pairs.source(x).reshape(2, 16, 5)
    image = x[:, 1:].reshape(2, 4, 6, 5).permute(0, 3, 1, 2)
    resized = F.interpolate(image, (3, 5), mode="bilinear", align_corners=False)
    assert torch.allclose(rows[:, 1:], resized.permute(0, 2, 3, 1).reshape(2, 15, 5), atol=1e-6)
    assert torch.equal(rows[:, 0], x[:, 0])
    y = torch.randn(2, 16, 3)
    assert torch.equal(pairs.target(y), y.reshape(-1, 3))


def test_a_token_that_the_source_does_not_have_pairs_with_nothing() -> None:
    distilled = match(Layout(prefix=1, grid=(2, 2)), Layout(prefix=2, grid=(2, 2)), 5, 6)
    x, y = torch.randn(3, 5, 4), torch.randn(3, 6, 4)
    assert torch.allclose(distilled.source(x), x.reshape(-1, 4))
    assert torch.equal(distilled.target(y), y[:, [0, 2, 3, 4, 5]].reshape(-1, 4))
    back = match(Layout(prefix=2, grid=(2, 2)), Layout(prefix=1, grid=(2, 2)), 6, 5)
    assert torch.allclose(back.source(y), y[:, [0, 2, 3, 4, 5]].reshape(-1, 4))


def test_equal_grids_need_nothing() -> None:
    pairs = match(Layout(prefix=1, grid=(2, 2)), Layout(prefix=1, grid=(2, 2)), 5, 5)
    assert pairs.weights is None
    assert pairs.keep is None


def test_a_wrong_grid_says_so() -> None:
    with pytest.raises(TaskferryError, match=r"target has 7 tokens.*2 x 2"):
        match(Layout(prefix=1, grid=(2, 2)), Layout(prefix=1, grid=(2, 2)), 5, 7)


def test_padding_on_either_side() -> None:
    """The k-th real token with the k-th, wherever the padding stands."""
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    left = torch.tensor([[0, 5, 6, 7], [0, 0, 8, 9]])
    A, B = Layout(mask=ids > 0, ids=ids), Layout(mask=left > 0, ids=left)
    pairs = match(A, B, 4, 4)
    x = ids[..., None].double()
    assert pairs.source(x).flatten().tolist() == pairs.target(left[..., None].double()).flatten().tolist()
    assert pairs.source(x).flatten().tolist() == [5, 6, 7, 8, 9]


def test_sequences_without_a_grid_are_resized_in_one_dimension() -> None:
    x = torch.arange(8.0).reshape(1, 8, 1)
    halved = match(Layout(), Layout(), 8, 4).source(x).flatten()
    assert torch.allclose(halved, torch.tensor([0.5, 2.5, 4.5, 6.5]))
    mask_A, mask_B = torch.ones(1, 8), torch.tensor([[1, 1, 1, 1, 0]])
    masked = match(Layout(mask=mask_A), Layout(mask=mask_B), 8, 5)
    assert torch.allclose(masked.source(x).flatten(), halved)
    assert masked.target(torch.arange(5.0).reshape(1, 5, 1)).flatten().tolist() == [0, 1, 2, 3]


def test_tokenizers_are_paired_by_characters() -> None:
    """ "unhappy cat": [CLS] un happy cat [SEP] against <s> unh appy cat </s>."""
    A = Layout(
        ids=torch.tensor([[1, 10, 11, 12, 2, 0]]),
        mask=torch.tensor([[1, 1, 1, 1, 1, 0]]),
        spans=torch.tensor([[[0, 0], [0, 2], [2, 7], [8, 11], [0, 0], [0, 0]]]),
    )
    B = Layout(
        ids=torch.tensor([[50, 60, 61, 62, 51]]), spans=torch.tensor([[[0, 0], [0, 3], [3, 7], [8, 11], [0, 0]]])
    )
    pairs = match(A, B, 6, 5)
    x = torch.tensor([100.0, 1.0, 3.0, 5.0, 200.0, 999.0]).reshape(1, 6, 1)
    assert pairs.source(x).flatten().tolist() == [100.0, 2.0, 3.0, 5.0, 200.0]


def test_a_token_that_overlaps_nothing_is_left_out() -> None:
    A = Layout(ids=torch.tensor([[3, 4]]), spans=torch.tensor([[[0, 2], [2, 4]]]))
    B = Layout(ids=torch.tensor([[7, 8, 9]]), spans=torch.tensor([[[0, 4], [4, 6], [0, 0]]]))
    pairs = match(A, B, 2, 3)
    assert pairs.source(torch.tensor([[[1.0], [2.0]]])).flatten().tolist() == [1.5]
    assert pairs.target(torch.tensor([[[5.0], [6.0], [7.0]]])).flatten().tolist() == [5.0]


def test_different_tokens_without_offsets_are_refused() -> None:
    with pytest.raises(TaskferryError, match="no character offsets"):
        match(Layout(ids=torch.tensor([[3, 4]])), Layout(ids=torch.tensor([[3, 5]])), 2, 2)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(TaskferryError, match="source has 3 tokens"):
        match(Layout(mask=torch.ones(1, 4)), Layout(mask=torch.ones(1, 3)), 3, 3)


def test_pooled_rows_need_no_tokens() -> None:
    pairs = match(Layout(mask=torch.ones(2, 9)), Layout(prefix=1, grid=(3, 3)), 1, 1)
    assert pairs.source(torch.ones(2, 1, 4)).shape == (2, 4)


def test_tokens_in_windows_pair_in_place_or_not_at_all() -> None:
    windows, x = Layout(in_place=True), torch.randn(2, 8, 3)
    assert torch.equal(match(windows, windows, 8, 8).source(x), x.reshape(-1, 3))
    with pytest.raises(TaskferryError, match="8 tokens of an image at a layer and the target 16"):
        match(windows, Layout(prefix=0, grid=(4, 4)), 8, 16)
