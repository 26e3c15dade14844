"""Objectives give the loss they say, and teachers the labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from taskferry import (
    Calibration,
    Head,
    LanguageModel,
    LinearProbe,
    Prototypes,
    TaskferryError,
    ZeroShot,
    fit,
    teacher_labels,
)
from taskferry.objectives.objectives import calibration_features, default_objective, fit_probe
from tests.helpers.tiny import TINY, VOCABULARY


@pytest.mark.parametrize(
    "objective", [Prototypes(), LinearProbe(), LinearProbe(ridge=0.1)], ids=["prototypes", "probe", "loose probe"]
)
def test_a_frozen_head_from_the_calibration_set_classifies_it(objective: Prototypes | LinearProbe) -> None:
    tiny = TINY["vit"]
    model, batches = tiny.model(32, 2, 0), [batch for batch, _ in tiny.calibration(12, 5)]
    logits = objective.logits(model, batches)
    scores, labels = torch.cat([logits(b) for b in batches]), torch.cat([b.labels for b in batches])
    assert scores.shape == (12, 3)
    assert float((scores.argmax(1) == labels).float().mean()) >= 0.9
    loss = objective.bind(model, batches)
    total = sum(float(loss(batch).detach()) for batch in batches)
    assert total == pytest.approx(float(F.cross_entropy(scores, labels, reduction="sum").detach()), rel=1e-5)
    assert total > 1e-3  # there is something left to align


def test_prototypes_are_the_class_means() -> None:
    tiny = TINY["vit"]
    model, batches = tiny.model(16, 2, 0), [tiny.batch(0, 9)]
    features, labels = calibration_features(model, batches)
    unit = F.normalize(features - features.mean(0), dim=-1)
    means = torch.stack([F.normalize(unit[labels == c].mean(0), dim=-1) for c in range(3)])
    expected = 5 * unit @ means.T
    assert torch.allclose(Prototypes().logits(model, batches)(batches[0]), expected, atol=1e-5)


def test_the_probe_is_at_its_minimum() -> None:
    X, y = torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 3
    weight, bias = (t.requires_grad_() for t in fit_probe(X, y, ridge=0.5, steps=500))
    loss = F.cross_entropy(X @ weight.T + bias, y, reduction="sum") + 0.25 * weight.square().sum()
    loss.backward()
    assert float(weight.grad.abs().max()) < 1e-4
    assert float(bias.grad.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["openclip", "clip"])
def test_zero_shot_head_from_the_model_s_own_text_tower(name: str) -> None:
    tiny = TINY[name]
    model = tiny.model(16, 2, 0)

    def tokenize(texts: list[str]):
        ids = torch.tensor(
            [[1 + sum(map(ord, t)) % (VOCABULARY - 3), len(t) % VOCABULARY, 3, 2, 0, 0, 0, 0] for t in texts]
        )
        return ids if name == "openclip" else Tokens(input_ids=ids, attention_mask=(ids > 0).long())

    objective = ZeroShot(["cat", "dog", "tree"], tokenize, ("a photo of a {}.", "a drawing of a {}."))
    head = objective.head(model)
    assert head.shape == (3, 8)
    assert torch.allclose(head.norm(dim=1), torch.ones(3), atol=1e-5)
    batch = tiny.batch(0, 4)
    if name == "openclip":
        image = F.normalize(model.encode_image(batch.inputs["image"]), dim=-1)
        expected = model.logit_scale.exp() * image @ head.T
        assert torch.allclose(objective.logits(model, [batch])(batch), expected, atol=1e-4)
    other = tiny.model(24, 3, 1)
    alignment = fit(model, other, tiny.calibration(), objective)
    assert {pair.target.stream for pair in alignment.pairs} == {"vision", "patches"}


class Tokens(dict):
    def to(self, device: object) -> Tokens:
        return self


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_the_language_model_loss_is_transformers_own_times_the_tokens(name: str) -> None:
    tiny = TINY[name]
    model, batch = tiny.model(16, 2, 0), tiny.batch(0, 4)
    labels = batch.inputs["labels"] if name == "t5" else batch.inputs["labels"][:, 1:]
    counted = int((labels != -100).sum())
    ours = LanguageModel().bind(model, [batch])(batch)
    theirs = model(**batch.inputs).loss * counted
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


def test_the_teacher_labels_plain_inputs() -> None:
    tiny = TINY["bert-classifier"]
    source, target = tiny.model(16, 2, 0), tiny.model(24, 2, 1)
    teacher = tiny.model(16, 2, 2)
    unlabelled = Calibration(
        (type(a)(a.inputs, None, a.ids), type(b)(b.inputs, None, b.ids)) for a, b in tiny.calibration()
    )
    with pytest.raises(TaskferryError, match="teacher_labels"):
        fit(source, target, unlabelled)
    labels = teacher_labels(teacher, unlabelled.side(0), Head())
    expected = torch.cat([teacher(**b.inputs).logits.argmax(1) for b in unlabelled.side(0)])
    assert torch.equal(labels, expected)
    labelled = unlabelled.with_labels(labels)
    assert torch.equal(labelled.labels, labels)
    assert len(fit(source, target, labelled).pairs) > 0


def test_the_default_follows_the_model() -> None:
    for name, kind in {
        "llama": LanguageModel,
        "t5": LanguageModel,
        "bert-classifier": Head,
        "bert": Prototypes,
    }.items():
        tiny = TINY[name]
        assert type(default_objective(tiny.model(16, 1, 0), tiny.calibration(4, 2))) is kind
    tiny = TINY["whisper"]
    assert type(default_objective(tiny.model(16, 1, 0), tiny.calibration(4, 2))) is LanguageModel
    plain = Calibration((type(a)(a.inputs), type(a)(a.inputs)) for a, _ in TINY["bert"].calibration(4, 2))
    with pytest.raises(TaskferryError, match="no loss of its own and the calibration set no labels"):
        default_objective(TINY["bert"].model(16, 1, 0), plain)


def test_what_is_wrong_with_a_loss_is_said() -> None:
    tiny = TINY["plain"]
    A, calibration = tiny.model(16, 1, 0), tiny.calibration(4, 2)
    with pytest.raises(TaskferryError, match="one finite number is needed"):
        fit(A, A, calibration, lambda model, batch: model(**batch.inputs).sum() * torch.nan)
    with pytest.raises(TaskferryError, match="does not depend on any of its linear layers"):
        fit(A, A, calibration, lambda model, batch: torch.zeros(()))
    with pytest.raises(TaskferryError, match="labels run from 0 to 2, the head has 2 classes"):
        fit(TINY["timm"].model(16, 1, 0), TINY["timm"].model(16, 1, 0), TINY["timm"].calibration(6, 6), TwoClasses())


class TwoClasses(Head):
    def logits(self, model, batches):
        inner = super().logits(model, batches)
        return lambda batch: inner(batch)[:, :2]
