"""State dictionaries in files: safetensors, or torch files read with weights_only. Never a pickle."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.taskvector import TaskVector, as_dense, match_names

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def is_state_file(path: Path) -> bool:
    """Whether this is a file that `read_state` reads."""
    return path.is_file() and path.suffix in (".safetensors", *TORCH_FILES)


def read_state(path: Path) -> dict[str, Tensor]:
    """Parameter name -> tensor, out of the wrappings that training scripts put around it."""
    if not path.is_file():
        raise TaskferryError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise TaskferryError(f"{path} is no readable safetensors file: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders about pickles aloud; the refusal below says all
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise TaskferryError(
            f"{path} cannot be read as plain weights (a pickled module could run code on loading, so it is refused): "
            "save its state_dict() as safetensors and give that"
        ) from error
    for name in WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping):
        raise TaskferryError(f"{path} holds a {type(state).__name__}, not a state dictionary")
    tensors = {str(k).removeprefix("module."): v for k, v in state.items() if isinstance(v, Tensor)}
    if not tensors:
        raise TaskferryError(f"{path} holds no tensors")
    return tensors


def add_to_state(state: dict[str, Tensor], tau: TaskVector, scale: float) -> dict[str, Tensor]:
    """State + scale · τ, each tensor in its own precision."""
    names = match_names(tau.deltas, state)
    changed = dict(state)
    for name, delta in tau.deltas.items():
        change = as_dense(delta)
        before = state[names[name]]
        changed[names[name]] = (before.to(change.dtype) + scale * change).to(before.dtype)
    return changed
