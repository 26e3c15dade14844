"""A model in memory, with where it came from."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from taskferry.errors import TaskferryError

BUFFER = "a buffer, no weight: the target keeps its own"  # why a change of one stays behind


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and where it came from."""

    model: nn.Module
    given: str  # what the user wrote
    folder: Path | None  # where its files lie
    format: ModuleType
    absent: frozenset[str] = frozenset()  # parameters that its checkpoint does not hold (a new head)
    extra: dict[str, Any] = field(default_factory=dict)
    precision: str = "float32"  # that was asked for

    @property
    def exact(self) -> bool:
        """True where its weights are those that are stored, not rounded to fewer digits."""
        stored = self.extra.get("dtype")
        return self.precision in ("float32", "auto") or str(stored).removeprefix("torch.") == self.precision

    def tokenizer(self) -> Any:
        """Load the model's own tokenizer."""
        return self._once("tokenizer")

    def image_transform(self) -> Any:
        """Load a function from a PIL image to the tensor that the model takes."""
        return self._once("image_transform")

    def processor(self) -> Any:
        """Load what makes inputs of texts with images, for a language model that also sees."""
        if not hasattr(self.format, "processor"):
            raise TaskferryError(
                f"{self.given} is no language model that reads images: give rows of text, or of images"
            )
        return self._once("processor")

    def to(self, device: str) -> Loaded:
        """Move the model, or say that it does not fit."""
        place = device_named(device)
        try:
            self.model.to(place)
        except torch.OutOfMemoryError as error:
            raise TaskferryError(
                f"{self.given} does not fit on {place}: give --dtype bfloat16, or two devices "
                "(--device cuda:0,cuda:1), or transfer with --engine blockwise: it needs a block of each at a time"
            ) from error
        return self

    def _once(self, what: str) -> Any:
        key = f"made {what}"
        if key not in self.extra:
            self.extra[key] = getattr(self.format, what)(self)
        return self.extra[key]


def library(name: str) -> Any:
    """Import a library that is an extra of the same name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = name.replace("_", "")
        raise TaskferryError(f"{name} is needed for this model: pip install 'taskferry[{extra}]'") from error


def device_named(name: str) -> torch.device:
    """Find a device that is there; `auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except torch.OutOfMemoryError:
        raise  # it is there, and full
    except (RuntimeError, AssertionError) as error:
        raise TaskferryError(f"no device '{name}' here: {str(error).splitlines()[0]}; give --device cpu") from error


def as_stored(precision: str, stored: torch.dtype) -> torch.dtype:
    """Name the precision by its word; `auto` is the stored one."""
    found = stored if precision == "auto" else getattr(torch, precision)
    if not isinstance(found, torch.dtype):
        raise ValueError(precision)
    return found
