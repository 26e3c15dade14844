"""What a site is: one linear map of a model, and how its weight is stored.

    >>> for site in find_sites(model):
    ...     print(site.name, site.stack, site.block, site.role, site.shape)

A packed matrix (q, k and v in one) is several sites of one parameter: each has its own output space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from taskferry.families import Family


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

    def read(self, stored: Tensor) -> Tensor:
        """This site's [out, in] out of the parameter as it is stored (a view)."""
        W = stored.flatten(1) if stored.ndim > 2 else stored
        W = W.T if self.transposed else W
        return W if self.rows is None else W[self.rows[0] : self.rows[1]]

    def read_bias(self, stored: Tensor) -> Tensor:
        """This site's [out] out of the bias as it is stored (a view)."""
        return stored if self.rows is None else stored[self.rows[0] : self.rows[1]]


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


def find_sites(model: nn.Module, family: Family | None = None) -> list[Site]:
    """All sites of a model, in the order of its parameters."""
    if family is None:
        from taskferry.families import family_of

        family = family_of(model)
    sites: list[Site] = []
    for linear in _linear_parameters(model, family):
        whole = family.name_site(model, linear)
        if not linear.parts:
            sites.append(whole)
            continue
        start = 0
        for part, size in linear.parts:
            role = whole.role.rsplit(".", 1)[0] + "." + part if "." in whole.role else part
            sites.append(
                replace(
                    whole,
                    name=f"{whole.name}#{part}",
                    role=role,
                    rows=(start, start + size),
                    shape=(size, whole.shape[1]),
                )
            )
            start += size
        if start != linear.out_features:
            raise ValueError(f"{linear.weight}: its parts have {start} rows, the matrix {linear.out_features}")
    return _number_blocks(sites)


def _linear_parameters(model: nn.Module, family: Family) -> list[LinearParameter]:
    found: list[LinearParameter] = []
    # A tied weight counts once, under its first name: a head tied to the embedding is the embedding.
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def add(linear: LinearParameter, parameter: Tensor) -> None:
        if names.get(id(parameter)) == linear.weight:
            found.append(linear)

    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        if isinstance(module, nn.Linear):
            out, in_ = module.weight.shape
            parts = family.parts(model, path, out, in_)
            add(LinearParameter(path, f"{dot}weight", _bias(module, dot), out, in_, parts=parts), module.weight)
        elif type(module).__name__ == "Conv1D" and getattr(module, "weight", None) is not None:
            in_, out = module.weight.shape  # GPT-2 stores [in, out]
            parts = family.parts(model, path, out, in_)
            linear = LinearParameter(path, f"{dot}weight", f"{dot}bias", out, in_, True, parts)
            add(linear, module.weight)
        elif isinstance(module, nn.Conv2d) and is_patch_embedding(module):
            out, in_ = module.weight.shape[0], module.weight[0].numel()
            add(LinearParameter(path, f"{dot}weight", _bias(module, dot), out, in_), module.weight)
        elif getattr(module, "in_proj_weight", None) is not None:
            # nn.MultiheadAttention and OpenCLIP's own Attention: q, k and v in one bare parameter.
            out, in_ = module.in_proj_weight.shape
            bias = None if module.in_proj_bias is None else f"{dot}in_proj_bias"
            qkv = (("q", out // 3), ("k", out // 3), ("v", out // 3))
            linear = LinearParameter(f"{dot}in_proj", f"{dot}in_proj_weight", bias, out, in_, parts=qkv)
            add(linear, module.in_proj_weight)
        for name in family.bare_projections:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.ndim == 2:
                in_, out = parameter.shape  # used as x @ parameter
                add(LinearParameter(f"{dot}{name}", f"{dot}{name}", None, out, in_, True), parameter)
    return found


def _bias(module: nn.Linear | nn.Conv2d, dot: str) -> str | None:
    return None if module.bias is None else f"{dot}bias"


def is_patch_embedding(module: nn.Conv2d) -> bool:
    """A convolution that cuts an image into patches and maps each linearly."""
    return (
        module.kernel_size == module.stride
        and module.kernel_size != (1, 1)
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding in ((0, 0), "valid")
    )


def _number_blocks(sites: list[Site]) -> list[Site]:
    """Blocks counted 0, 1, 2 … in each stack (a Sequential's layers may be numbered 0, 2, 4)."""
    order: dict[str, dict[int, int]] = {}
    for site in sites:
        if site.block is not None:
            order.setdefault(site.stack, {})[site.block] = 0
    for blocks in order.values():
        for position, block in enumerate(sorted(blocks)):
            blocks[block] = position
    return [s if s.block is None else replace(s, block=order[s.stack][s.block]) for s in sites]


def depths(sites: list[Site]) -> Mapping[str, int]:
    """Number of blocks of each stack."""
    depth: dict[str, int] = {}
    for site in sites:
        if site.block is not None:
            depth[site.stack] = max(depth.get(site.stack, 0), site.block + 1)
    return depth
