"""How good a model is: zero-shot or probe accuracy, or the loss of a language model.

>>> evaluate(model, test, ZeroShot(classes, tokenizer))          # a frozen head from the model's own text tower
>>> evaluate(model, test, LinearProbe(), shots=train)            # a head fitted on other samples, then frozen
>>> evaluate(model, test, LanguageModel())                       # loss a token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from taskferry.calibration.batch import IGNORED, Batch
from taskferry.display.bars import Tell, told
from taskferry.errors import TaskferryError
from taskferry.fitting.capture import device_of, frozen
from taskferry.fitting.language import expected
from taskferry.fitting.objectives import Classifier, Objective


@dataclass(frozen=True)
class Score:
    """Accuracy in per cent for classifiers, None for the rest; mean loss a sample, or a token of a language model."""

    accuracy: float | None
    loss: float
    samples: int

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
    device = device_of(model)
    right = units = samples = 0
    total = 0.0
    if isinstance(objective, Classifier):
        logits = objective.logits(model, shots)
    else:
        loss = objective.bind(model, shots)
    with torch.no_grad(), frozen(model):
        for done, batch in enumerate(test, 1):
            moved = batch.to(device)
            samples += len(batch)
            if isinstance(objective, Classifier):
                if moved.labels is None:
                    raise TaskferryError("test samples without labels cannot be scored: give a label for each")
                scores = logits(moved)
                # A head made from shots may lack a class: its samples count as wrong, and their loss as none.
                known = moved.labels < scores.shape[1]
                right += int((scores.argmax(1) == moved.labels).sum())
                total += float(F.cross_entropy(scores[known], moved.labels[known], reduction="sum"))
                units += int(known.sum())
            else:
                total += float(loss(moved))
                units += _predicted(model, moved)
            if tell is not None:
                tell(done, len(test))
    accuracy = 100.0 * right / max(1, samples) if isinstance(objective, Classifier) else None
    return Score(accuracy, total / max(1, units), samples)


def _predicted(model: torch.nn.Module, batch: Batch) -> int:
    """Tokens that a language model predicts, samples for any other loss; a causal model predicts no first token."""
    if "labels" not in batch.inputs:
        return len(batch)
    return int((expected(model, batch) != IGNORED).sum())
