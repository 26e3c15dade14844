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
from taskferry.data.batch import Batch
from taskferry.display.bars import Tell, told
from taskferry.errors import TaskferryError
from taskferry.objectives.answers import Answers
from taskferry.objectives.contrastive import Contrastive
from taskferry.objectives.language import predicted
from taskferry.objectives.objectives import Classifier, LanguageModel, Objective


@dataclass(frozen=True)
class Score:
    """Accuracy in per cent for classes and pairs, None for the rest; mean loss a sample, or a token that counts."""

    accuracy: float | None
    loss: float
    samples: int
    # Of a language model's answers, in per cent:
    right: float | None = None  # the likeliest of a small set, by one pass without generating
    exact: float | None = None  # written as wanted
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
    """Score a model on held-out micro-batches; a head that needs fitting is fitted on `shots`, never on `test`.

    `progress=True` shows a bar; a function is called with (done, total).
    """
    tell = told(progress, "scoring")
    place = place_of(model)
    right = units = samples = 0
    total = 0.0
    answers = None
    choosing = isinstance(objective, Classifier | Contrastive)
    if isinstance(objective, Classifier) and objective.fitted and not shots:
        raise TaskferryError(f"{objective.words} needs samples that it is made from: evaluate(…, shots=…)")
    if isinstance(objective, Classifier):
        logits = objective.logits(model, shots)
    elif isinstance(objective, LanguageModel):
        answers = Answers.of(model, test)
    elif not choosing:
        loss = objective.bind(model, shots)

    def classes(batch: Batch) -> tuple[Tensor, Tensor]:
        moved = batch.to(*place)
        if isinstance(objective, Contrastive):
            return objective.scores(model, moved)
        if moved.labels is None:
            raise TaskferryError("test samples without labels cannot be scored: give a label for each")
        return logits(moved), moved.labels

    with torch.no_grad(), frozen(model):
        for done, batch in enumerate(test, 1):
            samples += len(batch)
            if choosing:
                scores, labels = classes(batch)
                # A head made from shots may lack a class: its samples count as wrong, and their loss as none.
                known = labels < scores.shape[1]
                right += int((scores.argmax(1) == labels).sum())
                total += float(F.cross_entropy(scores[known], labels[known], reduction="sum"))
                units += int(known.sum())
            elif isinstance(objective, LanguageModel):
                words, labels, rows = predicted(model, batch.to(*place))
                total += float(F.cross_entropy(words, labels, reduction="sum"))
                units += len(labels)
                if answers is not None:
                    answers.count(words, labels, rows)
            else:
                total += float(loss(batch.to(*place)))
                units += len(batch)
            if tell is not None:
                tell(done, len(test))
    if not samples or (isinstance(objective, LanguageModel) and not units):
        raise TaskferryError("nothing of the test samples can be scored: they are empty for this model")
    accuracy = 100.0 * right / max(1, samples) if choosing else None
    found = (None, None) if answers is None else (answers.right, answers.exact)
    return Score(accuracy, total / max(1, units), samples, *found)
