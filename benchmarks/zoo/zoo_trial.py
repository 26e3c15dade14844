"""One pair of zoo models, one task and one draw, with all rows of both models at hand: what ideas are tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.zoo_bench import score
from taskferry import Alignment, TaskVector
from taskferry.alignment import AlignedPair
from taskferry.bench.recipe import Cell
from taskferry.bench.running import Bench
from taskferry.collect.capture import Side, collect
from taskferry.collect.device import frozen
from taskferry.collect.scale import choose_scale, losses_at, moved_by
from taskferry.collect.statistics import Paired
from taskferry.data.batch import Batch
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import DepthRule, Pair, nearest_block, pair_sites
from taskferry.linalg.procrustes import Map, procrustes

Solve = Callable[[Tensor, Tensor], Tensor]


def isometry(X_A: Tensor, X_B: Tensor) -> Tensor:
    """The paper's map from rows of both models, [M, d_A] and [M, d_B]."""
    return procrustes(X_A.T @ X_B)[0].dense()


@dataclass
class Rows:
    """All rows of both models, for maps of any kind: the zoo is small."""

    A: list[Tensor] = field(default_factory=list)
    B: list[Tensor] = field(default_factory=list)

    def add(self, X_A: Tensor, X_B: Tensor) -> None:
        self.A.append(X_A.detach().clone())
        self.B.append(X_B.detach().clone())

    def both(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.A), torch.cat(self.B)

    def plus(self, other: Rows) -> Rows:
        return Rows(self.A + other.A, self.B + other.B)


@dataclass
class AllRows(Paired[Rows]):
    """Of every site."""

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> Rows:  # noqa: ARG002
        return Rows()

    def plus(self, other: AllRows) -> AllRows:
        both = [
            {k: a[k].plus(b[k]) for k in a} for a, b in ((self.inputs, other.inputs), (self.outputs, other.outputs))
        ]
        return AllRows(*both, self.reads)


class Trial:
    """One pair, task and draw."""

    def __init__(self, bench: Bench, source: str, target: str, task: str, seed: int, count: int = 100) -> None:
        self.bench, self.names, self.task, self.seed = bench, (source, target), task, seed
        self.A, self.B = bench.model(source).model, bench.model(target).model
        self.prepared = bench.prepare(Cell(source, target, task, "random", count, False, seed, ()))
        self.calibration, self.heads = self.prepared.calibration, self.prepared.objectives
        self.tau, self.oracle = bench.tuned(source, task), bench.tuned(target, task)
        self.test = bench.task(task).test_batches(target, bench.model(target))
        self.logits = [head.logits(model, ()) for head, model in zip(self.heads, (self.A, self.B), strict=True)]
        true = [label for batch in self.calibration.side(1) for label in batch.labels.tolist()]
        self.true = F.one_hot(torch.tensor(true), bench.task(task).classes).float()

    @cached_property
    def soft(self) -> Tensor:
        """What the tuned source says of every sample."""
        with moved_by(self.A, self.tau) as at, torch.no_grad(), frozen(self.A):
            at(1.0)
            return torch.cat([self.logits[0](batch) for batch in self.calibration.side(0)]).softmax(-1)

    @cached_property
    def hard(self) -> Tensor:
        return F.one_hot(self.soft.argmax(-1), self.soft.shape[1]).float()

    def loss(self, side: int, labels: Tensor) -> Callable[[Batch], Tensor]:
        return lambda batch: F.cross_entropy(self.logits[side](batch), labels[list(batch.ids)], reduction="sum")

    def pairs(self, rule: DepthRule = nearest_block) -> list[Pair]:
        found = pair_sites(find_sites(self.A), find_sites(self.B), rule)[0]
        return [pair for pair in found if pair.target.stack != "text"]

    def rows(
        self, labels: Tensor, rule: DepthRule = nearest_block, at: tuple[TaskVector, TaskVector] | None = None
    ) -> AllRows:
        """Of the base models, or of both where they have moved a part of the way."""
        kept = AllRows()
        with ExitStack() as moves:
            for model, tau in zip((self.A, self.B), at or (), strict=False):
                moves.enter_context(moved_by(model, tau))(1.0)
            sides = (Side(self.A, self.loss(0, labels)), Side(self.B, self.loss(1, labels)))
            collect(kept, *sides, self.pairs(rule), self.calibration)
        return kept

    def alignment(self, rows: AllRows, R_in: Mapping[str, Map], R_out: Mapping[str, Map], rule: DepthRule) -> Alignment:
        pairs = [AlignedPair(p.source, p.target, rows.reads[p.target.name][0])
                 for p in self.pairs(rule) if p.target.name in rows.reads]  # fmt: skip
        shapes = [{n: tuple(p.shape) for n, p in model.named_parameters()} for model in (self.A, self.B)]
        return Alignment(tuple(pairs), R_in, R_out, {}, {}, *shapes, {}, {})

    def move(
        self, rows: AllRows, inputs: Solve | None = None, outputs: Solve | None = None, rule: DepthRule = nearest_block
    ) -> TaskVector:
        R_in = {name: Map(R=(inputs or isometry)(*kept.both())) for name, kept in rows.inputs.items()}
        R_out = {name: Map(R=(outputs or isometry)(*kept.both())) for name, kept in rows.outputs.items()}
        return self.alignment(rows, R_in, R_out, rule).apply(self.tau)

    @cached_property
    def base(self) -> AllRows:
        return self.rows(self.true)

    @cached_property
    def bico(self) -> TaskVector:
        return self.move(self.base)

    def automatic(self, tau: TaskVector, labels: Tensor) -> float:
        loss, batches = self.loss(1, labels), self.calibration.side(1)
        return choose_scale(lambda scales: losses_at(self.B, tau, loss, batches, scales)).best

    def accuracy(self, tau: TaskVector, scale: float) -> float:
        return score(self.B, self.test, self.heads[1], tau, scale)
