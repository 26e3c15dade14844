"""What every benchmark shares: the shared folder, arguments, results as JSON and as a Markdown table."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("TASKFERRY_SHARED", Path(__file__).parents[1].parent / "shared"))
RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version for CI, with looser bounds")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


def need_shared() -> Path:
    if not (SHARED / "models").is_dir():
        print(f"no real models at {SHARED}: set TASKFERRY_SHARED")
        sys.exit(0)
    return SHARED


def mean_spread(values: Sequence[float], digits: int = 1) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


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
