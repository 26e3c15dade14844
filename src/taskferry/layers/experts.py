"""Experts of a mixture: several linear maps stacked in one parameter, and the router that chooses among them.

    >>> experts_of(block.mlp.experts)
    Experts(up='gate_up_proj', down='down_proj', count=8, …)

transformers writes on every module of experts how it keeps them (`use_experts_implementation`): a module without those
marks computes in a way of its own, and stays in the coverage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from taskferry.layers.site import LinearParameter

ROUTER = "router"
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Experts:
    """How a module keeps its experts: `up` (with the gate before it, where there is one), then `down`."""

    up: str
    down: str
    count: int
    gated: bool
    packed: bool  # the rows of the gate in front of those of `up`, not one by one between them
    transposed: bool  # stored as [experts, in, out]
    bias: bool

    def parameters(self, module: nn.Module, dot: str) -> Iterator[tuple[LinearParameter, Tensor]]:
        """Its two stacks of linear maps."""
        for name in (self.up, self.down):
            weight = getattr(module, name)
            out, in_ = weight.shape[1:] if not self.transposed else weight.shape[:0:-1]
            halves = (("gate", out // 2), ("up", out // 2)) if name == self.up and self.gated and self.packed else ()
            bias = f"{dot}{name}_bias" if self.bias else None
            yield (
                LinearParameter(f"{dot}{name}", f"{dot}{name}", bias, out, in_, self.transposed, halves, self.count),
                weight,
            )


def experts_of(module: nn.Module) -> Experts | None:
    """None where a module has no experts, or keeps them in a form of its own."""
    if not all(isinstance(getattr(module, mark, None), bool) for mark in _MARKS):
        return None
    marks: Any = module
    up, down = "gate_up_proj" if marks.has_gate else "up_proj", "down_proj"
    weights = [module._parameters.get(name) for name in (up, down)]
    if any(weight is None or weight.ndim != 3 for weight in weights):
        return None
    count = getattr(module, up).shape[0]
    return Experts(up, down, count, marks.has_gate, marks.is_concatenated, marks.is_transposed, marks.has_bias)


def is_router(module: nn.Module) -> bool:
    """A module of its own whose weight has one row an expert."""
    weight = module._parameters.get("weight")
    counts = [getattr(module, name, None) for name in _COUNTS]
    return weight is not None and weight.ndim == 2 and weight.shape[0] in counts
