"""What every benchmark shares: the shared folder, arguments, results as JSON and as a Markdown table."""

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

from taskferry.bench.tables import table

__all__ = ["RESULTS", "ROOT", "SHARED", "arguments", "finish", "keep", "mean_spread", "need_shared", "table"]

ROOT = Path(__file__).absolute().parents[2]
SHARED = Path(os.environ.get("TASKFERRY_SHARED", ROOT.parent / "shared"))
RESULTS = ROOT / "benchmarks" / "results"


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version for CI, with looser bounds")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


def need_shared() -> Path:
    if not (SHARED / "models").is_dir():
        sys.exit(f"no real models and data at {SHARED}: set TASKFERRY_SHARED")
    return SHARED


def mean_spread(values: Sequence[float], digits: int = 1) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


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


def keep(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Add results to a file that several processes may share; returns all that it holds now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(path.read_text()) if path.exists() else {}
        merged = dict(sorted({**known, **results}.items()))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(merged, indent=1) + "\n")
        part.replace(path)
    path.with_suffix(".lock").unlink(missing_ok=True)
    return merged


def kept(path: Path | None, cells: dict[str, Any]) -> dict[str, Any]:
    """All cells that are known, these among them: other processes may add theirs to the same file."""
    known = cells if path is None else keep(path, cells)
    return {key: value for key, value in known.items() if isinstance(value, dict)}
