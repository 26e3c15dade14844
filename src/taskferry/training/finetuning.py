"""Fine-tuning by the paper's protocol, in steps that can be interrupted: AdamW, warm-up and cosine, 90/10 of train.

>>> history = finetune(model, Pool(samples, loaded), ZeroShot(classes, tokenizer), folder="runs/mnist")

Every checkpoint holds weights, optimiser and history; the samples of a step follow from seed and step alone. So a run
that was killed goes on from its last checkpoint and ends with the same bytes as one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from taskferry.collect.capture import Loss
from taskferry.collect.device import device_of
from taskferry.config import Settings
from taskferry.data.batch import Batch
from taskferry.disk.files import hash_parameters, open_safetensors, write_safetensors
from taskferry.display.bars import Tell, told
from taskferry.errors import TaskferryError
from taskferry.evaluation.pool import Data, LazyBatches
from taskferry.evaluation.scoring import evaluate
from taskferry.objectives.objectives import Classifier, NewHead, Objective

CHECKPOINT, KIND = "checkpoint.safetensors", "taskferry-finetuning"


class FineTuning(Settings):
    """The protocol; the defaults are the paper's."""

    steps: int = Field(2000, ge=1, description="optimiser steps")
    batch: int = Field(128, ge=1, description="samples a step")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW, at the end of the warm-up")
    head_rate: float = Field(10.0, gt=0, description="times the learning rate, for a new head")
    weight_decay: float = Field(0.1, ge=0, description="of AdamW")
    warmup: int = Field(200, ge=0, description="steps in which the learning rate grows")
    validation: float = Field(0.1, ge=0, lt=1, description="share of the samples kept for validation")
    every: int = Field(200, ge=1, description="steps between checkpoints and evaluations on the validation samples")
    seed: int = Field(0, description="of the split and the order of the samples")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of the products; weights stay float32")
    train: Literal["all", "blocks"] = Field("all", description="what learns: all parameters, or the blocks alone")


@dataclass
class History:
    """What happened: (step, training loss, validation score) at each evaluation."""

    evaluations: list[tuple[int, float, float | None]] = field(default_factory=list)
    resumed: int = 0  # steps that an earlier run had done

    @property
    def validation(self) -> float | None:
        """The last validation score."""
        return self.evaluations[-1][2] if self.evaluations else None

    @property
    def judged(self) -> list[tuple[int, float]]:
        """(step, the score then)."""
        return [(step, score) for step, _, score in self.evaluations if score is not None]


class Diverged(TaskferryError):
    """A loss that is no number any more."""


class OtherRun(TaskferryError):
    """A checkpoint that is of other settings, weights or data."""


def finetune(
    model: nn.Module,
    data: Data,
    objective: Objective,
    settings: FineTuning | None = None,
    *,
    folder: str | Path | None = None,
    anew: bool = False,
    judge: Callable[[], float] | None = None,
    dropout: bool = True,
    progress: Tell | bool | None = None,
) -> History:
    """Train `model` in place; with a `folder` it resumes what an earlier call left there (`anew`: if that fits).

    Parameters that require no gradient stay, so a PEFT model trains its adapter alone; where none requires one, all
    (or all in blocks) are trained. A `judge` gives a score on samples kept aside, in place of the validation.
    `dropout=False` trains in eval mode. `progress=True` shows a bar; a function is called with (step, steps, loss).
    """
    chosen, tell = settings or FineTuning(), told(progress, "fine-tuning")
    if isinstance(objective, Classifier) and objective.fitted:
        raise TaskferryError(
            f"{type(objective).__name__} is a head made from samples, which does not learn: use NewHead(classes)"
        )
    train, held_out = split(len(data), chosen)
    torch.manual_seed(chosen.seed)  # a new head and dropout
    loss = objective.bind(model, [data.batch(train[: chosen.batch])])
    head = objective.module if isinstance(objective, NewHead) else None
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    trained = _trained(model, chosen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    groups: list[dict[str, Any]] = [{"params": list(trained.values()), "lr": chosen.learning_rate}]
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": chosen.learning_rate * chosen.head_rate})
        trained = {**trained, **{f"new head.{n}": p for n, p in head.named_parameters()}}
    optimiser = torch.optim.AdamW(groups, weight_decay=chosen.weight_decay)
    checkpoint = None if folder is None else Path(folder) / CHECKPOINT
    identity = {
        **chosen.model_dump(),
        "weights": hash_parameters(model),
        "trained": sorted(trained),
        "samples": len(data),
        "objective": objective.describe(),
    }
    run = _Run(model, trained, optimiser, identity, chosen.steps)
    history = History()
    if checkpoint is not None and checkpoint.exists():
        try:
            history = run.resume(checkpoint)
        except OtherRun:
            if not anew:
                raise
    device, was_training = device_of(model), model.training
    batches = ([data.batch(order(train, step, chosen))] for step in range(history.resumed, chosen.steps))
    model.train(dropout)
    total = 0.0
    try:
        for done, value in descend(
            loss, batches, optimiser, lambda step: rate(step, chosen), device, chosen, history.resumed
        ):
            total += value
            if not math.isfinite(total):
                raise Diverged(
                    f"the loss is no number at step {done}: lower the learning rate ({chosen.learning_rate:g})"
                )
            if tell is not None:
                tell(done, chosen.steps, value)
            if done % chosen.every and done != chosen.steps:
                continue
            model.eval()
            looked = LazyBatches(data, held_out, chosen.batch)
            score = judge() if judge else evaluate(model, looked, objective).value if held_out else None
            model.train(dropout)
            history.evaluations.append((done, total / ((done - 1) % chosen.every + 1), score))
            total = 0.0
            if checkpoint is not None:
                run.save(checkpoint, done, history)
    finally:
        model.train(was_training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None
    return history


def descend(
    loss: Loss,
    batches: Iterable[Sequence[Batch]],
    optimiser: torch.optim.Optimizer,
    rate: Callable[[int], float],
    device: torch.device,
    settings: FineTuning,
    first: int = 0,
) -> Iterator[tuple[int, float]]:
    """One optimiser step for each group of micro-batches, on the mean loss of its samples: (steps done, that loss).

    The one loop of everything that trains here. `rate` is a share of the learning rate for each step.
    """
    rates = [group["lr"] for group in optimiser.param_groups]
    for step, parts in enumerate(batches, first):
        torch.manual_seed(settings.seed * 1_000_003 + step)  # dropout of a resumed run is the same
        samples = sum(map(len, parts))
        optimiser.zero_grad()
        value = 0.0
        for batch in parts:
            with torch.enable_grad(), precision(settings.precision, device):
                part = loss(batch.to(device)) / samples
            part.backward()  # type: ignore[no-untyped-call]
            value += part.item()
        for group, full in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = full * rate(step)
        optimiser.step()
        yield step + 1, value


def split(n: int, settings: FineTuning) -> tuple[list[int], list[int]]:
    """(training, validation) sample numbers, the same for the same seed."""
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    kept = round(n * settings.validation)
    if n - kept < 1:
        raise TaskferryError(f"{n} samples leave none to train on beside {kept} for validation")
    return shuffled[kept:], shuffled[:kept]


def order(train: Sequence[int], step: int, settings: FineTuning) -> list[int]:
    """The samples of a step: epochs of the shuffled samples, one after the other."""
    n, size = len(train), min(settings.batch, len(train))
    epoch, start = divmod(step * size, n)
    seen: list[int] = []
    while len(seen) < size:
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(n, generator=generator).tolist()
        seen += shuffled[start : start + size - len(seen)]
        epoch, start = epoch + 1, 0
    return [train[i] for i in seen]


def rate(step: int, settings: FineTuning) -> float:
    """Linear warm-up, then half a cosine down to nothing."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    rest = max(1, settings.steps - settings.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - settings.warmup) / rest)))


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Products in bfloat16 where asked for; on a CPU without the fused attention, whose backward is slow there."""
    if name == "float32":
        yield
        return
    with torch.autocast(device.type, torch.bfloat16):
        if device.type == "cpu":
            with sdpa_kernel(SDPBackend.MATH):
                yield
        else:
            yield


def _trained(model: nn.Module, settings: FineTuning) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    chosen = {name: p for name, p in named.items() if p.requires_grad} or named
    if settings.train == "blocks":
        chosen = {name: p for name, p in chosen.items() if any(part.isdigit() for part in name.split("."))}
    if not chosen:
        raise TaskferryError(f"{type(model).__name__} has no parameters in numbered blocks: use train='all'")
    return chosen


@dataclass
class _Run:
    """What a checkpoint holds of a run."""

    model: nn.Module
    trained: dict[str, nn.Parameter]
    optimiser: torch.optim.Optimizer
    identity: dict[str, Any]
    steps: int

    def save(self, path: Path, step: int, history: History) -> None:
        """Weights, buffers, optimiser, and what happened."""
        tensors: dict[str, Tensor] = {f"weight.{name}": p.detach() for name, p in self.trained.items()}
        tensors |= {f"buffer.{name}": b for name, b in self.model.named_buffers()}  # running means of a normalisation
        if step < self.steps:  # a finished run needs no optimiser
            for name, parameter in self.trained.items():
                for key, value in self.optimiser.state.get(parameter, {}).items():
                    tensors[f"{key}.{name}"] = value
        header = {"format": KIND, "step": step, "of": self.identity, "evaluations": history.evaluations}
        write_safetensors(path, tensors, header)

    def resume(self, path: Path) -> History:
        """What `save` left."""
        with open_safetensors(path, KIND) as (file, header):
            then, now = header.get("of"), json.loads(json.dumps(self.identity))
            if then != now:
                changed = [name for name in now if not isinstance(then, dict) or then.get(name) != now[name]]
                raise OtherRun(
                    f"{path} is of another run ({', '.join(changed)} differ): give another folder, or remove it"
                )
            keys = set(file.keys())
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(file.get_tensor(f"buffer.{name}"))
                for name, parameter in self.trained.items():
                    parameter.copy_(file.get_tensor(f"weight.{name}"))
                    state: dict[str, Any] = {
                        key: file.get_tensor(f"{key}.{name}").to("cpu" if key == "step" else parameter.device)
                        for key in ("step", "exp_avg", "exp_avg_sq")
                        if f"{key}.{name}" in keys
                    }
                    if state:
                        self.optimiser.state[parameter] = state
            evaluations = [(int(step), float(value), score) for step, value, score in header["evaluations"]]
            return History(evaluations, int(header["step"]))
