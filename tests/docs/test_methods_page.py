"""The example of a method of one's own, and the page of methods."""

from __future__ import annotations

import re

import pytest
import torch

from taskferry.errors import TaskferryError
from taskferry.methods import methods, registry, run
from tests.helpers.pages import ROOT, blocks
from tests.helpers.tiny import job


def test_the_example_of_an_own_method_runs() -> None:
    (example,) = blocks(ROOT / "docs" / "methods.md", "python")
    exec(compile(example, "methods.md", "exec"), {"__name__": "example"})
    given = job("vit")
    try:
        moved = run("between-methods", given, share=1.0)
        bico = run("bico", given)
        assert all(torch.allclose(moved.tau.deltas[n], d) for n, d in bico.tau.deltas.items())
        assert moved.provenance["method"] == "between-methods"
        with pytest.raises(TaskferryError, match="needs both models whole in one process"):
            registry.find("between-methods").refuse("blockwise")
    finally:
        registry._METHODS.pop("between-methods")


def test_settings_that_pages_name_are_settings_of_a_method() -> None:
    """A page kept naming one that was gone."""
    known = {setting for found in methods().values() for setting in found.settings}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = [(p.name, word) for p in pages for word in re.findall(r"--method-settings (\w+)=", p.read_text("utf-8"))]
    assert ("methods.md", "inputs") in named
    assert not [each for each in named if each[1] not in known | {"name"}]


def test_every_setting_stands_in_the_page() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for name, found in methods().items():
        assert f"## {name}" in page
        for setting in found.settings:
            assert f"`{setting}`" in page, (name, setting)
