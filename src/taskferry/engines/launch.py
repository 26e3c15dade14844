"""Whether torchrun started this process, and as which rank: read from its variables, without torch."""

from __future__ import annotations

import os


def started_by_torchrun() -> bool:
    """Whether this process is a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_and_size() -> tuple[int, int]:
    """Of this process in its job, before the ranks have met; (0, 1) for a process of its own."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
