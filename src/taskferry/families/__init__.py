"""Model families: what the sites of a model are called, how its tokens lie, what its features are.

A new family is one file with one class under `@register`. The last one registered that owns a model wins;
`Family` itself takes any `nn.Module` with linear layers.
"""

from __future__ import annotations

from torch import nn

from taskferry.families.base import Family

_FAMILIES: list[Family] = [Family()]


def register(cls: type[Family]) -> type[Family]:
    """Class decorator: make a family known."""
    _FAMILIES.append(cls())
    return cls


def family_of(model: nn.Module) -> Family:
    """The family that knows this model best."""
    return next(family for family in reversed(_FAMILIES) if family.owns(model))


from taskferry.families import huggingface, openclip, timm  # noqa: E402, F401  (they register themselves)

__all__ = ["Family", "family_of", "register"]
