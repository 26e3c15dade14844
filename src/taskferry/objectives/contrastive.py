"""The loss that sentence encoders are trained with: an anchor's positive is to be the most similar of its candidates.

>>> fit(A, B, pair_calibration(rows, tokenizer_A, tokenizer_B), Contrastive())

Candidates are all positives, and all negatives, of the micro-batch (in-batch negatives, InfoNCE; what
sentence-transformers calls MultipleNegativesRankingLoss). So the size of a micro-batch is part of this loss, and a
micro-batch of pairs is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.collect.capture import Loss
from taskferry.collect.device import wide
from taskferry.data.batch import Batch
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.objectives.objectives import Objective


@dataclass(frozen=True)
class Contrastive(Objective):
    """Cross-entropy over cosine similarities times `scale`, of the mean tokens of texts."""

    words: ClassVar[str] = "the positive among all candidates of its micro-batch (contrastive)"

    scale: float = 20.0  # a temperature of 0.05

    def scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """[n, candidates] of each anchor, and the place [n] of its positive: all positives first, then negatives."""
        if batch.texts < 2:
            raise TaskferryError("a contrastive loss needs pairs of texts: pair_calibration(…), not single ones")
        unit = F.normalize(wide(family_of(model).features(model, batch)), dim=-1)
        texts = unit.view(-1, batch.texts, unit.shape[-1]).transpose(0, 1)
        return self.scale * texts[0] @ texts[1:].flatten(0, 1).T, torch.arange(len(batch), device=unit.device)

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """Summed over anchors."""
        return lambda batch: F.cross_entropy(*self.scores(model, batch), reduction="sum")
