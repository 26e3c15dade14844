"""Right answers of a language model: word for word, and among the few answers that the samples have.

    >>> answers = Answers.of(model, batches)          # None where the samples are texts without a prompt
    >>> answers.count(scores, labels, rows)           # as `predicted` gives them
    >>> answers.exact, answers.right                  # in per cent

Greedy decoding writes the answer of a sample if and only if every token of it is the likeliest one at its place, so one
pass over prompt and answer tells both. A loss can fall while no answer gets better: at first a model learns the form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from taskferry.calibration.batch import IGNORED, Batch
from taskferry.fitting.language import expected

MOST = 50  # answers of a set
EACH = 3.0  # samples for each of them, at least


@dataclass
class Answers:
    """Counts samples whose answer is right; `choices` are the first tokens of the few answers that there are."""

    choices: Tensor | None
    samples: int = 0
    by_word: int = 0
    by_choice: int = 0

    @classmethod
    def of(cls, model: nn.Module, batches: Sequence[Batch]) -> Answers | None:
        """None where some sample is all text, with nothing to answer. The set of answers is found in the samples."""
        found: Counter[tuple[int, ...]] = Counter()
        for batch in batches:
            if "labels" not in batch.inputs:
                return None
            wanted = expected(model, batch)
            for row in wanted:
                counted = (row != IGNORED).nonzero()[:, 0]
                if not len(counted) or (int(counted[0]) == 0 and not _reads_apart(batch)):
                    return None
                found[tuple(row[counted].tolist())] += 1
        first = {answer[0] for answer in found}
        few = len(found) <= MOST and sum(found.values()) >= EACH * len(found) and len(first) == len(found) > 1
        return cls(torch.tensor(sorted(first)) if few else None)

    def count(self, scores: Tensor, labels: Tensor, rows: Tensor) -> None:
        """The samples of a micro-batch."""
        wrong = torch.zeros(int(rows.max()) + 1, device=rows.device).index_add_(
            0, rows, (scores.argmax(-1) != labels).float()
        )
        self.samples += len(wrong)
        self.by_word += int((wrong == 0).sum())
        if self.choices is not None:
            first = torch.ones_like(rows, dtype=torch.bool)
            first[1:] = rows[1:] != rows[:-1]
            choices = self.choices.to(scores.device)
            chosen = choices[scores[first][:, choices].argmax(-1)]
            self.by_choice += int((chosen == labels[first]).sum())

    @property
    def exact(self) -> float:
        """Per cent of the samples whose answer would be written word for word."""
        return 100.0 * self.by_word / max(1, self.samples)

    @property
    def right(self) -> float | None:
        """Per cent of the samples whose own answer is the likeliest of all that there are."""
        return None if self.choices is None else 100.0 * self.by_choice / max(1, self.samples)


def _reads_apart(batch: Batch) -> bool:
    """Whether the answer stands in a decoder, so that its first position has read the prompt."""
    ids = batch.inputs.get("input_ids")
    return ids is None or ids.shape != batch.inputs["labels"].shape
