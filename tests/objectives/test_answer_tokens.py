"""The tokens whose rows make maps: of a prompt with its answer, those that predict the answer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from taskferry import Batch, Calibration, LanguageModel, TaskVector
from taskferry.collect.capture import collect
from taskferry.collect.statistics import Capture, Statistics, Tokens
from taskferry.data.batch import IGNORED
from taskferry.engines.whole import WholePair
from taskferry.layers.tokens import Layout, match
from taskferry.methods import Job, run
from tests.helpers.tiny import TINY, relative, tuned

PROMPT = 5


def answered(batch: Batch, marks: int = PROMPT) -> Batch:
    """The first tokens of every text are a prompt."""
    labels = batch.inputs["labels"].clone()
    labels[:, :marks] = IGNORED
    return replace(batch, inputs={**batch.inputs, "labels": labels})


def sums(tokens: Tokens, calibration: Calibration) -> tuple[WholePair, Statistics]:
    A, B = (TINY["llama"].model(width, 2, seed).double() for seed, width in enumerate((16, 24)))
    pair = WholePair(A, B, calibration, LanguageModel())
    capture = Capture(tokens=tokens)
    found = Statistics(capture=capture)
    collect(found, *pair._sides(capture), pair.pairs, calibration, capture)
    return pair, found


def test_only_tokens_that_predict_the_answer_meet() -> None:
    """At the last block no other token has a gradient: its sums are the same; every row of an input is one of them."""
    batches = [answered(batch) for batch in TINY["llama"].calibration(24).side(0)]
    calibration = Calibration([(batch, batch) for batch in batches])
    pair, some = sums("answers", calibration)
    _, every = sums("all", calibration)
    predicting = sum(int((batch.inputs["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    assert {S.rows for S in some.inputs.values()} == {predicting} == {calibration.tokens(1, answers=True)}
    assert max(S.rows for S in every.inputs.values()) == sum(int(b.inputs["attention_mask"].sum()) for b in batches)
    last = next(p.target.name for p in pair.pairs if p.target.block == 1 and p.target.role == "mlp.down")
    first = next(p.target.name for p in pair.pairs if p.target.block == 0 and p.target.role == "attn.v")
    same, other = ([S.outputs[name].solve()[0].dense() for S in (some, every)] for name in (last, first))
    assert relative(same[0], same[1]) < 1e-9
    assert relative(other[0], other[1]) > 1e-2


def test_rows_are_those_of_an_autograd_of_ones_own() -> None:
    batch = answered(TINY["llama"].batch(0, 6))
    pair, found = sums("answers", Calibration([(batch, batch)]))
    expected = []
    for model, site in ((pair.source, pair.pairs[0].source), (pair.target, pair.pairs[0].target)):
        layer = model.get_submodule(site.weight.removesuffix(".weight"))
        seen: list[Tensor] = []
        handle = layer.register_forward_hook(lambda _, x, __, seen=seen: seen.append(x[0].detach()))
        model(**{name: batch.inputs[name] for name in ("input_ids", "attention_mask")})
        handle.remove()
        predicting = batch.inputs["labels"][:, 1:] != IGNORED
        expected.append(seen[0][:, :-1][predicting])
    C = expected[0].T @ expected[1]
    S = found.inputs[found.reads[pair.pairs[0].target.name][0]]
    U, values, Vh = torch.linalg.svd(C)
    rank = int((values > 1e-9 * values[0]).sum())
    assert relative(S.solve()[0].dense(), U[:, :rank] @ Vh[:rank]) < 1e-6


def test_what_is_no_prompt_has_all_its_tokens() -> None:
    plain = TINY["llama"].batch(0, 4)
    assert not plain.prompted  # every token counts
    assert not answered(plain, marks=1).prompted  # a mark of the beginning
    assert answered(plain, marks=2).prompted
    assert not TINY["t5"].batch(0, 4).prompted  # the answer stands in a decoder
    decoder = Batch({"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[IGNORED, IGNORED, 6]])})
    assert not decoder.prompted  # of the same length by chance
    assert not TINY["bert"].batch(0, 4).prompted


def test_one_decision_for_both_models_and_all_micro_batches() -> None:
    """A tokenizer with two marks at the beginning, or an answer that is cut on one side, asks nothing."""
    plain = [TINY["llama"].batch(start, 4) for start in (0, 4, 8)]
    marked = [answered(batch, marks=2) for batch in plain]
    texts = Calibration(list(zip(plain, marked, strict=True)))
    assert not texts.answers
    assert Calibration([*texts.pairs[:2], (marked[2], marked[2])]).answers
    models = [TINY["llama"].model(16, 2, seed) for seed in (0, 1)]
    tau = TaskVector.between(dict(models[0].named_parameters()), tuned(models[0]))
    job = Job.of(models[0], models[1], tau, texts, LanguageModel())
    one, other = (run("twofold", job, tokens=tokens, halfway=0.0).tau for tokens in ("answers", "all"))
    assert all(torch.equal(one.deltas[name], delta) for name, delta in other.deltas.items())  # type: ignore[arg-type]


def test_padding_in_front_predicts_nothing() -> None:
    ids = torch.tensor([[1, 1, 5, 6, 7, 8]])
    labels = ids.masked_fill(torch.arange(6) < 4, IGNORED)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    found = Batch({"input_ids": ids, "labels": labels, "attention_mask": mask}).predicting
    assert found.tolist() == [[False, False, False, True, True, False]]


def test_tokens_of_two_vocabularies_meet_where_they_predict_the_same_character() -> None:
    """In front of the answer stand marks of a chat that have no characters, as many as each template likes."""
    A = Layout(torch.ones(1, 5), torch.tensor([[9, 8, 7, 20, 21]]),
               torch.tensor([[[1, 4], [0, 0], [0, 0], [4, 7], [7, 9]]]))  # fmt: skip
    B = Layout(torch.ones(1, 4), torch.tensor([[9, 8, 30, 31]]),
               torch.tensor([[[1, 4], [0, 0], [4, 5], [5, 9]]]))  # fmt: skip
    answering = torch.tensor([[False, False, True, True, False]]), torch.tensor([[False, True, True, False]])
    met = match(A.predicting(answering[0]), B.predicting(answering[1]), 5, 4)
    x = torch.arange(5.0).reshape(1, 5, 1)
    assert met.source(x).flatten().tolist() == [2.0]  # both predict character 4; 7 and 5 are no beginnings of both
    assert met.target(torch.arange(4.0).reshape(1, 4, 1)).flatten().tolist() == [1.0]
