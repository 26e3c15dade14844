"""Right answers of a language model: those that it would write, and the likeliest of those that there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from taskferry import LanguageModel, evaluate
from taskferry.choices import is_language_class
from taskferry.data.batch import IGNORED, Batch
from taskferry.data.language import Segment
from taskferry.models import load_model
from taskferry.objectives.answers import Score, Written, answers_of, choices_of, gain
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
def by_hand(given: nn.Module, batches: list[Batch]) -> float:
    """Per cent of the answers that it decodes, token by token."""
    exact = samples = 0
    for batch in batches:
        for ids, labels in zip(batch.inputs["input_ids"], batch.inputs["labels"], strict=True):
            answer, text = labels[labels != IGNORED], ids[:4][None]
            for _ in answer:
                text = torch.cat([text, given(input_ids=text).logits[:, -1:].argmax(-1)], 1)
            exact += int(torch.equal(text[0, 4:], answer))
            samples += 1
    return 100 * exact / samples


def test_one_pass_finds_what_greedy_decoding_writes() -> None:
    batches, found = asked(), []
    for seed in (0, 2):
        given = model(seed)
        optimiser = torch.optim.Adam(given.parameters(), lr=3e-3)
        for _ in range(12 * seed):  # from nothing to much
            for batch in batches:
                optimiser.zero_grad()
                LanguageModel().bind(given, [])(batch).backward()
                optimiser.step()
        score = evaluate(given, batches, LanguageModel())
        assert score.exact == pytest.approx(by_hand(given, batches))
        found.append(score.exact)
    assert found[0] < 30 < found[1]
    texts = [Batch({**b.inputs, "labels": b.inputs["input_ids"].masked_fill(b.inputs["attention_mask"] == 0, IGNORED)})
             for b in batches]  # fmt: skip
    assert evaluate(given, texts, LanguageModel()).exact is None


def scored(*said: tuple[str, str, bool], choices: frozenset[str] = frozenset()) -> Score:
    """(wanted, written, stopped) of each sample."""
    return Score(tuple(w for w, _, _ in said), tuple(Written(text, stop) for _, text, stop in said), choices)


def test_an_answer_is_exact_where_it_is_the_wanted_one_and_ends() -> None:
    score = scored(("login", " login", True), ("login", " login login", False), ("login", " login", False))
    assert score.exact_each == [True, False, False]
    assert (score.exact, score.stopped, score.begins, score.valid) == (100 / 3, 100 / 3, None, None)
    few = scored(("login", " login login", False), ("out", "outside", True), ("outside", "outside.", True),
                 choices=frozenset(("login", "out", "outside")))  # fmt: skip
    assert few.begins_each == [True, False, True]
    assert few.right(ends=False) == pytest.approx(200 / 3)
    assert few.right() == 0


def test_json_is_right_as_a_value() -> None:
    wanted = '{"type": "human", "first": "Who"}'
    said = ['{"first":"Who","type":"human"}', wanted + " {", '{"type": "human"}', "human"]
    score = scored(*((wanted, text, True) for text in said))
    assert score.exact_each == [True, False, False, False]
    assert score.valid == 50
    assert scored(("7", "7", True), ("x", "x", True)).valid is None  # a number alone is no form


def test_few_answers_that_come_again_are_a_set() -> None:
    assert choices_of([" a", "b"] * 3) == {"a", "b"}
    assert choices_of(["a", "b"] * 2) == choices_of(["a"] * 9) == choices_of([str(i) for i in range(200)]) == set()


def test_a_gain_has_an_interval() -> None:
    """Against the published form of it, and with its sense: no change and small samples show nothing."""
    n, won, lost = 50, 12, 3
    before = [False] * won + [True] * lost + [True] * (n - won - lost)
    after = [True] * won + [False] * lost + [True] * (n - won - lost)
    points, low, high = gain(before, after)
    assert points == pytest.approx(18)
    mean = (won - lost) / (n + 2)
    half = 1.96 * ((won + lost + 1 - (won - lost) ** 2 / (n + 2)) ** 0.5) / (n + 2)
    assert (low, high) == pytest.approx((100 * (mean - half), 100 * (mean + half)))
    assert gain(after, before)[1:] == pytest.approx((-high, -low))
    same = gain([True, False] * 5, [True, False] * 5)
    assert same[0] == 0
    assert same[1] < 0 < same[2]
    assert gain([False] * 2, [True] * 2)[1] < 0 < gain([False] * 20, [True] * 20)[1]


@torch.no_grad()
def test_generating_is_decoding_token_by_token(tmp_path: Path) -> None:
    """Batches, padding and the cache change nothing; the end is the model's own, and the bound is kept."""
    folder = folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1, "bytes")
    loaded = load_model(str(folder))
    tokenizer = loaded.tokenizer()
    rows = [[Segment(f"The ferry {'leaves ' * i}", False), Segment(" at dawn")] for i in range(7)]
    score = answers_of(loaded.model, tokenizer, rows, length=6, batch=3)
    for row, found in zip(rows, score.written, strict=True):
        ids = tokenizer(row[0].text, return_tensors="pt")["input_ids"][:, :-1]  # it ends every text
        new: list[int] = []
        while len(new) < 6 and tokenizer.eos_token_id not in new:
            read = torch.cat([ids, torch.tensor([new], dtype=torch.long)], 1)
            new.append(int(loaded.model(input_ids=read).logits[0, -1].argmax()))
        assert found.stopped == (new[-1] == tokenizer.eos_token_id)
        whole = [*ids[0].tolist(), *new[: len(new) - found.stopped]]
        assert row[0].text + found.text == tokenizer.decode(whole, skip_special_tokens=True)
    assert len(score.written) == 7


def test_evaluate_and_the_verdict_say_them(tmp_path: Path) -> None:
    base = folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    other = folders.causal(tmp_path / "b", "LlamaForCausalLM", 24, 3, 2)
    folders.lora(base, tmp_path / "lora", ["q_proj", "v_proj"])
    rows = [{"prompt": f"The ferry leaves {i} ", "completion": ("dawn", "night", "harbour")[i % 3]} for i in range(18)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quick = taskferry("evaluate", base, "--test", data, "--quick", "--json").json
    assert quick["exact"] is not None
    assert quick["stopped"] is None
    shown = taskferry("evaluate", base, "--test", data, "--quick").out
    assert "not generated" in shown
    score = taskferry("evaluate", base, "--test", data, "--json").json
    assert None not in (score["exact"], score["begins"], score["stopped"])
    shown = taskferry("evaluate", base, "--test", data).out
    assert "exact answers" in shown
    assert "stopped" in shown
    given = ["transfer", "--source-base", base, "--source-tuned", tmp_path / "lora", "--target-base", other,
             "--calibration", data, "--method", "bico", "--scale", 1, "--force"]  # fmt: skip
    out = tmp_path / "out"
    ran = taskferry(*given, "--out", out)
    answers = json.loads((out / "taskferry.json").read_text())["verdict"]["answers"]
    assert (answers["samples"], answers["held_out"]) == (18, False)  # maps at a given scale are of all samples
    assert "on 18 calibration samples, " in " ".join(ran.out.split())
    for who, scale in (("before", []), ("after", ["--add", out])):
        found = taskferry("evaluate", other, *scale, "--test", data, "--json").json
        assert found["stopped"] == answers[who]["stopped"]  # a random model never ends
    for which in answers["examples"]:
        assert which["prompt"].startswith("The ferry leaves")
    assert "tuned source" in ran.out
    card = (out / "README.md").read_text()
    assert "## Answers" in card
    taskferry("report", out, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "What it answers" in page
    assert "Right answers" in page


def test_classes_that_predict_tokens_are_known_by_their_names() -> None:
    transformers = pytest.importorskip("transformers")
    classes = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "MarianMTModel")
    assert all(is_language_class(name) and hasattr(transformers, name) for name in classes)
    assert not any(map(is_language_class, ("BertModel", "BertForSequenceClassification", "MarianModel")))
