"""Model families: what the sites of a model are called, how its tokens lie, what its features are.

A new family is one file with one class under `@register`. The last one registered that owns a model wins;
`Family` itself takes any `nn.Module` with linear layers.
"""

from taskferry.layers import huggingface, openclip, timm  # they register themselves
from taskferry.layers.family import Family
from taskferry.layers.registry import family_of, register

__all__ = ["Family", "family_of", "huggingface", "openclip", "register", "timm"]
