"""What one small run must show: the order of the rows, and the time."""

from __future__ import annotations

from collections.abc import Sequence

from taskferry.bench.running import ORACLE, TARGET, TUNED, Record

LIMIT = 300.0  # seconds
MARGIN = 2.0  # points; a naive transfer may gain no more


def smoke_failures(records: Sequence[Record], seconds: float) -> list[str]:
    """Sentences for everything that is not as it must be: naive < THESEUS < BiCo (at scale 1 or its own) < oracle."""
    scores = {entry["row"]: entry["score"] for record in records for entry in record["rows"] if "score" in entry}
    above = [
        ("theseus", "naive"),
        ("bico", "theseus"),
        ("bico", TARGET),
        ("bico, automatic scale", "theseus"),
        (ORACLE, "bico, automatic scale"),
        (TUNED, TARGET),
    ]
    lost = sorted({row for pair in above for row in (*pair, "naive")} - set(scores))
    if lost:
        return [f"no score for {', '.join(lost)}"]
    failures = [
        f"{high} ({scores[high]:.1f}) is not above {low} ({scores[low]:.1f})"
        for high, low in above
        if not scores[high] > scores[low]
    ]
    if scores["naive"] > scores[TARGET] + MARGIN:
        failures.append(f"naive ({scores['naive']:.1f}) gains over the target ({scores[TARGET]:.1f})")
    if seconds > LIMIT:
        failures.append(f"it took {seconds:.0f} s, more than {LIMIT:.0f} s")
    return failures
