"""BiCo, and its ablations as settings of the same code (paper, section 4 and the table of alignment strategies)."""

from __future__ import annotations

from typing import Annotated, Literal

from taskferry.choices import DEFAULT_TOLERANCE
from taskferry.collect.statistics import Capture
from taskferry.errors import TaskferryError
from taskferry.methods import Job, MapRank, Moved, Needs, Shown, TableRow, Tolerance, method

ROWS = (
    TableRow("bico", beats=("theseus", "target"), curve=0, compared=True),
    TableRow("bico, automatic scale", auto_scale=True, passes=(1.0, 4.3), beats=("theseus",), curve=2),
    TableRow("bico, teacher", teacher=True, passes=(4 / 3, 1.0)),
    TableRow("bico, teacher, automatic scale", auto_scale=True, teacher=True, passes=(4 / 3, 4.3)),
    TableRow("bico, input-only", {"outputs": "identity"}, curve=3, compared=True),
    TableRow("bico, output-only", {"inputs": "identity"}),
    TableRow("bico, gradient-only", {"inputs": "gradients"}),
)


@method(
    needs=Needs(gradients=True, captures=1, maps=True),
    shown=Shown(
        5, "nothing was trained: the change of every linear layer was carried over by two orthogonal maps", ROWS
    ),
    paper={"map_rank": "full", "scale": 1},
)
def bico(
    job: Job,
    *,
    inputs: Annotated[Literal["activations", "gradients", "identity"], "what the input side aligns"] = "activations",
    outputs: Annotated[Literal["gradients", "activations", "identity"], "what the output side aligns"] = "gradients",
    map_rank: MapRank = "range",
    tolerance: Tolerance = DEFAULT_TOLERANCE,
) -> Moved:
    """Activations align the input side, gradients the output side: τ_B = R_outᵀ τ_A R_in.

    The paper's ablations: input-only is `outputs="identity"`, output-only `inputs="identity"`, gradient-only
    `inputs="gradients"`.
    """
    if inputs == outputs == "identity":
        raise TaskferryError("bico: inputs=identity and outputs=identity together align nothing: use the method naive")
    capture = Capture(
        inputs="gradients" if inputs == "gradients" else "activations",
        outputs="activations" if outputs == "activations" else "gradients",
        identity="inputs" if inputs == "identity" else "outputs" if outputs == "identity" else None,
    )
    return job.move(capture, job.maps(map_rank, tolerance))
