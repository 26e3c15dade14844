"""How close each method brings the target to the fine-tuned target, block by block (paper, figure 2).

>>> curves = output_similarity(B, B_tuned, batches, {"moved": tau_B})
>>> curves["moved"][("vision", 3)], curves["moved"][("visual.proj", None)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from taskferry.analysis.agreement import agreement, by_block
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch
from taskferry.taskvector import TaskVector

AS_IT_IS = "target as it is"


def output_similarity(
    target: nn.Module,
    tuned: nn.Module,
    batches: Sequence[Batch],
    moved: Mapping[str, TaskVector],
    scale: float = 1.0,
) -> dict[str, dict[tuple[str, int | None], float]]:
    """Row -> place -> mean cosine of the outputs of θ_B + τ to those of the tuned target, over sites and tokens.

    A place is a block, or a site outside of the blocks by its name: the projection behind the last block says what
    became of the features themselves.
    """
    curves: dict[str, dict[tuple[str, int | None], float]] = {}
    for name, tau in {AS_IT_IS: TaskVector({}), **moved}.items():
        with moved_by(target, tau) as set_scale:
            set_scale(scale)
            rows = agreement(tuned, target, batches)
        found = curves.setdefault(name, {})
        for (stack, block), value in by_block(rows, lambda row: 1 - row.outputs.direction).items():
            found[stack, block] = value
        for row in rows:
            if row.block is None:
                found[row.site, None] = 1 - row.outputs.direction
    return curves
