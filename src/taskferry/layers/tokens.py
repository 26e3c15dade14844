"""Making two token sequences comparable (paper, section 3.2).

    >>> pairs = match(layout_A, layout_B, length_A, length_B)
    >>> X_A, X_B = pairs.source(x_A), pairs.target(x_B)       # [M, d_A] and [M, d_B], row by row the same token

The source is brought to the target's tokens. Class tokens are kept, patch grids are resized bilinearly in two
dimensions, text in two tokenizers is paired by character offsets, other sequences are resized in one dimension.
Padding is masked out of both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry.errors import TaskferryError


@dataclass(frozen=True)
class Layout:
    """What the rows of one stream of activations stand for, in one micro-batch of n samples."""

    mask: Tensor | None = None  # [n, L], true where a token is no padding
    ids: Tensor | None = None  # [n, L], token ids, to see whether both sides read the same tokens
    spans: Tensor | None = None  # [n, L, 2], character offsets; (0, 0) for a special token
    prefix: int = 0  # class and register tokens in front of the grid
    grid: tuple[int, int] | None = None  # rows and columns of patches
    in_place: bool = False  # tokens of windows or of stages that shrink: they pair with as many tokens, or with none

    @property
    def length(self) -> int | None:
        """Tokens of a sample, where that is known."""
        if self.grid is not None:
            return self.prefix + self.grid[0] * self.grid[1]
        tensor = self.mask if self.mask is not None else self.ids if self.ids is not None else self.spans
        return None if tensor is None else tensor.shape[1]


@dataclass(frozen=True)
class GridResize:
    """Class tokens kept, the patches between them resized bilinearly. A token the source does not have becomes zero."""

    prefix_A: int
    prefix_B: int
    grid_A: tuple[int, int]
    grid_B: tuple[int, int]

    def __call__(self, x: Tensor) -> Tensor:
        """[n, L_A, d] to [n, L_B, d]. Channels last is how tokens lie in memory, so nothing is transposed."""
        n, _, d = x.shape
        patches = x[:, self.prefix_A :].reshape(n, *self.grid_A, d).permute(0, 3, 1, 2)
        resized = F.interpolate(patches, size=self.grid_B, mode="bilinear", align_corners=False)
        tokens = x.new_zeros(n, self.prefix_B + self.grid_B[0] * self.grid_B[1], d)
        shared = min(self.prefix_A, self.prefix_B)
        tokens[:, :shared] = x[:, :shared]
        tokens[:, self.prefix_B :] = resized.permute(0, 2, 3, 1).reshape(n, -1, d)
        return tokens


@dataclass(frozen=True)
class TokenMatch:
    """Rows of the source as rows of the target, restricted to the tokens kept."""

    weights: Tensor | GridResize | None = None  # [L_B, L_A] or [n, L_B, L_A] @ x_A; None is the identity
    keep: Tensor | None = None  # [L_B] or [n, L_B]; None keeps all

    def source(self, x: Tensor) -> Tensor:
        """[n, L_A, d_A] to [M, d_A]; what is resized or averaged is in float32 at least."""
        if self.weights is not None and x.dtype.itemsize < 4:
            x = x.float()
        if isinstance(self.weights, GridResize):
            x = self.weights(x)
        elif self.weights is not None:
            x = self.weights.to(x) @ x
        return self._select(x)

    def target(self, x: Tensor) -> Tensor:
        """[n, L_B, d_B] to [M, d_B]."""
        return self._select(x)

    def _select(self, x: Tensor) -> Tensor:
        if self.keep is None:
            return x.reshape(-1, x.shape[-1])
        places = self._places.to(x.device)
        if self.keep.ndim == 1:
            return x.index_select(1, places).reshape(-1, x.shape[-1])
        return x.reshape(-1, x.shape[-1]).index_select(0, places)

    @cached_property
    def _places(self) -> Tensor:
        """Of the tokens kept, found where the mask is: a device would make the host wait for their number."""
        mask = torch.ones(0, dtype=torch.bool) if self.keep is None else self.keep
        return mask.flatten().nonzero()[:, 0]


def match(A: Layout, B: Layout, length_A: int, length_B: int) -> TokenMatch:
    """How the source's tokens become the target's, for activations of length_A and length_B."""
    if length_A == length_B == 1:
        return TokenMatch()  # pooled: one row a sample
    if (A.in_place or B.in_place) and length_A != length_B:
        raise TaskferryError(
            f"the source has {length_A} tokens of an image at a layer and the target {length_B}, in an order that "
            "cannot be resized: give two models that cut images alike, or rows of text where they read texts"
        )
    if A.grid is not None and B.grid is not None:
        return _match_grids(A, B, length_A, length_B)
    _check_length("source", A, length_A)
    _check_length("target", B, length_B)
    if A.ids is not None and B.ids is not None:
        if _same_tokens(A, B):
            return _match_in_order(A, B, length_A, length_B)
        if A.spans is None or B.spans is None:
            raise TaskferryError(
                "the two models read different tokens and there are no character offsets to pair them by: "
                "use fast tokenizers (return_offsets_mapping=True) or models that share a tokenizer"
            )
        return _match_spans(A, B)
    return _match_in_order(A, B, length_A, length_B)


def _check_length(side: str, layout: Layout, length: int) -> None:
    for name, tensor in (("mask", layout.mask), ("ids", layout.ids), ("spans", layout.spans)):
        if tensor is not None and tensor.shape[1] != length:
            raise TaskferryError(f"the {side} has {length} tokens at a layer but a {name} of length {tensor.shape[1]}")


def _match_grids(A: Layout, B: Layout, length_A: int, length_B: int) -> TokenMatch:
    grid_A, grid_B = A.grid or (0, 0), B.grid or (0, 0)
    for side, layout, grid, length in (("source", A, grid_A, length_A), ("target", B, grid_B, length_B)):
        if layout.prefix + grid[0] * grid[1] != length:
            raise TaskferryError(
                f"the {side} has {length} tokens at a layer, but {layout.prefix} class tokens and a grid of "
                f"{grid[0]} x {grid[1]} patches; give images of one size, or a family that knows its tokens"
            )
    if grid_A == grid_B and A.prefix == B.prefix:
        return TokenMatch()
    # A class or register token that the source does not have pairs with nothing.
    keep = None
    if A.prefix < B.prefix:
        keep = torch.ones(length_B, dtype=torch.bool)
        keep[A.prefix : B.prefix] = False
    return TokenMatch(GridResize(A.prefix, B.prefix, grid_A, grid_B), keep)


def _valid(layout: Layout, n: int, length: int) -> Tensor:
    if layout.mask is None:
        return torch.ones(n, length, dtype=torch.bool)
    return layout.mask.bool().cpu()


def _same_tokens(A: Layout, B: Layout) -> bool:
    if A.ids is None or B.ids is None:
        return False
    n = A.ids.shape[0]
    tokens_A = A.ids.cpu()[_valid(A, n, A.ids.shape[1])]
    tokens_B = B.ids.cpu()[_valid(B, n, B.ids.shape[1])]
    return tokens_A.shape == tokens_B.shape and bool((tokens_A == tokens_B).all())


def _match_in_order(A: Layout, B: Layout, length_A: int, length_B: int) -> TokenMatch:
    """The k-th real token with the k-th; resized linearly where their numbers differ."""
    if A.mask is None and B.mask is None:
        if length_A == length_B:
            return TokenMatch()
        return TokenMatch(_resize_1d(length_A, length_B))
    n = A.mask.shape[0] if A.mask is not None else B.mask.shape[0] if B.mask is not None else 0
    valid_A, valid_B = _valid(A, n, length_A), _valid(B, n, length_B)
    if valid_A.shape == valid_B.shape and bool((valid_A == valid_B).all()):
        return TokenMatch(None, None if bool(valid_B.all()) else valid_B)
    weights = torch.zeros(n, length_B, length_A, dtype=torch.float64)
    for i in range(n):
        at_A, at_B = valid_A[i].nonzero().flatten(), valid_B[i].nonzero().flatten()
        if at_A.numel() and at_B.numel():
            weights[i, at_B[:, None], at_A] = _resize_1d(at_A.numel(), at_B.numel())
    return TokenMatch(weights, valid_B & weights.any(dim=2))


def _resize_1d(length_A: int, length_B: int) -> Tensor:
    """[L_B, L_A]: linear interpolation along a sequence."""
    eye = torch.eye(length_A, dtype=torch.float64)[:, None]
    return F.interpolate(eye, size=length_B, mode="linear", align_corners=False)[:, 0].T


def _match_spans(A: Layout, B: Layout) -> TokenMatch:
    """A target token takes the mean of the source tokens whose characters overlap its own."""
    if A.spans is None or B.spans is None:
        raise ValueError("no spans")
    spans_A, spans_B = A.spans.cpu(), B.spans.cpu()
    n, length_B = spans_B.shape[:2]
    valid_A, valid_B = _valid(A, n, spans_A.shape[1]), _valid(B, n, length_B)
    start_A, end_A = spans_A[:, None, :, 0], spans_A[:, None, :, 1]  # [n, 1, L_A]
    start_B, end_B = spans_B[:, :, None, 0], spans_B[:, :, None, 1]  # [n, L_B, 1]
    overlap = (torch.minimum(end_A, end_B) > torch.maximum(start_A, start_B)).double()
    overlap *= (valid_B[:, :, None] & valid_A[:, None, :]).double()
    _pair_special_tokens(overlap, spans_A, spans_B, valid_A, valid_B)
    total = overlap.sum(dim=2, keepdim=True)
    return TokenMatch(overlap / total.clamp_min(1), valid_B & (total[..., 0] > 0))


def _pair_special_tokens(overlap: Tensor, spans_A: Tensor, spans_B: Tensor, valid_A: Tensor, valid_B: Tensor) -> None:
    """First and last tokens that stand for no characters (class, separator, end) pair with each other."""
    for i in range(overlap.shape[0]):
        at_A, at_B = valid_A[i].nonzero().flatten(), valid_B[i].nonzero().flatten()
        if not at_A.numel() or not at_B.numel():
            continue
        for end in (0, -1):
            a, b = int(at_A[end]), int(at_B[end])
            if spans_A[i, a, 0] == spans_A[i, a, 1] and spans_B[i, b, 0] == spans_B[i, b, 1]:
                overlap[i, b, a] = 1.0
