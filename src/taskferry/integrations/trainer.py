"""A callback for transformers' `Trainer` that records how a fine-tune goes: its size, its direction, its inputs.

>>> trainer = Trainer(model, …, callbacks=[TrajectoryCallback("trajectory.json", every=100, probe=batch)])

The task vector is a sum over steps, and BiCo aligns it by activations of the base alone. That is fair while the run
keeps its direction and its layers' inputs stay near the base's (paper, appendix on activation consistency): both are
written here. At each measurement: ‖τ‖, and its cosine with the finished τ, of the whole and of each block; with a
`probe` batch also 1 − cos(x_t, x_pre) and | ‖x_t‖ − ‖x_pre‖ | / ‖x_pre‖ at the input of every linear layer, mean over
tokens.

Memory: two copies of what is trained (for a LoRA: its factors), and one of the probe's layer inputs. The τ of each
measurement waits on disk beside the file until the run ends, because its cosine is known only then.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from taskferry.collect.recorder import Call, Recorder
from taskferry.disk.files import write_text
from taskferry.errors import TaskferryError
from taskferry.layers.discovery import find_sites
from taskferry.layers.routed import Rows
from taskferry.taskvector import Delta, LowRank, TaskVector

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")
WHOLE = "all"


class TrajectoryCallback(TrainerCallback):
    """Looks every `every` steps and at the end; writes one JSON file, also when the run is stopped early."""

    def __init__(self, path: str | Path, *, every: int = 100, probe: Mapping[str, Any] | None = None) -> None:
        self.path, self.every, self.probe = Path(path), every, probe
        self.measurements: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Keep what is trained as it is before the first step, and the probe's inputs."""
        model: nn.Module = kwargs["model"]
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise TaskferryError("the trajectory of sharded weights (FSDP, DeepSpeed) cannot be seen from one process")
        self._writes = bool(state.is_world_process_zero)
        if not self._writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.measurements, self._kept = [], Path(tempfile.mkdtemp(dir=self.path.parent, prefix=".trajectory."))
        self._start = _trained(model)
        self._inputs = _layer_inputs(model, self.probe)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Look, where it is time."""
        model: nn.Module = kwargs["model"]
        if self._writes and state.global_step % self.every == 0:
            self._measure(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """A last measurement; then the cosines with where the run ended, and the file."""
        model: nn.Module = kwargs["model"]
        if not self._writes:
            return
        try:
            if not self.measurements or self.measurements[-1]["step"] != state.global_step:
                self._measure(state.global_step, model)
            end = _changes(self._start, _trained(model))
            for measurement in self.measurements:
                then = _changes(self._start, load_file(self._file(measurement["step"])))
                measurement |= _compare(then, end)
            write_text(self.path, json.dumps({"every": self.every, "measurements": self.measurements}, indent=1) + "\n")
        finally:
            shutil.rmtree(self._kept, ignore_errors=True)

    def _file(self, step: int) -> Path:
        return self._kept / f"{step}.safetensors"

    def _measure(self, step: int, model: nn.Module) -> None:
        save_file(_trained(model), self._file(step))
        now = _layer_inputs(model, self.probe)
        self.measurements.append(
            {"step": step, "inputs": {name: _shift(self._inputs[name], x) for name, x in now.items()}}
        )


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all that learns."""
    return {n: p.detach().to("cpu", copy=True).contiguous() for n, p in model.named_parameters() if p.requires_grad}


def _changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> TaskVector:
    """τ of what was trained: differences, and B A of each LoRA module (its scaling is one factor for all steps)."""
    deltas: dict[str, Delta] = {}
    factors: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in after.items():
        found = _FACTOR.fullmatch(name)
        if found is None:
            deltas[name] = tensor.float() - before[name].float()
        else:
            factors[found["module"], found["adapter"]][found["side"]] = tensor.float()
    for (module, _), sides in factors.items():
        deltas[f"{module}.weight"] = LowRank(sides["B"], sides["A"])
    return TaskVector(deltas)


def _compare(then: TaskVector, end: TaskVector) -> dict[str, Any]:
    """Norm and cosine with the end, of the whole and by block."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, delta in then.deltas.items():
        last = end.deltas[name]
        for part in (WHOLE, block_of(name)):
            for i, value in enumerate((_inner(delta, delta), _inner(delta, last), _inner(last, last))):
                sums[part][i] += value
    parts = {
        part: {"norm": max(a, 0.0) ** 0.5, "cosine": None if a <= 0 or c <= 0 else b / (a * c) ** 0.5}
        for part, (a, b, c) in sums.items()
    }
    return {**parts.pop(WHOLE, {}), "blocks": parts}


def _inner(a: Delta, b: Delta) -> float:
    """⟨a, b⟩; of two low-rank changes by r × r products."""
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return float(((a.left.double().T @ b.left.double()) * (a.right.double() @ b.right.double().T)).sum())
    if isinstance(a, LowRank) or isinstance(b, LowRank):
        raise TypeError("a change is low-rank at every step or at none")
    return float((a.double() * b.double()).sum())


def block_of(name: str) -> str:
    """The part of a parameter's name up to its first number, or "other"."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else "other"


@torch.no_grad()
def _layer_inputs(model: nn.Module, probe: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The input of every linear layer of the base, [tokens, width], on the probe batch; in eval mode."""
    if probe is None:
        return {}
    found: dict[str, Tensor] = {}

    device = next(model.parameters()).device
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in probe.items()}
    mask = batch.get("attention_mask")

    def note(call: Call, x: Rows, y: Rows) -> None:  # noqa: ARG001
        if not isinstance(x, Tensor):
            return  # an expert: its tokens are others at every step
        tokens = x[mask.bool()] if mask is not None and mask.shape == x.shape[:2] else x.flatten(0, -2)  # no padding
        found.setdefault(call.site.name, tokens.float().cpu())

    sites = [site for site in find_sites(model) if "lora_" not in site.name]
    samples = next(len(value) for value in batch.values() if isinstance(value, Tensor))
    training = model.training
    model.eval()
    try:
        with Recorder(model, sites, samples=samples, on_forward=note, on_gradient=lambda call, g: None):  # noqa: ARG005
            model(**batch)
    finally:
        model.train(training)
    return found


def _shift(before: Tensor, after: Tensor) -> dict[str, float]:
    """Mean over tokens of the change of direction and of magnitude."""
    cosine = torch.nn.functional.cosine_similarity(after, before, dim=-1)
    size = before.norm(dim=-1)
    moved = (after.norm(dim=-1) - size).abs() / size
    seen = size > 0  # a padded token of zeros has no direction
    return {"direction": float((1 - cosine[seen]).mean()), "magnitude": float(moved[seen].mean())}
