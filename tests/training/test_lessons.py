"""What the tuned source teaches: classes, tokens of one vocabulary or two, likeness of features."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from taskferry import Calibration, TaskferryError, TaskVector
from taskferry.collect.scale import ScaleCurve, moved_by
from taskferry.data.batch import IGNORED
from taskferry.data.language import Segment, language_calibration
from taskferry.data.vocabulary import translation
from taskferry.methods import Job, distil, run
from taskferry.objectives.language import expected
from taskferry.objectives.objectives import Classifier, Function
from taskferry.training.lessons import Classes, Lesson, Likeness, Tokens, lesson_of, trimmed
from tests.helpers import texts, tiny
from tests.helpers.tiny import job, rebuilt


def lesson(given: Job, **more: float) -> Lesson:
    return lesson_of(given.pair, given.tau, **more)


def at(model: nn.Module, tau: TaskVector, inputs: dict[str, Tensor]) -> Tensor:
    with moved_by(model, tau) as set_scale, torch.no_grad():
        set_scale(1.0)
        return model(**inputs).logits


def test_classes_are_the_probabilities_of_the_tuned_source() -> None:
    given = job("bert-classifier", (16, 2), (24, 3))
    found = lesson(given)
    assert isinstance(found, Classes)
    A, B = next(iter(given.calibration))
    teacher = at(given.source, given.tau, dict(A.inputs)).softmax(-1)
    assert torch.allclose(found.answers[: len(A)], teacher, atol=1e-6)
    by_hand = -(teacher * at(given.target, TaskVector({}), dict(B.inputs)).log_softmax(-1)).sum()
    assert float(found.loss(found.batch(range(len(A))))) == pytest.approx(float(by_hand), rel=1e-5)
    mixed = lesson(given, labels=0.25)
    assert isinstance(mixed, Classes)
    assert A.labels is not None
    true = F.one_hot(A.labels, teacher.shape[1])
    assert torch.allclose(mixed.answers[: len(A)], 0.75 * teacher + 0.25 * true, atol=1e-6)


def test_tokens_of_one_vocabulary_are_the_distributions_of_the_tuned_source() -> None:
    """With fewer words than are kept, the lesson is the whole cross-entropy between the two models."""
    given = job("llama", (16, 2), (24, 3))
    found = lesson(given)
    assert isinstance(found, Tokens)
    total, tokens = 0.0, 0
    for A, B in given.calibration:
        inputs = {name: x for name, x in A.inputs.items() if name != "labels"}
        counted = expected(given.target, B) != IGNORED
        teacher = at(given.source, given.tau, inputs).softmax(-1)[counted]
        student = at(given.target, TaskVector({}), inputs).log_softmax(-1)[counted]
        total, tokens = total - float((teacher * student).sum()), tokens + int(counted.sum())
    assert found.carried == tokens
    everything = found.batch(range(found.samples))
    assert float(found.loss(everything)) / found.samples == pytest.approx(total / tokens, rel=1e-4)


def test_words_that_the_target_has_no_row_for_are_not_taught() -> None:
    """Of one tokenizer, where the source's table was padded further than the target's."""
    given = job("llama", (16, 2), (24, 3))
    words = given.target.get_output_embeddings().weight.shape[0]
    table = given.source.get_output_embeddings()
    table.weight = nn.Parameter(torch.cat([table.weight, 3 * torch.randn(64, table.weight.shape[1])]))
    found = lesson_of(given.pair, TaskVector({}))
    assert isinstance(found, Tokens)
    assert max(int(each.max()) for each in found.likely) < words
    assert all(torch.allclose(each.sum(1), torch.ones(len(each))) for each in found.chances)
    assert torch.isfinite(found.loss(found.batch(range(2))))


def test_an_encoder_decoder_is_taught_too() -> None:
    given = job("t5", (16, 2), (24, 3))
    found = lesson(given)
    assert isinstance(found, Tokens)
    assert math.isfinite(float(found.loss(found.batch([1, 2]))))
    assert found.carried == sum(int((B.inputs["labels"] != IGNORED).sum()) for _, B in given.calibration)


WORDS = ("<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(" ".join(texts.TEXTS).replace(".", " .").split()))


def of_words(numbers: dict[str, int]) -> Any:
    """A tokenizer of whole words with these numbers."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_vocabulary_in_another_order_is_taught_the_same() -> None:
    """Planted: the same words under other numbers. Every distribution arrives, on the numbers of the target."""
    order = [*range(4), *(4 + torch.randperm(len(WORDS) - 4, generator=torch.Generator().manual_seed(1))).tolist()]
    first = of_words({word: i for i, word in enumerate(WORDS)})
    second = of_words({word: order[i] for i, word in enumerate(WORDS)})
    assert translation((first, second)).tolist() == order
    samples = [[Segment(text[:9], counted=False), Segment(text[9:])] for text in texts.TEXTS[:4]]
    one, two = (language_calibration(samples, first, other, micro_batch=2) for other in (first, second))
    A = tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=len(WORDS)).eval()
    with torch.no_grad():
        same, other = Tokens((A, A), one, 0.0), Tokens((A, A), two, 0.0)
    assert other.carried == same.carried == sum(map(len, same.at)) > 8
    for words, chances, theirs, known in zip(same.likely, same.chances, other.likely, other.chances, strict=True):
        assert torch.equal(torch.tensor(order)[words], theirs)
        assert torch.allclose(chances, known, atol=1e-6)
    with pytest.raises(TaskferryError, match="two vocabularies"):
        Tokens((A, A), Calibration(two), 0.0)


def test_tokens_of_bytes_and_of_characters_meet_by_what_they_write() -> None:
    """One vocabulary writes bytes as letters of an alphabet, the other characters, and bytes as <0xE9>."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    def made(words: list[str], decoder: object) -> PreTrainedTokenizerFast:
        inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        inner.decoder = decoder
        return PreTrainedTokenizerFast(tokenizer_object=inner)

    first = made(["?", "cafÃ©", "Ġdog", "æĹ", "Ã©", "é", "Ċ"], decoders.ByteLevel())  # "é" is the byte 0xE9 alone
    second = made(["?", "é", "▁dog", "café", "<0xE9>", "<0x0A>", "æ"], decoders.ByteFallback())
    assert translation((first, second)).tolist() == [0, 3, 2, -1, 1, 4, 5]
    assert translation((second, first)).tolist() == [0, 4, 2, 1, 5, 6, -1]


def test_a_token_that_the_teacher_cannot_name_is_taught_by_the_text() -> None:
    """The target lacks most words: what the teacher says there is lost, and the text's own token is the answer."""
    few = ("<pad>", "<s>", "</s>", "<unk>", "the", "harbour")
    first, second = of_words({word: i for i, word in enumerate(WORDS)}), of_words({w: i for i, w in enumerate(few)})
    samples = [[Segment(text[:9], counted=False), Segment(text[9:])] for text in texts.TEXTS[:4]]
    calibration = language_calibration(samples, first, second, micro_batch=2)
    A, B = (tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=n).eval() for n in (len(WORDS), len(few)))
    with torch.no_grad():
        found = Tokens((A, B), calibration, 0.0)
    assert found.carried == 0
    for words, chances in zip(found.likely, found.chances, strict=True):
        assert torch.equal(chances[:, -1], torch.ones(len(words)))
        assert float(chances[:, :-1].abs().sum()) == 0


def test_likeness_is_nought_for_a_target_that_is_the_tuned_source() -> None:
    given = job("bert", (16, 2), (16, 2))
    same = rebuilt(given, target=given.source)
    found = lesson(same)
    assert isinstance(found, Likeness)
    with moved_by(given.source, given.tau) as set_scale:
        assert float(found.loss(found.batch(range(8)))) > 1e-6
        set_scale(1.0)
        # Its own centre is that of the base: close, not equal.
        assert float(found.loss(found.batch(range(8)))) < 1e-2
    with pytest.raises(TaskferryError, match="made from samples"):
        lesson(given, labels=0.5)


def test_a_loss_of_ones_own_cannot_be_taught() -> None:
    given = job("bert")
    own = rebuilt(given, objective=Function(lambda model, batch: model(**batch.inputs)[0].sum()))
    with pytest.raises(TaskferryError, match="cannot teach by Function"):
        lesson(own)


def test_padding_at_the_end_of_all_rows_is_cut() -> None:
    batch = tiny.text(0, 4, "causal")  # the longest of them has ten tokens
    assert trimmed(batch.take([0])).inputs["input_ids"].shape[1] == 10
    assert trimmed(batch.take([3])).inputs["input_ids"].shape[1] == 7
    assert trimmed(batch.take([3])).inputs["labels"].shape[1] == 7


def distance_to_teacher(given: Job, tau: TaskVector) -> float:
    """Mean cross-entropy of the target's answers against the tuned source's, on the samples."""
    heads = given.pair.objectives
    answers = []
    for model, change, side, head in (
        (given.source, given.tau, 0, heads[0]),
        (given.target, tau, 1, heads[1]),
    ):
        assert isinstance(head, Classifier)
        with moved_by(model, change) as set_scale, torch.no_grad():
            set_scale(1.0)
            logits = head.logits(model, given.calibration.side(side))
            answers.append(torch.cat([logits(batch) for batch in given.calibration.side(side)]))
    return float(F.cross_entropy(answers[1], answers[0].softmax(-1)))


def test_the_target_answers_more_as_the_tuned_source_does() -> None:
    given = job("vit", (16, 2), (24, 3))
    before = distance_to_teacher(given, TaskVector({}))
    moved = distance_to_teacher(given, run("bico", given).tau)
    after = distance_to_teacher(given, run("distil", given, steps=60, learning_rate=1e-2, views=2).tau)
    own = distance_to_teacher(rebuilt(given, target=given.source), given.tau)  # the entropy: no less is possible
    assert after - own < 0.5 * (min(before, moved) - own)


def test_labels_do_not_matter_from_a_cold_start() -> None:
    given = job("bert-classifier")
    wrong = rebuilt(given, calibration=given.calibration.with_labels(torch.zeros(24, dtype=torch.long)))
    first, second = (run("distil", j, steps=3, start="cold").tau for j in (given, wrong))
    assert all(torch.equal(delta, second.deltas[name]) for name, delta in first.deltas.items())


def test_a_move_that_was_refused_is_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `transfer --refine`: the target itself is refined then, in the weights that would have moved."""
    given = job("vit", (16, 2), (24, 3))
    moved = run("bico", given)
    found = {}
    for best in (0.0, 1.0):
        curve = ScaleCurve(((0.0, 1.0), (1.0, 2.0)), best)
        monkeypatch.setattr(distil, "run", lambda *_, curve=curve: replace(moved, curve=curve))
        found[best] = run("distil", given, steps=1, learning_rate=1e-12, start="twofold").tau
    assert found[0.0].norm() < 1e-3 * moved.tau.norm()
    assert (found[1.0] - moved.tau).norm() < 1e-3 * moved.tau.norm()
