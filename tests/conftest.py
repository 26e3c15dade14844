"""Settings for every test, and the one place that knows where shared models and data lie."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

SHARED = Path(os.environ.get("TASKFERRY_SHARED", Path(__file__).parents[1].parent / "shared"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real models and data; tests that want it skip where it is absent."""
    if not (SHARED / "models").is_dir():
        pytest.skip(f"no real models at {SHARED}: set TASKFERRY_SHARED")
    return SHARED
