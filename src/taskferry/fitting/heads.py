"""Which head scores the classes of samples, and which of its rows is which class.

    >>> objectives = objectives_of(settings, samples, source, target)
    >>> own_head(loaded, samples).logits(loaded.model, batches)      # columns in the order of samples.classes

Class names are what data and heads have in common: where both have them, they and not the numbers decide. A head
without names (LABEL_0, LABEL_1 …) is taken to count as the data does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from taskferry.calibration.batch import Calibration
from taskferry.calibration.data import Samples
from taskferry.checkpoints import Loaded, Tuned
from taskferry.checkpoints.classifiers import class_names, has_own_head
from taskferry.errors import TaskferryError
from taskferry.fitting.objectives import (
    Classifier,
    CrossProbe,
    Head,
    LinearProbe,
    Objective,
    Prototypes,
    ZeroShot,
    teacher_labels,
)
from taskferry.fitting.teacher import teacher_model
from taskferry.settings import CalibrationSettings
from taskferry.sites import family_of


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
    if name == "head" and not samples.classes:
        # Numbers are all that is known of the classes: both heads must mean the same by them.
        A, B = (class_names(loaded.model) for loaded in (source, target))
        if A and B and [_plain(n) for n in A] != [_plain(n) for n in B]:
            raise TaskferryError(
                f"the classes of {samples.source} are numbers, and {source.given} counts {_listed(A)}, {target.given} "
                f"{_listed(B)}: give the names of the classes in their place"
            )
    first, second = (named_classifier(name, m, samples, settings.templates) for m in (source, target))
    return first, second


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
        "cross-probe": CrossProbe(),
    }
    return kinds[name]


def own_head(loaded: Loaded, samples: Samples) -> Head:
    """The head that a model has, its classes in the order of the samples'; refused where it was never trained."""
    lost = sorted(loaded.absent & {name for name, _ in loaded.model.named_parameters()})
    if lost and has_own_head(loaded.model):
        raise TaskferryError(
            f"{loaded.given} has no trained head: {lost[0]} is in none of its files, so that it would score by "
            "chance; give --objective probe, or a model with its head"
        )
    return Head(order_of(class_names(loaded.model), samples, loaded.given))


def order_of(names: Sequence[str], samples: Samples, given: str) -> tuple[int, ...]:
    """Which rows of a head with these names are the classes of the samples, in their order; those of others follow.

    () for the rows as they are: no names on one side, or names of the data with nothing in common with the head's
    where the data has counted them itself.
    """
    if not names or not samples.classes:
        return ()
    where = {_plain(name): i for i, name in enumerate(names)}
    wanted = [_plain(name) for name in samples.classes]
    strange = [name for name in samples.classes if _plain(name) not in where]
    if len(where) < len(names) or len(set(wanted)) < len(wanted):
        return ()  # names that do not tell classes apart
    if len(strange) == len(wanted) == len(names) and not samples.sorted:
        return ()
    if strange:
        raise TaskferryError(
            f"{samples.source} has the class '{strange[0]}', the head of {given} has {_listed(names)}: call the "
            "classes as the head does, or give their numbers there"
        )
    first = [where[name] for name in wanted]
    order = (*first, *(i for i in range(len(names)) if i not in set(first)))
    return () if order == tuple(range(len(names))) else order


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
            head = own_head(teacher, samples)
        else:
            raise TaskferryError(
                f"the tuned source is a {type(teacher.model).__name__}, which predicts no classes, and the data has no "
                "labels: give labels, or a tuned model with its classification head"
            )
        classes = samples.classes or class_names(teacher.model)
        return teacher_labels(teacher.model, calibration.side(0), head), classes


def _tokenize(loaded: Loaded) -> Callable[[list[str]], Any]:
    tokenizer = loaded.tokenizer()
    if family_of(loaded.model).name == "openclip":
        return lambda texts: tokenizer(texts)
    return lambda texts: tokenizer(texts, padding=True, truncation=True, return_tensors="pt")


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])
