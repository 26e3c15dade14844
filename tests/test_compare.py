"""taskferry compare: methods on one pair, one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import folders
from tests.helpers.command import taskferry

pytest.importorskip("transformers")


def test_one_table_from_one_command(tmp_path: Path) -> None:
    """Rows with the same samples and seeds; a method that cannot move the pair says why."""
    folders.encoder(tmp_path / "a", 16, 2, 1)
    folders.encoder(tmp_path / "b", 16, 2, 2)
    folders.encoder(tmp_path / "wide", 24, 3, 3)
    folders.shifted(tmp_path / "a", tmp_path / "tuned")
    folders.texts(tmp_path / "data.jsonl")
    given = ["--source-base", tmp_path / "a", "--source-tuned", tmp_path / "tuned", "--samples", 9, "--micro-batch", 3,
             "--calibration", tmp_path / "data.jsonl", "--test", tmp_path / "data.jsonl"]  # fmt: skip
    taskferry("compare", *given, "--target-base", tmp_path / "b", "--seeds", 2, "--methods", "naive", "--methods",
              "bico", "--out", tmp_path / "table")  # fmt: skip
    table = json.loads((tmp_path / "table.json").read_text())
    assert list(table["scores"]) == ["unchanged target", "naive", "bico, scale 1", "bico"]
    assert table["metric"] == "accuracy, %"
    assert all(len(scores) == 2 for scores in table["scores"].values())
    assert not table["refused"]
    markdown = (tmp_path / "table.md").read_text()
    assert all(f"| {row} |" in markdown for row in table["scores"])
    wide = taskferry("compare", *given, "--target-base", tmp_path / "wide", "--methods", "gradfix", "--json").json
    assert list(wide["scores"]) == ["unchanged target"]
    assert "equal" in wide["refused"]["gradfix"]
    bad = ["--target-base", tmp_path / "b", "--methods", "magic"]
    assert "no method 'magic'" in taskferry("compare", *given, *bad, code=2).err


def test_answers_are_compared_by_generating_them(tmp_path: Path) -> None:
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.shifted(tmp_path / "a", tmp_path / "tuned")
    folders.prompts(tmp_path / "data.jsonl")
    shown = taskferry(
        "compare", "--source-base", tmp_path / "a", "--source-tuned", tmp_path / "tuned", "--target-base",
        tmp_path / "a", "--calibration", tmp_path / "data.jsonl", "--test", tmp_path / "data.jsonl", "--samples", 8,
        "--test-samples", 4, "--methods", "naive",
    ).out  # fmt: skip
    assert "| method | right answers, % | CPU-seconds |" in shown
