"""The parts of a target parameter put together: rows of a packed matrix, slices of stacked experts, shares of a sum."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from taskferry.layers.site import Site
from taskferry.taskvector import Delta, LowRank, as_dense


class Assembly:
    """The parts of one target parameter, put together in its stored form."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.parts: list[tuple[Site, Delta]] = []
        self.sources: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.missing: list[str] = []

    def add(self, target: Site, source: str, delta: Delta, note: str = "") -> None:
        """What a site of the target takes from a parameter of the source; a note says how that was chosen."""
        self.parts.append((target, delta))
        self.sources[source] = None
        if note:
            self.notes[note] = None

    def miss(self, target: Site) -> None:
        """A site whose source does not change."""
        self.missing.append(target.role)

    def delta(self) -> Delta:
        """The change of the whole parameter."""
        if self.parts[0][0].expert is None:
            return _together(self.parts, self.shape)
        experts: dict[int, list[tuple[Site, Delta]]] = {}
        for site, delta in self.parts:
            experts.setdefault(site.expert or 0, []).append((site, delta))
        found = {expert: _together(parts, self.shape[1:]) for expert, parts in experts.items()}
        low = {expert: delta for expert, delta in found.items() if isinstance(delta, LowRank)}
        if len(low) == len(found):
            return _stacked(low, self.shape[0])
        first = as_dense(next(iter(found.values())))
        whole = first.new_zeros(self.shape)  # experts that did not move stay as they are
        for expert, delta in found.items():
            whole[expert] = as_dense(delta)
        return whole


def _together(parts: list[tuple[Site, Delta]], shape: tuple[int, ...]) -> Delta:
    """The parts of a matrix or a bias in its stored form: rows that did not move are zero, shares add up."""
    first, delta = parts[0]
    if first.rows is None and len(parts) == 1:
        return _stored(first, delta, shape)
    out = shape[-1] if first.transposed else shape[0]
    if all(isinstance(part, LowRank) for _, part in parts):
        return _stored(first, _pack_low_rank(parts, out), shape)
    # A packed matrix is put together in the orientation [out, …].
    dense = [(site, as_dense(part)) for site, part in parts]
    whole = dense[0][1].new_zeros(out, *dense[0][1].shape[1:])
    for site, part in dense:
        site.add(part, whole)
    return _stored(first, whole, shape)


def _pack_low_rank(parts: list[tuple[Site, Delta]], out: int) -> LowRank:
    """Parts that share their right factor keep their rank; others stand side by side."""
    groups: dict[int, LowRank] = {}
    for site, part in parts:
        if not isinstance(part, LowRank):
            raise TypeError("only low-rank rows can be packed")
        group = groups.get(id(part.right))
        if group is None:
            group = LowRank(part.left.new_zeros(out, part.rank), part.right)
            groups[id(part.right)] = group
        site.add(part.left, group.left)
    return LowRank(
        torch.cat([group.left for group in groups.values()], 1),
        torch.cat([group.right for group in groups.values()], 0),
    )


def _stacked(experts: Mapping[int, LowRank], count: int) -> LowRank:
    """The changes of experts in one: all of the largest rank, filled up with zeros."""
    first = next(iter(experts.values()))
    rank = max(delta.rank for delta in experts.values())
    left = first.left.new_zeros(count, first.left.shape[0], rank)
    right = first.right.new_zeros(count, rank, first.right.shape[1])
    for expert, delta in experts.items():
        left[expert, :, : delta.rank], right[expert, : delta.rank] = delta.left, delta.right
    return LowRank(left, right)


def _stored(site: Site, delta: Delta, shape: tuple[int, ...]) -> Delta:
    if isinstance(delta, LowRank):
        return delta.T if site.transposed else delta
    return (delta.T.contiguous() if site.transposed and delta.ndim == 2 else delta).reshape(shape)
