"""THESEUS: activations on both sides (Rinaldi et al., 2026, as BiCo's paper describes and compares it)."""

from __future__ import annotations

from taskferry.choices import DEFAULT_TOLERANCE
from taskferry.collect.maps import Maps
from taskferry.methods import Job, MapRank, Moved, Needs, Tolerance, method


@method(needs=Needs(maps=True))
def theseus(job: Job, *, map_rank: MapRank = "range", tolerance: Tolerance = DEFAULT_TOLERANCE) -> Moved:
    """Layer inputs align the input side, layer outputs the output side; forward passes only."""
    return job.move(Maps(outputs="activations", rank=map_rank, tolerance=tolerance))
