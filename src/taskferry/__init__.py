"""taskferry carries a fine-tune from one base model to another without training.

>>> import taskferry
>>> result = taskferry.transfer(source_tuned="my-lora", target_base="base-b", data="data.jsonl")
>>> result.verdict, result.model()

A name is imported when it is first used: torch alone takes seconds, and `taskferry --help` needs none of it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskferry.version import __version__

if TYPE_CHECKING:
    from taskferry.alignment import Alignment
    from taskferry.coverage import Coverage
    from taskferry.data import Batch, Calibration, image_calibration, text_calibration
    from taskferry.data.samples import load_samples
    from taskferry.engines.whole import fit
    from taskferry.errors import TaskferryError
    from taskferry.evaluation import Pool, evaluate
    from taskferry.models import load_model, load_tuned
    from taskferry.objectives.objectives import (
        Head,
        LanguageModel,
        LinearProbe,
        Objective,
        Prototypes,
        ZeroShot,
        teacher_labels,
    )
    from taskferry.output.record import Result
    from taskferry.taskvector import LowRank, TaskVector

_WHERE = {
    "alignment": ("Alignment",),
    "data": ("Batch", "Calibration", "image_calibration", "text_calibration"),
    "data.samples": ("load_samples",),
    "models": ("load_model", "load_tuned"),
    "coverage": ("Coverage",),
    "engines.whole": ("fit",),
    "errors": ("TaskferryError",),
    "evaluation": ("Pool", "evaluate"),
    "objectives.objectives": (
        "Head",
        "LanguageModel",
        "LinearProbe",
        "Objective",
        "Prototypes",
        "ZeroShot",
        "teacher_labels",
    ),
    "output.record": ("Result",),
    "taskvector": ("LowRank", "TaskVector"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Alignment",
    "Batch",
    "Calibration",
    "Coverage",
    "Head",
    "LanguageModel",
    "LinearProbe",
    "LowRank",
    "Objective",
    "Pool",
    "Prototypes",
    "Result",
    "TaskVector",
    "TaskferryError",
    "ZeroShot",
    "__version__",
    "evaluate",
    "fit",
    "image_calibration",
    "load_model",
    "load_samples",
    "load_tuned",
    "teacher_labels",
    "text_calibration",
    "transfer",
]


def transfer(
    *,
    source_tuned: Any,
    target_base: str | Path,
    data: Any,
    source_base: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Move a fine-tune to another base model, as the command does.

    Args:
        source_tuned: A PEFT LoRA, a tuned model, a state file or a task vector: a path, a hub id, or a `PeftModel`.
        target_base: The base model to move to: a path or a hub id.
        data: Samples: a path, a hub id, a `datasets.Dataset`, a list of rows or of texts, or "generate": the tuned
            source writes them.
        source_base: The base model that was tuned; the one that an adapter names, unless given.
        out: A new folder for the output; in memory only, unless given (`Result.save` writes it then).
        progress: Show bars.
        settings: All others of `taskferry transfer` by their names, and keys of its `--config`.

    Returns:
        The result: `.verdict`, `.coverage`, `.model()`, `.save(folder)`, `.report()`.

    Raises:
        TaskferryError: Something in the inputs is wrong; the message says how to fix it.
    """
    from taskferry.api import transfer as run

    return run(source_tuned, target_base, data, source_base, out, progress, settings)


def __getattr__(name: str) -> Any:
    """A public name, from the module that has it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'taskferry' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"taskferry.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
