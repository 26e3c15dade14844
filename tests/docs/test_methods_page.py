"""The page of methods: its example, and every setting."""

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
        with pytest.raises(TaskferryError, match="needs both models whole"):
            registry.find("between-methods").refuse("blockwise")
    finally:
        registry._METHODS.pop("between-methods")


def test_every_method_and_setting_stands_in_the_page() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.S | re.M))
    for name, found in methods().items():
        assert f"| `{name}` |" in page
        for setting in found.settings:
            assert f"`{setting}`" in sections[name], (name, setting)
