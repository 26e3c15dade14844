"""THESEUS: activations on both sides (Rinaldi et al., 2026, as BiCo's paper describes and compares it)."""

from __future__ import annotations

from taskferry.capture import Signals
from taskferry.fitting import fit
from taskferry.methods import Job, method
from taskferry.methods.bico import MapRank, Tolerance
from taskferry.procrustes import DEFAULT_TOLERANCE
from taskferry.taskvector import TaskVector


@method
def theseus(job: Job, *, map_rank: MapRank = "range", tolerance: Tolerance = DEFAULT_TOLERANCE) -> TaskVector:
    """Layer inputs align the input side, layer outputs the output side; forward passes only."""
    alignment = fit(
        job.source,
        job.target,
        job.calibration,
        job.objective,
        signals=Signals(inputs="activations", outputs="activations"),
        only=job.tau.deltas.keys(),
        map_rank=map_rank,
        tolerance=tolerance,
        progress=job.progress,
    )
    return alignment.apply(job.tau)
