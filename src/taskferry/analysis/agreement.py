"""Two models of one architecture, side by side: how their activations differ in direction and in length.

>>> for row in agreement(tuned, model, batches):
...     print(row.site, row.outputs.direction, row.inputs.magnitude)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.linalg import vector_norm

from taskferry.collect.capture import Side, collect
from taskferry.collect.statistics import Capture, Paired
from taskferry.data.batch import Batch, Calibration
from taskferry.errors import TaskferryError
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import Pair
from taskferry.objectives.objectives import ForwardOnly

FORWARD = Capture(outputs="activations")


@dataclass(frozen=True)
class Shift:
    """Means over tokens (paper, appendix B), relative to the first model."""

    direction: float  # 1 − cos(x, x_first)
    magnitude: float  # |‖x‖ − ‖x_first‖| / ‖x_first‖


@dataclass(frozen=True)
class Agreement:
    """One site of two models of the same architecture."""

    site: str
    stack: str
    block: int | None
    role: str
    inputs: Shift
    outputs: Shift


def agreement(first: nn.Module, model: nn.Module, batches: Sequence[Batch]) -> list[Agreement]:
    """Every site that a forward pass reaches; sites that read the same tensor have the same `inputs`."""
    sites = {site.name: site for site in find_sites(model)}
    if {s: site.shape for s, site in sites.items()} != {site.name: site.shape for site in find_sites(first)}:
        raise TaskferryError(
            f"{type(first).__name__} and {type(model).__name__} differ in their linear layers: "
            "activations are compared coordinate by coordinate, so both must be of one architecture"
        )
    kept = _Kept()
    run = ForwardOnly()
    sides = [Side(m, run.bind(m, batches)) for m in (first, model)]
    pairs = [Pair(site, site) for site in sites.values()]
    collect(kept, sides[0], sides[1], pairs, Calibration((b, b) for b in batches), capture=FORWARD)
    rows = []
    for name, keys in kept.reads.items():
        site, ins = sites[name], [kept.inputs[key] for key in keys]
        rows.append(Agreement(name, site.stack, site.block, site.role, _shift(ins), _shift([kept.outputs[name]])))
    return rows


def by_block(rows: Iterable[Agreement], value: Callable[[Agreement], float]) -> dict[tuple[str, int], float]:
    """The mean over the sites of each block; sites outside of blocks are left out."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row.block is not None:
            found.setdefault((row.stack, row.block), []).append(value(row))
    return {place: statistics.mean(found[place]) for place in sorted(found)}


@dataclass
class _Sums:
    tokens: int = 0
    direction: float = 0.0
    magnitude: float = 0.0

    def add(self, X_A: Tensor, X_B: Tensor) -> None:
        """One micro-batch; padding is zero on both sides in no model, so only a zero row of the first is left out."""
        alive = X_A.any(1)
        X_A, X_B = X_A[alive].double(), X_B.to(X_A)[alive].double()
        before = vector_norm(X_A, dim=1)
        self.tokens += X_A.shape[0]
        self.direction += float((1 - F.cosine_similarity(X_A, X_B)).sum())
        self.magnitude += float(((vector_norm(X_B, dim=1) - before).abs() / before).sum())


class _Kept(Paired[_Sums]):
    def start(self, inputs: bool, site: str, d_A: int, d_B: int) -> _Sums:  # noqa: ARG002
        """Empty sums."""
        return _Sums()


def _shift(parts: Sequence[_Sums]) -> Shift:
    tokens = max(1, sum(part.tokens for part in parts))
    return Shift(sum(p.direction for p in parts) / tokens, sum(p.magnitude for p in parts) / tokens)
