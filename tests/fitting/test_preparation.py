"""From a file to a calibration set: what the teacher answers, what rows lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from taskferry.checkpoints import load_model, load_tuned
from taskferry.fitting import preparation
from taskferry.settings import CalibrationSettings
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.texts import SECOND, TEXTS

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "wide", 24, 3, 2)
    folders.shifted(root / "bert", root / "tuned")
    return root


def test_completions_keep_the_space_before_them(tmp_path: Path) -> None:
    folders.causal(tmp_path / "llama", "LlamaForCausalLM", 16, 1, 0, "bytes")
    loaded = load_model(str(tmp_path / "llama"))
    tokenizer = loaded.tokenizer()
    (answer,) = preparation.complete(loaded.model, tokenizer, [TEXTS[0]], length=6)
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    whole = loaded.model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert tokenizer.decode(whole[0], skip_special_tokens=True) == TEXTS[0] + answer


def test_blank_answers_of_the_teacher_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample without an answer must not end the whole transfer; one in the data still does."""
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    data = folders.prompts(tmp_path / "asked.jsonl", completions=False)
    loaded = load_model(str(tmp_path / "a"))
    settings = CalibrationSettings(calibration=str(data), samples=6)
    answers = [" the ferry", "  ", " a quay", "", " the sea", " a boat"]
    monkeypatch.setattr(preparation, "complete", lambda *_: answers)
    prepared = preparation.prepare(settings, loaded, loaded, load_tuned(str(tmp_path / "a"), loaded))
    assert prepared.calibration.samples == len(prepared.indices) == 4
    assert prepared.labels == "4 completions of the tuned source (teacher); 2 blank ones left out"


def test_pairs_that_are_missing_in_some_rows_are_told(world: Path, tmp_path: Path) -> None:
    rows = [
        {"text": a, "text_pair": b if i else None, "label": i % 2}
        for i, (a, b) in enumerate(zip(TEXTS, SECOND, strict=True))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--source-base", world / "bert", "--source-tuned", world / "tuned", "--target-base", world / "wide"]
    ran = taskferry("transfer", *given, "--calibration", tmp_path / "data.jsonl", "--out", tmp_path / "x", code=2)
    assert "1 of 12 rows have no text_pair" in ran.err


@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_texts_of_one_length_share_a_micro_batch(tmp_path: Path, kind: str) -> None:
    """Padding is computed and thrown away; which samples were taken, and what belongs to which, stays."""
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    loaded = load_model(str(tmp_path / "a"))
    texts = ["the film " * n for n in (9, 1, 7, 2, 8, 3)]
    rows = [{"text": text} if kind == "text" else {"prompt": text, "completion": " good"} for text in texts]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = CalibrationSettings(calibration=str(tmp_path / "data.jsonl"), samples=6, micro_batch=2)
    prepared = preparation.prepare(settings, loaded, loaded, None)
    assert prepared.indices == (1, 3, 5, 2, 4, 0)
    lengths = [int(n) for batch in prepared.shots(1) for n in batch.inputs["attention_mask"].sum(1)]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 6
    widths = [batch.inputs["input_ids"].shape[1] for batch in prepared.shots(1)]
    assert widths == lengths[1::2]
