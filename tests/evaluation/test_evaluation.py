"""Scoring: equal to the same written by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from taskferry import LanguageModel, LinearProbe, Prototypes, TaskferryError
from taskferry.data.batch import Batch
from taskferry.evaluation import evaluate
from tests.helpers import tiny
from tests.helpers.pictures import Pictures, Small


def test_scores_equal_those_by_hand() -> None:
    data, model = Pictures(), Small().eval()
    shots, test = [data.batch(range(15))], [data.batch(range(15, 30)), data.batch(range(30, 40))]
    for head in (Prototypes(), LinearProbe()):
        logits = head.logits(model, shots)
        with torch.no_grad():
            scores = torch.cat([logits(batch) for batch in test])
        labels = data.labels[15:]
        found = evaluate(model, test, head, shots)
        assert found.accuracy == pytest.approx(100 * float((scores.argmax(1) == labels).float().mean()))
        assert found.loss == pytest.approx(float(F.cross_entropy(scores, labels)), rel=1e-5)
        assert found.samples == 25
        assert found.value == found.accuracy


def test_a_class_without_shots_counts_as_wrong() -> None:
    data, model = Pictures(), Small().eval()
    known = [i for i in range(20) if data.labels[i] < 2]
    found = evaluate(model, [data.batch(range(20, 40))], Prototypes(), [data.batch(known)])
    assert found.samples == 20
    assert found.accuracy is not None
    assert found.accuracy <= 100 * float((data.labels[20:] < 2).float().mean())


def test_a_language_model_is_scored_by_the_token() -> None:
    model = tiny.hf("LlamaForCausalLM", 16, 2).eval()
    batch = tiny.text(0, 3, labels="causal")
    found = evaluate(model, [batch], LanguageModel())
    with torch.no_grad():
        by_hand = model(**batch.inputs).loss  # transformers' own mean over tokens
    assert found.accuracy is None
    assert found.loss == pytest.approx(float(by_hand), rel=1e-5)


def test_an_encoder_decoder_predicts_every_label() -> None:
    """As many labels as inputs must not be taken for a causal model's."""
    model = tiny.t5(16, 2).eval()
    batch = tiny.text(0, 3)
    labels = batch.inputs["input_ids"].clone()
    same = Batch({**batch.inputs, "labels": labels}, None, batch.ids)
    with torch.no_grad():
        by_hand = model(**same.inputs).loss
    assert evaluate(model, [same], LanguageModel()).loss == pytest.approx(float(by_hand), rel=1e-5)


def test_a_head_that_is_made_from_samples_needs_some() -> None:
    with pytest.raises(TaskferryError, match=r"prototypes.*needs samples that it is made from"):
        evaluate(torch.nn.Linear(1, 1), [], Prototypes())
