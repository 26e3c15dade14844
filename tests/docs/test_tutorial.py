"""The tutorial, executed as a notebook: its losses are those that it was committed with, its bars need no widgets."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def execute(path: Path) -> Any:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    # Its last cell is the transfer of docs/start.md, which .ci/five_minutes.py runs in full: here on fewer samples.
    (last,) = (cell for cell in notebook.cells if cell.cell_type == "code" and "TransferSettings(\n" in cell.source)
    last.source = last.source.replace("TransferSettings(\n", "TransferSettings(\n        samples=16,\n")
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def outputs(notebook: Any) -> str:
    """Everything that the cells show, in order."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert not any("widget" in kind for kind in data), "a bar that needs widgets"
            shown.append(output.get("text") or data.get("text/html") or data.get("text/plain") or "")
    return "\n".join(shown)


@pytest.mark.every
def test_the_tutorial_runs_and_shows_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed anew; the losses are those that the committed notebook shows."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    nbformat = pytest.importorskip("nbformat")
    path = ROOT / "docs" / "tutorial.ipynb"
    shown, committed = outputs(execute(path)), outputs(nbformat.read(path, as_version=4))
    losses = r"loss per token: ([\d.]+) before, ([\d.]+) after"
    (now,), (then,) = re.findall(losses, shown), re.findall(losses, committed)
    before, after = map(float, now)
    assert before - after > 0.1
    assert [before, after] == pytest.approx(list(map(float, then)), abs=0.02), "run docs/tutorial.ipynb and commit it"
    covered = [re.findall(r"<strong>Coverage</strong>.*?</table>", text, re.DOTALL) for text in (shown, committed)]
    assert covered[0] == covered[1], "run docs/tutorial.ipynb and commit it"
    for text in (shown, committed):
        assert "<progress" in text
        assert "Traceback" not in text
        assert "<strong>Alignment</strong>" in text
        assert "<strong>Coverage</strong>" in text


def test_the_site_shows_the_committed_outputs() -> None:
    """The page that mkdocs makes of the notebook."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "theme" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.as_markdown(json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8")))
    assert "loss per token:" in page
    assert "<progress" in page
    assert "```python\nalignment = fit(" in page
