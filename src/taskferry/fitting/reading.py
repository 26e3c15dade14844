"""Which tokens a loss reads: where it reads the class token alone, the other tokens say little of the task.

    >>> reads = tokens_read(Side(A, loss_A), sites, batch)           # {"vision": 1}

Found by the gradient at the last block, not by a table of models: one head reads the class token, another the mean of
all tokens, a third the last token of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from taskferry.calibration.batch import Batch
from taskferry.fitting.capture import Side, watch
from taskferry.fitting.models import frozen, place_of
from taskferry.fitting.recorder import Call
from taskferry.sites import family_of
from taskferry.sites.routed import Rows
from taskferry.sites.site import Site, depths
from taskferry.sites.tokens import Layout

SAMPLES = 4  # that tell


def tokens_read(side: Side, sites: Sequence[Site], batch: Batch) -> dict[str, int]:
    """By stream: how many of the first tokens alone the loss reads, or -1 for the last one; others are not named."""
    if "labels" in batch.inputs:
        return {}
    deep = depths(list(sites))
    last = [site for site in sites if site.block is not None and site.block == deep[site.stack] - 1]
    some = batch.take(range(min(SAMPLES, len(batch))))
    layouts = side.family.layouts(side.model, some)
    calls: list[Call] = []
    found: dict[str, Tensor] = {}

    def forward(call: Call, x: Rows, y: Rows) -> None:  # noqa: ARG001
        if isinstance(y, Tensor):
            calls.append(call)

    def gradient(call: Call, g: Rows) -> None:
        if isinstance(g, Tensor):
            found.setdefault(call.site.name, g)

    with torch.inference_mode(False), frozen(side.model), torch.enable_grad():
        loss = watch(side, some.to(*place_of(side.model)), last, forward, gradient, layouts)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    if not calls or calls[-1].site.name not in found:
        return {}
    site = calls[-1].site
    return reads_of(side.model, some, found[site.name], site.stream)


def reads_of(model: nn.Module, batch: Batch, g: Tensor, stream: str) -> dict[str, int]:
    """From the gradient [n, L, d] at the last block; what a language model predicts is told by its labels."""
    if "labels" in batch.inputs or g.ndim != 3 or g.shape[0] != batch.rows:
        return {}
    layout = family_of(model).layouts(model, batch).get(stream, Layout())
    count = layout.read_by((g != 0).any(-1).cpu())
    return {stream: count} if count else {}
