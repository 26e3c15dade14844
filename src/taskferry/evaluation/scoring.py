"""How good a model is: zero-shot or probe accuracy, or the loss of a language model.

>>> evaluate(model, test, ZeroShot(classes, tokenizer))          # a frozen head from the model's own text tower
>>> evaluate(model, test, LinearProbe(), shots=train)            # a head fitted on other samples, then frozen
>>> evaluate(model, test, LanguageModel())                       # loss per token
>>> evaluate(model, test, Contrastive())                         # pairs: how often the positive is the most similar
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry.collect.device import frozen, place_of
from taskferry.data.batch import IGNORED, Batch
from taskferry.display.bars import Tell, told
from taskferry.errors import TaskferryError
from taskferry.objectives.language import expected, is_sequence_to_sequence, predicted
from taskferry.objectives.objectives import Classifier, Contrastive, LanguageModel, Objective


@dataclass(frozen=True)
class Score:
    """Accuracy in per cent for classes and pairs, None for the rest; mean loss a sample, or a token that counts."""

    accuracy: float | None
    loss: float
    samples: int
    # Answers of a language model, in per cent; exact by one pass without generating unless the others are there too.
    exact: float | None = None  # as wanted
    begins: float | None = None  # begun with the wanted one of a small set
    stopped: float | None = None  # ended by the model itself
    valid_json: float | None = None  # that are JSON, where the wanted ones are

    @property
    def value(self) -> float:
        """The number that tables show."""
        return self.loss if self.accuracy is None else self.accuracy


def evaluate(
    model: torch.nn.Module,
    test: Sequence[Batch],
    objective: Objective,
    shots: Sequence[Batch] = (),
    progress: Tell | bool | None = None,
) -> Score:
    """Score a model on held-out micro-batches.

    Args:
        model: The model.
        test: Micro-batches to score on.
        objective: What scores: a head, or a loss.
        shots: Micro-batches that a head is made from, where it needs some; never those of `test`.
        progress: True for a bar, or a function that is called with (done, total).
    """
    tell, place = told(progress, "scoring"), place_of(model)
    if isinstance(objective, Classifier) and objective.fitted and not shots:
        raise TaskferryError(f"{objective.words} needs samples that it is made from: evaluate(…, shots=…)")
    right = units = samples = 0
    total = 0.0
    answers = True  # whether each sample has something in front of what counts
    choosing = isinstance(objective, Classifier | Contrastive)
    if isinstance(objective, Classifier):
        logits = objective.logits(model, shots)
    elif not choosing and not isinstance(objective, LanguageModel):
        loss = objective.bind(model, shots)
    with torch.no_grad(), frozen(model):
        for done, micro in enumerate(test, 1):
            batch = micro.to(*place)
            samples += len(batch)
            if isinstance(objective, LanguageModel):
                words, labels, rows = predicted(model, batch)
                total += float(F.cross_entropy(words, labels, reduction="sum"))
                units += len(labels)
                wrong = torch.zeros(len(batch)).index_add_(0, rows.cpu(), (words.argmax(-1) != labels).float().cpu())
                right += int((wrong == 0).sum())
                counted = expected(model, batch) != IGNORED
                answers &= is_sequence_to_sequence(model) or not bool(counted[:, 0].any())
            elif choosing:
                if isinstance(objective, Contrastive):
                    scores, labels = objective.scores(model, batch)
                else:
                    scores, labels = logits(batch), _labels(batch)
                # A head made from shots may lack a class: its samples count as wrong, and their loss as none.
                known = labels < scores.shape[1]
                right += int((scores.argmax(1) == labels).sum())
                total += float(F.cross_entropy(scores[known], labels[known], reduction="sum"))
                units += int(known.sum())
            else:
                total += float(loss(batch))
                units += len(batch)
            if tell is not None:
                tell(done, len(test))
    if not samples or (isinstance(objective, LanguageModel) and not units):
        raise TaskferryError("nothing of the test samples can be scored: they are empty for this model")
    share, mean = 100.0 * right / samples, total / max(1, units)
    if isinstance(objective, LanguageModel):
        return Score(None, mean, samples, exact=share if answers else None)
    return Score(share if choosing else None, mean, samples)


def _labels(batch: Batch) -> Tensor:
    if batch.labels is None:
        raise TaskferryError("test samples without labels cannot be scored: give a label for each")
    return batch.labels
