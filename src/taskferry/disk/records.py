"""JSON that every reader takes: what is no number is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any


def as_json(data: Any) -> str:
    """Indented; NaN and infinities, which JSON does not have, as null; other objects as their text."""
    return json.dumps(_finite(data), indent=1, default=str, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, bool):
        return data
    if isinstance(data, Integral):
        return int(data)
    if isinstance(data, Real):  # of numpy as well
        return float(data) if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return [_finite(value) for value in data]
    return data
