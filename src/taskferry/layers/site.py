"""What a site is: one linear map of a model, and how its weight is stored.

A packed matrix (q, k and v in one) is several sites of one parameter: each has its own output space. Its rows may lie
in one piece, or in one piece for every head: `rows=(8, 16, 24)` is 8 to 16, 32 to 40, 56 to 64 … of the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """One linear map y = x Wᵀ + b, W: [out, in].

    `stack`, `block` and `role` say what it is in any model of its kind ("vision", 3, "attn.q"), so that
    sites of two models can be paired; `stream` names the tokens that flow through it.
    """

    name: str  # unique in the model; "…#q" for a part of a packed matrix
    weight: str  # parameter name
    bias: str | None
    shape: tuple[int, int]  # [out, in] of this site
    role: str
    stack: str = ""
    block: int | None = None
    stream: str = "tokens"
    rows: tuple[int, ...] | None = None  # (start, stop) of a packed matrix's outputs, (…, period) where they repeat
    transposed: bool = False  # stored as [in, out]
    fixed: str | None = None  # why this site is never moved
    kind: str = ""  # what its block is among the blocks of its stack, where the model says so: "sliding attention"

    def oriented(self, stored: Tensor) -> Tensor:
        """The whole parameter as [out, in] (a view); a bias as it is."""
        if stored.ndim == 1:
            return stored
        W = stored.flatten(1) if stored.ndim > 2 else stored
        return W.T if self.transposed else W

    def read(self, stored: Tensor) -> Tensor:
        """This site's [out, in] out of the weight as it is stored, or its [out] out of the bias.

        A view, unless its rows repeat.
        """
        return self.own(self.oriented(stored))

    def own(self, packed: Tensor, dim: int = 0, first: int = 0) -> Tensor:
        """This site's outputs along one dimension of all that its matrix has, or of those from `first` on."""
        mine, dim = self._within(packed, dim, first), dim % packed.ndim
        return mine if mine.ndim == packed.ndim else mine.flatten(dim, dim + 1)

    def put(self, part: Tensor, packed: Tensor) -> None:
        """The inverse of `own`: this site's outputs into the first dimension of all."""
        mine = self._within(packed)
        mine.copy_(part.reshape(mine.shape))

    def _within(self, packed: Tensor, dim: int = 0, first: int = 0) -> Tensor:
        """A view of this site's outputs; where they repeat, with a dimension for the repetitions before their own."""
        if self.rows is None:
            return packed
        start, stop, *period = self.rows
        if not period:
            return packed.narrow(dim, start - first, stop - start)
        dim %= packed.ndim
        return torch.unflatten(packed, dim, (-1, period[0])).narrow(dim + 1, start, stop - start)


@dataclass(frozen=True)
class LinearParameter:
    """A parameter that acts as a linear map, before it is named and split: what the walk finds."""

    path: str  # of the module, or of the parameter where it is used bare
    weight: str
    bias: str | None
    out_features: int
    in_features: int
    transposed: bool = False
    parts: tuple[tuple[str, int], ...] = ()  # (suffix of the role, rows) of a packed matrix; fewer rows in all repeat


def is_patch_embedding(module: nn.Conv2d) -> bool:
    """A convolution that cuts an image into patches and maps each linearly."""
    return (
        module.kernel_size == module.stride
        and module.kernel_size != (1, 1)
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding in ((0, 0), "valid")
    )


def depths(sites: Sequence[Site]) -> Mapping[str, int]:
    """Number of blocks of each stack."""
    depth: dict[str, int] = {}
    for site in sites:
        if site.block is not None:
            depth[site.stack] = max(depth.get(site.stack, 0), site.block + 1)
    return depth
