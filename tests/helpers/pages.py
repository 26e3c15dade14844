"""The pages of the documentation, as text."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: Path, kind: str) -> list[str]:
    """What stands between the fences of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
