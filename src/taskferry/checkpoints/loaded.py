"""A model in memory, with where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn


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
        return self.format.tokenizer(self)

    def image_transform(self) -> Any:
        """A function from a PIL image to the tensor that the model takes."""
        return self.format.image_transform(self)
