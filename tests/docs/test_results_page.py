"""The page of results and the README's table say what the committed results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "shared" / "results.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run python benchmarks/shared/results.py\n{done.stderr}"


def test_the_zoo_is_small_and_says_how_it_was_made() -> None:
    import json

    folders = [p.parent for p in (ROOT / "benchmarks" / "zoo").glob("*/training.json")]
    assert {p.name for p in folders} == {"narrow", "wide", "twin", "deep"}
    assert sum(f.stat().st_size for p in folders for f in p.iterdir()) < 30e6
    for folder in folders:
        record = json.loads((folder / "training.json").read_text())
        assert record["command"] == f"python benchmarks/zoo/pretrain_zoo.py {folder.name}"
        assert record["log"][-1]["step"] == record["steps"]
