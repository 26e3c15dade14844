"""taskferry carries a fine-tune from one base model to another without training.

>>> from taskferry import TaskVector, fit
>>> tau = TaskVector.between(A, A_tuned)
>>> alignment = fit(A, B, calibration)              # one forward and backward pass of each
>>> alignment.apply(tau).add_to(B)

A name is imported when it is first used: torch alone takes seconds, and `taskferry --help` needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from taskferry.version import __version__

if TYPE_CHECKING:
    from taskferry.alignment import Alignment
    from taskferry.coverage import Coverage
    from taskferry.data import Batch, Calibration, image_calibration, text_calibration
    from taskferry.data.data import load_samples
    from taskferry.engines.whole import fit
    from taskferry.errors import TaskferryError
    from taskferry.evaluation import Pool, evaluate
    from taskferry.models import load_model, load_tuned
    from taskferry.objectives.objectives import (
        Head,
        LanguageModel,
        LinearProbe,
        NewHead,
        Objective,
        Prototypes,
        ZeroShot,
        teacher_labels,
    )
    from taskferry.taskvector import LowRank, TaskVector
    from taskferry.training import FineTuning, finetune

_WHERE = {
    "alignment": ("Alignment",),
    "data": ("Batch", "Calibration", "image_calibration", "text_calibration"),
    "data.data": ("load_samples",),
    "models": ("load_model", "load_tuned"),
    "coverage": ("Coverage",),
    "engines.whole": ("fit",),
    "errors": ("TaskferryError",),
    "evaluation": ("Pool", "evaluate"),
    "objectives.objectives": (
        "Head",
        "LanguageModel",
        "LinearProbe",
        "NewHead",
        "Objective",
        "Prototypes",
        "ZeroShot",
        "teacher_labels",
    ),
    "taskvector": ("LowRank", "TaskVector"),
    "training": ("FineTuning", "finetune"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Alignment",
    "Batch",
    "Calibration",
    "Coverage",
    "FineTuning",
    "Head",
    "LanguageModel",
    "LinearProbe",
    "LowRank",
    "NewHead",
    "Objective",
    "Pool",
    "Prototypes",
    "TaskVector",
    "TaskferryError",
    "ZeroShot",
    "__version__",
    "evaluate",
    "finetune",
    "fit",
    "image_calibration",
    "load_model",
    "load_samples",
    "load_tuned",
    "teacher_labels",
    "text_calibration",
]


def __getattr__(name: str) -> Any:
    """A public name, from the module that has it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'taskferry' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"taskferry.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
