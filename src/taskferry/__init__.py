"""taskferry carries a fine-tune from one base model to another without training.

>>> from taskferry import TaskVector, fit
>>> tau = TaskVector.between(A, A_tuned)
>>> alignment = fit(A, B, calibration)              # one forward and backward pass of each
>>> alignment.apply(tau).add_to(B)
"""

from taskferry.alignment import Alignment
from taskferry.calibration import Batch, Calibration, image_calibration, text_calibration
from taskferry.calibration.data import load_samples
from taskferry.checkpoints import load_model, load_tuned
from taskferry.coverage import Coverage
from taskferry.engines.whole import fit
from taskferry.errors import TaskferryError
from taskferry.evaluation import Pool, evaluate
from taskferry.fitting.objectives import (
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
from taskferry.version import __version__

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
