"""What one small run must show: the order of the rows, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from taskferry.bench.rows import rows
from taskferry.bench.running import ORACLE, TARGET, TUNED, Record

LIMIT = 300.0  # CPU-seconds: the clock of a machine that others use too says nothing of this program
MARGIN = 2.0  # points; a row that needs no samples may gain no more
POINT = 1.0  # what a row may be below one that it must reach


def smoke_failures(records: Sequence[Record], seconds: float) -> list[str]:
    """Sentences for everything that is not as it must be: what the methods say of their rows, and the levels."""
    scores = {entry["row"]: entry["score"] for record in records for entry in record["rows"] if "score" in entry}
    known = rows()
    above = [(name, low) for name, kind in known.items() for low in kind.row.beats]
    above += [(ORACLE, name) for name in dict.fromkeys(high for high, _ in above)] + [(TUNED, TARGET)]
    lost = sorted({row for pair in above for row in pair} - set(scores))
    if lost:
        return [f"no score for {', '.join(lost)}"]
    failures = [
        f"{high} ({scores[high]:.1f}) is not above {low} ({scores[low]:.1f})"
        for high, low in above
        if not scores[high] > scores[low]
    ]
    failures += [
        f"{name} ({scores[name]:.1f}) does not reach {low} ({scores[low]:.1f})"
        for name, kind in known.items()
        for low in kind.row.reaches
        if scores[name] < scores[low] - POINT
    ]
    for name in (name for name, kind in known.items() if not kind.drawn and name in scores):
        if scores[name] > scores[TARGET] + MARGIN:
            failures.append(f"{name} ({scores[name]:.1f}) gains over the target ({scores[TARGET]:.1f})")
    if seconds > LIMIT:
        failures.append(f"it took {seconds:.0f} CPU-seconds, more than {LIMIT:.0f}")
    return failures
