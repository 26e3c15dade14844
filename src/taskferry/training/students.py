"""A target that learns from a change that was moved to it, in the form of that change.

    >>> with learning(target, moved) as result:
    ...     finetune(target, …)                     # only what moved learns
    ...     refined = result()

A LoRA learns by its two factors, on PEFT's own layers; a full fine-tune by the weights that it changes.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.models import Skeleton, write_adapter
from taskferry.models.conversion import peft_for
from taskferry.models.expert_adapters import unstacked, wrapped
from taskferry.taskvector import Delta, LowRank, TaskVector

Result = Callable[[], TaskVector]


@contextmanager
def learning(target: nn.Module, start: TaskVector) -> Iterator[Result]:
    """Inside, the target stands at its base + `start`, and only what `start` changes asks for a gradient.

    The result is the change as it is then, in its form. Afterwards the target is as it was.
    """
    asked = [(parameter, parameter.requires_grad) for parameter in target.parameters()]
    skeleton = Skeleton.of(target)
    as_lora = start.low_rank and all(name in skeleton.linear | skeleton.by_parameter for name in start.deltas)
    try:
        with _factors(target, start, skeleton) if as_lora else _weights(target, start.dense()) as result:
            yield result
    finally:
        for parameter, flag in asked:
            parameter.requires_grad_(flag)


@contextmanager
def _weights(target: nn.Module, start: TaskVector) -> Iterator[Result]:
    """The changed parameters themselves learn."""
    moving = start.on(target)
    base = {name: parameter.detach().clone() for name, parameter, _ in moving}
    target.requires_grad_(False)

    def result() -> TaskVector:
        return TaskVector({name: p.detach() - base[name] for name, p, _ in moving}, start.coverage)

    try:
        start.add_to(target)
        for _, parameter, _ in moving:
            parameter.requires_grad_(True)
        yield result
    finally:
        with torch.no_grad():
            for name, parameter, _ in moving:
                parameter.copy_(base[name])


@contextmanager
def _factors(target: nn.Module, start: TaskVector, skeleton: Skeleton) -> Iterator[Result]:
    """An adapter of the target on PEFT's layers: as its user would load it, but trainable."""
    peft = peft_for("refine a LoRA")
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), start, skeleton, base_name="")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT still asks transformers for
            adapted = peft.PeftModel.from_pretrained(target, folder, is_trainable=True)

    by_parameter = [name for name in start.deltas if name in skeleton.by_parameter]

    def result() -> TaskVector:
        found: dict[str, Delta] = {}
        for name in start.deltas:
            path = (
                wrapped(name, by_parameter, skeleton.parameters)
                if name in by_parameter
                else name.removesuffix(".weight")
            )
            layer: Any = target.get_submodule(path)
            A, B = (side["default"].weight.detach().clone() for side in (layer.lora_A, layer.lora_B))
            if name in skeleton.stacked:
                A, B = unstacked(A, B, skeleton.parameters[name][0])
            change = LowRank(B, A)
            found[name] = change.T if name in skeleton.transposed else change
        return TaskVector(found, start.coverage)

    try:
        yield result
    finally:
        adapted.unload()
