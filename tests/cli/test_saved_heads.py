"""A head that was saved beside an adapter: part of a score, or named in a warning; never dropped without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import folders
from tests.helpers.command import taskferry

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def always(model: Any, says: int) -> None:
    """A head whose answer is a class, whatever it reads."""
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.nn.functional.one_hot(torch.tensor(says), 2).float() * 50)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose head says 0, an adapter whose head says 1, data where 1 is right; and a base without a head."""
    root = tmp_path_factory.mktemp("heads")
    folders.encoder(root / "bare", 16, 2, 1)
    model = transformers.BertForSequenceClassification.from_pretrained(root / "bare", num_labels=2)
    always(model, 0)
    folders.save(model, root / "base")
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    always(adapter.base_model.model, 1)
    adapter.save_pretrained(root / "lora")
    rows = [{"text": text, "label": 1} for text in ("a cat sits", "a dog runs", "the sun", "rain")]
    (root / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_a_score_is_that_of_the_adapter_with_its_head(world: Path) -> None:
    given = ["evaluate", world / "base", "--test", world / "test.jsonl", "--json"]
    assert taskferry(*given).json["accuracy"] == 0
    found = taskferry(*given, "--add", world / "lora").json
    assert found["accuracy"] == 100
    assert found["warnings"] == []


def test_half_of_a_head_is_none(world: Path, tmp_path: Path) -> None:
    """A part of it that the model has no place for: the score is that of the model's own, with a warning."""
    lora = shutil.copytree(world / "lora", tmp_path / "lora")
    file = lora / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.pre_classifier.weight": torch.zeros(16, 16)}, file)
    given = ["evaluate", world / "base", "--test", world / "test.jsonl", "--json"]
    found = taskferry(*given, "--add", lora).json
    assert found["accuracy"] == 0
    assert any("pre_classifier" in text or "more" in text for text in found["warnings"])


def test_what_has_no_place_is_told(world: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(("a cat", "a dog", "the sun", "rain"))]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["evaluate", world / "bare", "--test", tmp_path / "two.jsonl", "--shots", tmp_path / "two.jsonl"]
    shown = taskferry(*given, "--add", world / "lora").out
    assert "warning classifier.bias, classifier.weight of the fine-tune was not added" in " ".join(shown.split())
