"""What the tuned source teaches: classes, tokens of one vocabulary or two, likeness of features."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor, nn

from taskferry import Calibration, TaskferryError, TaskVector
from taskferry.collect.device import frozen
from taskferry.collect.scale import moved_by
from taskferry.data.batch import IGNORED, trimmed
from taskferry.data.language import Segment, language_calibration
from taskferry.methods import Job
from taskferry.objectives.language import expected, logits_at
from taskferry.objectives.objectives import Function, LanguageModel
from taskferry.objectives.teacher import Classes, Lesson, Likeness, Tokens, lesson_of
from tests.helpers import texts, tiny
from tests.helpers.tiny import job, rebuilt


def lesson(given: Job) -> Lesson:
    return lesson_of((given.source, given.target), given.tau, given.calibration, given.pair.objectives)


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
    by_hand = -(teacher * at(given.target, TaskVector({}), dict(B.inputs)).log_softmax(-1)).sum()
    assert float(found.loss(found.batch(range(len(A))))) == pytest.approx(float(by_hand), rel=1e-5)


def test_tokens_of_one_vocabulary_are_the_distributions_of_the_tuned_source() -> None:
    """With fewer words than are kept, the lesson is the whole cross-entropy; batches of any size add up to it."""
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
    for size in (len(found), 5):
        parts = [range(i, min(i + size, len(found))) for i in range(0, len(found), size)]
        loss = sum(float(found.loss(found.batch(part))) for part in parts)
        assert loss / len(found) == pytest.approx(total / tokens, rel=1e-4)


@pytest.mark.parametrize("name", ["bert-classifier", "llama", "bert"])
def test_the_floor_is_the_loss_of_the_tuned_source_itself(name: str) -> None:
    given = job(name)
    found = lesson_of((given.source, given.source), given.tau, given.calibration, given.pair.objectives)
    with moved_by(given.source, given.tau) as set_scale, torch.no_grad():
        set_scale(1.0)
        own = float(found.loss(found.batch(range(len(found))))) / len(found)
    assert found.floor == pytest.approx(own, rel=1e-4, abs=1e-6)


def test_a_token_that_stands_twice_has_both_of_its_probabilities() -> None:
    given = job("llama")
    found = lesson(given)
    assert isinstance(found, Tokens)
    found.words, found.chances = [torch.tensor([[3, 5, 3]])], [torch.tensor([[0.2, 0.5, 0.3]])]
    found.weight = float(len(found))
    assert found.floor == pytest.approx(math.log(2))


def test_words_that_the_target_has_no_row_for_are_not_taught() -> None:
    """Of one tokenizer, where the source's table was padded further than the target's."""
    given = job("llama", (16, 2), (24, 3))
    words = given.target.get_output_embeddings().weight.shape[0]
    table = given.source.get_output_embeddings()
    table.weight = nn.Parameter(torch.cat([table.weight, 3 * torch.randn(64, table.weight.shape[1])]))
    found = lesson(rebuilt(given, tau=TaskVector({})))
    assert isinstance(found, Tokens)
    assert max(int(each.max()) for each in found.words) < words
    assert all(torch.allclose(each.sum(1), torch.ones(len(each))) for each in found.chances)
    assert torch.isfinite(found.loss(found.batch(range(2))))


def test_an_encoder_decoder_is_taught_too() -> None:
    given = job("t5", (16, 2), (24, 3))
    found = lesson(given)
    assert isinstance(found, Tokens)
    assert math.isfinite(float(found.loss(found.batch([1, 2]))))
    assert found.carried == sum(int((B.inputs["labels"] != IGNORED).sum()) for _, B in given.calibration)


@pytest.mark.parametrize("name", ["bert-classifier", "llama", "bert"])
def test_probes_have_the_curvature_of_the_loss(name: str) -> None:
    """Their mean outer product is the second derivative by the logits (of a cross-entropy: the Fisher matrix)."""
    given = job(name)
    found = lesson(given)
    with frozen(given.target):
        logits, targets = found.scores(found.batch(range(2)))
    logits = logits.double().detach().requires_grad_()
    if isinstance(targets, tuple):
        targets = targets[0], targets[1].double()
    wanted = torch.autograd.functional.hessian(lambda x: found.loss_of(x, targets), logits)
    wanted = wanted.reshape(logits.numel(), -1)
    generator, mean = torch.Generator().manual_seed(0), torch.zeros_like(wanted)
    for _ in range(400):
        v = torch.autograd.grad(found.probe(logits, generator), logits)[0].flatten()
        mean += v[:, None] * v / 400
    assert float((mean - wanted).norm() / wanted.norm()) < 4 * math.sqrt(len(wanted) / 400)
    assert float(mean.trace()) == pytest.approx(float(wanted.trace()), rel=0.05)


WORDS = (
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    *dict.fromkeys(" ".join(texts.TEXTS).replace(".", " .").replace(",", " ,").split()),
)


def of_words(numbers: dict[str, int]) -> Any:
    """A tokenizer of whole words with these numbers."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def taught(A: nn.Module, B: nn.Module, calibration: Calibration) -> Tokens:
    found = lesson_of((A, B), TaskVector({}), calibration, (LanguageModel(), LanguageModel()))
    assert isinstance(found, Tokens)
    return found


def dense(found: Tokens, words: int) -> list[Tensor]:
    """[P, words] of each sample."""
    pairs = zip(found.words, found.chances, strict=True)
    return [torch.zeros(len(w), words).scatter_add(1, w, chances) for w, chances in pairs]


def test_a_vocabulary_in_another_order_is_taught_the_same() -> None:
    """Planted: the same words under other numbers. Every distribution arrives, on the numbers of the target."""
    order = [*range(4), *(4 + torch.randperm(len(WORDS) - 4, generator=torch.Generator().manual_seed(1))).tolist()]
    first = of_words({word: i for i, word in enumerate(WORDS)})
    second = of_words({word: order[i] for i, word in enumerate(WORDS)})
    cuts = [(text, text.index(" ", 9)) for text in texts.TEXTS[:4]]
    samples = [[Segment(text[:at], counted=False), Segment(text[at:])] for text, at in cuts]
    one, two = (language_calibration(samples, first, other, micro_batch=2) for other in (first, second))
    A = tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=len(WORDS)).eval()
    same, other = taught(A, A, one), taught(A, A, two)
    assert other.carried == same.carried == sum(map(len, same.at)) > 8
    for mine, theirs in zip(dense(same, len(WORDS)), dense(other, len(WORDS)), strict=True):
        mine[:, [0, 1, 3]] = 0.0  # marks that are no text and no end
        assert torch.allclose(mine / mine.sum(1, keepdim=True), theirs[:, order], atol=1e-6)
    with pytest.raises(TaskferryError, match="two vocabularies"):
        taught(A, A, Calibration(two))


def test_a_token_that_the_teacher_cannot_name_is_taught_by_the_text() -> None:
    """The target lacks most words: what the teacher says there is lost, and the text's own token is the answer."""
    few = ("<pad>", "<s>", "</s>", "<unk>", "the", "harbour")
    first, second = of_words({word: i for i, word in enumerate(WORDS)}), of_words({w: i for i, w in enumerate(few)})
    samples = [[Segment(text[:9], counted=False), Segment(text[9:])] for text in texts.TEXTS[:4]]
    calibration = language_calibration(samples, first, second, micro_batch=2)
    A, B = (tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=n).eval() for n in (len(WORDS), len(few)))
    found = taught(A, B, calibration)
    for words, chances in zip(found.words, found.chances, strict=True):
        assert not bool(((words[:, :-1] < 4) & (chances[:, :-1] > 0)).any()) or found.carried


def of_numbers(joined: bool) -> Any:
    """A byte-level BPE that was trained on sums; its digits are tokens of their own, or joined."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = bytes_ if joined else tokenizers.pre_tokenizers.Sequence([digits, bytes_])
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sums = [f"the sum of {a}+{b}:{a + b}." for a in range(10, 50) for b in range(10, 50)]
    inner.train_from_iterator(sums, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("source_joins", [True, False])
def test_digits_that_one_tokenizer_joins_and_the_other_splits_are_not_suppressed(source_joins: bool) -> None:
    """The target's own token keeps at least the probability of all the tokens by which the source spells it."""
    first, second = of_numbers(source_joins), of_numbers(not source_joins)
    assert [len(each("12", add_special_tokens=False)["input_ids"]) for each in (first, second)] in ([1, 2], [2, 1])
    samples = [[Segment("the sum of 10+2:", counted=False), Segment("12")]]
    calibration = language_calibration(samples, first, second, ends=True)
    ((A, B),) = calibration.pairs
    models = [tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=len(each)).eval() for each in (first, second)]
    table = models[0].get_output_embeddings().weight
    counted = expected(models[0], A) != IGNORED
    with torch.no_grad():  # a source that is nearly sure of its answer
        hidden = models[0].model(A.inputs["input_ids"]).last_hidden_state[counted]
        for h, token in zip(hidden, expected(models[0], A)[counted], strict=True):
            table[token] += 4.0 * h / h.square().sum()
        p = logits_at(models[0], A, counted).softmax(-1)
    own = p.gather(1, expected(models[0], A)[counted][:, None])[:, 0]
    found = taught(models[0], models[1], calibration)
    (kept,) = dense(found, len(second))
    mine = kept.gather(1, expected(models[1], B)[expected(models[1], B) != IGNORED][:, None])[:, 0]
    joint = float(own[:-1].prod())
    assert float(mine[0]) >= joint - 1e-6
    assert float(mine[:-1].prod()) >= joint - 1e-6  # the whole answer
    assert float(mine[-1]) >= float(own[-1]) - 1e-6  # and its end
    if not source_joins:  # the first digit alone is the way to "12", and nothing else that the target could write
        assert float(kept[0, second.convert_tokens_to_ids("1")]) == 0.0
    assert torch.allclose(kept.sum(1), torch.ones(len(kept)))


def test_one_tokenizer_on_both_sides_has_the_exact_distributions() -> None:
    """Also where the two models read other text in front: only the template differs."""
    tokenizer = of_numbers(True)
    other = of_numbers(True)
    other.padding_side = "left" if tokenizer.padding_side == "right" else "right"
    samples = [[Segment("the sum of 10+2:", counted=False), Segment("12.")], [Segment("20:", False), Segment("1")]]
    one = language_calibration(samples, tokenizer, ends=True)
    two = language_calibration(samples, tokenizer, other, ends=True)
    A = tiny.hf("LlamaForCausalLM", 16, 2, vocab_size=len(tokenizer)).eval()
    with torch.no_grad():
        A.get_output_embeddings().weight.mul_(40)  # peaked: all that matters is among the likeliest
    same, carried = taught(A, A, one), taught(A, A, two)
    assert carried.carried == same.carried == sum(map(len, same.at))
    for mine, theirs in zip(dense(same, len(tokenizer)), dense(carried, len(tokenizer)), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-2)


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
