"""A model as a pass meets it: where its inputs belong, in which precision, and how it is kept still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; every module in its own mode afterwards, since some may have been kept still in a training model."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode, and no parameter asks for a gradient; everything as before afterwards."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's inputs belong."""
    parameter = next((p for p in model.parameters() if p.device.type != "meta"), None)
    return torch.device("cpu") if parameter is None else parameter.device


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Where and how the model's inputs belong: those of a model in half precision are in its own."""
    precision = next((p.dtype for p in model.parameters() if p.ndim > 1 and p.is_floating_point()), torch.float32)
    return device_of(model), narrow(precision)


def narrow(precision: torch.dtype) -> torch.dtype | None:
    """Half precision, or None."""
    return precision if precision.itemsize < 4 else None


def wide(x: Tensor) -> Tensor:
    """In float32 at least: nothing is added up in half precision."""
    return x.float() if x.dtype.itemsize < 4 else x
