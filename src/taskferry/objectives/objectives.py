"""Objectives: the loss whose gradient is taken at the frozen base models, summed over samples.

    >>> fit(A, B, calibration, Prototypes())                           # encoders, labels from the data
    >>> fit(A, B, calibration, lambda model, batch: my_loss(model(**batch.inputs), batch.labels))

An objective is bound to each model on its own, so each side has its own head. The loss is a sum, so the size of
the micro-batches does not matter; the maps do not depend on its scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.collect.capture import Loss
from taskferry.collect.device import device_of, frozen, place_of, wide
from taskferry.data.batch import IGNORED, Batch, Calibration
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.objectives.language import expected, is_language_model, logits_of, predicted

Logits = Callable[[Batch], Tensor]


class Objective:
    """Something that turns a model into a loss on micro-batches."""

    words: ClassVar[str] = "your own loss"  # for people
    unit: ClassVar[str] = "per sample"  # of a mean loss

    def units(self, model: nn.Module, batches: Sequence[Batch]) -> int:  # noqa: ARG002
        """How many samples, or tokens that count, a mean loss is taken over."""
        return sum(map(len, batches))

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """The loss of this model; `batches` are its side of the calibration set."""
        raise TypeError(f"{type(self).__name__} does not say how to bind")

    def describe(self) -> str:
        """Name and settings, the same in every run."""
        settings = [f"{k}={v}" for k, v in vars(self).items() if isinstance(v, float | int | str)]
        return f"{type(self).__name__}({', '.join(settings)})"


@dataclass(frozen=True)
class Function(Objective):
    """Any function of (model, batch) that returns the loss summed over the samples."""

    loss: Callable[[nn.Module, Batch], Tensor]

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """The function with its model."""
        return lambda batch: self.loss(model, batch)


class Classifier(Objective):
    """Cross-entropy on a class for each sample; the kinds differ in where the logits come from."""

    fitted: ClassVar[bool] = False  # whether the head is made from samples

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:  # noqa: ARG002
        """A function from a micro-batch to [n, classes]."""
        raise TypeError(f"{type(self).__name__} does not say where its logits come from")

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:
        """Summed cross-entropy."""
        logits = self.logits(model, batches)

        def loss(batch: Batch) -> Tensor:
            scores = logits(batch)
            labels = _labels(batch).to(scores.device)
            if int(labels.max()) >= scores.shape[1] or int(labels.min()) < 0:
                raise TaskferryError(
                    f"labels run from {int(labels.min())} to {int(labels.max())}, the head has "
                    f"{scores.shape[1]} classes"
                )
            return F.cross_entropy(scores, labels, reduction="sum")

        return loss


@dataclass(frozen=True)
class Head(Classifier):
    """The model's own classification head: `model(**inputs).logits`, or the tensor it returns."""

    words: ClassVar[str] = "the model's own head"

    order: tuple[int, ...] = ()  # its row for each class of the samples; () where both count alike
    names: tuple[str, ...] = ()  # of the classes in that order, where they are known

    def describe(self) -> str:
        """With the order: other rows are another loss."""
        return f"Head({' '.join(map(str, self.order))})"

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:  # noqa: ARG002
        """The model's logits."""
        family = family_of(model)

        def scores(batch: Batch) -> Tensor:
            found = wide(logits_of(model(**family.arguments(model, batch))))
            if found.ndim != 2:
                raise TaskferryError(
                    f"the head of a {type(model).__name__} gives {list(found.shape)} for {len(batch)} samples, not one "
                    "score for each class: give another objective, such as objective=prototypes"
                )
            return found[:, list(self.order)] if self.order else found

        return scores


@dataclass(frozen=True)
class ZeroShot(Classifier):
    """A frozen head from the model's own text tower: one prompt-averaged embedding for each class.

    `tokenize` turns a list of texts into what the text tower takes: open_clip's tokenizer as it is, or
    `lambda texts: tokenizer(texts, padding=True, return_tensors="pt")` for transformers. Give one objective for
    each model where their tokenizers differ: `fit(A, B, calibration, (ZeroShot(…), ZeroShot(…)))`.
    """

    words: ClassVar[str] = "a zero-shot head"

    classes: Sequence[str]
    tokenize: Callable[[list[str]], Any]
    templates: Sequence[str] = ("a photo of a {}.",)

    def describe(self) -> str:
        """The number of classes, and a hash of their names and of the prompts."""
        words = hashlib.sha256("\n".join([*self.classes, "", *self.templates]).encode()).hexdigest()[:12]
        return f"ZeroShot({len(self.classes)} classes, {words})"

    def head(self, model: nn.Module) -> Tensor:
        """[classes, d], unit length."""
        family, device = family_of(model), device_of(model)
        rows = []
        with torch.no_grad(), frozen(model):
            for name in self.classes:
                tokens = self.tokenize([template.format(name) for template in self.templates])
                moved = tokens.to(device) if hasattr(tokens, "to") else tokens
                text = F.normalize(wide(family.text_features(model, moved)), dim=-1)
                rows.append(F.normalize(text.mean(0), dim=-1))
        return torch.stack(rows)

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:  # noqa: ARG002
        """Scaled cosine similarity of image and class."""
        head, family = self.head(model), family_of(model)
        scale = family.logit_scale(model)
        return lambda batch: scale * F.normalize(wide(family.features(model, batch)), dim=-1) @ head.T


@dataclass(frozen=True)
class Prototypes(Classifier):
    """Class means of the calibration features, cosine with a temperature, features centred.

    The default for encoders: unlike a probe fitted to near-zero loss it leaves a gradient to align.
    """

    fitted: ClassVar[bool] = True
    words: ClassVar[str] = "class means of the samples (prototypes)"

    temperature: float = 5.0

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:
        """Scaled cosine similarity of a sample and its class mean."""
        features, labels = calibration_features(model, batches)
        centre = features.mean(0)
        unit = F.normalize(features - centre, dim=-1)
        classes = int(labels.max()) + 1
        sums = unit.new_zeros(classes, unit.shape[1]).index_add_(0, labels, unit)
        head, family = F.normalize(sums, dim=-1), family_of(model)
        return lambda batch: (
            self.temperature * F.normalize(wide(family.features(model, batch)) - centre, dim=-1) @ head.T
        )


@dataclass(frozen=True)
class LinearProbe(Classifier):
    """A ridge-regularised logistic probe on standardised features, fitted on the calibration set, then frozen."""

    fitted: ClassVar[bool] = True
    words: ClassVar[str] = "a linear probe"

    ridge: float = 1.0

    def logits(self, model: nn.Module, batches: Sequence[Batch]) -> Logits:
        """The probe's scores."""
        features, labels = calibration_features(model, batches)
        mean, spread = features.mean(0), features.std(0, unbiased=False).clamp_min(1e-6)
        weight, bias = fit_probe((features - mean) / spread, labels, ridge=self.ridge)
        family = family_of(model)
        return lambda batch: ((wide(family.features(model, batch)) - mean) / spread) @ weight.T + bias


@dataclass(frozen=True)
class LanguageModel(Objective):
    """Next-token loss on `inputs["labels"]`, summed over tokens; positions with label −100 do not count.

    A causal model predicts label t + 1 at position t, an encoder-decoder label t at position t.
    """

    words: ClassVar[str] = "the next-token loss"
    unit: ClassVar[str] = "per token"

    def units(self, model: nn.Module, batches: Sequence[Batch]) -> int:
        """Tokens that count."""
        return sum(int((expected(model, batch) != IGNORED).sum()) for batch in batches)

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """Summed cross-entropy over tokens; no other position has its words scored."""

        def loss(batch: Batch) -> Tensor:
            scores, labels, _ = predicted(model, batch)
            return F.cross_entropy(scores, labels, reduction="sum")

        return loss


@dataclass(frozen=True)
class Contrastive(Objective):
    """Cross-entropy over cosine similarities times `scale`, of the mean tokens of texts: which is an anchor's positive?

    Candidates are all positives, and all negatives, of the micro-batch (in-batch negatives, InfoNCE; what
    sentence-transformers calls MultipleNegativesRankingLoss). So the size of a micro-batch is part of this loss, and a
    micro-batch of pairs is never cut.
    """

    words: ClassVar[str] = "the positive among all candidates of its micro-batch (contrastive)"

    scale: float = 20.0  # a temperature of 0.05

    def scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """[n, candidates] of each anchor, and the place [n] of its positive: all positives first, then negatives."""
        if batch.texts < 2:
            raise TaskferryError("a contrastive loss needs pairs of texts: pair_calibration(…), not single ones")
        unit = F.normalize(wide(family_of(model).features(model, batch)), dim=-1)
        texts = unit.view(-1, batch.texts, unit.shape[-1]).transpose(0, 1)
        return self.scale * texts[0] @ texts[1:].flatten(0, 1).T, torch.arange(len(batch), device=unit.device)

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """Summed over anchors."""
        return lambda batch: F.cross_entropy(*self.scores(model, batch), reduction="sum")


@dataclass(frozen=True)
class ForwardOnly(Objective):
    """No loss: the forward pass alone, for methods that take no gradient and so need no labels."""

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """A forward pass; its value is not used."""
        family = family_of(model)

        def run(batch: Batch) -> Tensor:
            if is_language_model(model):
                return logits_of(model(**family.arguments(model, batch), use_cache=False)).sum()
            return family.features(model, batch).sum()

        return run


AnyObjective = Objective | Callable[[nn.Module, Batch], Tensor]


def both_objectives(
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None,
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
) -> tuple[Objective, Objective]:
    """One objective for each model: as given, the same for both, or what each model's kind suggests."""
    if objective is None:
        return default_objective(source, calibration), default_objective(target, calibration)
    given = objective if isinstance(objective, tuple) else (objective, objective)
    first, second = (each if isinstance(each, Objective) else Function(each) for each in given)
    return first, second


def default_objective(model: nn.Module, calibration: Calibration) -> Objective:
    """What samples and model suggest: a contrastive loss of pairs, the model's own loss or head, or prototypes."""
    kind = type(model).__name__
    if calibration.pairs[0][0].texts > 1:
        return Contrastive()
    if is_language_model(model):
        return LanguageModel()
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        return Head()
    if calibration.labels is None:
        raise TaskferryError(
            f"{kind} has no loss of its own and the calibration set no labels: give labels, let the tuned "
            "source give them (teacher_labels), or pass an objective"
        )
    return Prototypes()


def teacher_labels(tuned: nn.Module, batches: Sequence[Batch], classifier: Classifier) -> Tensor:
    """[N] the classes that the tuned source model predicts: plain inputs are enough for a calibration set.

    >>> calibration = calibration.with_labels(teacher_labels(tuned_A, calibration.side(0), Head()))
    """
    logits = classifier.logits(tuned, batches)
    with torch.no_grad(), frozen(tuned):
        return torch.cat([logits(batch.to(*place_of(tuned))).argmax(-1).cpu() for batch in batches])


def calibration_features(model: nn.Module, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Features [N, d] and labels [N] of one model's side of the calibration set."""
    family, place = family_of(model), place_of(model)
    with torch.no_grad(), frozen(model):
        features = torch.cat([wide(family.features(model, batch.to(*place))) for batch in batches])
    labels = torch.cat([_labels(batch) for batch in batches]).to(features.device)
    if int(labels.max()) == int(labels.min()):
        raise TaskferryError(
            f"all {len(labels)} samples have class {int(labels[0])}: a head made from them has nothing to tell apart; "
            "give samples of at least two classes"
        )
    return features, labels


def fit_probe(features: Tensor, labels: Tensor, *, ridge: float = 1.0, steps: int = 100) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression by L-BFGS, deterministic: weight [classes, d] and bias [classes].

    Minimises Σ cross-entropy + ridge / 2 · ‖weight‖².
    """
    classes = int(labels.max()) + 1
    X = features.detach().double()
    weight = X.new_zeros(classes, X.shape[1], requires_grad=True)
    bias = X.new_zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=steps, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(X @ weight.T + bias, labels, reduction="sum") + ridge / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimiser.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach().to(features.dtype), bias.detach().to(features.dtype)


def _labels(batch: Batch) -> Tensor:
    if batch.labels is None:
        raise TaskferryError(
            "this objective needs a label for each sample: give labels, or let the tuned source give them "
            "(teacher_labels)"
        )
    return batch.labels
