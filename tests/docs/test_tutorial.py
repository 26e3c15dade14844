"""The notebook: executed anew it shows that the move helps, and the site shows what it was committed with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


@pytest.mark.every
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "It helps" in shown
    assert "<strong>Coverage</strong>" in shown


def test_the_site_shows_the_committed_outputs() -> None:
    """The page that mkdocs makes of the notebook."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("notebooks", PATH.parent / "theme" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.as_markdown(json.loads(PATH.read_text(encoding="utf-8")))
    assert "It helps" in page
    assert "```python\nresult = taskferry.transfer(" in page
    assert "Traceback" not in page
