"""timm folders: config.json with an `architecture`, weights in model.safetensors or pytorch_model.bin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.disk.files import read_json, write_plain_safetensors
from taskferry.errors import TaskferryError, first_line
from taskferry.models.loaded import Loaded, as_stored, library
from taskferry.models.states import add_to_state, check_folder, read_state
from taskferry.taskvector import TaskVector


def owns(where: str) -> bool:
    """Tell a folder whose config.json names a timm architecture."""
    config = Path(where) / "config.json"
    if not config.is_file():
        return False
    try:
        data = read_json(config)
    except TaskferryError:
        return False  # the next format says what is wrong with it
    return "architecture" in data and "model_type" not in data


def load(
    where: str,
    like: nn.Module | None,  # noqa: ARG001
    dtype: str,
    image_size: int | None = None,
) -> tuple[nn.Module, Path, set[str], dict[str, Any]]:
    """Load the model with its pretrained weights."""
    timm = library("timm")
    check_folder(Path(where))
    state = read_state(_weights(Path(where)))  # refuses what timm must not open
    stored = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    try:
        more = {} if image_size is None else {"img_size": image_size}
        model = timm.create_model(f"local-dir:{where}", pretrained=True, **more)
    except (RuntimeError, ValueError, TypeError, FileNotFoundError, KeyError) as error:
        raise TaskferryError(f"{where} does not load with timm: {first_line(error)}") from error
    return model.to(as_stored(dtype, stored)), Path(where), set(), {"dtype": stored, "image_size": image_size}


def write(target: Loaded, tau: TaskVector, folder: Path) -> None:
    """Write config.json as it is, and model.safetensors in the target's precision."""
    if target.folder is None:
        raise ValueError("a timm model has a folder")
    state = read_state(_weights(target.folder))
    now = target.model.state_dict()
    if state.keys() != now.keys():  # timm knows the names of older files
        model = library("timm").create_model(f"local-dir:{target.folder}", pretrained=True)
        state = {
            name: t.to(target.extra["dtype"]) if t.is_floating_point() else t for name, t in model.state_dict().items()
        }
    write_plain_safetensors(folder / "model.safetensors", add_to_state(state, tau))
    (folder / "config.json").write_bytes((target.folder / "config.json").read_bytes())


def tokenizer(loaded: Loaded) -> Any:
    """Refuse: timm models read images only."""
    raise TaskferryError(f"{loaded.given} is an image model: give images with labels as calibration")


def image_transform(loaded: Loaded) -> Any:
    """Make timm's own evaluation transform of this model."""
    timm = library("timm")
    size = loaded.extra.get("image_size")
    asked = {} if size is None else {"input_size": (3, size, size)}
    transform = timm.data.create_transform(**timm.data.resolve_data_config(asked, model=loaded.model))
    return lambda image: transform(image.convert("RGB"))


def _weights(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise TaskferryError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
