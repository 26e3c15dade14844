"""The example of a method of one's own, and the table of one command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from taskferry.bench.rows import rows
from taskferry.errors import TaskferryError
from taskferry.methods import methods, registry, run
from tests.helpers import folders
from tests.helpers.command import taskferry
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


@pytest.mark.every
def test_one_table_from_one_command(tmp_path: Path) -> None:
    """All methods, same samples, same seeds; a method that cannot handle the pair says why."""
    folders.encoder(tmp_path / "a", 16, 2, 1)
    folders.encoder(tmp_path / "b", 16, 2, 2)
    folders.encoder(tmp_path / "wide", 24, 3, 3)
    folders.shifted(tmp_path / "a", tmp_path / "tuned")
    folders.texts(tmp_path / "data.jsonl")
    given = ["--source-base", tmp_path / "a", "--source-tuned", tmp_path / "tuned", "--samples", 9, "--micro-batch", 3,
             "--calibration", tmp_path / "data.jsonl", "--test", tmp_path / "data.jsonl"]  # fmt: skip
    taskferry("bench", "compare", *given, "--target-base", tmp_path / "b", "--seeds", 2, "--out", tmp_path / "table")
    table = json.loads((tmp_path / "table.json").read_text())
    expected = {"unchanged target", *rows()}
    assert {"twofold", "bico", "theseus", "transfusion", "gradfix", "naive", "few-shot", "distil"} <= expected
    assert set(table["scores"]) == expected
    assert all(len(scores) == 2 for scores in table["scores"].values())
    assert not table["refusals"]
    markdown = (tmp_path / "table.md").read_text()
    assert all(f"| {row} |" in markdown for row in expected)
    chosen = ["--methods", "bico", "--methods", "gradfix", "--methods", "transfusion"]
    wide = taskferry("bench", "compare", *given, "--target-base", tmp_path / "wide", *chosen, "--json").json
    assert set(wide["refusals"]) == {
        "bico, input-only", "bico, output-only", "gradfix", "gradfix, automatic scale", "transfusion"
    }  # fmt: skip
    assert all("equal" in sentence for sentence in wide["refusals"].values())
    bad = ["--target-base", tmp_path / "b", "--methods", "magic"]
    assert "no method 'magic'" in taskferry("bench", "compare", *given, *bad, code=2).err
