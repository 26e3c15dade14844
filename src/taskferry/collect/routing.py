"""Which expert of the source feeds which of the target: by what each adds to the same tokens.

    >>> found = match_experts(sides, sites, pairs, calibration)
    >>> found["blocks", 3].mixture().source           # the source's expert for each of the target's

An expert's part in a token is what the router gives it times the length of what it returns; two experts overlap by the
cosine of their parts over all tokens. As many experts on both sides are assigned one to one; else each of the target's
takes the one that overlaps most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from taskferry.collect.capture import Side, watch
from taskferry.collect.device import frozen, place_of
from taskferry.collect.recorder import Call
from taskferry.data.batch import Batch
from taskferry.layers.pairing import Mixture, Pair, Place
from taskferry.layers.routed import Routed, Rows
from taskferry.layers.site import Site
from taskferry.layers.tokens import Layout, match
from taskferry.linalg.assignment import assign

Parts = dict[Place, tuple[Tensor, Layout]]  # [n, L, experts] of a block, and how its tokens lie


def has_experts(pairs: Iterable[Pair]) -> bool:
    """Whether any site of them is one."""
    return any(site.expert is not None for pair in pairs for site in (pair.source, pair.target))


def match_experts(
    sides: tuple[Side, Side],
    sites: tuple[Sequence[Site], Sequence[Site]],
    pairs: Sequence[Pair],
    calibration: Iterable[tuple[Batch, Batch]],
) -> dict[Place, Meeting]:
    """What meets in every block of the target, from one forward pass of both models over the samples."""
    meetings = {_place(pair.target): Meeting(_place(pair.source)) for pair in pairs if has_experts([pair])}
    last = [[site for site in own if site.expert is not None and site.role.endswith("down")] for own in sites]
    for batches in calibration:
        parts_A, parts_B = (_parts(*each) for each in zip(sides, batches, last, strict=True))
        for place, meeting in meetings.items():
            meeting.add(parts_A.get(meeting.source), parts_B.get(place))
    return meetings


@dataclass
class Meeting:
    """The experts of a block of the source and of the block of the target that takes its change."""

    source: Place
    products: Tensor | None = None  # [E_A, E_B], of their parts in all tokens
    squares: list[Tensor] = field(default_factory=list)  # of either side, [E_A] and [E_B]
    given: Tensor | None = None  # [E_A], the sum of the parts of the source's experts

    def add(self, A: tuple[Tensor, Layout] | None, B: tuple[Tensor, Layout] | None) -> None:
        """The parts of one micro-batch."""
        if A is not None:
            self.given = A[0].sum((0, 1)) + (0 if self.given is None else self.given)
        if A is None or B is None:
            return
        tokens = match(A[1], B[1], A[0].shape[1], B[0].shape[1])
        X_A, X_B = tokens.source(A[0]), tokens.target(B[0])
        squares = [X_A.square().sum(0), X_B.square().sum(0)]
        self.products = X_A.T @ X_B + (0 if self.products is None else self.products)
        self.squares = [a + b for a, b in zip(squares, self.squares, strict=True)] if self.squares else squares

    def overlap(self) -> Tensor | None:
        """[E_A, E_B], the cosines; None where one of the two has no experts."""
        if self.products is None:
            return None
        A, B = (each.sqrt().clamp_min(torch.finfo(torch.float64).tiny) for each in self.squares)
        return self.products / A[:, None] / B

    def mixture(self) -> Mixture:
        """How the experts pair up."""
        overlap = self.overlap()
        if overlap is None:
            shares = () if self.given is None else tuple((self.given / self.given.sum()).tolist())
            return Mixture(shares=shares)
        count_A, count_B = overlap.shape
        chosen = assign(overlap.T) if count_A == count_B else overlap.argmax(0).tolist()
        return Mixture(source=tuple(chosen))

    def facts(self) -> dict[str, Any]:
        """For the record."""
        overlap, mixture = self.overlap(), self.mixture()
        if overlap is None:
            why = "each expert's change, by its share of the tokens" if mixture.shares else "one change for all experts"
            return {"why": why, "shares": [round(share, 4) for share in mixture.shares]}
        equal = overlap.shape[0] == overlap.shape[1]
        nearest = f"the nearest of {overlap.shape[0]} for each of {overlap.shape[1]}: their numbers differ"
        return {
            "why": "assigned one to one by what they add to the same tokens" if equal else nearest,
            "source": list(mixture.source),
            "overlap": [round(float(overlap[a, b]), 4) for b, a in enumerate(mixture.source)],
        }


def _parts(side: Side, batch: Batch, last: Sequence[Site]) -> Parts:
    """What each expert adds to each token, block by block; `last` are the experts' last layers."""
    if not last:
        return {}
    layouts = side.family.layouts(side.model, batch)
    found: Parts = {}
    counts: dict[Place, int] = {}
    for site in last:
        counts[_place(site)] = max(counts.get(_place(site), 0), (site.expert or 0) + 1)

    def look(call: Call, _: Rows, y: Rows) -> None:
        site = call.site
        if not isinstance(y, Routed):
            return
        if _place(site) not in found:
            empty = y.rows.new_zeros(y.samples * y.length, counts[_place(site)], dtype=torch.float64)
            found[_place(site)] = (empty, layouts.get(site.stream, Layout()))
        part = y.weights.double().abs() * torch.linalg.vector_norm(y.rows.double(), dim=1)
        found[_place(site)][0][y.tokens, site.expert] = part

    with torch.inference_mode(False), torch.no_grad(), frozen(side.model):
        watch(side, batch.to(*place_of(side.model)), last, look, lambda *_: None, layouts)
    return {place: (x.view(batch.rows, -1, x.shape[-1]), layout) for place, (x, layout) in found.items()}


def _place(site: Site) -> Place:
    return site.stack, site.block
