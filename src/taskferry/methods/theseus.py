"""THESEUS: activations on both sides (Rinaldi et al., 2026, as BiCo's paper describes and compares it)."""

from __future__ import annotations

from taskferry.choices import DEFAULT_TOLERANCE
from taskferry.collect.statistics import Capture
from taskferry.methods import Job, MapRank, Moved, Needs, Shown, TableRow, Tolerance, method

ROWS = (
    TableRow("theseus", passes=(1 / 3, 1 / 3), beats=("naive",), curve=1, compared=True),
    TableRow("theseus, automatic scale", auto_scale=True, passes=(1 / 3, 4 + 1 / 3)),
)


@method(needs=Needs(captures=1, maps=True), shown=Shown(2, "nothing was trained", ROWS))
def theseus(job: Job, *, map_rank: MapRank = "range", tolerance: Tolerance = DEFAULT_TOLERANCE) -> Moved:
    """Layer inputs align the input side, layer outputs the output side; forward passes only."""
    return job.move(Capture(outputs="activations"), job.maps(map_rank, tolerance))
