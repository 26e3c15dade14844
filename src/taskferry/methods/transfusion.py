"""TransFusion: re-basin of transformers of equal shape by permutations (Rinaldi et al., 2025).

Heads are matched in two levels: between heads by the distance of their singular values, which no rotation or
permutation inside a head changes; within matched heads by inner products. Hidden units and the residual stream are
matched by inner products, given the other permutations, until nothing changes. Every parameter that touches a space
is permuted with it, so the permuted source computes the same function as before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from taskferry.alignment import NO_CHANGE
from taskferry.coverage import Coverage, Row
from taskferry.layers import family_of
from taskferry.layers.discovery import find_sites
from taskferry.layers.site import Site
from taskferry.methods import CannotMove, Job, Moved, Needs, method, need_equal_shapes
from taskferry.taskvector import Delta, TaskVector, as_dense

KNOWN = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.gate", "mlp.down", "patch", "proj", "pooler")
Axis = tuple[str, int, Site | None, str]  # parameter, axis of the site's or parameter's own form, site, space


@method(needs=Needs(samples=False, whole=True))
def transfusion(job: Job, *, iterations: Annotated[int, "rounds over all spaces, at most"] = 30) -> Moved:
    """Permute the source's units onto the target's, then add the permuted change. Needs no calibration set."""
    # In the host's memory, where units are assigned: the two models may be on two devices.
    A, B = ({n: p.detach().cpu() for n, p in model.named_parameters()} for model in (job.source, job.target))
    stay = need_equal_shapes("transfusion", job)
    spaces = Spaces.of(job.source).among({n for n, p in A.items() if n in B and p.shape == B[n].shape})
    order = match_permutations(spaces, A, B, iterations)
    moved = spaces.permute({n: as_dense(d) for n, d in job.tau.deltas.items() if n not in stay}, order)
    deltas: dict[str, Delta] = {name: moved[name] for name in B if name in moved}
    rows = [
        Row(n, tuple(p.shape), "moved", "", (n,))
        if n in deltas
        else Row(n, tuple(p.shape), "kept", stay.get(n, NO_CHANGE))
        for n, p in B.items()
    ]
    return Moved(TaskVector(deltas, Coverage(tuple(rows), stay)))


@dataclass
class Spaces:
    """Which axes of which parameters are coordinates of one space that a permutation may reorder."""

    axes: dict[str, list[Axis]] = field(default_factory=dict)  # space -> axes
    sizes: dict[str, int] = field(default_factory=dict)
    heads: dict[str, tuple[int, str]] = field(default_factory=dict)  # head-structured space -> (heads, block)

    @classmethod
    def of(cls, model: nn.Module) -> Spaces:
        """The spaces of a transformer without rotary positions or norms inside heads."""
        config = getattr(model, "config", None)
        rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
        if rotary or getattr(config, "rotary_dim", None):
            raise CannotMove("transfusion cannot permute inside heads with rotary positions")
        if getattr(config, "model_type", "") in ("bloom", "mpt") or getattr(config, "alibi", False):
            raise CannotMove("transfusion cannot permute heads that weigh distances each in its own way (ALiBi)")
        if getattr(config, "is_encoder_decoder", False):
            raise CannotMove("transfusion does not know the spaces of an encoder-decoder")
        family = family_of(model)
        sites = find_sites(model)
        spaces = cls()
        taken: set[str] = set()
        for site in sites:
            if site.role not in KNOWN and (family.name != "timm" or site.fixed is None):
                raise CannotMove(
                    f"transfusion does not know the space that {site.name} reads: give the model without its head"
                )
            stream = family.stream(model, site.name.partition("#")[0], "")
            block = f"{stream}.{site.block}"
            out, in_ = _spaces_of(site.role, block, f"{stream}.residual")
            for space, axis in ((out, 0), (in_, 1)):
                if space is not None:
                    spaces._add(space, site.weight, axis, site, site.shape[axis])
            if site.bias is not None:
                taken.add(site.bias)
                if out is not None:
                    spaces._add(out, site.bias, 0, site, site.shape[0])
            taken.add(site.weight)
            for space in (out, in_):
                if space is not None and space.endswith((".qk", ".v")):
                    spaces.heads[space] = (attention_heads(model, stream), block)
        for name, parameter in model.named_parameters():
            if name in taken or not parameter.ndim:
                continue
            residual = f"{family.stream(model, name, '')}.residual"
            width = spaces.sizes.get(residual)
            if width is None or parameter.shape[-1] != width:
                if parameter.ndim == 1 and any(part.isdigit() for part in name.split(".")):
                    raise CannotMove(f"transfusion does not know the space of {name} {tuple(parameter.shape)}")
                continue
            spaces._add(residual, name, parameter.ndim - 1, None, width)
        return spaces

    def among(self, names: Collection[str]) -> Spaces:
        """The same spaces, seen in these parameters alone: one that the other model lacks has nothing to be held to."""
        axes = {space: [axis for axis in found if axis[0] in names] for space, found in self.axes.items()}
        return replace(self, axes=axes)

    def _add(self, space: str, parameter: str, axis: int, site: Site | None, size: int) -> None:
        if self.sizes.setdefault(space, size) != size:
            raise CannotMove(f"transfusion: {parameter} has {size} units in {space}, others {self.sizes[space]}")
        self.axes.setdefault(space, []).append((parameter, axis, site, space))

    def permute(self, tensors: Mapping[str, Tensor], order: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every tensor with the axes of its spaces reordered; `order[space][i]` is the unit that comes i-th."""
        result = {name: tensor.clone() for name, tensor in tensors.items()}
        for space, axes in self.axes.items():
            for name, axis, site, _ in axes:
                if name in result:
                    part = own_form(result[name], site)
                    turned = part.index_select(axis, order[space].to(part.device))
                    if site is None:
                        part.copy_(turned)
                    else:
                        site.put(turned, site.oriented(result[name]))
        return result


def own_form(stored: Tensor, site: Site | None) -> Tensor:
    """The form [out, in] of a site's weight, [out] of its bias; other parameters as they are."""
    if site is None:
        return stored
    return site.read(stored.view(stored.shape[0], -1) if stored.ndim > 2 else stored)


def attention_heads(model: nn.Module, stream: str) -> int:
    """Number of heads of a tower, from its configuration or its first attention module."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, f"{stream}_config", config)
    if hasattr(config, "num_attention_heads"):
        return int(config.num_attention_heads)
    tower: Any = model
    if hasattr(model, "visual"):
        tower = model.visual if stream == "vision" else getattr(model, "text", getattr(model, "transformer", model))
    for module in tower.modules():
        if isinstance(getattr(module, "num_heads", None), int):
            return int(module.num_heads)
    raise CannotMove("transfusion does not find the number of attention heads")


def match_permutations(
    spaces: Spaces, A: Mapping[str, Tensor], B: Mapping[str, Tensor], iterations: int
) -> dict[str, Tensor]:
    """The order of the source's units in every space that brings its weights closest to the target's."""
    order = {space: torch.arange(size) for space, size in spaces.sizes.items()}
    heads: dict[str, list[int]] = {}
    for space, (count, block) in spaces.heads.items():
        if block not in heads:
            heads[block] = _match_heads(spaces, A, B, block, count)
        order[space] = _expand(heads[block], spaces.sizes[space])
    for _ in range(iterations):
        changed = False
        for space in spaces.axes:
            gain = _gain(spaces, space, A, B, order)
            if space in spaces.heads:
                count, block = spaces.heads[space]
                new = _assign_within(gain, heads[block], count)
            else:
                new = _assign(gain)
            if (
                float(gain[torch.arange(len(new)), new].sum())
                > float(gain[torch.arange(len(new)), order[space]].sum()) + 1e-9
            ):
                order[space], changed = new, True
        if not changed:
            break
    return order


def _spaces_of(role: str, block: str, residual: str) -> tuple[str | None, str | None]:
    """(space of the outputs, space of the inputs) of a role."""
    return {
        "attn.q": (f"{block}.qk", residual),
        "attn.k": (f"{block}.qk", residual),
        "attn.v": (f"{block}.v", residual),
        "attn.o": (residual, f"{block}.v"),
        "mlp.up": (f"{block}.mlp", residual),
        "mlp.gate": (f"{block}.mlp", residual),
        "mlp.down": (residual, f"{block}.mlp"),
        "patch": (residual, None),
    }.get(role, (None, residual))


def _gain(
    spaces: Spaces, space: str, A: Mapping[str, Tensor], B: Mapping[str, Tensor], order: Mapping[str, Tensor]
) -> Tensor:
    """G[i, j]: inner product of the target's unit i with the source's unit j, the other axes in their present order."""
    total = torch.zeros(spaces.sizes[space], spaces.sizes[space], dtype=torch.float64)
    others = {
        (name, axis, None if site is None else site.name): other
        for other, axes in spaces.axes.items()
        for name, axis, site, _ in axes
        if other != space
    }
    for name, axis, site, _ in spaces.axes[space]:
        a, b = (own_form(P[name].detach(), site).double() for P in (A, B))
        for other_axis in range(a.ndim):
            other = others.get((name, other_axis, None if site is None else site.name))
            if other is not None:
                a = a.index_select(other_axis, order[other])
        total += b.movedim(axis, 0).flatten(1) @ a.movedim(axis, 0).flatten(1).T if a.ndim > 1 else torch.outer(b, a)
    return total


def _match_heads(spaces: Spaces, A: Mapping[str, Tensor], B: Mapping[str, Tensor], block: str, count: int) -> list[int]:
    """Source head for each target head, by the distance of singular values."""
    distance = torch.zeros(count, count, dtype=torch.float64)
    for space, (_, owner) in spaces.heads.items():
        for name, axis, site, _ in spaces.axes[space] if owner == block else ():
            a, b = (own_form(P[name].detach(), site).double() for P in (A, B))
            if a.ndim == 2:
                values = [
                    torch.linalg.svdvals(m.movedim(axis, 0).reshape(count, -1, m.shape[1 - axis])) for m in (b, a)
                ]
                distance += torch.cdist(values[0], values[1])
    return _assign(-distance).tolist()


def _expand(heads: list[int], size: int) -> Tensor:
    width = size // len(heads)
    return torch.cat([torch.arange(h * width, (h + 1) * width) for h in heads])


def _assign_within(gain: Tensor, heads: list[int], count: int) -> Tensor:
    width = gain.shape[0] // count
    parts = []
    for target, source in enumerate(heads):
        block = gain[target * width : (target + 1) * width, source * width : (source + 1) * width]
        parts.append(source * width + _assign(block))
    return torch.cat(parts)


def _assign(gain: Tensor) -> Tensor:
    """The assignment of columns to rows with the largest sum."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise CannotMove("transfusion needs SciPy: pip install 'taskferry[methods]'") from error
    return torch.as_tensor(linear_sum_assignment(gain.numpy(), maximize=True)[1])
