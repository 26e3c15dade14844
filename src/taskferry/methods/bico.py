"""BiCo, and its gradient-only ablation (paper, section 4)."""

from __future__ import annotations

from typing import Annotated

from taskferry.choices import DEFAULT_TOLERANCE
from taskferry.collect.maps import Maps, Signal
from taskferry.methods import Job, MapRank, Moved, Needs, Tolerance, method


@method(
    needs=Needs(gradients=True, maps=True),
    card="nothing was trained: the change of every linear layer was carried over by two orthogonal maps",
    paper={"map_rank": "full", "scale": 1},
)
def bico(
    job: Job,
    *,
    inputs: Annotated[Signal, "what the input side aligns"] = "activations",
    outputs: Annotated[Signal, "what the output side aligns"] = "gradients",
    map_rank: MapRank = "range",
    tolerance: Tolerance = DEFAULT_TOLERANCE,
) -> Moved:
    """Activations align the input side, gradients the output side: τ_B = R_outᵀ τ_A R_in."""
    return job.move(Maps(inputs, outputs, map_rank, tolerance))
