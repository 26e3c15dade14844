"""Model cards as a hub's own library reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from taskferry.integrations.hub import card_fields, hub_id, pipeline_of
from taskferry.methods import find
from taskferry.output.card import write_card

pytest.importorskip("transformers")
pytest.importorskip("peft")

RECORD = {
    "settings": {"source_base": "org/a", "source_tuned": "me/lora", "target_base": "org/b@main",
                 "calibration": "org/data", "method": "bico"},
    "verdict": {"sentence": "12 of 20 parameters moved.", "scale": 1.0},
    "provenance": {"target": {"class": "Qwen3ForCausalLM"}, "method": "bico"},
    "command": "taskferry transfer …",
    "coverage_summary": "12 of 20",
}  # fmt: skip


def card_of(folder: Path) -> Any:
    return ModelCard.load(folder / "README.md")


def test_a_hub_reads_base_relation_library_task_and_data(tmp_path: Path) -> None:
    write_card(tmp_path, RECORD, adapter=True)
    data = card_of(tmp_path).data
    assert data.base_model == "org/b"
    assert data.to_dict()["base_model_relation"] == "adapter"
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    assert data.datasets == ["org/data"]
    assert data.tags == ["taskferry", "task-vector-transfer", "lora"]
    assert "12 of 20 parameters moved." in card_of(tmp_path).text
    assert f"- method: bico; {find('bico').card}" in card_of(tmp_path).text


def test_a_folder_on_this_machine_is_no_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("models/b") is None
    assert hub_id("models/c@v1") == "models/c"
    assert hub_id("/models/c") is None
    fields = card_fields(tmp_path, {**RECORD, "settings": {"target_base": "models/b"}}, adapter=False).to_dict()
    assert "base_model" not in fields
    assert "datasets" not in fields


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("LlamaForCausalLM", "text-generation"),
        ("BertModel", "feature-extraction"),
        ("CLIPModel", "zero-shot-image-classification"),
        ("CustomTextCLIP", "zero-shot-image-classification"),
        ("VisionTransformer", "image-feature-extraction"),
        ("T5ForConditionalGeneration", None),
        ("", None),
    ],
)
def test_the_task_of_a_class(kind: str, task: str | None) -> None:
    assert pipeline_of(kind) == task


@pytest.mark.parametrize(
    ("file", "content", "library"),
    [
        ("config.json", '{"model_type": "bert"}', "transformers"),
        ("config.json", '{"architecture": "deit_tiny_patch16_224"}', "timm"),
        ("open_clip_config.json", "{}", "open_clip"),
    ],
)
def test_the_library_follows_from_the_files(file: str, content: str, library: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    assert card_fields(tmp_path, RECORD, adapter=False)["library_name"] == library


def test_a_hostile_name_stays_one_value(tmp_path: Path) -> None:
    name = 'org/b"\nlicense: stolen\n---\n# no'
    record = {**RECORD, "settings": {**RECORD["settings"], "target_base": name, "calibration": "a: b\n- c"}}
    write_card(tmp_path, record, adapter=True)
    fields = card_of(tmp_path).data.to_dict()
    assert "license" not in fields
    assert set(fields) == {"library_name", "pipeline_tag", "tags"}
