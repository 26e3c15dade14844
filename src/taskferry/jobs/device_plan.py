"""Memory of a device, by arithmetic: one block of each model is rehearsed on the meta device, the rest are sizes.

    >>> on_device(job, cost, precisions).whole, on_device(job, cost, precisions).blockwise        # bytes at the peak

Both models are taken to lie on one device. Checked against the memory counter of pretended devices
(tests/devices/test_plan.py); what a library's kernels and allocator take besides, only a real device tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from taskferry.collect.rehearsal import Rehearsal, on_meta, rehearse
from taskferry.collect.scale import ROUND, START
from taskferry.collect.statistics import Capture
from taskferry.errors import TaskferryError
from taskferry.jobs.block_plan import map_shapes
from taskferry.jobs.cost import as_rows, map_bytes, map_rank, rows_met, size, sums_bytes, workspace_bytes
from taskferry.layers.discovery import block_paths
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.methods import Cost, Job
from taskferry.taskvector import LowRank

Shape = tuple[int, int]
Kinds = list[tuple[type[CrossCovariance], Shape]]


@dataclass(frozen=True)
class OnDevice:
    """Bytes on the device at the peak, by engine; and on the host, where weights pass through it."""

    whole: int
    blockwise: int
    host_whole: int
    host_blockwise: int
    weights: int


def on_device(
    job: Job, cost: Cost, precisions: tuple[torch.dtype, torch.dtype] | None = None, *, products: bool = True
) -> OnDevice:
    """Of a job's models, in other precisions where they are given; the models may be skeletons.

    `products`: whether maps are solved by products of matrices alone, as they are on CUDA.
    """
    given = precisions or (None, None)
    models = on_meta(job.source, given[0]), on_meta(job.target, given[1])
    sizes = _Sizes(job, models, job.wanted, cost, products)
    blocks, outer = sizes.blocks, sizes.outer
    return OnDevice(
        whole=sizes.whole(),
        blockwise=sizes.blockwise(),
        host_whole=max(sizes.weights),
        host_blockwise=max(max(blocks[0]) + max(blocks[1]), *outer),
        weights=sum(sizes.weights),
    )


class _Sizes:
    """All that the sums below are made of, in bytes."""

    def __init__(
        self, job: Job, models: tuple[nn.Module, nn.Module], pairs: list[Pair], cost: Cost, products: bool
    ) -> None:
        self.job, self.models, self.pairs, self.cost, self.products = job, models, pairs, cost, products
        self.groups: dict[tuple[str, int], list[Pair]] = {}
        for pair in pairs:
            if pair.target.block is not None and pair.source.block is not None:
                self.groups.setdefault((pair.target.stack, pair.target.block), []).append(pair)
        if not self.groups:
            raise TaskferryError(
                "no block of the target takes a change: the memory of a device is not told without weights; leave "
                "--device-memory out"
            )
        self.one = max(self.groups.values(), key=len)  # the pairs of the fullest block
        sides = job.pair.source_sites, job.pair.target_sites
        self.paths = [block_paths(sites) for sites in sides]
        self.blocks = [
            [_under(model, path) for path in found.values()] for model, found in zip(models, self.paths, strict=True)
        ]
        self.weights = [sum(p.nbytes for p in model.parameters()) for model in models]
        self.outer = [whole - sum(inside) for whole, inside in zip(self.weights, self.blocks, strict=True)]

    @cached_property
    def passes(self) -> Rehearsal:
        """Of the largest micro-batch."""
        first = self.one[0]
        places = ((first.source.stack, first.source.block), (first.target.stack, first.target.block))
        paths = self.paths[0][places[0]], self.paths[1][places[1]]  # type: ignore[index]
        batches = max(self.job.calibration, key=lambda both: size(both[1]))
        mine = [p for p in self.one if p.source.block == first.source.block]
        return rehearse(
            self.models,
            paths,
            mine,
            batches,
            Capture(sums=self.cost.sums, directions=self.cost.directions, tokens=self.cost.tokens),
        )

    @cached_property
    def seen(self) -> int:
        """Tokens that both models have, of all captures."""
        return rows_met(self.job.calibration, self.cost.tokens) * max(1, self.cost.captures)

    def kinds(self, pairs: Iterable[Pair]) -> Kinds:
        """Of every map of some pairs: its kind of sums, and its widths."""
        inputs, outputs = map_shapes(pairs)
        return [*((CrossCovariance, shape) for shape in inputs), *((self.cost.sums, shape) for shape in outputs)]

    def sums(self, kinds: Kinds) -> int:
        """With those of folds."""
        return sum(sums_bytes(kind, self.seen, *shape, self.cost.folds, self.cost.directions) for kind, shape in kinds)

    def maps(self, kinds: Kinds) -> int:
        """One version of them."""
        low_rank = self.job.tau.low_rank and not self.job.every_site
        total = 0
        for kind, (a, b) in kinds:
            kept = map_rank(self.seen, a, b, self.cost.directions)
            by_products = self.products and len(kind.moments) == 1 and kept == min(a, b)
            dense = not low_rank or (by_products and not as_rows(kind, self.seen, a, b, self.cost.directions))
            total += map_bytes(self.seen, a, b, self.cost.directions) if dense else 4 * kept * (a + b)
        return total

    def workspace(self, kinds: Kinds) -> int:
        """Of the largest decomposition, in float64."""
        return max(
            self._total(kind, *shape) + workspace_bytes(kind, self.seen, *shape, self.cost.directions, self.products)
            for kind, shape in kinds
        )

    def _total(self, kind: type[CrossCovariance], a: int, b: int) -> int:
        """The sums of all folds of one map together, where they are not rows that are there already."""
        rows_alone = as_rows(kind, self.seen, a, b, self.cost.directions)
        return 0 if self.cost.folds == 1 or rows_alone else 4 * kind.numbers(a, b)

    def moving(self, side: int) -> int:
        """A copy of the weights that move."""
        model = self.models[side]
        names = {(pair.source, pair.target)[side].weight for pair in self.pairs}
        return sum(model.get_parameter(name).nbytes for name in names)

    def changes(self) -> int:
        """The change itself where the maps lie, and what was moved by each version of them."""
        versions = self.cost.versions
        deltas = [self.job.tau.deltas[p.source.weight] for p in self.pairs if p.source.weight in self.job.tau.deltas]
        if all(isinstance(delta, LowRank) for delta in deltas):
            ranks = [delta.rank if isinstance(delta, LowRank) else 0 for delta in deltas]
            shapes = [(sum(p.source.shape), sum(p.target.shape)) for p in self.pairs]
            return sum(4 * r * (a + versions * b) for r, (a, b) in zip(ranks, shapes, strict=False))
        return sum(4 * (math.prod(p.source.shape) + versions * math.prod(p.target.shape)) for p in self.pairs)

    def whole(self) -> int:
        """Both models, and the worst of capture, solving and trying scales."""
        cost, A, B = self.cost, self.passes.source, self.passes.target
        kinds = self.kinds(self.pairs)
        every, memory = self.sums(kinds), self.job.pair.work.sums_memory
        sums, groups = min(every, memory), max(1, -(-every // memory))
        maps, workspace = self.maps(kinds), self.workspace(kinds)
        # Maps without a fold are let go with their block, or with their group.
        passing = 0 if cost.versions == 1 else self.maps(self.kinds(self.one)) if groups == 1 else maps // groups
        used = len({(pair.source.stack, pair.source.block) for pair in self.pairs})
        depth_A, depth_B = (len(blocks) for blocks in self.blocks)
        # Blocks of the source that no pair takes from hold no rows; their graph is there.
        graph_A = used * A.forward + (depth_A - used) * (A.forward - (A.backward - A.gradients))
        passes = max(
            graph_A + max(A.head, A.most - A.forward),
            used * A.backward + B.most,
            used * A.gradients + depth_B * B.forward + max(B.head, B.most - B.forward),
        )
        halfway = self.moving(0) + self.moving(1) if cost.captures > 1 and cost.rough else 0
        capture = sums + passes + halfway + maps * (groups - 1) // groups
        solve = max(sums + maps * (groups - 1) // groups + passing, maps) + workspace
        scale = maps + self.moving(1) + max(B.quiet, B.head)
        return sum(self.weights) + self.changes() + max(capture, solve, scale)

    def blockwise(self) -> int:
        """One block of each model, the hidden states of all samples, and the sums of one block."""
        cost, A, B = self.cost, self.passes.source, self.passes.target
        kinds = self.kinds(self.one)
        points = max(1, min(2, cost.captures))
        edges, calls = self._states()
        block_A, block_B = (max(blocks) for blocks in self.blocks)
        sums, state = self.sums(kinds), points * (3 * sum(edges) + sum(calls))
        scales = 2 if cost.evaluations <= 2 else sum(scale <= 1 for scale in START) if self.job.few else ROUND
        # The first block is there beside what stands outside of all; then each block alone; then the loss.
        walks = [
            max(outer + block + kept.quiet + 2 * kept.edge, block + edge // (cost.folds if scaled else 1) + kept.quiet,
                outer + kept.head)
            for scaled, outer, block, edge, kept in (
                (False, self.outer[0], block_A, edges[0], A),
                (False, self.outer[1], block_B, edges[1], B),
                (True, self.outer[1], block_B, edges[1], B),
            )
        ]  # fmt: skip
        peak = max(
            block_A + block_B + state + sums + max(A.most, A.backward + B.most),
            state + sums + self.maps(kinds) + self.workspace(kinds),
            points * (sum(edges) + sum(calls)) + max(walks[:2]),
            scales * (edges[1] + calls[1]) * max(1, cost.judged) // cost.folds + walks[2],
        )
        return self.changes() + peak

    def _states(self) -> tuple[list[int], list[int]]:
        """Hidden states of all micro-batches, and what their blocks are called with, of each model."""
        edges, calls = [], []
        for side, kept in enumerate((self.passes.source, self.passes.target)):
            batches = self.job.calibration.side(side)
            largest = size(max(self.job.calibration, key=lambda both: size(both[1]))[side])
            share = sum(map(size, batches)) / largest
            given = sum(tensor.nbytes for batch in batches for tensor in batch.inputs.values())
            edges.append(round(kept.edge * share))
            calls.append(round(kept.call * share) + given)
        return edges, calls


def _under(model: nn.Module, path: str) -> int:
    return sum(parameter.nbytes for parameter in model.get_submodule(path).parameters())
