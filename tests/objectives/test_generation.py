"""Samples that the tuned source writes: whose they are, what they begin with, and that they can be had again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.config import FitSettings
from taskferry.data.samples import load_samples
from taskferry.errors import TaskferryError
from taskferry.models import Loaded, Tuned, load_model, load_tuned
from taskferry.objectives import generation
from taskferry.objectives.answers import Written, written
from taskferry.objectives.generation import BATCH, Drawn, draw
from taskferry.objectives.teacher import teacher_model
from tests.helpers import folders
from tests.helpers.texts import TEXTS
from tests.helpers.tiny import hf

pytest.importorskip("transformers")
pytest.importorskip("peft")
Models = tuple[Loaded, Loaded, Tuned]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "a", "LlamaForCausalLM", 16, 2, 1, "bytes")
    folders.causal(root / "b", "Qwen3ForCausalLM", 24, 3, 2, "pieces")
    folders.lora(root / "a", root / "lora", ["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return root


@pytest.fixture
def models(world: Path) -> Models:
    A, B = load_model(str(world / "a")), load_model(str(world / "b"))
    return A, B, load_tuned(str(world / "lora"), A)


def drawn(models: Models, /, **more: Any) -> Drawn:
    given = {"samples": 5, "max_length": 24, "source_base": "a", "target_base": "b", "source_tuned": "lora"}
    settings = FitSettings(calibration="generate", out=Path("unused"), **{**given, **more})
    return draw(settings, *models)


def without_template(models: Models) -> Models:
    for loaded in models[:2]:
        loaded.tokenizer().chat_template = None
    return models


def test_the_same_settings_give_the_same_texts(models: Models) -> None:
    state = torch.get_rng_state()
    first = drawn(models)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's draws change
    assert first.samples.kind == "text"
    assert len(first.samples) == first.how["samples"] == 5
    assert first.how["sha256"] == hashlib.sha256(first.lines().encode()).hexdigest() == drawn(models).how["sha256"]
    more = drawn(models, samples=BATCH + 3, micro_batch=2)
    assert more.samples.rows[:5] == first.samples.rows
    assert len({row["text"] for row in more.samples.rows}) == more.how["distinct"] > BATCH
    for other in ({"seed": 1}, {"temperature": 0.5}, {"max_length": 20}):
        assert drawn(models, **other).how["sha256"] != first.how["sha256"], other


def test_they_are_of_the_base_with_the_adapter(models: Models, world: Path) -> None:
    """Texts of PEFT's own merge, and not of the base."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(world / "a")
    before = [row["text"] for row in drawn(models).samples.rows]
    texts = []
    for model in (peft.PeftModel.from_pretrained(base, world / "lora").merge_and_unload(), models[0].model):
        torch.manual_seed(0)
        found = written(model, models[0].tokenizer(), [""] * BATCH, length=22, keep=2, temperature=1.0)
        texts.append([each.text.replace("\ufffd", "") for each in found][:5])
    assert before == texts[0] != texts[1]


def test_a_batch_of_prompts_is_read_as_each_alone(models: Models) -> None:
    """Prompts of other lengths beside one change nothing, nor does the order; at next to no temperature as greedily."""
    model, tokenizer = models[0].model, models[0].tokenizer()
    prompts = [TEXTS[0], "The", TEXTS[1] + " " + TEXTS[2]]
    together = written(model, tokenizer, prompts, length=8)
    assert together == [written(model, tokenizer, [prompt], length=8)[0] for prompt in prompts]
    assert together == written(model, tokenizer, prompts, length=8, temperature=1e-4)
    assert together == written(model, tokenizer, prompts[::-1], length=8, batch=2)[::-1]


def test_tokens_are_drawn_from_the_model_s_own_distribution(models: Models) -> None:
    """Whatever its generation_config.json would do to it."""
    model, tokenizer = models[0].model, models[0].tokenizer()
    own = replace_config(model, top_k=2, repetition_penalty=5.0)
    torch.manual_seed(0)
    found = written(model, tokenizer, ["The"] * 4000, length=1, keep=9, temperature=0.7, special=False, batch=4000)
    assert model.generation_config is own
    ids = tokenizer("The", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = (model(ids).logits[0, -1] / 0.7).softmax(-1)
    shares: Counter[str] = Counter()
    for token, share in enumerate(expected.tolist()):
        whole = tokenizer.decode([*ids[0].tolist(), token], skip_special_tokens=True)
        shares[whole[len("The") :]] += share
    counts = Counter(each.text for each in found)
    distance = 0.5 * sum(abs(counts[text] / 4000 - share) for text, share in shares.items())
    assert distance < 0.09, distance  # of 4,000 draws from the right one: 0.07; at temperature 1: 0.2


def test_answers_are_the_model_s_own_as_well(models: Models) -> None:
    """Greedily, and not by what a generation_config.json would have of it."""
    model, tokenizer = models[0].model, models[0].tokenizer()
    prompts = [TEXTS[0], TEXTS[1]]
    before = written(model, tokenizer, prompts, length=12)
    own = replace_config(model, repetition_penalty=5.0, num_beams=3)
    assert written(model, tokenizer, prompts, length=12) == before
    assert model.generation_config is own


def replace_config(model: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(model.generation_config, name, value)
    return model.generation_config


def test_what_they_begin_with(models: Models, tmp_path: Path) -> None:
    own = drawn(models, prompts="own")
    assert own.samples.kind == "messages"
    for row in own.samples.rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert all(m["content"].strip() for m in row["messages"])
    plain = without_template((models[0], replace(models[1], extra={}), models[2]))
    alone = drawn(plain, prompts="own")
    free = drawn(plain)
    assert alone.samples.kind == "prompt"
    assert [row["prompt"] + row["completion"] for row in alone.samples.rows] == [
        row["text"] for row in free.samples.rows
    ]
    given = drawn(plain, prompts=str(folders.prompts(tmp_path / "asked.jsonl", completions=False)), samples=20)
    assert given.samples.kind == "prompt"
    assert {row["prompt"] for row in given.samples.rows} == set(TEXTS)
    assert len({row["completion"] for row in given.samples.rows}) > 15  # twelve prompts, other answers each time
    for each in (own, alone, free, given):
        (tmp_path / "again.jsonl").write_text(each.lines(), encoding="utf-8")
        again = load_samples(str(tmp_path / "again.jsonl"))
        assert again.kind == each.samples.kind
        assert [{name: row[name] for name in was} for row, was in zip(again.rows, each.samples.rows, strict=True)] == [
            *each.samples.rows
        ]


def test_chats_are_answered_from_their_last_question(models: Models, tmp_path: Path) -> None:
    chats = drawn(models, prompts=str(folders.chats(tmp_path / "chats.jsonl")), samples=12)
    questions = {TEXTS[i] for i in range(4)}
    assert {row["messages"][0]["content"] for row in chats.samples.rows} == questions
    old = {json.loads(line)["messages"][1]["content"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()}
    assert not old & {row["messages"][1]["content"] for row in chats.samples.rows}


def test_an_encoder_decoder_answers_prompts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, width in (("a", 16), ("b", 24)):
        size = {"vocab_size": 400, "d_kv": 4, "d_ff": 32, "num_decoder_layers": 2, "decoder_start_token_id": 0}
        folders.save(hf("T5ForConditionalGeneration", width, 2, **size), tmp_path / name)
    folders.shifted(tmp_path / "a", tmp_path / "tuned")
    A, B = load_model(str(tmp_path / "a")), load_model(str(tmp_path / "b"))
    models = A, B, load_tuned(str(tmp_path / "tuned"), A)
    asked = str(folders.prompts(tmp_path / "asked.jsonl", completions=False))
    answered = drawn(models, prompts=asked)
    assert all(row["prompt"] in TEXTS and row["completion"].strip() for row in answered.samples.rows)
    with pytest.raises(TaskferryError, match="answers what it reads: give a file with the column prompt"):
        drawn(models)


def test_a_trial_draws_one_batch(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    real = generation.Author.rows
    monkeypatch.setattr(generation.Author, "rows", lambda self, n: numbers.append(n) or real(self, n))
    given = {"source_base": "a", "target_base": "b", "source_tuned": "lora", "samples": 100, "max_length": 24}
    few = draw(FitSettings(calibration="generate", out=Path("unused"), **given), *models, trial=True)
    assert numbers == [0]
    assert len(few.samples) == 100
    assert few.samples.rows[:5] == drawn(models).samples.rows


def test_adapters_of_a_fleet_write_equal_shares(models: Models, world: Path, tmp_path: Path) -> None:
    """Each what it would write alone, the second from other numbers than the first."""
    A, B, _ = models
    for name, seed in (("second", 5), ("third", 6)):
        folders.lora(world / "a", tmp_path / name, ["q_proj", "down_proj"], task_type="CAUSAL_LM", seed=seed)
    (tmp_path / "manifest").mkdir()
    found = generation.adapters_in(tmp_path)
    assert [folder.name for folder in found] == ["second", "third"]
    settings = FitSettings(calibration="generate", out=Path("unused"), source_base="a", target_base="b", samples=7,
                           max_length=24, adapters=str(tmp_path))  # fmt: skip
    both = draw(settings, A, B, None, adapters=found)
    alone = [drawn((A, B, load_tuned(str(folder), A)), samples=4).samples.rows for folder in found]
    assert both.samples.rows[:4] == alone[0]
    assert both.samples.rows[4:] != alone[1][:3]
    assert len(both.samples) == 7
    with teacher_model(A, load_tuned(str(found[1]), A)) as third:
        author = generation.Author(third.model, A.tokenizer(), settings, "text", both.how["length"], (), 1)
        assert both.samples.rows[4:] == author.rows(0)[:3]
    assert both.how["adapters"] == ["second", "third"]
    assert both.labels == "written by 2 adapters in turn"
    trial = draw(settings.model_copy(update={"samples": 2}), A, B, None, adapters=found, trial=True)
    assert len(trial.samples) == 2
    with pytest.raises(TaskferryError, match="2 adapters cannot share 1 samples: raise --samples"):
        draw(settings.model_copy(update={"samples": 1}), A, B, None, adapters=found)
    with pytest.raises(TaskferryError, match="has no folders of PEFT adapters in it"):
        generation.adapters_in(tmp_path / "manifest")
    with pytest.raises(ValueError, match="give --calibration generate, or leave --adapters out"):
        FitSettings(calibration="file", out=Path("unused"), source_base="a", target_base="b", adapters="folder")


def test_texts_that_say_nothing_are_drawn_again(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what writes nothing else, or one thing alone, is refused."""

    def says(*texts: str) -> None:
        monkeypatch.setattr(
            generation,
            "written",
            lambda _m, _t, prompts, **_: [Written(text, True) for text in (list(texts) * len(prompts))[: len(prompts)]],
        )

    says("", "one two three", "  ", "four five six")
    assert [row["text"] for row in drawn(models, samples=9).samples.rows[:2]] == ["one two three", "four five six"]
    says("", " \n ")
    with pytest.raises(TaskferryError, match=r"wrote 0 texts that say something.*raise temperature"):
        drawn(models)
    says("always the same")
    with pytest.raises(TaskferryError, match="1 that differ"):
        drawn(models)


def test_models_and_prompts_that_cannot_be_used_are_refused(world: Path, models: Models, tmp_path: Path) -> None:
    folders.encoder(tmp_path / "bert", 16, 1, 1)
    bert = load_model(str(tmp_path / "bert"))
    with pytest.raises(TaskferryError, match="BertModel, which writes no text: give texts or pictures"):
        drawn((bert, bert, models[2]))
    with pytest.raises(TaskferryError, match="has text rows: the column prompt is needed"):
        drawn(models, prompts=str(folders.texts(tmp_path / "texts.jsonl")))
    (tmp_path / "holes.jsonl").write_text('{"prompt": "a"}\n{"prompt": null}\n')
    with pytest.raises(TaskferryError, match=r"row 2 of .*holes.jsonl has no prompt: leave it out"):
        drawn(models, prompts=str(tmp_path / "holes.jsonl"))
    with pytest.raises(TaskferryError, match="has no chat template: give the column prompt"):
        drawn(without_template(models), prompts=str(folders.chats(tmp_path / "chats.jsonl")))
