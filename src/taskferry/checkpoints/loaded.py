"""A model in memory, with where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from taskferry.errors import TaskferryError


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and where it came from."""

    model: nn.Module
    given: str  # what the user wrote
    folder: Path | None  # where its files lie
    format: ModuleType
    absent: frozenset[str] = frozenset()  # parameters that its checkpoint does not hold (a new head)
    extra: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return self._once("tokenizer")

    def image_transform(self) -> Any:
        """A function from a PIL image to the tensor that the model takes."""
        return self._once("image_transform")

    def _once(self, what: str) -> Any:
        """Made from files the first time it is asked for."""
        key = f"made {what}"
        if key not in self.extra:
            self.extra[key] = getattr(self.format, what)(self)
        return self.extra[key]


def to_device(loaded: Loaded, device: str) -> None:
    """Move a model; `auto` is a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise TaskferryError(f"no device '{device}' here: {str(error).splitlines()[0]}; give --device cpu") from error
