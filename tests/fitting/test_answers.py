"""Right answers of a language model: those that it would write, and the likeliest of those that there are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from taskferry import Calibration, LanguageModel, TaskVector, evaluate
from taskferry.calibration.batch import IGNORED, Batch
from taskferry.engines.whole import WholePair
from taskferry.fitting.answers import Answers
from taskferry.fitting.language import is_language_class, predicted
from tests.helpers import folders, tiny
from tests.helpers.command import taskferry

ANSWERS = ((5, 6), (7, 8, 9), (11,))


def asked(n: int = 24) -> list[Batch]:
    """Prompts of four tokens, each with one of three answers of one to three tokens; padded in front or behind."""
    batches = []
    for start in range(0, n, 6):
        rows, labels, masks = [], [], []
        for i in range(start, start + 6):
            answer = ANSWERS[i % 3]
            prompt = torch.randint(12, 40, (4,), generator=torch.Generator().manual_seed(i)).tolist()
            padding, length = 3 - len(answer), 4 + len(answer)
            rows.append([*prompt, *answer, *[0] * padding])
            labels.append([*[IGNORED] * 4, *answer, *[IGNORED] * padding])
            masks.append([*[1] * length, *[0] * padding])
        made = {"input_ids": rows, "attention_mask": masks, "labels": labels}
        inputs = {name: torch.tensor(value) for name, value in made.items()}
        batches.append(Batch(inputs, None, tuple(range(start, start + 6))))
    return batches


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=40, initializer_range=0.3)
    return made.eval()


@torch.no_grad()
def by_hand(given: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    """What it decodes, token by token; and the answer whose first token it likes best."""
    exact = right = samples = 0
    for batch in batches:
        for ids, labels in zip(batch.inputs["input_ids"], batch.inputs["labels"], strict=True):
            answer = labels[labels != IGNORED]
            text = ids[:4][None]
            scores = given(input_ids=text).logits[0, -1]
            right += int(max(ANSWERS, key=lambda a: float(scores[a[0]]))[0] == int(answer[0]))
            for _ in answer:
                text = torch.cat([text, given(input_ids=text).logits[:, -1:].argmax(-1)], 1)
            exact += int(torch.equal(text[0, 4:], answer))
            samples += 1
    return 100 * right / samples, 100 * exact / samples


def test_they_are_those_of_greedy_decoding() -> None:
    batches, found = asked(), []
    for seed in range(3):
        given = model(seed)
        optimiser = torch.optim.Adam(given.parameters(), lr=3e-3)
        for _ in range(12 * seed):  # from nothing to much
            for batch in batches:
                optimiser.zero_grad()
                LanguageModel().bind(given, [])(batch).backward()
                optimiser.step()
        score = evaluate(given, batches, LanguageModel())
        assert (score.right, score.exact) == pytest.approx(by_hand(given, batches))
        found.append((score.right, score.exact))
    assert found[0] != found[2]
    assert min(found[2]) > 30


def test_free_answers_have_no_set_and_texts_no_answer() -> None:
    batches = asked()
    given = model(0)
    known = Answers.of(given, batches)
    assert known is not None
    assert known.choices is not None
    assert known.choices.tolist() == [5, 7, 11]
    few = Answers.of(given, [batches[0].take([0, 1, 2])])  # one sample for each answer: no set
    assert few is not None
    assert few.right is None
    few.count(*predicted(given, batches[0].take([0, 1, 2])))
    assert few.samples == 3
    texts = [Batch({**b.inputs, "labels": b.inputs["input_ids"].masked_fill(b.inputs["attention_mask"] == 0, IGNORED)})
             for b in batches]  # fmt: skip
    assert Answers.of(given, texts) is None
    assert evaluate(given, texts, LanguageModel()).exact is None


def test_the_set_is_that_of_all_samples_though_a_part_judges() -> None:
    """Every other sample has the third answer: the half that judges lacks it, and is scored among all three."""
    mixed = []
    for number, batch in enumerate(asked(24)):
        order = [0, 2, 1, 5, 3, 2, 4, 5]  # of two answers, with the third between them
        mixed.append(replace(batch.take(order), ids=tuple(range(8 * number, 8 * number + 8))))
    pair = WholePair(model(0), model(1), Calibration(zip(mixed, mixed, strict=True)))
    folded = pair.with_calibration(pair.calibration.in_folds(2, enough=16))
    assert folded.calibration.judged == 1
    found = folded.answers([TaskVector({})])
    assert found is not None
    for counts in found:
        assert counts.choices is not None
        assert counts.choices.tolist() == [5, 7, 11]
        assert counts.samples == 16


def test_evaluate_and_the_verdict_say_them(tmp_path: Path) -> None:
    base = folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    other = folders.causal(tmp_path / "b", "LlamaForCausalLM", 24, 3, 2)
    folders.lora(base, tmp_path / "lora", ["q_proj", "v_proj"])
    rows = [{"prompt": f"The ferry leaves {i} ", "completion": ("dawn", "night", "harbour")[i % 3]} for i in range(18)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    score = taskferry("evaluate", base, "--test", data, "--json").json
    assert score["right"] is not None
    assert score["exact"] is not None
    assert "right answers" in taskferry("evaluate", base, "--test", data).out
    out = tmp_path / "out"
    taskferry("transfer", "--source-base", base, "--source-tuned", tmp_path / "lora", "--target-base", other,
              "--calibration", data, "--scale", 1, "--method", "bico", "--force", "--out", out)  # fmt: skip
    told = json.loads((out / "taskferry.json").read_text())["verdict"]
    assert len(told["right_answers"]) == len(told["exact_answers"]) == 2
    assert "Right answers among the 3 in the samples" in told["sentence"]
    taskferry("transfer", "--source-base", base, "--source-tuned", tmp_path / "lora", "--target-base", other,
              "--calibration", data, "--scale", 1, "--force", "--out", tmp_path / "default")  # fmt: skip
    told = json.loads((tmp_path / "default" / "taskferry.json").read_text())["verdict"]
    scored = taskferry("evaluate", other, "--add", tmp_path / "default", "--test", data, "--json").json
    assert told["right_answers"][1] == pytest.approx(scored["right"])  # of the change that is written, on all samples
    taskferry("report", out, "--out", tmp_path / "page.html")
    assert "Right answers" in (tmp_path / "page.html").read_text()


def test_classes_that_predict_tokens_are_known_by_their_names() -> None:
    transformers = pytest.importorskip("transformers")
    classes = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "MarianMTModel")
    assert all(is_language_class(name) and hasattr(transformers, name) for name in classes)
    assert not any(map(is_language_class, ("BertModel", "BertForSequenceClassification", "MarianModel")))
