"""Which head scores the classes of samples, and which of its rows is which class.

    >>> objectives = objectives_of(settings, samples, source, target)
    >>> own_head(loaded, samples).logits(loaded.model, batches)      # columns in the order of samples.classes

Class names are what data and heads have in common: where both have them, they and not the numbers decide. A head
without names (LABEL_0, LABEL_1 …) is taken to count as the data does: names that the data has not numbered are sorted,
as the libraries do that train on folders and on strings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.collect.device import frozen, place_of, wide
from taskferry.collect.scale import moved_by
from taskferry.config import CalibrationSettings
from taskferry.data.batch import Batch, Calibration
from taskferry.data.samples import Samples
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.models import Loaded, Tuned
from taskferry.models.classifiers import class_count, class_names, classifier_around, counted, has_own_head
from taskferry.objectives.language import logits_of
from taskferry.objectives.objectives import (
    Classifier,
    Head,
    LinearProbe,
    Objective,
    Prototypes,
    ZeroShot,
    teacher_labels,
)
from taskferry.objectives.teacher import teacher_model
from taskferry.taskvector import TaskVector


def objectives_of(
    settings: CalibrationSettings, samples: Samples, source: Loaded, target: Loaded
) -> tuple[Objective, Objective]:
    """The loss of each model on samples with classes."""
    name = settings.objective
    has_text = all(has_text_tower(m) for m in (source, target))
    if name == "auto":
        name = "zero-shot" if has_text and samples.kind == "image" and samples.classes else "prototypes"
    if name == "zero-shot" and (not has_text or not samples.classes):
        raise TaskferryError(
            "a zero-shot head needs two image-text models and class names (a classes.json beside the data)"
        )
    if name == "head":
        return _own_heads(samples, source, target)
    first, second = (named_classifier(name, m, samples, settings.templates) for m in (source, target))
    return first, second


def _own_heads(samples: Samples, source: Loaded, target: Loaded) -> tuple[Head, Head]:
    """Both with their classes in one order; refused where numbers would mean different ones."""
    A = own_head(source, samples)
    # What the data does not have comes in the order of the source's names.
    asked = set(map(_plain, samples.classes))
    B = own_head(target, samples, [name for name in A.names if name not in asked])
    if A.names and B.names and not (A.order or B.order) and A.names != B.names:
        raise TaskferryError(
            f"the classes of {samples.source} are known by number, and {source.given} counts {_listed(A.names)}, "
            f"{target.given} {_listed(B.names)}: call them as both heads do"
        )
    by_name = samples.sorted and any(counted(name) is None for name in samples.classes)
    for head, model, other in ((A, source, target), (B, target, source)):
        if by_name and head.order and head.names and not (A.names and B.names):
            raise TaskferryError(
                f"{other.given} does not name its classes, and {model.given} counts "
                f"{_listed(class_names(model.model))}, which is not how {samples.source} sorts them: say which row is "
                "which class (id2label in its config.json), or give the samples numbers as labels"
            )
    return A, B


def named_classifier(name: str, loaded: Loaded, samples: Samples, templates: Sequence[str]) -> Classifier:
    """The head that an option names, for one model."""
    if name == "zero-shot":
        return zero_shot(loaded, samples.classes, templates)
    if name == "language":
        raise TaskferryError("the objective 'language' needs a language model")
    if name == "head":
        return own_head(loaded, samples)
    kinds: dict[str, Classifier] = {
        "prototypes": Prototypes(),
        "probe": LinearProbe(),
    }
    return kinds[name]


def own_head(loaded: Loaded, samples: Samples, rest: Sequence[str] = ()) -> Head:
    """The head that a model has, its classes in the order of the samples'; refused where it was never trained.

    `rest`: names that come next.
    """
    lost = sorted(loaded.absent & {name for name, _ in loaded.model.named_parameters()})
    if lost and has_own_head(loaded.model):
        raise TaskferryError(
            f"{loaded.given} has no trained head: {lost[0]} is in none of its files, so that it would score by "
            "chance; give objective=probe, or a model with its head"
        )
    names = class_names(loaded.model)
    order = order_of(names, class_count(loaded.model), samples, loaded.given, rest)
    return Head(order, tuple(_plain(names[i]) for i in order or range(len(names))) if names else ())


def order_of(
    names: Sequence[str], count: int, samples: Samples, given: str, rest: Sequence[str] = ()
) -> tuple[int, ...]:
    """Which of a head's rows are the classes of the samples, in their order; `rest`, then those of others follow.

    () for the rows as they are: no names on one side, or names of the data with nothing in common with the head's
    where the data has counted them itself.
    """
    numbers = [counted(name) for name in samples.classes]
    if all(number is not None for number in numbers):  # LABEL_3, or folders 0, 1, 10: the head's own numbers
        first = [number for number in numbers if number is not None]
        if count and max(first, default=0) >= count:
            raise TaskferryError(
                f"{samples.source} has the class {max(first)}, the head of {given} {count} classes, counted from 0"
            )
        return _filled(first, count or len(first))
    if not names:
        return ()
    plain = [_plain(name) for name in names]
    times = Counter(plain)
    where = {name: i for i, name in enumerate(plain) if times[name] == 1}
    strange = [name for name in samples.classes if _plain(name) not in where]
    if len(strange) == len(samples.classes) == len(names) and not samples.sorted:
        return ()
    if strange:
        twice = "more than once" if _plain(strange[0]) in times else f"not: it has {_listed(names)}"
        raise TaskferryError(
            f"{samples.source} has the class '{strange[0]}', the head of {given} {twice}; call the classes as the head "
            "does, or give their numbers there"
        )
    wanted = [where[_plain(name)] for name in samples.classes]
    return _filled([*wanted, *(where[name] for name in rest if name in where)], len(names))


def _filled(first: Sequence[int], count: int) -> tuple[int, ...]:
    """These rows, then all others; () for the rows as they are."""
    taken = set(first)
    order = (*dict.fromkeys(first), *(i for i in range(count) if i not in taken))
    return () if order == tuple(range(count)) else order


def zero_shot(loaded: Loaded, classes: Sequence[str], templates: Sequence[str]) -> ZeroShot:
    """The frozen head of an image-text model for these classes, by its own tokenizer and text tower."""
    if not has_text_tower(loaded) or not classes:
        raise TaskferryError(f"{loaded.given}: a zero-shot head needs an image-text model and class names")
    return ZeroShot(tuple(classes), _tokenize(loaded), tuple(templates))


def has_text_tower(loaded: Loaded) -> bool:
    """Whether a model embeds texts and images in one space."""
    return hasattr(loaded.model, "encode_text") or hasattr(loaded.model, "get_text_features")


def taught(
    settings: CalibrationSettings, calibration: Calibration, samples: Samples, source: Loaded, tuned: Tuned | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Classes predicted by the tuned source with its own head, or its zero-shot head, and what they are called."""
    with teacher_model(source, tuned) as teacher:
        if samples.classes and has_text_tower(source):
            # The head of the base: its text tower may have been tuned, the classes are what it was asked for.
            head: Classifier = zero_shot(source, samples.classes, settings.templates)
        elif has_own_head(teacher.model):
            head = own_head(teacher, replace(samples, classes=()))  # whatever labels the data has are not asked for
        else:
            raise TaskferryError(
                f"the tuned source is a {type(teacher.model).__name__}, which predicts no classes, and the data has no "
                "labels: give labels, or a tuned model with its classification head"
            )
        classes = samples.classes if isinstance(head, ZeroShot) else class_names(teacher.model)
        return teacher_labels(teacher.model, calibration.side(0), head), classes


def solved_head(
    tuned: Tuned,
    source: Loaded,
    target: Loaded,
    moved: TaskVector,
    calibration: Calibration,
    held_out: Calibration,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Solve a head of the target, which has none, by ridge regression to the tuned source's logits on the samples.

    Args:
        tuned: A classification LoRA with its head: one linear layer, saved beside the factors.
        source: The base that it was made on.
        target: The base that is to have the head.
        moved: The change that the target has under it.
        calibration: Samples that the head is made from.
        held_out: Samples that count how often both heads give the same class.

    Returns:
        The head's tensors by name, and facts for the record; nothing of either where the head stays behind.
    """
    if tuned.adapter is None or tuned.adapter.config.get("task_type") not in (None, "SEQ_CLS"):
        return {}, {}
    saved = tuned.adapter.saved
    name = next((name.removesuffix(".weight") for name, tensor in saved.items() if tensor.ndim == 2), "")
    if (
        not name
        or "." in name
        or not saved.keys() <= {f"{name}.weight", f"{name}.bias"}
        or (has_own_head(target.model) and not target.absent)
    ):
        return {}, {}
    weight, bias = saved[f"{name}.weight"].float(), saved.get(f"{name}.bias", torch.zeros(())).float()
    readers = [classifier_around(model, name, len(weight)) for model in (source, target)]
    read: list[list[Tensor]] = []  # what the heads read, of both models on both sets of samples
    for side, (loaded, reader, tau) in enumerate(zip((source, target), readers, (tuned.tau, moved), strict=True)):
        if reader is None:
            return {}, {}
        with moved_by(loaded.model, tau) as set_scale:
            set_scale(1.0)
            read.append([_head_inputs(reader, samples.side(side)) for samples in (calibration, held_out)])
    (X_A, held_A), (X_B, held_B) = read
    if X_A.shape[1] != weight.shape[1]:
        return {}, {}
    W, b = ridge(X_B, X_A @ weight.T + bias)
    same = (held_A @ weight.T + bias).argmax(1) == (held_B @ W.T + b).argmax(1)
    facts = {"layer": name, "classes": len(W), "agreement": round(float(same.double().mean()), 4)}
    return {f"{name}.weight": W, f"{name}.bias": b}, facts


def ridge(X: Tensor, Z: Tensor, share: float = 1e-2) -> tuple[Tensor, Tensor]:
    """Solve min ‖X Wᵀ + b − Z‖² + ρ ‖W‖² for weight [classes, d] and bias, with ρ = share · mean of the diagonal."""
    mean_x, mean_z = X.double().mean(0), Z.double().mean(0)
    centred = X - mean_x
    gram = centred.T @ centred
    gram.diagonal().add_(share * gram.diagonal().mean() + torch.finfo(torch.float32).tiny)
    W = torch.linalg.solve(gram, centred.T @ (Z - mean_z)).T
    return W.float(), (mean_z - W @ mean_x).float()


def _head_inputs(reader: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Read [N, d] what the head of a classifier reads of each sample."""
    family, place = family_of(reader), place_of(reader)
    with torch.no_grad(), frozen(reader):
        found = [logits_of(reader(**family.arguments(reader, batch.to(*place)))) for batch in batches]
    return torch.cat([wide(each).cpu() for each in found])


def _tokenize(loaded: Loaded) -> Callable[[list[str]], Any]:
    tokenizer = loaded.tokenizer()
    if family_of(loaded.model).name == "openclip":
        return lambda texts: tokenizer(texts)
    return lambda texts: tokenizer(texts, padding=True, truncation=True, return_tensors="pt")


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])
