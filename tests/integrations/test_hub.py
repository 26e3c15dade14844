"""Model cards as a hub's own library reads them, and sending to a stand-in of a hub on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from taskferry import TaskferryError
from taskferry.integrations.hub import add_score, card_fields, hub_id, pipeline_of, read_card
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
    assert f"- method: bico; {find('bico').shown.card}" in card_of(tmp_path).text


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
    fields = read_card(tmp_path).data.to_dict()
    assert "license" not in fields
    assert set(fields) == {"library_name", "pipeline_tag", "tags"}


def test_scores_become_results_that_a_hub_reads(tmp_path: Path) -> None:
    write_card(tmp_path, RECORD, adapter=True)
    text = card_of(tmp_path).text
    test = tmp_path / "test.jsonl"
    test.touch()
    for value in (3.5, 3.25):  # the second look at the same data replaces the first
        add_score(tmp_path, data=str(test), metric="loss", value=value, samples=200, how="next tokens")
    add_score(tmp_path, data="org/other", metric="accuracy", value=81.5, samples=100, how="its head")
    data = card_of(tmp_path).data
    assert card_of(tmp_path).text == text
    found = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert found == {("test.jsonl", "loss"): 3.25, ("org/other", "accuracy"): 81.5}
    assert all(r.task_type == "text-generation" for r in data.eval_results)


def test_fields_and_results_of_others_stay(tmp_path: Path) -> None:
    """A person may have added to the card before it is scored."""
    write_card(tmp_path, RECORD, adapter=True)
    card = card_of(tmp_path)
    card.data["license"], card.data["my_own"] = "mit", {"a": [1, "b"]}
    card.save(tmp_path / "README.md")
    for data in ("org/first", "org/second"):
        add_score(tmp_path, data=data, metric="loss", value=2.0, samples=10, how="next tokens")
    fields = card_of(tmp_path).data.to_dict()
    assert (fields["license"], fields["my_own"]) == ("mit", {"a": [1, "b"]})
    assert fields["base_model_relation"] == "adapter"
    assert fields["model-index"] == [
        {
            "name": tmp_path.name,
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"name": name, "type": f"org/{name}"},
                    "metrics": [{"type": "loss", "value": 2.0, "name": "loss on 10 samples, by next tokens"}],
                }
                for name in ("first", "second")
            ],
        }
    ]


@pytest.mark.parametrize(
    "text",
    ["", "# mine", "---\n\n---\n# mine", "---\nlicense: mit\n# no end"],
)
def test_a_card_without_fields_is_refused(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(TaskferryError, match="an output of taskferry"):
        read_card(tmp_path)
    assert capfd.readouterr().err == ""


BOMB = "a: &a [x, x]\n" + "".join(f"{n}: &{n} [*{b}, *{b}]\n" for b, n in zip("abcdefgh", "bcdefghi", strict=True))
INDEX = "model-index: [{name: a, results: [{task: {type: t}, dataset: {type: d, name: n}, metrics: %s}]}]"


@pytest.mark.parametrize(
    "head",
    [
        "[",
        "- a",
        "3: a",
        "a: " + "[" * 5000,
        "d: 2001-99-99",
        "x: !!python/object/apply:os.system [true]",
        "to_dict: a",
        "to_yaml: a",
        "ignore_metadata_errors: true",
        "eval_results: 3",
        "model-index: 3",
        "model-index: [{name: a, results: [{task: t}]}]",
        INDEX % "[{type: loss}]",
        INDEX % "[{type: loss, value: null}]",
        INDEX.replace("type: d", "type: [d]") % "[{type: loss, value: 3}]",
        BOMB + INDEX % "[{type: loss, value: *i}]",
    ],
)
def test_a_hostile_card_gives_one_sentence(head: str, tmp_path: Path) -> None:
    card = f"---\n{head}\n---\n# mine"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(TaskferryError, match=r"README\.md cannot be read as a model card: .") as refused:
        add_score(tmp_path, data="x", metric="loss", value=1, samples=1, how="x")
    assert len(str(refused.value).splitlines()) == 1
    assert (tmp_path / "README.md").read_text() == card


def test_a_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskferryError, match=r"README\.md"):
        add_score(tmp_path, data="x", metric="loss", value=1, samples=1, how="x")
