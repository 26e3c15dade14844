"""What a site is: one linear map of a model, and how its weight is stored.

A packed matrix (q, k and v in one) is several sites of one parameter: each has its own output space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    rows: tuple[int, int] | None = None  # which outputs of a packed matrix
    transposed: bool = False  # stored as [in, out]
    fixed: str | None = None  # why this site is never moved
    expert: int | None = None  # which slice of experts stacked in one parameter
    share: float = 1.0  # of several changes that come together in one weight: what this one counts

    def read(self, stored: Tensor) -> Tensor:
        """This site's [out, in] out of the parameter as it is stored (a view)."""
        W = stored if self.expert is None else stored[self.expert]
        W = W.flatten(1) if W.ndim > 2 else W
        W = W.T if self.transposed else W
        return W if self.rows is None else W[self.rows[0] : self.rows[1]]

    def read_bias(self, stored: Tensor) -> Tensor:
        """This site's [out] out of the bias as it is stored (a view)."""
        b = stored if self.expert is None else stored[self.expert]
        return b if self.rows is None else b[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class LinearParameter:
    """A parameter that acts as a linear map, before it is named and split: what the walk finds."""

    path: str  # of the module, or of the parameter where it is used bare
    weight: str
    bias: str | None
    out_features: int
    in_features: int
    transposed: bool = False
    parts: tuple[tuple[str, int], ...] = ()  # (suffix of the role, rows) of a packed matrix
    experts: int = 0  # how many are stacked in it; 0 for a plain matrix


def is_patch_embedding(module: nn.Conv2d) -> bool:
    """A convolution that cuts an image into patches and maps each linearly."""
    return (
        module.kernel_size == module.stride
        and module.kernel_size != (1, 1)
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding in ((0, 0), "valid")
    )


def depths(sites: list[Site]) -> Mapping[str, int]:
    """Number of blocks of each stack."""
    depth: dict[str, int] = {}
    for site in sites:
        if site.block is not None:
            depth[site.stack] = max(depth.get(site.stack, 0), site.block + 1)
    return depth
