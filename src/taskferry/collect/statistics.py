"""What a fit captures, and what it keeps of it.

>>> Capture()                                # BiCo: activations in, gradients back (paper, section 4)
>>> Capture(outputs="activations")           # THESEUS
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance

Signal = Literal["activations", "gradients"]


@dataclass(frozen=True)
class Capture:
    """Signals that are captured of every pair of sites."""

    inputs: Signal = "activations"  # x, or the gradient of the loss with respect to x through this site
    outputs: Signal = "gradients"  # the gradient with respect to y, or y

    @property
    def backward(self) -> bool:
        """Whether a backward pass is needed."""
        return "gradients" in (self.inputs, self.outputs)

    def numbers(self, pair: Pair, rows: int | None = None) -> int:
        """Of the sums of a pair, at most; of so many rows, where that is known."""
        (out_A, in_A), (out_B, in_B) = pair.source.shape, pair.target.shape
        shared = bool(pair.target.expert) and not pair.target.role.endswith("down")  # all experts read one tensor
        numbers = CrossCovariance.numbers(out_A, out_B, rows)
        if shared and self.inputs == "activations":
            return numbers
        return numbers + CrossCovariance.numbers(in_A, in_B, rows)


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


@dataclass
class Statistics(Paired[CrossCovariance]):
    """Sums of products."""

    exact: bool = False

    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> CrossCovariance:  # noqa: ARG002
        """Empty sums."""
        return CrossCovariance(d_A, d_B, exact=self.exact)

    def input_of(self, name: str) -> tuple[str, CrossCovariance]:
        """The key and the sums of what a target site reads, over all its uses."""
        keys = self.reads[name]
        if len(keys) == 1:
            return keys[0], self.inputs[keys[0]]
        total = CrossCovariance(self.inputs[keys[0]].d_A, self.inputs[keys[0]].d_B, exact=self.exact)
        for key in keys:
            total.merge(self.inputs[key])
        return f"{name}@all", total
