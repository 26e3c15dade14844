"""Which tokens of an answer are counted, and which of a long prompt are kept."""

from __future__ import annotations

import pytest

from taskferry import TaskferryError
from taskferry.calibration.language import Segment, language_calibration, sequence_calibration
from tests.helpers.texts import train


def test_short_answers_are_counted_in_their_place() -> None:
    tokenizer = train("bytes")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
    chat = [[Segment("Which letter?", False, "user"), Segment("a", True, "assistant")]]
    ((batch, _),) = language_calibration(chat, tokenizer).pairs
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    counted = (labels != -100).nonzero().flatten().tolist()
    assert tokenizer.decode(ids[: counted[-1] + 1]).endswith("<|assistant|> a")
    assert len(counted) <= 2


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
