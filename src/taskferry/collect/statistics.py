"""What a fit captures, and what it keeps of it.

>>> BICO = Capture()                                             # activations in, gradients back (paper, section 4)
>>> Capture(outputs="activations")                               # THESEUS
>>> Capture(sums=Whitened, points=(BASE, Point(half_A, half_B)))   # whitened gradients, at two points
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from taskferry.data.batch import Batch
from taskferry.disk.files import hash_tensor
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.taskvector import LowRank, TaskVector

Signal = Literal["activations", "gradients"]
Tokens = Literal["answers", "all"]


@dataclass(frozen=True)
class Point:
    """Where both models stand when they are captured: what is added to each base."""

    source: TaskVector = field(default_factory=lambda: TaskVector({}))
    target: TaskVector = field(default_factory=lambda: TaskVector({}))


BASE = Point()


@dataclass(frozen=True)
class Capture:
    """What is captured of every pair of sites: signals, the kind of sums, and where both models stand."""

    inputs: Signal = "activations"  # x, or the gradient of the loss with respect to x through this site
    outputs: Signal = "gradients"  # the gradient with respect to y, or y
    sums: type[CrossCovariance] = CrossCovariance  # of the output side
    directions: int = 0  # the most that a map of wide spaces has; 0: as many as there are
    tokens: Tokens = "all"  # or those that predict an answer, where samples are prompts with answers
    points: tuple[Point, ...] = (BASE,)
    identity: Literal["inputs", "outputs"] | None = None  # a side whose coordinates stay as they are
    again: bool = False  # whether another capture will add a point to this one: its sums stay where they fit
    folds: int = 1  # the parts that the samples are in
    judged: int | None = None  # the first of them, or all: the last capture has maps without each of these as well

    @property
    def backward(self) -> bool:
        """Whether a backward pass is needed."""
        return "gradients" in (self.inputs, self.outputs)

    @property
    def versions(self) -> int:
        """Of every map: of all samples, then without each fold that is judged on."""
        return 1 if self.again or self.folds == 1 else 1 + (self.folds if self.judged is None else self.judged)

    def numbers(self, pair: Pair, rows: int | None = None) -> int:
        """Of the sums of a pair, at most; with so many rows of a fold at each point, where that is known."""
        (out_A, in_A), (out_B, in_B) = pair.source.shape, pair.target.shape
        shared = bool(pair.target.expert) and not pair.target.role.endswith("down")  # all experts read one tensor
        kinds = [(self.sums, out_A, out_B)]
        if not (shared and self.inputs == "activations"):
            kinds.append((CrossCovariance, in_A, in_B))
        if rows is None:
            return self.folds * sum(kind.numbers(a, b) for kind, a, b in kinds)
        each = rows * (len(self.points) + self.again)
        return self.folds * sum(kind.numbers_of(each, a, b, self.directions) for kind, a, b in kinds)

    def start(self, inputs: bool, d_A: int, d_B: int, exact: bool = False) -> CrossCovariance:
        """Empty sums for one side of a site."""
        return (CrossCovariance if inputs else self.sums)(d_A, d_B, exact=exact, directions=self.directions)

    def key(self) -> str:
        """The same for captures that see the same."""
        what = (self.inputs, self.outputs, self.sums.__name__, self.directions, self.tokens, self.identity)
        digest = hashlib.sha256(repr((*what, self.folds, self.judged, self.again)).encode())
        for point in self.points:
            for side, tau in (("source", point.source), ("target", point.target)):
                for name, delta in tau.deltas.items():
                    for part in (delta.left, delta.right) if isinstance(delta, LowRank) else (delta,):
                        hash_tensor(digest, f"{side} {name}", part)
        return digest.hexdigest()


class Sums(Protocol):
    """Takes the rows of both models, token by token the same, one micro-batch after the other."""

    def add(self, X_A: Tensor, X_B: Tensor) -> None:
        """X_A: [M, d_A], X_B: [M, d_B]."""


S = TypeVar("S", bound=Sums)


@dataclass
class Paired(Generic[S]):
    """What a capture keeps for a group of pairs. Sites that read the same tensors share one entry of `inputs`."""

    inputs: dict[str, S] = field(default_factory=dict)  # by the first target site that reads it
    outputs: dict[str, S] = field(default_factory=dict)  # by target site
    reads: dict[str, list[str]] = field(default_factory=dict)  # target site -> keys of `inputs`, one a use

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> S:  # noqa: ARG002
        """Empty sums for the inputs (or the outputs) of a target site."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps")

    def of(self, batch: Batch) -> Paired[S]:  # noqa: ARG002
        """Where the rows of a micro-batch go."""
        return self


@dataclass
class Statistics(Paired[CrossCovariance]):
    """Sums of products, of the kinds that a capture asks for."""

    capture: Capture = field(default_factory=Capture)
    exact: bool = False
    parts: list[Statistics] = field(default_factory=list)  # of each fold, where there are several

    def __post_init__(self) -> None:
        if self.capture.folds > 1 and not self.parts:
            one = replace(self.capture, folds=1)
            self.parts = [Statistics(capture=one, exact=self.exact) for _ in range(self.capture.folds)]

    def of(self, batch: Batch) -> Statistics:
        """The part of its fold."""
        return self.parts[batch.fold] if self.parts else self

    def versions(self, capture: Capture) -> list[Statistics]:
        """As many as a capture asks for: of all samples, then without each fold that is judged on.

        Where a second point will be added, the maps only say how far the first goes: plain ones do as well for that.
        """
        whole = _total(self.parts) if self.parts else self
        if capture.again:
            whole = replace(whole, outputs={name: sums.plain() for name, sums in whole.outputs.items()})
        if not self.parts or capture.versions == 1:
            return [whole]
        left = [[part for part in self.parts if part is not out] for out in self.parts[: capture.judged]]
        return [whole, *(some[0] if len(some) == 1 else _total(some) for some in left)]

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> CrossCovariance:  # noqa: ARG002
        """Empty sums of that side's kind."""
        return self.capture.start(inputs, d_A, d_B, self.exact)

    def input_of(self, name: str) -> tuple[str, CrossCovariance]:
        """The key and the sums of what a target site reads, over all its uses."""
        keys = self.reads[name]
        if len(keys) == 1:
            return keys[0], self.inputs[keys[0]]
        total = self.capture.start(True, self.inputs[keys[0]].d_A, self.inputs[keys[0]].d_B, self.exact)
        for key in keys:
            total.merge(self.inputs[key])
        return f"{name}@all", total


def _total(parts: list[Statistics]) -> Statistics:
    """The sums of several parts together, each added up when it is solved; the parts stay as they are."""
    total = Statistics(capture=parts[0].capture, exact=parts[0].exact)
    for part in parts:
        for name, keys in part.reads.items():
            known = total.reads.setdefault(name, [])
            known += [key for key in keys if key not in known]
    for inputs, mine, its in (
        (True, total.inputs, [part.inputs for part in parts]),
        (False, total.outputs, [part.outputs for part in parts]),
    ):
        for key in dict.fromkeys(key for sums in its for key in sums):
            some = [sums[key] for sums in its if key in sums]
            mine[key] = total.capture.start(inputs, some[0].d_A, some[0].d_B, total.exact)
            mine[key].total_of(some)
    return total
