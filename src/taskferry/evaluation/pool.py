"""Samples made ready for one model when they are asked for: many more than fit in memory as tensors.

>>> pool = Pool(load_samples("train.parquet"), load_model("B"))
>>> pool.batch([3, 1, 4]), pool.batches(range(1000), 64)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taskferry.data.batch import Batch
from taskferry.data.builders import evenly
from taskferry.data.samples import Samples
from taskferry.models import Loaded
from taskferry.objectives.language import longest_text
from taskferry.objectives.preparation import one_sided


class Pool:
    """Labelled samples of one model."""

    def __init__(self, samples: Samples, loaded: Loaded, *, max_length: int = 128) -> None:
        self.samples, self.loaded = samples, loaded
        self.max_length = longest_text(max_length, loaded.model)
        self.full: set[int] = set()  # those seen so far that fill all tokens: what was longer has been cut

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples as the model takes them."""
        return self.batches(indices, len(indices))[0]

    def batches(self, indices: Sequence[int], size: int) -> list[Batch]:
        """The same in micro-batches."""
        made = one_sided(self.samples.take(indices), self.loaded, max_length=self.max_length, micro_batch=size)
        flags = torch.cat([batch.filled(self.max_length) for batch in made]).tolist()
        places = [place for batch in made for place in batch.ids] or range(len(flags))
        self.full.update(indices[place] for place, full in zip(places, flags, strict=True) if full)
        return made


class LazyBatches(Sequence[Batch]):
    """Micro-batches that are made when they are asked for: a whole test set as tensors may not fit."""

    def __init__(self, pool: Pool, indices: Sequence[int], size: int) -> None:
        self.pool, self.indices = pool, indices
        self.parts = evenly(len(indices), size)  # a last one of a single pair would have nothing to tell apart

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: Any) -> Any:
        """One micro-batch."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        part = self.parts[place]
        return self.pool.batch(self.indices[part.start : part.stop])
