"""Fine-tuning by the paper's protocol, in steps that can be interrupted: AdamW, warm-up and cosine, 90/10 of train.

>>> history = finetune(model, Pool(samples, loaded), ZeroShot(classes, tokenizer), folder="runs/mnist")

Every checkpoint holds weights, optimiser and history; the samples of a step follow from seed and step alone. So a run
that was killed goes on from its last checkpoint and ends with the same bytes as one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from taskferry.calibration.batch import Batch
from taskferry.disk.files import hash_parameters, open_safetensors, write_safetensors
from taskferry.display.bars import Tell, told
from taskferry.errors import TaskferryError
from taskferry.evaluation.scoring import evaluate
from taskferry.fitting.capture import device_of
from taskferry.fitting.objectives import Classifier, NewHead, Objective
from taskferry.settings import Settings

CHECKPOINT, KIND = "checkpoint.safetensors", "taskferry-finetuning"


class Data(Protocol):
    """Labelled samples that can be asked for by number, such as a `Pool`."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples as the model takes them."""


class LazyBatches(Sequence[Batch]):
    """Micro-batches that are made when they are asked for: a whole test set as tensors may not fit."""

    def __init__(self, data: Data, indices: Sequence[int], size: int) -> None:
        self.data, self.indices, self.size = data, indices, size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.size)

    def __getitem__(self, place: Any) -> Any:
        """One micro-batch."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self.data.batch(self.indices[place * self.size : (place + 1) * self.size])


class FineTuning(Settings):
    """The protocol; the defaults are the paper's."""

    steps: int = Field(2000, ge=1, description="optimiser steps")
    batch: int = Field(128, ge=1, description="samples a step")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW, at the end of the warm-up")
    head_rate: float = Field(10.0, gt=0, description="times the learning rate, for a new head")
    weight_decay: float = Field(0.1, ge=0, description="of AdamW")
    warmup: int = Field(200, ge=0, description="steps in which the learning rate grows")
    validation: float = Field(0.1, ge=0, lt=1, description="share of the samples kept for validation")
    every: int = Field(200, ge=1, description="steps between checkpoints and looks at the validation samples")
    seed: int = Field(0, description="of the split and the order of the samples")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of the products; weights stay float32")
    train: Literal["all", "blocks"] = Field("all", description="what learns: all parameters, or the blocks alone")


@dataclass
class History:
    """What happened: (step, training loss, validation score) at each look."""

    looks: list[tuple[int, float, float | None]] = field(default_factory=list)
    resumed: int = 0  # steps that an earlier run had done

    @property
    def validation(self) -> float | None:
        """The last validation score."""
        return self.looks[-1][2] if self.looks else None


def finetune(
    model: nn.Module,
    data: Data,
    objective: Objective,
    settings: FineTuning | None = None,
    *,
    folder: str | Path | None = None,
    progress: Tell | bool | None = None,
) -> History:
    """Train `model` in place; with a `folder` it resumes what an earlier call left there.

    Parameters that require no gradient stay, so a PEFT model trains its adapter alone; where none requires one, all
    (or all in blocks) are trained. `progress=True` shows a bar; a function is called with (step, steps, loss).
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
    rates = [group["lr"] for group in groups]
    optimiser = torch.optim.AdamW(groups, weight_decay=chosen.weight_decay)
    checkpoint = None if folder is None else Path(folder) / CHECKPOINT
    identity = {
        **chosen.model_dump(),
        "weights": hash_parameters(model),
        "trained": sorted(trained),
        "samples": len(data),
        "objective": objective.describe(),
    }
    resumable = checkpoint is not None and checkpoint.exists()
    history = (
        _resume(checkpoint, model, trained, optimiser, identity) if checkpoint is not None and resumable else History()
    )
    device, was_training = device_of(model), model.training
    model.train()
    total = 0.0
    try:
        for step in range(history.resumed, chosen.steps):
            torch.manual_seed(chosen.seed * 1_000_003 + step)  # dropout of a resumed run is the same
            batch = data.batch(order(train, step, chosen)).to(device)
            with torch.enable_grad(), precision(chosen.precision, device):
                value = loss(batch) / len(batch)
            optimiser.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            for group, full in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = full * rate(step, chosen)
            optimiser.step()
            total += value.item()
            if not math.isfinite(total):
                raise TaskferryError(
                    f"the loss is no number at step {step + 1}: lower the learning rate ({chosen.learning_rate:g})"
                )
            if tell is not None:
                tell(step + 1, chosen.steps, value.item())
            done = step + 1
            if done % chosen.every == 0 or done == chosen.steps:
                model.eval()
                looked = LazyBatches(data, held_out, chosen.batch)
                score = evaluate(model, looked, objective).value if held_out else None
                model.train()
                history.looks.append((done, total / ((done - 1) % chosen.every + 1), score))
                total = 0.0
                if checkpoint is not None:
                    _save(checkpoint, model, trained, optimiser, done, chosen, identity, history)
    finally:
        model.train(was_training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None
    return history


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


def _save(
    path: Path,
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    step: int,
    settings: FineTuning,
    identity: dict[str, Any],
    history: History,
) -> None:
    tensors: dict[str, Tensor] = {f"weight.{name}": p.detach() for name, p in trained.items()}
    tensors |= {f"buffer.{name}": b for name, b in model.named_buffers()}  # running means of a normalisation
    if step < settings.steps:  # a finished run needs no optimiser
        for name, parameter in trained.items():
            for key, value in optimiser.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
    header = {"format": KIND, "step": step, "of": identity, "looks": history.looks}
    write_safetensors(path, tensors, header)


def _resume(
    path: Path,
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    identity: dict[str, Any],
) -> History:
    with open_safetensors(path, KIND) as (file, header):
        then, now = header.get("of"), json.loads(json.dumps(identity))
        if then != now:
            changed = [name for name in now if not isinstance(then, dict) or then.get(name) != now[name]]
            raise TaskferryError(
                f"{path} is of another run ({', '.join(changed)} differ): give another folder, or remove it"
            )
        keys = set(file.keys())
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(file.get_tensor(f"buffer.{name}"))
            for name, parameter in trained.items():
                parameter.copy_(file.get_tensor(f"weight.{name}"))
                state: dict[str, Any] = {
                    key: file.get_tensor(f"{key}.{name}").to("cpu" if key == "step" else parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in keys
                }
                if state:
                    optimiser.state[parameter] = state
        looks = [(int(step), float(value), score) for step, value, score in header["looks"]]
        return History(looks, int(header["step"]))
