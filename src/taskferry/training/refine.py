"""Train a change that was moved, towards what the tuned source answers: AdamW on PEFT's LoRA layers, or on weights.

    >>> fit, held_out = (lesson_of(models, tau, part, objectives) for part in calibration.split())
    >>> refined = refine(target, moved, fit, held_out, steps=30)
    >>> refined.change, refined.kept, refined.losses

A LoRA learns by its two factors, a dense change by the weights that it changes; what does not change stays. Held-out
samples judge about four times on the way, and the best of these changes is kept: where none is better, the start.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.collect.device import evaluating, place_of
from taskferry.models import Skeleton, write_adapter
from taskferry.objectives.teacher import Lesson, Tokens
from taskferry.taskvector import Delta, LowRank, TaskVector

LOOKS = 4  # at the held-out samples, about
TEXTS, OTHERS = 16, 64  # samples a step
# Learning rates: of factors by the root of the width, because entries of wider weights are smaller; of whole weights by
# the width, so that a step of AdamW changes what a layer says by a like share at any width.
LORA, DENSE, USUAL_WIDTH = 0.05, 0.02, 768


@dataclass(frozen=True)
class Refined:
    """A refined change, and the held-out losses that judged it."""

    change: TaskVector
    losses: tuple[tuple[int, float], ...]  # (steps, held-out loss), the start first
    kept: int  # steps of the change; 0 for the start
    untouched: float  # held-out loss of the target without any change
    samples: int  # held out
    unit: str  # of the losses
    rate: float  # learning rate

    @property
    def better(self) -> bool:
        """Whether training was kept, and is better than the target without any change."""
        return self.kept > 0 and dict(self.losses)[self.kept] < self.untouched

    @property
    def sentence(self) -> str:
        """For people."""
        (_, before), (steps, after) = self.losses[0], self.losses[-1]
        if not math.isfinite(before):
            return "Refining was dropped: the loss of what was moved is no number."
        if not math.isfinite(after):
            return (
                f"Refining was dropped: the loss is no number after {steps} steps, lower the learning rate "
                f"({self.rate:g})."
            )
        if not self.kept:
            return (
                f"Refining for {steps} steps did not lower the loss to the tuned source on {self.samples} held-out "
                f"samples ({before:.4g} {self.unit} before, {after:.4g} after): it was dropped."
            )
        return (
            f"Refined for {self.kept} steps: the loss to the tuned source on {self.samples} held-out samples went from "
            f"{before:.4g} to {dict(self.losses)[self.kept]:.4g} {self.unit} (the untouched target has "
            f"{self.untouched:.4g})."
        )

    def record(self) -> dict[str, Any]:
        """For machines."""
        return {
            "kept": self.kept,
            "held_out": self.samples,
            "unit": self.unit,
            "learning_rate": self.rate,
            "untouched": self.untouched,
            "losses": [list(each) for each in self.losses],
            "sentence": self.sentence,
        }


def refine(
    target: nn.Module,
    start: TaskVector,
    fit: Lesson,
    held_out: Lesson,
    steps: int,
    *,
    learning_rate: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Refined:
    """Train `start` on `fit` for some steps and keep what `held_out` judges best.

    Args:
        target: The base model of the target; it is as before afterwards.
        start: The change to begin with; a LoRA stays one of its rank.
        fit: What the tuned source answers on the samples to learn from.
        held_out: The same on samples that neither made `start` nor are learned from.
        steps: Optimiser steps.
        learning_rate: Of AdamW after its warm-up; by form and width unless given.
        batch: Samples a step; 16 texts of a language model, 64 of all others.
        seed: Of the order of the samples.
        progress: Called with the steps that are done and all.
    """
    size = min(batch or (TEXTS if isinstance(fit, Tokens) else OTHERS), len(fit))
    rate, warmup, every = learning_rate or usual_rate(start), min(10, steps // 10), max(1, steps // LOOKS)
    place, generator = place_of(target), torch.Generator().manual_seed(seed)

    def judged() -> float:
        with torch.no_grad(), evaluating(target):
            parts = [range(i, min(i + size, len(held_out))) for i in range(0, len(held_out), size)]
            return sum(float(held_out.loss(held_out.batch(part).to(*place))) for part in parts) / len(held_out)

    untouched = judged()
    with evaluating(target), learning(target, start) as result:
        losses, best, kept = [(0, judged())], start, 0
        optimiser = torch.optim.AdamW([p for p in target.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
        share = [min((i + 1) / max(1, warmup), _cosine(i - warmup, steps - warmup)) for i in range(steps)]
        order: list[int] = []
        for step in range(1, steps + 1):
            while len(order) < size:
                order += torch.randperm(len(fit), generator=generator).tolist()
            chosen, order = order[:size], order[size:]
            with torch.enable_grad():
                loss = fit.loss(fit.batch(chosen).to(*place)) / size
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.param_groups[0]["lr"] = rate * share[step - 1]
            optimiser.step()
            if progress is not None:
                progress(step, steps)
            if step % every == 0 or step == steps or not math.isfinite(loss.item()):
                losses.append((step, judged()))
                if not math.isfinite(losses[-1][1]):
                    break
                if losses[-1][1] < min(value for _, value in losses[:-1]):
                    best, kept = result(), step
    return Refined(best, tuple(losses), kept, untouched, len(held_out), fit.unit, rate)


def _cosine(step: int, steps: int) -> float:
    """Half a cosine from 1 down to 0."""
    return 0.5 * (1 + math.cos(math.pi * max(0, step) / max(1, steps)))


def usual_rate(start: TaskVector) -> float:
    """A learning rate for a change by its form and the width of its layers."""
    widths = sorted(min(delta.shape) for delta in start.deltas.values() if len(delta.shape) > 1)
    width = widths[len(widths) // 2] if widths else USUAL_WIDTH
    return float(f"{LORA / math.sqrt(width) if start.low_rank else DENSE / width:.2g}")


@contextmanager
def learning(target: nn.Module, start: TaskVector) -> Iterator[Callable[[], TaskVector]]:
    """Inside, the target stands at its base + `start`, and only what `start` changes asks for a gradient.

    The result is the change as it is then, in its form. Afterwards the target is as it was.
    """
    asked = [(parameter, parameter.requires_grad) for parameter in target.parameters()]
    skeleton = Skeleton.of(target)
    as_lora = start.low_rank and start.deltas.keys() <= skeleton.linear
    try:
        with _factors(target, start, skeleton) if as_lora else _weights(target, start.dense()) as result:
            yield result
    finally:
        for parameter, flag in asked:
            parameter.requires_grad_(flag)


@contextmanager
def _weights(target: nn.Module, start: TaskVector) -> Iterator[Callable[[], TaskVector]]:
    """Let the changed parameters themselves learn."""
    moving = start.on(target)
    base = {name: parameter.detach().clone() for name, parameter, _ in moving}
    target.requires_grad_(False)
    try:
        start.add_to(target)
        for _, parameter, _ in moving:
            parameter.requires_grad_(True)
        yield lambda: TaskVector({name: p.detach() - base[name] for name, p, _ in moving}, start.coverage)
    finally:
        with torch.no_grad():
            for name, parameter, _ in moving:
                parameter.grad = None
                parameter.copy_(base[name])


@contextmanager
def _factors(target: nn.Module, start: TaskVector, skeleton: Skeleton) -> Iterator[Callable[[], TaskVector]]:
    """Let an adapter on PEFT's layers learn: as its user would load it, but trainable."""
    import peft

    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), start, skeleton, base_name="")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT still asks transformers for
            adapted = peft.PeftModel.from_pretrained(target, folder, is_trainable=True)

    def result() -> TaskVector:
        found: dict[str, Delta] = {}
        for name in start.deltas:
            layer: Any = target.get_submodule(name.removesuffix(".weight"))
            A, B = (side["default"].weight.detach().clone() for side in (layer.lora_A, layer.lora_B))
            change = LowRank(B, A)
            found[name] = change.T if name in skeleton.transposed else change
        return TaskVector(found, start.coverage)

    try:
        yield result
    finally:
        adapted.unload()
