"""Products of float32 matrices in float32: whoever lets torch round them (TF32, bfloat16) means his model, not sums.

>>> with full_precision():
...     C.addmm_(X_A.T, X_B)

The reductions in half precision that torch also allows do not touch sums: those are of float32 numbers at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> list[tuple[Any, str, Any]]:
    """What torch calls it: of CUDA, and of CPUs with units for bfloat16."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        switches = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
        return [(each, "fp32_precision", "ieee") for each in switches if each is not None]
    return [(torch.backends.cuda.matmul, "allow_tf32", False)]


_SWITCHES = _switches()


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, float32 is float32."""
    found = [(place, name, getattr(place, name), value) for place, name, value in _SWITCHES]
    changed = [each for each in found if each[2] != each[3]]
    for place, name, _, value in changed:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, was, _ in changed:
            setattr(place, name, was)
