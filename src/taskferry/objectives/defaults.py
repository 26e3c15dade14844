"""Which objective a pair of models gets: as given, or what the samples and each model's kind suggest."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from taskferry.data.batch import Batch, Calibration
from taskferry.errors import TaskferryError
from taskferry.objectives.contrastive import Contrastive
from taskferry.objectives.language import is_language_model
from taskferry.objectives.objectives import Function, Head, LanguageModel, Objective, Prototypes


def default_objective(model: nn.Module, calibration: Calibration) -> Objective:
    """What samples and model suggest: a contrastive loss of pairs, the model's own loss or head, or prototypes."""
    kind = type(model).__name__
    if calibration.pairs[0][0].texts > 1:
        return Contrastive()
    if is_language_model(model):
        return LanguageModel()
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        return Head()
    if calibration.labels is None:
        raise TaskferryError(
            f"{kind} has no loss of its own and the calibration set no labels: give labels, let the tuned "
            "source give them (teacher_labels), or pass an objective"
        )
    return Prototypes()


AnyObjective = Objective | Callable[[nn.Module, Batch], Tensor]


def as_objective(objective: AnyObjective) -> Objective:
    """Functions of (model, batch) are objectives too."""
    return objective if isinstance(objective, Objective) else Function(objective)


def both_objectives(
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None,
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
) -> tuple[Objective, Objective]:
    """One objective for each model: as given, the same for both, or what each model's kind suggests."""
    if isinstance(objective, tuple):
        return as_objective(objective[0]), as_objective(objective[1])
    if objective is None:
        return default_objective(source, calibration), default_objective(target, calibration)
    return as_objective(objective), as_objective(objective)
