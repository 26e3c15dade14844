"""What is shown of files: names without what steers a terminal, adapters by their kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from taskferry import TaskVector
from tests.helpers import folders
from tests.helpers.command import taskferry

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "head", 16, 2, 1, "BertForSequenceClassification")
    folders.encoder(root / "wide", 24, 3, 2)
    folders.lora(root / "head", root / "lora", ["query"], task_type="SEQ_CLS")
    folders.texts(root / "texts.jsonl")
    return root


def test_how_near_two_bases_are(world: Path, tmp_path: Path) -> None:
    """One line, then a row a kind of layer; as JSON a row a layer."""
    folders.shifted(world / "bert", tmp_path / "next", size=0.01)
    shown = taskferry("inspect", world / "bert", tmp_path / "next", "--tuned", world / "lora")
    first, header, *rows = shown.out.splitlines()
    assert first.startswith("close relative: ")
    assert "times the fine-tune's change" in " ".join([first, header])
    assert any(row.split()[:2] == ["encoder.layer.*.attention.self.query.weight", "2"] for row in rows)
    found = taskferry("inspect", world / "bert", tmp_path / "next", "--json").json
    query = next(row for row in found["rows"] if row["layers"] == "encoder.layer.1.attention.self.query.weight")
    assert 0.01 < query["distance"] < 0.1
    assert query["cosine"] > 0.99
    assert taskferry("inspect", world / "bert", world / "wide").out.startswith("not comparable")
    assert "give the other base" in taskferry("inspect", world / "bert", "--tuned", world / "lora", code=2).err


def test_names_from_files_do_not_reach_the_terminal_raw(world: Path, tmp_path: Path) -> None:
    TaskVector({"evil\x1b[31m[bold]x": torch.ones(2)}).save(tmp_path / "evil.safetensors")
    shown = taskferry("inspect", tmp_path / "evil.safetensors").out
    assert "\x1b" not in shown
    assert "[bold]x" in shown
    assert "LORA adapter of rank 4" in taskferry("inspect", world / "lora").out
    (tmp_path / "file").write_text("x")
    under = ["--source-base", world / "bert", "--target-base", world / "wide", "--calibration", world / "texts.jsonl"]
    assert "is a file" in taskferry("fit", *under, "--out", tmp_path / "file" / "x.alignment", code=2).err
