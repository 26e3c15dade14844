"""From a file to a calibration set: what the teacher answers, what rows lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from taskferry.config import CalibrationSettings
from taskferry.models import load_model, load_tuned
from taskferry.objectives import preparation
from taskferry.objectives.answers import Written, written
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.texts import SECOND, TEXTS
from tests.helpers.tiny import hf

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "wide", 24, 3, 2)
    folders.shifted(root / "bert", root / "tuned")
    return root


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_texts_are_cut_to_the_places_that_both_models_have(kind: str, tmp_path: Path) -> None:
    """A --max-length beyond them ended in a traceback of torch."""
    name, places = {"bert": ("BertModel", 12), "roberta": ("RobertaModel", 14)}[kind]  # RoBERTa's begin at the third
    more = {"vocab_size": 400, "initializer_range": 0.2, "pad_token_id": 1}
    torch.manual_seed(0)
    folders.save(hf(name, 16, 2, **more, max_position_embeddings=places), tmp_path / "a")
    folders.save(hf("BertModel", 24, 2, **more, max_position_embeddings=64), tmp_path / "b")
    folders.shifted(tmp_path / "a", tmp_path / "tuned")
    rows = [{"text": " ".join([*TEXTS[i:], *TEXTS]), "label": i % 2} for i in range(8)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--source-base", tmp_path / "a", "--source-tuned", tmp_path / "tuned", "--target-base", tmp_path / "b",
             "--calibration", tmp_path / "long.jsonl", "--method", "bico",
                     "--scale", 1, "--set", "max_length=100"]  # fmt: skip
    plan = taskferry("transfer", *given, "--out", tmp_path / "never", "--dry-run", "--json").json["plan"]
    assert plan["cut"].startswith("8 of 8 samples fill all 12 tokens")
    taskferry("transfer", *given, "--out", tmp_path / "out")
    test = ["--test", tmp_path / "long.jsonl", "--shots", tmp_path / "long.jsonl", "--max-length", 100]
    assert taskferry("evaluate", tmp_path / "a", *test, "--json").json["samples"] == 8


def test_completions_keep_the_space_before_them(tmp_path: Path) -> None:
    folders.causal(tmp_path / "llama", "LlamaForCausalLM", 16, 1, 0, "bytes")
    loaded = load_model(str(tmp_path / "llama"))
    tokenizer = loaded.tokenizer()
    (answer,) = written(loaded.model, tokenizer, [TEXTS[0]], length=6)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert ids[0, -1] == tokenizer.eos_token_id  # nothing follows the end of a text
    whole = loaded.model.generate(ids[:, :-1], max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert tokenizer.decode(whole[0], skip_special_tokens=True) == TEXTS[0] + answer.text


def test_a_padding_that_the_model_has_no_row_for_is_not_used(tmp_path: Path) -> None:
    folder = folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    tokenizer = load_model(str(folder)).tokenizer()
    tokenizer.add_tokens([f"[more {i}]" for i in range(400)])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    found = taskferry("evaluate", folder, "--test", folders.prompts(tmp_path / "asked.jsonl"), "--json").json
    assert found["samples"] > 2


def test_the_teacher_reads_the_end_of_prompts_that_are_longer_than_its_positions(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=90, n_embd=16, n_layer=1, n_head=4, n_positions=24, eos_token_id=2, initializer_range=0.5
    )  # as many words as the tokenizer has
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wte.weight.data[:4] = 0  # tokens that end a text are never the likeliest
    folders.save(model, tmp_path / "gpt")
    loaded = load_model(str(tmp_path / "gpt"))
    long, short = " ".join(TEXTS), TEXTS[0]
    answers = written(loaded.model, loaded.tokenizer(), [long, short], length=64)
    assert len(answers) == 2
    assert answers[0] == written(loaded.model, loaded.tokenizer(), [" ".join(TEXTS[1:])], length=64)[0]


def test_blank_answers_of_the_teacher_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample without an answer must not end the whole transfer; one in the data still does."""
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    data = folders.prompts(tmp_path / "asked.jsonl", completions=False)
    loaded = load_model(str(tmp_path / "a"))
    settings = CalibrationSettings(calibration=str(data), samples=6)
    answers = [Written(text, True) for text in (" the ferry", "  ", " a quay", "", " the sea", " a boat")]
    monkeypatch.setattr(preparation, "written", lambda *_, **__: answers)
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
    lengths = [int(n) for batch in prepared.calibration.side(1) for n in batch.inputs["attention_mask"].sum(1)]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 6
    widths = [batch.inputs["input_ids"].shape[1] for batch in prepared.calibration.side(1)]
    assert widths == lengths[1::2]


def test_the_labels_of_chats_are_their_answers(tmp_path: Path) -> None:
    loaded = load_model(str(folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = {"the answers in the chats": folders.chats(tmp_path / "chats.jsonl"),
            "the text itself": tmp_path / "texts.jsonl"}  # fmt: skip
    for labels, file in data.items():
        settings = CalibrationSettings(calibration=str(file), samples=4)
        assert preparation.prepare(settings, loaded, loaded, None).labels == labels
