"""Bars in a notebook: one table that is drawn anew, with everything escaped."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from taskferry.display.bars import Bars


def test_a_notebook_shows_one_row_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def display(html: str, **_: Any) -> Any:
        drawn.append(html)
        return SimpleNamespace(update=drawn.append)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    with Bars(console=Console(force_jupyter=True)) as tell:
        tell("capture", 3, 10)
        tell("<b>'\"", 2, 2, "loss <i>")
    last = drawn[-1]
    assert last.count("<tr>") == 2
    assert '<progress value="3" max="10" aria-label="forward and backward"></progress>' in last
    assert 'aria-label="&lt;b&gt;&#x27;&quot;"' in last
    assert "<td>2/2</td><td>0 s</td><td>loss &lt;i&gt;</td>" in last
