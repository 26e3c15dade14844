"""Finding the sites of a model.

>>> for site in find_sites(model):
...     print(site.name, site.stack, site.block, site.role, site.shape)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from taskferry.layers import Family, family_of
from taskferry.layers.family import split_path
from taskferry.layers.site import LinearParameter, Site, is_patch_embedding


def find_sites(model: nn.Module, family: Family | None = None) -> list[Site]:
    """All sites of a model, in the order of its parameters."""
    family = family or family_of(model)
    sites: list[Site] = []
    for linear in _linear_parameters(model, family):
        sites += _parts(family.name_site(model, linear), linear)
    kinds = {at: family.kind(model, path) for at, path in block_paths(sites).items()}
    sites = [site if site.block is None else replace(site, kind=kinds[site.stack, site.block]) for site in sites]
    return _number_blocks(sites)


def _parts(whole: Site, linear: LinearParameter) -> list[Site]:
    """One site for every part of a packed matrix, or the matrix itself.

    Parts that fill only a share of its rows repeat, one run a head.
    """
    if not linear.parts:
        return [whole]
    period = sum(size for _, size in linear.parts)
    if linear.out_features % period:
        raise ValueError(f"{linear.weight}: its parts have {period} rows, the matrix {linear.out_features}")
    runs = linear.out_features // period
    sites, start = [], 0
    for part, size in linear.parts:
        role = whole.role.rsplit(".", 1)[0] + "." + part if "." in whole.role else part
        rows = (start, start + size) if runs == 1 else (start, start + size, period)
        shape = (size * runs, whole.shape[1])
        sites.append(replace(whole, name=f"{whole.name}#{part}", role=role, rows=rows, shape=shape))
        start += size
    return sites


def block_paths(sites: Iterable[Site]) -> dict[tuple[str, int], str]:
    """(stack, block) -> the path of its module, in the order of the blocks."""
    paths: dict[tuple[str, int], str] = {}
    for site in sites:
        if site.block is not None:
            before, number, _ = split_path(site.weight)
            paths[site.stack, site.block] = f"{before}.{number}"
    return dict(sorted(paths.items()))


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


def _bias(module: nn.Module, dot: str) -> str | None:
    return None if module._parameters.get("bias") is None else f"{dot}bias"


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
