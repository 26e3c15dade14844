"""Values by module, as an adapter's rank_pattern and alpha_pattern give them: names, or regular expressions of anyone.

PEFT takes the first pattern that ends a module's path. Python's own matcher has no bound in time, so an expression
goes through the `regex` library, which can be stopped; a plain name needs neither.
"""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path
from typing import Any

from taskferry.errors import TaskferryError

SECONDS = 1.0  # for all matches of one table
LONGEST = 1000
_NAME = re.compile(r"[\w.-]+")


class Patterns:
    """One table of an adapter's configuration, checked."""

    def __init__(self, folder: Path, name: str, table: Any) -> None:
        self.where = f"{folder}: {name}"
        table = {} if table is None else table
        if not isinstance(table, dict) or not all(is_positive(value, (int, float)) for value in table.values()):
            raise TaskferryError(f"{self.where} is no table of positive numbers by module: the adapter is damaged")
        self.table: dict[str, Any] = table
        self._left = SECONDS

    def of(self, module: str, default: Any) -> Any:
        """The value of the first pattern that ends the module's path."""
        for pattern, value in self.table.items():
            if module == pattern or module.endswith(f".{pattern}") or self._matches(pattern, module):
                return value
        return default

    def _matches(self, pattern: str, module: str) -> bool:
        if _NAME.fullmatch(pattern):
            return False  # a plain name or path, which was compared already
        if len(pattern) > LONGEST:
            raise TaskferryError(f"{self.where} has an expression of {len(pattern)} letters: simplify it")
        try:
            regex = importlib.import_module("regex")
        except ImportError as error:
            raise TaskferryError(f"{self.where} has an expression ({pattern[:80]!r}): pip install regex") from error
        started = time.perf_counter()
        try:
            found = regex.match(rf"(.*\.)?({pattern})$", module, timeout=max(self._left, 1e-3))
        except TimeoutError as error:
            raise TaskferryError(f"{self.where}: {pattern[:80]!r} takes too long to match: simplify it") from error
        except (regex.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
            raise TaskferryError(f"{self.where}: {pattern[:80]!r} is no expression: {error}") from error
        finally:
            self._left -= time.perf_counter() - started
        return found is not None


def is_positive(value: Any, kinds: Any) -> bool:
    """A number above zero and below a million, no switch."""
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 1e6
