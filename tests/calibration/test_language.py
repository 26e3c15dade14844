"""Which tokens of an answer are counted, and which of a long prompt are kept."""

from __future__ import annotations

import pytest

from taskferry import TaskferryError
from taskferry.calibration.language import Segment, language_calibration
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
