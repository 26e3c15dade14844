"""Folders whose weights are quantised, each beside a plain folder with the numbers that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import relative

WEIGHTS = "model.safetensors"
PROJECTIONS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def is_layer(name: str) -> bool:
    """Whether it is the matrix of a block: what every method quantises."""
    return ".layers." in name and name.endswith("proj.weight")


def configured(folder: Path, out: Path, form: dict[str, Any] | None, state: dict[str, Tensor]) -> Path:
    """A copy of a folder with other weights and another word on how they are stored."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config | ({"quantization_config": form} if form else {})))
    save_file(state, out / WEIGHTS, {"format": "pt"})
    return out


def spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of every weight."""
    return torch.kron(scale, torch.ones(block))[: shape[0], : shape[1]]


def fp8(folder: Path, out: Path, block: tuple[int, int] = (16, 16)) -> tuple[Path, Path]:
    """As DeepSeek and Qwen store weights, and the plain numbers (`out-plain`)."""
    state, stored, plain = load_file(folder / WEIGHTS), {}, {}
    for name, value in state.items():
        if not is_layer(name):
            stored[name] = plain[name] = value
            continue
        rows, columns = (-(-size // each) for size, each in zip(value.shape, block, strict=True))
        padded = torch.zeros(rows * block[0], columns * block[1])
        padded[: value.shape[0], : value.shape[1]] = value
        scale = padded.reshape(rows, block[0], columns, block[1]).abs().amax((1, 3)) / 448
        every = spread(scale, block, value.shape)
        stored[name] = (value / every).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        plain[name] = stored[name].float() * every
    form = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return configured(folder, out, form, stored), configured(folder, out.with_name(f"{out.name}-plain"), None, plain)


def transfer(world: Path, source: Path, tuned: Path, target: Path, out: Path, *more: object, code: int = 0) -> Ran:
    return taskferry("transfer", "--source-base", source, "--source-tuned", tuned, "--target-base", target,
                     "--calibration", world / "prompts.jsonl", "--samples", 8, "--scale", 0.5, "--method", "bico",
                     "--force", "--out", out, *more, code=code)  # fmt: skip


def same(one: Path, two: Path, most: float = 1e-5) -> None:
    """Two files hold the same tensors, and one of them is not empty."""
    first, second = load_file(one), load_file(two)
    assert first.keys() == second.keys()
    assert len(first) > 3
    for name, value in first.items():
        assert relative(value, second[name]) < most, name


def words(ran: Ran) -> str:
    return " ".join((ran.out + ran.err).split())
