"""Which families there are."""

from __future__ import annotations

from torch import nn

from taskferry.layers.family import Family

_FAMILIES: list[Family] = [Family()]


def register(cls: type[Family]) -> type[Family]:
    """Class decorator: make a family known."""
    _FAMILIES.append(cls())
    return cls


def family_of(model: nn.Module) -> Family:
    """The family that knows this model best."""
    return next(family for family in reversed(_FAMILIES) if family.owns(model))
