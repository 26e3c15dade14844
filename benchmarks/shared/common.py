"""Folders, arguments, JSON and tables of every benchmark."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[2]
SHARED = Path(os.environ.get("TASKFERRY_SHARED", ROOT.parent / "shared"))  # real models and data
DATA = Path(os.environ.get("TASKFERRY_BENCH_DATA", Path.home() / ".cache" / "taskferry-bench"))  # made on the way
RESULTS = ROOT / "benchmarks" / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="a small version, whose numbers mean nothing")
    found.add_argument("--json", type=Path, help="write the results here, and their tables beside them")
    return found


def need_shared() -> Path:
    if not (SHARED / "models").is_dir():
        sys.exit(f"no real models and data at {SHARED}: set TASKFERRY_SHARED")
    return SHARED


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    ruled = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*ruled, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def mean_spread(values: Sequence[float], digits: int = 1) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def finish(results: dict[str, Any], markdown: str, path: Path | None, failures: Sequence[str], started: float) -> None:
    """Print, write, and exit with 1 where a bound was missed."""
    results["seconds"] = round(time.time() - started)
    print(markdown)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown + "\n")
    for failure in failures:
        print("missed:", failure)
    sys.exit(1 if failures else 0)


def keep(path: Path | None, cells: dict[str, Any]) -> dict[str, Any]:
    """Add cells to a file that several processes may share, one a line; returns all that it holds now."""
    if path is None:
        return cells
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(path.read_text()) if path.exists() else {}
        merged = dict(sorted({**known, **cells}.items()))
        part = path.with_suffix(".part")
        lines = (f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in merged.items())
        part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        part.replace(path)
    path.with_suffix(".lock").unlink(missing_ok=True)
    return merged
