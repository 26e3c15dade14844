"""BiCo, and its ablations as settings of the same code (paper, section 4 and the table of alignment strategies)."""

from __future__ import annotations

from typing import Annotated, Literal

from taskferry.capture import Signals
from taskferry.fitting import fit
from taskferry.methods import CannotMove, Job, method
from taskferry.procrustes import DEFAULT_TOLERANCE, RankPolicy
from taskferry.taskvector import TaskVector

MapRank = Annotated[RankPolicy, "directions kept: those the samples show, or all"]
Tolerance = Annotated[float, "smallest singular value kept, relative to the largest"]


@method
def bico(
    job: Job,
    *,
    inputs: Annotated[Literal["activations", "gradients", "identity"], "what the input side aligns"] = "activations",
    outputs: Annotated[Literal["gradients", "activations", "identity"], "what the output side aligns"] = "gradients",
    map_rank: MapRank = "range",
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    tokens_per_width: Annotated[float | None, "tokens kept for each map, as a multiple of its width"] = None,
) -> TaskVector:
    """Activations align the input side, gradients the output side: τ_B = R_outᵀ τ_A R_in.

    The paper's ablations: input-only is `outputs="identity"`, output-only `inputs="identity"`, gradient-only
    `inputs="gradients"`.
    """
    signals = Signals(
        inputs="gradients" if inputs == "gradients" else "activations",
        outputs="activations" if outputs == "activations" else "gradients",
    )
    alignment = fit(
        job.source,
        job.target,
        job.calibration,
        job.objective,
        signals=signals,
        only=job.tau.deltas.keys(),
        map_rank=map_rank,
        tolerance=tolerance,
        tokens_per_width=tokens_per_width,
        factored=job.tau.low_rank,
        progress=job.progress,
    )
    for side, chosen in (("inputs", inputs), ("outputs", outputs)):
        if chosen == "identity":
            try:
                alignment = alignment.with_identity(side == "inputs")
            except ValueError as error:
                raise CannotMove(f"bico with {side}=identity needs equal widths: {error}") from error
    return alignment.apply(job.tau)
