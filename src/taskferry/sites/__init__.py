"""Model families: what the sites of a model are called, how its tokens lie, what its features are.

A new family is one file with one class under `@register`. The last one registered that owns a model wins;
`Family` itself takes any `nn.Module` with linear layers.
"""

from taskferry.sites import huggingface, openclip, timm  # they register themselves
from taskferry.sites.family import Family
from taskferry.sites.registry import family_of, register

__all__ = ["Family", "family_of", "huggingface", "openclip", "register", "timm"]
