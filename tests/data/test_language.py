"""Which tokens of an answer are counted, and which of a long prompt are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taskferry import TaskferryError
from taskferry.data.batch import IGNORED
from taskferry.data.language import (
    Segment,
    differ_in_spaces,
    language_calibration,
    prompt_of,
    rendered_chat,
    sequence_calibration,
    with_template,
)
from tests.helpers.texts import train

ByteLevel = pytest.importorskip("tokenizers.processors").ByteLevel


def test_short_answers_are_counted_in_their_place() -> None:
    tokenizer = train("bytes")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
    chat = [[Segment("Which letter?", False, "user"), Segment("a", True, "assistant")]]
    ((batch, _),) = language_calibration(chat, tokenizer).pairs
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    counted = (labels != -100).nonzero().flatten().tolist()
    assert tokenizer.decode(ids[: counted[-1] + 1]).endswith("<|assistant|> a")
    assert len(counted) <= 2


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
STRICT = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user') }}{% endif %}"
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('An empty message') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, STRICT])
@pytest.mark.parametrize("answer", ["<think>hm</think> four", "<", "<|", "taskferry-message", "tas", "user", "b"])
def test_messages_stand_where_the_template_puts_them(template: str, answer: str) -> None:
    """Whatever they begin with, and though a template refuses empty messages and chats that nobody began."""
    tokenizer = train("bytes")
    tokenizer.chat_template = template
    chat = [("system", "b"), ("user", answer), ("assistant", answer), ("user", " <b> "), ("assistant", answer)]
    text, places = rendered_chat(tokenizer, [Segment(said, True, role) for role, said in chat])
    mark = "<|im_start|>{}\n" if template == CHATML else "[{}] "
    at = 0
    for (role, said), place in zip(chat, places, strict=True):
        at = text.index(mark.format(role), at) + len(mark.format(role))
        assert text[at : place.start].strip() == ""
        assert text[place.start : place.stop] == said.strip()
        at = place.stop


def test_tokens_meet_whether_or_not_the_space_is_theirs() -> None:
    """Offsets of one tokenizer have the space in front of a word, those of the other do not."""
    A, B = train("bytes"), train("bytes")
    rows = [[Segment("The ferry leaves", False), Segment(" at dawn from the harbour")]]
    for tokenizer, trim in ((A, False), (B, True)):
        tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    assert differ_in_spaces(A, B)
    assert not differ_in_spaces(A, A)
    assert not differ_in_spaces(B, None)
    ((one, other),) = language_calibration(rows, A, B).pairs
    assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
    assert torch.equal(one.spans["tokens"], other.spans["tokens"])
    ((as_it_is, _),) = language_calibration(rows, A, A).pairs
    assert not torch.equal(as_it_is.spans["tokens"], one.spans["tokens"])  # only where they differ


def test_a_tokenizer_without_any_mark_pads_all_the_same() -> None:
    tokenizer = train("bytes")
    tokenizer.pad_token = tokenizer.eos_token = None
    ((batch, _),) = language_calibration([[Segment("Yes.")], [Segment("The ferry leaves.")]], tokenizer).pairs
    assert batch.inputs["attention_mask"].sum(1).tolist() != [batch.inputs["input_ids"].shape[1]] * 2
    assert bool((batch.inputs["labels"][batch.inputs["attention_mask"] == 0] == IGNORED).all())


def test_long_prompts_keep_their_answers() -> None:
    tokenizer = train("bytes")
    long = [[Segment("The ferry leaves. " * 30, counted=False), Segment(" At dawn.")]]
    ((batch, _),) = language_calibration(long, tokenizer, max_length=24).pairs
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    assert len(ids) == 24
    assert tokenizer.decode(ids[labels != -100]).strip() == "At dawn."
    hopeless = [[Segment("Yes.", counted=False), Segment("")]]
    with pytest.raises(TaskferryError, match="nothing of its answer fits"):
        language_calibration(hopeless, tokenizer)


def test_texts_that_were_cut_are_counted() -> None:
    """By either model's tokenizer, and a decoder's answers too; a text that fits is not."""
    A, B = train("bytes"), train("pieces")
    texts = ["The ferry leaves. " * 30, "The ferry leaves at dawn: zzzzzzzz zzzzzzzz.", "Yes."]
    plain = [[Segment(text)] for text in texts]
    of_A, of_B = ([len(tokenizer(text)["input_ids"]) for text in texts] for tokenizer in (A, B))
    assert of_B[1] < of_A[1] - 1 < min(of_A[0], of_B[0])
    length = of_A[1] - 1  # the second text has one token too many for A, and some to spare for B
    assert language_calibration(plain, A, max_length=length).filled(length) == 2
    assert language_calibration(plain, B, A, max_length=length).filled(length) == 2
    assert language_calibration(plain, B, max_length=length).filled(length) == 1
    assert language_calibration(plain, A, max_length=4096).filled(4096) == 0
    answers = [[Segment("Yes?", counted=False), Segment(text)] for text in texts]
    assert sequence_calibration(answers, A, max_length=length).filled(length) == 2


def ended(tokenizer: Any, rows: list[list[Segment]], other: Any = None) -> list[list[int]]:
    """The counted tokens of each sample, with ends, for one model and the other."""
    calibration = language_calibration(rows, tokenizer, other, ends=True)
    first = [batch.inputs["labels"][0] for batch in calibration.pairs[0]]
    return [ids[ids != IGNORED].tolist() for ids in first]


def with_end(kind: str, end: str, template: str | None = None) -> Any:
    tokenizer = train(kind)
    tokenizer.add_special_tokens({"eos_token": end})
    tokenizer.chat_template = template
    return tokenizer


def test_an_answer_counts_its_end_each_model_its_own() -> None:
    A, B = with_end("bytes", "<|im_end|>"), with_end("pieces", "</done>")
    prompt = [[Segment("Which letter?", False), Segment(" a quay")]]
    plain = [each[:-1] for each in ended(A, prompt, B)]
    ((one, other),) = language_calibration(prompt, A, B).pairs
    assert plain == [batch.inputs["labels"][batch.inputs["labels"] != IGNORED].tolist() for batch in (one, other)]
    assert [each[-1] for each in ended(A, prompt, B)] == [A.eos_token_id, B.eos_token_id]
    ((one, other),) = language_calibration(prompt, A, B, ends=True).pairs
    spans = [b.spans["tokens"][0][b.inputs["labels"][0] != IGNORED][-1].tolist() for b in (one, other)]
    assert spans[0] == spans[1]  # so that they are paired
    assert spans[0][1] - spans[0][0] == 1
    texts = [[Segment("The ferry leaves.")]]
    assert A.eos_token_id not in ended(A, texts)[0]  # a plain text has no answer
    twice = [[Segment("Which letter?", False), Segment(" a quay<|im_end|>")]]
    assert ended(A, twice)[0].count(A.eos_token_id) == 1


def test_the_end_of_a_turn_is_the_template_s_own() -> None:
    chat = [[Segment("Which letter?", False, "user"), Segment("a", True, "assistant")]]
    tokenizer = with_end("bytes", "</done>", CHATML)
    assert ended(tokenizer, chat)[0][-1] == tokenizer.eos_token_id  # <|im_end|> is text here, and ends nothing
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert ended(tokenizer, chat)[0][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prompt_of(tokenizer, chat[0]).endswith("<|im_start|>assistant\n")


def test_a_borrowed_template_ends_turns_by_the_borrower_s_end() -> None:
    A, B = with_end("bytes", "<|im_end|>", CHATML), with_end("pieces", "</done>")
    chat = [[Segment("Which letter?", False, "user"), Segment("a", True, "assistant")]]
    with pytest.raises(TaskferryError, match="has no chat template"):
        language_calibration(chat, A, B)
    assert with_template(B, A)
    assert not with_template(B, A)  # it has one now
    text, _ = rendered_chat(B, chat[0])
    assert text == f"{B.bos_token}<|im_start|>user\nWhich letter?</done>\n<|im_start|>assistant\na</done>\n"
    assert ended(A, chat, B)[1][-1] == B.eos_token_id
    calibration = language_calibration(chat, A, B, ends=True)
    assert calibration.ends == (A.eos_token_id, B.eos_token_id)
