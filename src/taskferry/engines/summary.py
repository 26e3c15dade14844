"""The page that a fleet leaves beside its outputs: how many, how fast, and what failed and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from taskferry.engines.moving import Moved

SHOWN = 1000  # failures listed; the manifest has all

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>taskferry fleet</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430 }}
.bar {{ display: flex; height: 1.4rem; border-radius: .4rem; overflow: hidden; background: #e3e8ef }}
.done {{ background: #16a34a }} .failed {{ background: #dc2626 }}
table {{ border-collapse: collapse; width: 100%; margin-top: 1rem }}
td, th {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e3e8ef; overflow-wrap: anywhere }}
</style></head><body>
<h1>{done} of {of} adapters moved</h1>
<div class="bar"><div class="done" style="width: {done_share:.2f}%"></div>
<div class="failed" style="width: {failed_share:.2f}%"></div></div>
<p>{failed} failed, {pending} pending; {seconds} s, {rate} adapters a second.</p>
<h2>Why they failed</h2><table><tr><th>reason</th><th>adapters</th></tr>{reasons}</table>
<h2>Which</h2><table><tr><th>adapter</th><th>move</th><th>reason</th></tr>{failures}</table>
</body></html>
"""


def summary_page(summary: Mapping[str, Any], states: Iterable[Moved]) -> str:
    """HTML; every name and reason is text from files, and escaped."""
    of = max(1, int(summary["of"]))
    failures = [state for state in states if state.status == "failed"][:SHOWN]
    return _PAGE.format(
        done=summary["done"],
        of=summary["of"],
        failed=summary["failed"],
        pending=summary["pending"],
        seconds=summary["seconds"],
        rate=summary["adapters_a_second"],
        done_share=100 * summary["done"] / of,
        failed_share=100 * summary["failed"] / of,
        reasons="".join(f"<tr><td>{escape(k)}</td><td>{v}</td></tr>" for k, v in summary["reasons"].items()),
        failures="".join(_row(state) for state in failures),
    )


def _row(state: Moved) -> str:
    return f"<tr><td>{escape(state.adapter)}</td><td>{escape(state.move)}</td><td>{escape(state.reason)}</td></tr>"
