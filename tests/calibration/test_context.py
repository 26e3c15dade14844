"""Prompts with answers behind each other: the same tokens in both models' places, each model's own marks once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taskferry.calibration.batch import IGNORED, Calibration
from taskferry.calibration.context import in_context
from taskferry.calibration.language import Segment, language_calibration
from tests.helpers.texts import WORDS, prompts, train
from tests.helpers.tiny import hf

pytest.importorskip("tokenizers")

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"


def written(calibration: Calibration) -> list[str]:
    """Each row as text, without padding; the tokenizer of the source keeps every character."""
    assert calibration.tokenizers is not None
    tokenizer: Any = calibration.tokenizers[0]
    return [tokenizer.decode(ids[mask != 0], skip_special_tokens=True)
            for batch in calibration.side(0)
            for ids, mask in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True)]  # fmt: skip


def parts(calibration: Calibration) -> list[str]:
    """The samples in all rows, sorted."""
    return sorted(part.strip() for text in written(calibration) for part in text.split("\n\n"))


def counted(calibration: Calibration, side: int) -> int:
    return sum(int((batch.inputs["labels"] != IGNORED).sum()) for batch in calibration.side(side))


def test_samples_stand_behind_each_other() -> None:
    """All of them once, with no token of an answer more or less."""
    alone = prompts()
    shown = in_context(alone, 3, 1024)
    assert [text.count("Question:") for text in written(shown)] == [3, 3, 1]
    assert parts(shown) == parts(alone)
    assert written(shown) != written(in_context(alone, 7, 1024))
    for side in (0, 1):
        assert counted(shown, side) == counted(alone, side)


def test_tokens_of_both_models_stand_for_the_same_characters() -> None:
    """The answers begin at the same characters by either tokenizer, and no token stands for two samples."""
    shown = in_context(prompts(), 3, 1024)
    for A, B in shown:
        for row in range(A.rows):
            begins = []
            for batch in (A, B):
                labels, spans = batch.inputs["labels"][row], batch.spans["tokens"][row]
                answer = labels != IGNORED
                first = answer & ~torch.cat([torch.tensor([False]), answer[:-1]])
                starts = spans[first][:, 0].tolist()
                assert starts == sorted(starts)
                begins.append(starts)
            assert len(begins[0]) == len(begins[1])
            assert all(abs(a - b) <= 1 for a, b in zip(*begins, strict=True))  # a space in front belongs to one alone
            ends = A.spans["tokens"][row][:, 1].max()
            assert abs(int(ends) - int(B.spans["tokens"][row][:, 1].max())) <= 1


def test_the_first_is_read_as_it_is_alone() -> None:
    """What stands behind a sample does not change it; what stands before the others does."""
    alone, model = prompts(micro_batch=1), hf("LlamaForCausalLM", 16, 2, vocab_size=400)
    shown = in_context(alone, 3, 1024)
    batch = shown.side(0)[0]
    together = model(batch.inputs["input_ids"][:1]).logits[0]
    first = next(i for i, text in enumerate(written(alone)) if written(shown)[0].startswith(text))
    one = alone.side(0)[first].inputs["input_ids"][:, :-1]  # the mark of the end is left out in the middle
    torch.testing.assert_close(together[: one.shape[1]], model(one).logits[0], rtol=1e-4, atol=1e-5)


def test_folds_stay_apart() -> None:
    """A part that is judged by maps made without it shows nothing of itself to those."""
    alone = prompts().in_folds(2)
    shown = in_context(alone, 3, 1024)
    assert shown.folds == 2
    for fold in range(2):
        some, mine = (Calibration([pair for pair in given if pair[0].fold == fold], given.tokenizers)
                      for given in (shown, alone))  # fmt: skip
        assert parts(some) == parts(mine)
    assert [B.judges for _, B in shown] == [True] * len(shown)


def test_no_more_tokens_than_a_model_reads() -> None:
    alone = prompts()
    longest = max(int(batch.inputs["attention_mask"].sum(1).max()) for pair in alone for batch in pair)
    shown = in_context(alone, 7, 2 * longest + 4)
    assert max(batch.inputs["input_ids"].shape[1] for pair in shown for batch in pair) <= 2 * longest + 4
    assert len(written(shown)) < len(WORDS)
    assert counted(shown, 0) == counted(alone, 0)
    assert len(written(in_context(alone, 7, longest // 2))) == len(WORDS)  # each alone, whole


def test_marks_of_a_tokenizer_stand_once() -> None:
    """The beginning of a text is no beginning in the middle of it; marks of a chat are the chat's own."""
    tokenizer = train("pieces")
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    ids = torch.cat([row for batch in in_context(prompts(), 7, 1024).side(1) for row in batch.inputs["input_ids"]])
    assert int((ids == tokenizer.bos_token_id).sum()) == 1
    tokenizer = train("bytes")
    tokenizer.chat_template = CHATML
    chats = [[Segment(f"Say {i}", False, "user"), Segment(str(i), True, "assistant")] for i in range(4)]
    (text,) = written(in_context(language_calibration(chats, tokenizer), 4, 1024))
    assert text.count("<|end|>") == 8
    assert "\n\n" not in text


def test_other_samples_stay_as_they_are() -> None:
    texts = language_calibration([[Segment("a film")], [Segment("one")]], train("bytes"))
    assert in_context(texts, 5, 1024) is texts
    alone = prompts()
    assert in_context(alone, 1, 1024) is alone
    assert in_context(Calibration(alone.pairs), 5, 1024).pairs == alone.pairs  # nobody says how they are kept apart
