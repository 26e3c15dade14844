"""Which cases of a slow test run with each change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], few: Collection[str]) -> list[Any]:
    """The few, by name, stand for all of the values between nightly runs."""
    names = [(value, value if isinstance(value, str) else value.name) for value in values]
    return [pytest.param(value, id=name, marks=() if name in few else pytest.mark.every) for value, name in names]
